//! The ec2 provider under test, with AWS's SDK over the test cloud.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use kiyot_config::MilpaBackend;
use kiyot_ec2::{
    provider::{CAPABILITIES, Ec2},
    sdk::Client,
};
use kiyot_engine::{
    id::CellId,
    provider::{Capabilities, InstanceId, Owner, Provider, owner},
};
use kiyot_local::PauseImage;
use kiyot_testcloud::{Cloud, Hold, Instance, Lists, Outage, Outcome, Reply, State};
use kiyot_testkit::wait_until;
use tokio::runtime;

use super::{
    super::bench::LIMIT,
    Subject,
    fault::{Fault, Gate},
    listings,
};

#[path = "../../ec2/over_cloud.rs"]
mod over_cloud;

/// The period of listings. The provider's pace is ten calls a second.
const LISTING_PERIOD: Duration = Duration::from_millis(200);
/// The calls that the provider makes for instances.
const ACTIONS: [&str; 3] = ["RunInstances", "DescribeInstances", "TerminateInstances"];

/// The ec2 provider under test.
pub(super) struct Ec2Subject {
    cloud: Cloud,
    config: MilpaBackend,
    client: Client,
    shutdowns: Gate,
    /// Instances that a fault has launched, and ends.
    foreign: Mutex<BTreeSet<String>>,
}

impl Ec2Subject {
    pub(super) async fn new() -> Self {
        let cloud = Cloud::start().await;
        let ec2 = over_cloud::config(&cloud);
        let client = over_cloud::client(&cloud, &ec2.region).await;
        let config = MilpaBackend { ec2, ..MilpaBackend::default() };
        Self { cloud, config, client, shutdowns: Gate::default(), foreign: Mutex::default() }
    }

    /// Returns the instances that are left, even in part.
    fn left(&self) -> Vec<Instance> {
        let mut instances = self.cloud.instances();
        instances.retain(|instance| instance.state != State::Terminated);
        instances
    }

    fn call(&self, action: &str, parameters: &[(&str, &str)]) -> Reply {
        let reply = block_on(async || self.cloud.call(action, parameters).await.unwrap());
        assert_eq!(reply.error(), None, "{action}");
        reply
    }

    fn interrupt(&self, instance: &str) {
        block_on(async || self.cloud.interrupt(instance).await);
    }

    /// Repeats the launch of an instance with some values changed, and returns the other instance.
    fn launch_like(&self, instance: &Instance, changed: &[(&str, &str)]) -> String {
        let token = instance.client_token.as_str();
        let launches = self.cloud.calls_of("RunInstances");
        let is_wanted = |parameters: &&_| token_of(parameters) == token;
        let parameters = launches.iter().map(|call| &call.parameters).find(is_wanted).unwrap();
        let other = format!("other-than-{}", instance.id);
        let parameters = parameters.iter().map(|(key, value)| {
            let new = changed.iter().find(|(old, _)| value == old).map(|(_, new)| *new);
            let is_token = value == token;
            (key.as_str(), if is_token { &other } else { new.unwrap_or(value) })
        });
        let reply = self.call("RunInstances", &parameters.collect::<Vec<_>>());
        reply.root().all("instanceId")[0].text.clone()
    }
}

/// Waits for the cloud, which runs on a thread of its own.
fn block_on<T: Send>(call: impl AsyncFnOnce() -> T + Send) -> T {
    let run = || {
        let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(call())
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap())
}

fn token_of(parameters: &BTreeMap<String, String>) -> &str {
    parameters.get("ClientToken").map_or("", String::as_str)
}

fn cell_of(instance: &Instance) -> CellId {
    CellId::parse(&instance.tags[owner::CELL]).unwrap()
}

impl Subject for Ec2Subject {
    /// Returns a new provider with empty caches.
    fn provider(&self) -> Arc<dyn Provider> {
        Arc::new(Ec2::new(
            &self.config,
            self.owner(),
            Arc::new(self.client.clone()),
            PauseImage::new(None),
        ))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { listing_period: LISTING_PERIOD, ..CAPABILITIES }
    }

    fn owner(&self) -> Owner {
        Owner { cluster: "a-cluster".into(), node: "a-node".into(), fingerprint: "ours".into() }
    }

    fn unknown(&self) -> InstanceId {
        InstanceId("i-0123456789abcdef0".into())
    }

    fn inject(&self, fault: Fault) -> bool {
        let faults = self.cloud.faults();
        match fault {
            Fault::HeldLaunch => faults.set_hold("RunInstances", Some(Hold::Reply)),
            Fault::LateLaunch => faults.set_hold("RunInstances", Some(Hold::Effect)),
            Fault::RefusedLaunch => {
                for subnet in &self.cloud.setup().subnets {
                    faults.set_subnet_full(&subnet.id, true);
                }
            }
            Fault::UnseenInstance => {
                faults.set_visible_after(Duration::MAX);
                // No pod is bound before its metadata service is closed.
                faults.set_changes_unseen(true);
            }
            Fault::StaleList => faults.set_lists(Some(Lists::Stale)),
            Fault::PartialList => faults.set_lists(Some(Lists::Partial)),
            Fault::HeldShutdown => self.shutdowns.close(),
            Fault::SlowEnd => faults.set_shutting_down_for(Duration::MAX),
            Fault::FailedEnd => {
                faults.fail("TerminateInstances", 400, "IncorrectInstanceState", usize::MAX);
            }
            Fault::Twin => {
                for instance in self.left() {
                    self.launch_like(&instance, &[]);
                }
            }
            Fault::OtherAuthority => {
                let ours = self.left().remove(0);
                let cell = CellId::mint().unwrap();
                let changed =
                    [(&*ours.tags[owner::CELL], cell.as_str()), ("ours", "of another daemon")];
                let theirs = self.launch_like(&ours, &changed);
                self.foreign.lock().unwrap().insert(theirs);
            }
            Fault::Interruption => {
                for instance in self.left() {
                    self.interrupt(&instance.id);
                }
            }
            Fault::Outage => faults.set_outage(Some(Outage::Refused)),
            Fault::Denied => faults.set_denied("*", true),
            // Other users of the account use up the rate.
            Fault::Throttled => {
                for action in ACTIONS {
                    faults.fail(action, 503, "RequestLimitExceeded", usize::MAX);
                }
            }
        }
        true
    }

    fn heal(&self) {
        self.shutdowns.open();
        self.cloud.faults().clear();
        for id in std::mem::take(&mut *self.foreign.lock().unwrap()) {
            self.interrupt(&id);
        }
        self.settle();
        // Its port opens some time after an outage.
        block_on(async || {
            let is_up = async || self.cloud.call("DescribeRegions", &[]).await.ok();
            wait_until("the API answers", LIMIT, is_up).await;
        });
    }

    fn holds_launch(&self) -> bool {
        self.cloud.calls_of("RunInstances").iter().any(|call| call.outcome == Outcome::Held)
    }

    fn shutdowns(&self) -> Option<&Gate> {
        Some(&self.shutdowns)
    }

    fn settle(&self) {
        for instance in self.left() {
            self.cloud.settle(&instance.id);
        }
    }

    fn running(&self) -> Vec<(InstanceId, CellId)> {
        let left = self.left();
        left.iter().map(|it| (InstanceId(it.id.clone()), cell_of(it))).collect()
    }

    fn assert_nothing_left(&self, _launched: &[InstanceId]) {
        assert_eq!(self.running(), []);
        let left = |action, set: &str| self.call(action, &[]).root().items(set).to_vec();
        assert_eq!(left("DescribeVolumes", "volumeSet"), []);
        assert_eq!(left("DescribeNetworkInterfaces", "networkInterfaceSet"), []);
    }

    fn listings_of_outage(&self) -> usize {
        listings(CAPABILITIES.listing_period)
    }
}
