//! Tags of pods that take warm cells. They are set in the background, because no pod waits for
//! them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use kiyot_config::{AWS_TAG_PREFIX, MAX_TAGS, check_tag_key};
use kiyot_engine::provider::{ErrorClass, InstanceId};
use tokio::{task::JoinSet, time::sleep};

use crate::{
    CallError, Ec2Api, InstanceDescription, InstanceFilter, provider::error_codes::classify,
};

/// Bounds the calls for an instance.
const MAX_CALLS: u32 = 8;
/// Pause after the first failed call. It doubles up to [`MAX_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// See [`FIRST_PAUSE`].
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Bounds the instances whose tags are being set.
const MAX_TASKS: usize = 1000;

/// The parts of an instance that have tags, and the keys of its tags.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Tagged {
    volumes: Vec<String>,
    interfaces: Vec<String>,
    /// The keys that count toward EC2's limit.
    keys: BTreeSet<String>,
}

impl Tagged {
    pub(super) fn of(described: &InstanceDescription) -> Self {
        let keys = described.tags.keys().filter(|key| !key.starts_with(AWS_TAG_PREFIX));
        Self {
            volumes: described.volumes.clone(),
            interfaces: described.interfaces.clone(),
            keys: keys.cloned().collect(),
        }
    }
}

/// Sets tags of instances, each in its own task. The tasks end with this value.
#[derive(Debug)]
pub(super) struct Tagging {
    api: Arc<dyn Ec2Api>,
    tasks: Mutex<JoinSet<()>>,
}

impl Tagging {
    pub(super) fn new(api: Arc<dyn Ec2Api>) -> Self {
        Self { api, tasks: Mutex::default() }
    }

    /// Begins to set tags of an instance. `known` is its last description.
    pub(super) fn begin(
        &self,
        instance: &InstanceId,
        known: Option<Tagged>,
        tags: BTreeMap<String, String>,
    ) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        if tasks.len() >= MAX_TASKS {
            tracing::warn!(%instance, busy = tasks.len(), "tags of a pod not set, too many tasks");
            return;
        }
        let call = Call { api: Arc::clone(&self.api), instance: instance.clone() };
        tasks.spawn(async move {
            let instance = &call.instance;
            match call.set(known, tags).await {
                Ok(()) => tracing::debug!(%instance, "tags of a pod set"),
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(%instance, error, "tags of a pod not set");
                }
            }
        });
    }
}

/// The setting of an instance's tags.
struct Call {
    api: Arc<dyn Ec2Api>,
    instance: InstanceId,
}

impl Call {
    /// Sets the tags of instance, volumes and network interfaces, or only of the instance if EC2
    /// refuses this. Setting tags is idempotent, so a call without a response is repeated.
    async fn set(
        &self,
        known: Option<Tagged>,
        tags: BTreeMap<String, String>,
    ) -> Result<(), CallError> {
        // The response to a launch has no volumes.
        let known = match known.filter(|known| !known.volumes.is_empty()) {
            Some(known) => known,
            None => self.described().await,
        };
        let (tags, left_out) = fitting(&known.keys, tags);
        if !left_out.is_empty() {
            tracing::warn!(
                instance = %self.instance,
                count = left_out.len(),
                ?left_out,
                "labels of a pod left out, its warm cell has other tags"
            );
        }
        let mut resources = vec![self.instance.0.clone()];
        resources.extend(known.volumes.into_iter().chain(known.interfaces));
        let mut pause = FIRST_PAUSE;
        let mut calls = 0;
        loop {
            let Err(error) = self.api.create_tags(&resources, &tags).await else { return Ok(()) };
            calls += 1;
            if calls >= MAX_CALLS {
                return Err(error);
            }
            match classify(&error).0 {
                ErrorClass::Throttled
                | ErrorClass::Transient
                | ErrorClass::Unanswered
                | ErrorClass::NotFound => {
                    sleep(pause).await;
                    pause = (pause * 2).min(MAX_PAUSE);
                }
                _ if resources.len() > 1 => resources.truncate(1),
                _ => return Err(error),
            }
        }
    }

    /// Describes the instance. Without a response its volumes stay untagged.
    async fn described(&self) -> Tagged {
        let filter = InstanceFilter::Ids(vec![self.instance.0.clone()]);
        let described = self.api.describe_instances(&filter).await.unwrap_or_default();
        described.first().map(Tagged::of).unwrap_or_default()
    }
}

/// Returns the new tags that fit beside the present tags, the daemon's own first, and the keys of
/// the tags that do not fit. An instance has further tags if the configuration or an operator has
/// changed them.
fn fitting(
    present: &BTreeSet<String>,
    tags: BTreeMap<String, String>,
) -> (BTreeMap<String, String>, Vec<String>) {
    let mut room = MAX_TAGS.saturating_sub(present.len());
    let (own, labels): (Vec<_>, Vec<_>) =
        tags.into_iter().partition(|(key, _)| check_tag_key(key).is_err());
    let (mut fitting, mut left_out) = (BTreeMap::new(), Vec::new());
    for (key, value) in own.into_iter().chain(labels) {
        if !present.contains(&key) {
            if room == 0 {
                left_out.push(key);
                continue;
            }
            room -= 1;
        }
        fitting.insert(key, value);
    }
    (fitting, left_out)
}

#[cfg(test)]
mod tests {
    use crate::Failure;

    use super::{super::fake_api::FakeApi, *};

    fn texts(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn tagged() -> Tagged {
        Tagged {
            volumes: vec!["vol-1".into()],
            interfaces: vec!["eni-1".into()],
            keys: BTreeSet::new(),
        }
    }

    /// Sets tags while calls fail, and returns the resources of each call.
    async fn set(failures: &[&str]) -> Vec<String> {
        let refused =
            |code: &&str| Failure::Refused { code: Some((*code).into()), message: "".into() };
        let failures = Mutex::new(failures.iter().map(refused).collect());
        let api = Arc::new(FakeApi { tag_failures: failures, ..FakeApi::default() });
        let tagging = Tagging::new(Arc::clone(&api) as _);
        tagging.begin(&InstanceId("i-1".into()), Some(tagged()), texts(&[("app", "web")]));
        let mut tasks = std::mem::take(&mut *tagging.tasks.lock().unwrap());
        while tasks.join_next().await.is_some() {}
        let calls = std::mem::take(&mut *api.tag_calls.lock().unwrap());
        calls.into_iter().map(|ids| ids.join(" ")).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn throttled_calls_are_repeated_and_bounded() {
        let all = "i-1 vol-1 eni-1";
        assert_eq!(set(&[]).await, [all]);
        assert_eq!(set(&["RequestLimitExceeded", "Unavailable"]).await, [all; 3]);
        let began = tokio::time::Instant::now();
        assert_eq!(set(&["RequestLimitExceeded"; 50]).await, [all; MAX_CALLS as usize]);
        assert_eq!(began.elapsed(), Duration::from_secs(1 + 2 + 4 + 8 + 16 + 32 + 60));
    }

    #[tokio::test(start_paused = true)]
    async fn instance_is_tagged_if_its_volume_is_refused() {
        let all = "i-1 vol-1 eni-1";
        assert_eq!(set(&["InvalidVolume.NotFound"]).await, [all, "i-1"]);
        assert_eq!(set(&["UnauthorizedOperation"; 9]).await, [all, "i-1"]);
    }

    #[tokio::test(start_paused = true)]
    async fn tag_setting_ends_with_its_owner() {
        let failures = Mutex::new(vec![Failure::Unanswered("reset".into()); 3].into());
        let api = Arc::new(FakeApi { tag_failures: failures, ..FakeApi::default() });
        let tagging = Tagging::new(Arc::clone(&api) as _);
        tagging.begin(&InstanceId("i-1".into()), Some(tagged()), texts(&[("app", "web")]));
        tokio::time::sleep(FIRST_PAUSE / 2).await;
        drop(tagging);
        tokio::time::sleep(MAX_PAUSE).await;
        assert_eq!(api.tag_calls.lock().unwrap().len(), 1);
        assert_eq!(Arc::strong_count(&api), 1);
    }

    #[test]
    fn tags_of_the_daemon_fit_first() {
        let present: BTreeSet<String> =
            (0..MAX_TAGS - 2).map(|number| format!("x{number}")).collect();
        let tags = texts(&[("app", "web"), ("kiyot:pod", "web-0"), ("run", "x"), ("x1", "new")]);
        let (fitting, left_out) = fitting(&present, tags);
        assert_eq!(fitting, texts(&[("app", "web"), ("kiyot:pod", "web-0"), ("x1", "new")]));
        assert_eq!(left_out, ["run"]);
    }
}
