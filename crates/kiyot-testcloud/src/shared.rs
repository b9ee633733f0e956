//! State that the proxy, the instances and the handles of a test share.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Seek, SeekFrom},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::Instant,
};

use tokio::sync::Notify;

use crate::{
    calls::{Call, MAX_CALLS, Outcome},
    catalogue::InstanceType,
    client::Reply,
    faults::FaultSet,
    instance::Instance,
    machine::Disk,
    moto::Moto,
    proxy::Caller,
    query::Query,
    role::Role,
    throttle::Buckets,
    volume::ImageVolume,
    vpc::Vpc,
    xml::Element,
};

/// Most bytes of console output that the API returns.
const MAX_CONSOLE_BYTES: u64 = 64 * 1024;

/// A launch with a client token.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    pub(crate) parameters: BTreeMap<String, String>,
    pub(crate) reply: Element,
    pub(crate) instances: Vec<String>,
}

/// A file of the image.
#[derive(Debug, Clone)]
pub(crate) struct ImageFile {
    /// Absolute path in an instance's root.
    pub(crate) path: String,
    pub(crate) content: Vec<u8>,
    pub(crate) mode: u32,
}

/// The mutable state.
#[derive(Debug, Default)]
pub(crate) struct Mutable {
    pub(crate) faults: FaultSet,
    pub(crate) instances: BTreeMap<String, Instance>,
    pub(crate) launches: BTreeMap<String, Launch>,
    pub(crate) buckets: Buckets,
    /// Id of the host of the test.
    pub(crate) host: Option<String>,
    /// The role of the host's instance profile.
    pub(crate) role: Role,
    pub(crate) image_files: Vec<ImageFile>,
    /// Block devices of the image.
    pub(crate) image_volumes: Vec<ImageVolume>,
    /// Disk of new instances: they are virtual machines.
    pub(crate) disk: Option<Disk>,
    calls: BTreeMap<u64, Call>,
    next_call: u64,
}

impl Mutable {
    /// Returns an instance, in its current state.
    pub(crate) fn instance(&mut self, id: &str) -> Option<&mut Instance> {
        let instance = self.instances.get_mut(id)?;
        instance.settle(Instant::now());
        Some(instance)
    }

    /// Returns an instance that the API shows.
    pub(crate) fn visible(&mut self, id: &str) -> Option<&mut Instance> {
        self.instance(id).filter(|instance| instance.is_visible(Instant::now()))
    }

    /// Returns all instances that the API shows.
    pub(crate) fn all_visible(&mut self) -> BTreeMap<String, Instance> {
        let ids: Vec<String> = self.instances.keys().cloned().collect();
        ids.into_iter().filter_map(|id| Some((id.clone(), self.visible(&id)?.clone()))).collect()
    }

    /// Records a call and returns its number.
    pub(crate) fn record(&mut self, query: &Query, caller: &Caller) -> u64 {
        let number = self.next_call;
        self.next_call += 1;
        self.calls.insert(number, Call::new(query, caller));
        if self.calls.len() > MAX_CALLS {
            self.calls.pop_first();
        }
        number
    }

    /// Records the outcome of a call.
    pub(crate) fn finish(&mut self, number: u64, outcome: Outcome) {
        if let Some(call) = self.calls.get_mut(&number) {
            call.outcome = outcome;
        }
    }

    /// Returns the recorded calls in order.
    pub(crate) fn calls(&self) -> Vec<Call> {
        self.calls.values().cloned().collect()
    }

    /// Drops the recorded calls.
    pub(crate) fn clear_calls(&mut self) {
        self.calls.clear();
    }
}

/// State of a cloud.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Server with the resources.
    pub(crate) moto: Moto,
    /// Directory of the cloud's files.
    pub(crate) directory: PathBuf,
    /// Instance types by name.
    pub(crate) types: BTreeMap<String, InstanceType>,
    /// True if instances are booted.
    pub(crate) boots: bool,
    pub(crate) state: Mutex<Mutable>,
    /// Notified when faults or instances change.
    pub(crate) changed: Notify,
    /// Locked during a launch, so that a client token is used once.
    pub(crate) launching: tokio::sync::Mutex<()>,
    /// Locked during a termination, so that moto gets each instance once.
    pub(crate) terminating: tokio::sync::Mutex<()>,
    /// The VPC of a cloud whose instances are booted.
    pub(crate) network: OnceLock<Weak<Vpc>>,
}

impl Shared {
    /// Locks the state.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Mutable> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the VPC while instances are booted.
    pub(crate) fn vpc(&self) -> Option<Arc<Vpc>> {
        self.network.get()?.upgrade()
    }

    /// Sends a call to moto. moto has the resources in a single region, whatever region the caller
    /// names.
    pub(crate) async fn moto(&self, query: &Query, signed: Option<&str>) -> Result<Reply, String> {
        let signed = signed.map(in_region_of_moto);
        self.moto.call(query, signed.as_deref()).await
    }

    /// Returns the file of an instance's console.
    pub(crate) fn console(&self, id: &str) -> PathBuf {
        self.directory.join(format!("{id}.console"))
    }

    /// Reads the end of an instance's console.
    pub(crate) fn console_tail(&self, id: &str) -> Vec<u8> {
        let mut tail = Vec::new();
        let read = fs::File::open(self.console(id)).and_then(|mut file| {
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(length.saturating_sub(MAX_CONSOLE_BYTES)))?;
            file.take(MAX_CONSOLE_BYTES).read_to_end(&mut tail)
        });
        // A console without output has no file.
        read.map_or_else(|_| Vec::new(), |_| tail)
    }
}

/// Replaces the region in the scope of a signature, `KEY/DATE/REGION/ec2/aws4_request`.
fn in_region_of_moto(signed: &str) -> String {
    let Some((before, after)) = signed.split_once("/ec2/aws4_request") else {
        return signed.to_owned();
    };
    let Some((before, _)) = before.rsplit_once('/') else { return signed.to_owned() };
    format!("{before}/us-east-1/ec2/aws4_request{after}")
}
