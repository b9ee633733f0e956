//! The offerings from which a pod's cell is launched.

use std::sync::{Arc, atomic::Ordering};

use async_trait::async_trait;
use kiyot::backends::Method;
use kiyot_config::{WarmKind, WarmPool};
use kiyot_engine::{
    placement::{
        ApiRequests, Catalogue, CatalogueFile, Entry, Market, Offering, PodRequests, Unoffered,
    },
    request::{
        Architecture,
        keys::{
            ARCHITECTURE, CPU, GPU, INSTANCE_TYPE, LAUNCH_TYPE, MAX_PRICE, MEMORY, SPOT_INSTANCE,
        },
    },
};
use kiyot_proto::cri;
use kiyot_testkit::{log::CapturedLog, wait_for};
use tonic::{Code, Status};

use crate::kit::Fixture;

/// Returns a daemon whose provider has these instance types, a name with a price each.
pub(crate) async fn with_types(types: &[(&str, &str)]) -> Fixture {
    let kiyot = Fixture::start().await;
    let header = "instance_type,vcpus,memory_mib,architectures,on_demand_usd_per_hour\n";
    let rows = types.iter().map(|(name, price)| format!("{name},2,4096,x86_64,{price}\n"));
    let text = header.to_owned() + &rows.collect::<String>();
    *kiyot.provider.catalogue.lock().unwrap() =
        CatalogueFile::parse(text.as_bytes()).unwrap().catalogue;
    kiyot
}

async fn run(kiyot: &Fixture, annotations: &[(&str, &str)]) -> Result<(), Status> {
    let mut request = kiyot.sandbox_request("web");
    let own = &mut request.config.as_mut().unwrap().annotations;
    own.insert(ARCHITECTURE.to_owned(), "amd64".to_owned());
    own.extend(annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())));
    let ran = kiyot.call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request);
    ran.await.map(|_| ())
}

fn candidates(kiyot: &Fixture) -> Vec<Offering> {
    kiyot.provider.candidates.lock().unwrap().clone()
}

fn names(kiyot: &Fixture) -> Vec<String> {
    candidates(kiyot).into_iter().map(|offering| offering.instance_type).collect()
}

/// Verifies A10.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn launch_has_the_cheapest_offerings_that_fit() {
    let kiyot = with_types(&[("b", "0.2"), ("c", "0.3"), ("a", "0.4")]).await;
    run(&kiyot, &[(MEMORY, "1Gi")]).await.unwrap();
    assert_eq!(names(&kiyot), ["b", "c", "a"]);
}

/// Verifies A12.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_that_fits_nothing_is_an_invalid_argument() {
    let kiyot = with_types(&[("a", "0.2"), ("b", "0.3"), ("c", "0.4"), ("d", "0.5")]).await;
    let refused = run(&kiyot, &[(MAX_PRICE, "0.1")]).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let nearest = "nearest: a costs $0.2000 an hour, and $0.1000 is the highest allowed | b costs \
                   $0.3000 an hour, and $0.1000 is the highest allowed | c costs";
    assert!(refused.message().contains(nearest), "{}", refused.message());
    assert_eq!((kiyot.provider.launched(), kiyot.daemon.cells.all().len()), (0, 0));
}

/// Verifies A12.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn named_type_that_no_zone_offers_is_an_invalid_argument_with_the_reason() {
    let kiyot = with_types(&[("a", "0.2"), ("b", "0.3")]).await;
    {
        let mut catalogue = kiyot.provider.catalogue.lock().unwrap();
        let entries = catalogue.entries().iter().cloned().map(|entry| {
            if entry.instance_type.name == "b" {
                let zones = vec!["us-east-1e".to_owned()];
                Entry::not_offered(entry.instance_type, Unoffered::Zones(zones))
            } else {
                entry
            }
        });
        let entries = entries.collect();
        *catalogue = Catalogue::new(entries);
    }
    let refused = run(&kiyot, &[(INSTANCE_TYPE, "b")]).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let problem = "nearest: b exists, but is offered in no zone with a subnet of cells, only in \
                   us-east-1e | a is not b";
    assert!(refused.message().ends_with(problem), "{}", refused.message());
    assert_eq!(kiyot.provider.launched(), 0);
    run(&kiyot, &[]).await.unwrap();
    assert_eq!(names(&kiyot), ["a"]);
}

/// Verifies A2, A7, A11, A12.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_annotation_is_an_invalid_argument_and_launches_nothing() {
    let kiyot = with_types(&[("a", "0.2"), ("b", "0.3")]).await;
    for (annotations, problem) in [
        (&[(CPU, "two")][..], "pod.elotl.co/cpu = \"two\": is invalid; allowed: a quantity"),
        (&[(MAX_PRICE, "-0.1")], "pod.elotl.co/max-price = \"-0.1\": is invalid; allowed: dollars"),
        (&[(INSTANCE_TYPE, "")], "pod.elotl.co/instance-type = \"\": is empty; allowed:"),
        (&[(INSTANCE_TYPE, "x9*")], "nearest: a is not x9* | b is not x9*"),
        (&[(MAX_PRICE, "0")], "a costs $0.2000 an hour, and $0.0000 is the highest allowed"),
        // An exact type that is smaller than another annotation wants.
        (&[(INSTANCE_TYPE, "a"), (MEMORY, "64Gi")], "nearest: a has 3953 MiB for processes"),
        (&[(SPOT_INSTANCE, "true"), (LAUNCH_TYPE, "On-Demand")], "pod.elotl.co/spot-instance"),
        (&[(LAUNCH_TYPE, "Spot")], "a is not offered as Spot"),
        (&[(ARCHITECTURE, "arm64")], "a is amd64, and arm64 is needed"),
    ] {
        let refused = run(&kiyot, annotations).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{annotations:?}");
        assert!(refused.message().contains(problem), "{annotations:?}: {}", refused.message());
    }
    assert_eq!((kiyot.provider.launched(), kiyot.daemon.cells.all().len()), (0, 0));
}

/// Verifies A12, A26.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_of_an_architecture_without_an_image_of_cells_is_an_invalid_argument() {
    // Its only offering fits every size.
    let kiyot = Fixture::start().await;
    let of_node = Architecture::of_node();
    let other = [Architecture::Amd64, Architecture::Arm64].into_iter().find(|it| *it != of_node);
    let other = other.unwrap().to_string();
    let refused = run(&kiyot, &[(ARCHITECTURE, &other)]).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let problem = format!("cells have an image for {of_node}, and {other} is needed");
    assert!(refused.message().contains(&problem), "{}", refused.message());
    assert_eq!(kiyot.provider.launched(), 0);
    run(&kiyot, &[(ARCHITECTURE, &of_node.to_string())]).await.unwrap();
}

/// Verifies A12.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_is_refused_while_the_provider_offers_nothing() {
    let kiyot = Fixture::start().await;
    *kiyot.provider.catalogue.lock().unwrap() = Catalogue::default();
    let refused = run(&kiyot, &[]).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let problem = "the catalogue has no instance type";
    assert!(refused.message().ends_with(problem), "{}", refused.message());
}

/// Returns a warm pool with cells for pods of this memory.
fn pool(memory: u64, count: usize) -> WarmPool {
    WarmPool { kind: WarmKind::Size { milli_cpus: 100, memory }, count, ..WarmPool::default() }
}

/// Verifies A27.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn catalogue_unreadable_at_the_start_refuses_pods_with_the_cause_until_it_is_read() {
    let kiyot = Fixture::start().await;
    kiyot.provider.is_unreadable.store(true, Ordering::SeqCst);
    kiyot.daemon.cells.set_warm(&[pool(1 << 30, 1)]);
    for _ in 0..2 {
        let refused = run(&kiyot, &[]).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        let cause = "the provider of cells: read the catalogue: the test says no";
        assert_eq!(refused.message(), cause);
    }
    assert_eq!(kiyot.provider.launched(), 0);
    kiyot.provider.is_unreadable.store(false, Ordering::SeqCst);
    run(&kiyot, &[]).await.unwrap();
    wait_for("the pool is filled", || kiyot.provider.launched() == 2).await;
}

/// Verifies A21, A27.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pool_that_is_changed_during_an_outage_keeps_its_cells_and_is_filled_afterwards() {
    let (kept, other) = (1 << 30, 2 << 30);
    let kiyot = Fixture::start().await;
    kiyot.daemon.cells.set_warm(&[pool(kept, 1)]);
    let launched = |count| move |kiyot: &Fixture| kiyot.provider.launched() == count;
    wait_for("the pool is filled", || launched(1)(&kiyot)).await;
    kiyot.provider.is_unreadable.store(true, Ordering::SeqCst);
    kiyot.daemon.cells.set_warm(&[pool(kept, 2), pool(other, 1)]);
    // The offerings of this pool are known, the offerings of the other pool are not.
    wait_for("the pool is larger", || launched(2)(&kiyot)).await;
    let refused = run(&kiyot, &[]).await.unwrap_err();
    assert!(refused.message().ends_with("read the images: the test says no"), "{refused}");
    let provider = &kiyot.provider;
    let ended = provider.asked_to_end.load(Ordering::SeqCst);
    assert_eq!((provider.launched(), provider.running(), ended), (2, 2, 0));
    provider.is_unreadable.store(false, Ordering::SeqCst);
    wait_for("the other pool is filled", || launched(3)(&kiyot)).await;
    let ended = provider.asked_to_end.load(Ordering::SeqCst);
    assert_eq!((provider.running(), ended), (3, 0));
}

/// Verifies A16, A17, A24.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn verbose_status_has_price_cost_and_timeline_of_the_cell() {
    let kiyot = with_types(&[("a", "0.2"), ("b", "0.3")]).await;
    run(&kiyot, &[]).await.unwrap();
    let listed: cri::ListPodSandboxResponse =
        kiyot.call(Method::ListPodSandbox, cri::ListPodSandboxRequest::default()).await.unwrap();
    let pod_sandbox_id = listed.items[0].id.clone();
    let request = cri::PodSandboxStatusRequest { pod_sandbox_id, verbose: true };
    let status: cri::PodSandboxStatusResponse =
        kiyot.call(Method::PodSandboxStatus, request).await.unwrap();
    let info: serde_json::Value = serde_json::from_str(&status.info["info"]).unwrap();
    let instance = &info["instance"];
    assert_eq!((&instance["type"], &instance["market"]), (&"a".into(), &"On-Demand".into()));
    assert_eq!(instance["pricePerHour"], "$0.2000");
    assert!(instance["cost"].as_str().is_some_and(|cost| cost > "$0.0000"), "{instance}");
    for step in ["launchedMs", "bootedMs", "enrolledMs", "boundMs"] {
        assert!(info["start"][step].is_u64(), "{step} in {info}");
        let times = &info["starts"]["steps"][step];
        assert_eq!((&times["count"], &times["le"]["+Inf"]), (&1.into(), &1.into()), "{step}");
    }
    assert_eq!(info["starts"]["cells"], "a (cold)");
    assert_eq!(info["starts"]["steps"]["firstContainerMs"]["count"], 0);
    assert_eq!(info["namespace"]["cells"], 1);
    assert_eq!(info["namespace"]["pricePerHour"], "$0.2000");
}

/// Verifies A13.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn offering_without_capacity_is_not_tried_again_at_once() {
    let kiyot = with_types(&[("a", "0.2"), ("b", "0.3")]).await;
    let only_a = [(MAX_PRICE, "0.2")];
    kiyot.provider.full.lock().unwrap().push(Offering {
        instance_type: "a".to_owned(),
        zone: String::new(),
        market: Market::OnDemand,
    });
    let refused = run(&kiyot, &only_a).await.unwrap_err();
    assert_eq!((refused.code(), names(&kiyot)), (Code::ResourceExhausted, vec!["a".to_owned()]));
    // The provider is not called.
    kiyot.provider.candidates.lock().unwrap().clear();
    let refused = run(&kiyot, &only_a).await.unwrap_err();
    assert_eq!((refused.code(), candidates(&kiyot)), (Code::ResourceExhausted, vec![]));
    let message = "every offering that fits the pod was refused lately (1 of them); a (On-Demand) \
                   is tried again in 1";
    assert!(refused.message().contains(message), "{}", refused.message());
    run(&kiyot, &[]).await.unwrap();
    assert_eq!(names(&kiyot), ["b"]);
}

/// A played reader of the Kubernetes API. It returns the requests of a pod, or never answers.
#[derive(Debug)]
pub(crate) struct PlayedRequests(pub(crate) Option<ApiRequests>);

#[async_trait]
impl PodRequests for PlayedRequests {
    async fn of_pod(&self, _uid: &str) -> Option<ApiRequests> {
        match &self.0 {
            Some(known) => Some(known.clone()),
            None => std::future::pending().await,
        }
    }

    fn known(&self, _uid: &str) -> Option<ApiRequests> {
        self.0.clone()
    }
}

/// Verifies K10.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_is_sized_by_the_requests_of_the_api_if_known() {
    let large = ApiRequests { memory_request: 64 << 30, ..ApiRequests::default() };
    let kiyot = with_types(&[("a", "0.2")]).await;
    kiyot.daemon.cri.set_pod_requests(Arc::new(PlayedRequests(Some(large))));
    let refused = run(&kiyot, &[]).await.unwrap_err();
    assert!(
        refused.message().contains("64 GiB") || refused.message().contains("65536"),
        "{refused}"
    );
    // An annotation takes precedence.
    run(&kiyot, &[(MEMORY, "1Gi")]).await.unwrap();
    assert_eq!(names(&kiyot), ["a"]);
}

/// Verifies U28.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_with_gpus_is_refused_before_a_launch() {
    let kiyot = with_types(&[("a", "0.2")]).await;
    let refusal = async |gpus: &str| {
        let refused = run(&kiyot, &[(GPU, gpus)]).await.unwrap_err();
        assert_eq!((refused.code(), candidates(&kiyot)), (Code::InvalidArgument, vec![]));
        refused.message().to_owned()
    };
    let why = "pods in cells have no devices yet";
    assert!(refusal("1 T4").await.contains(&format!("pod.elotl.co/gpu (1 GPU (T4)): {why}")));
    let requests = ApiRequests { gpus: Some("amd.com/gpu".to_owned()), ..ApiRequests::default() };
    kiyot.daemon.cri.set_pod_requests(Arc::new(PlayedRequests(Some(requests))));
    assert!(refusal("0").await.contains(&format!("amd.com/gpu: {why}")));
}

/// Verifies K6, K10.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_runs_although_the_api_does_not_answer() {
    let kiyot = with_types(&[("a", "0.2")]).await;
    kiyot.daemon.cri.set_pod_requests(Arc::new(PlayedRequests(None)));
    run(&kiyot, &[]).await.unwrap();
    assert_eq!(names(&kiyot), ["a"]);
}

/// The warning is logged with the event of the pod. Runs on a single thread, whose log is captured.
///
/// Verifies K8.
#[tokio::test]
async fn pod_with_variables_in_files_of_volumes_is_warned_by_name() {
    for has_env_in_files in [true, false] {
        let log = CapturedLog::start();
        let kiyot = with_types(&[("a", "0.2")]).await;
        let requests = ApiRequests { has_env_in_files, ..ApiRequests::default() };
        kiyot.daemon.cri.set_pod_requests(Arc::new(PlayedRequests(Some(requests))));
        run(&kiyot, &[]).await.unwrap();
        let warnings: Vec<_> =
            log.lines().into_iter().filter(|line| line.contains("(fileKeyRef)")).collect();
        assert_eq!(warnings.len(), usize::from(has_env_in_files), "{warnings:?}");
        assert!(warnings.iter().all(|line| line.contains("WARN") && line.contains("shop/web")));
    }
}
