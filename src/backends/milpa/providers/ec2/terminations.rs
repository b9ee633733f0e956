//! Terminations in batches: pods that end together need one call, and an unknown id spoils none.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use kiyot_ec2::{CallError, Ec2Api, Failure, InstanceStateName};
use tokio::{sync::oneshot, time::sleep};

use super::{
    super::{ErrorClass, InstanceId, ProviderError, Termination},
    error_codes::classify,
    pacing::{Action, Pacing},
};

/// The time in which terminations are collected for one call.
const COLLECT: Duration = Duration::from_millis(200);
/// Bounds the ids of a call, as EC2 advises.
const MAX_IDS: usize = 50;
/// The code of the error that names unknown ids.
pub(super) const NOT_FOUND: &str = "InvalidInstanceID.NotFound";

type Outcome = Result<Termination, ProviderError>;

/// Collects the terminations of several callers.
#[derive(Debug)]
pub(super) struct Terminations {
    api: Arc<dyn Ec2Api>,
    pacing: Arc<Pacing>,
    waiting: Mutex<BTreeMap<String, Vec<oneshot::Sender<Outcome>>>>,
}

impl Terminations {
    pub(super) fn new(api: Arc<dyn Ec2Api>, pacing: Arc<Pacing>) -> Self {
        Self { api, pacing, waiting: Mutex::default() }
    }

    /// Terminates instances, together with those of other callers.
    pub(super) async fn terminate(&self, ids: &[InstanceId]) -> super::super::Terminations {
        let mut outcomes = Vec::new();
        let leads = {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            let leads = waiting.is_empty();
            for id in ids {
                let (sender, receiver) = oneshot::channel();
                waiting.entry(id.0.clone()).or_default().push(sender);
                outcomes.push((id, receiver));
            }
            leads
        };
        if leads {
            self.lead().await;
        }
        let mut answered = super::super::Terminations::new();
        for (id, outcome) in outcomes {
            // The caller that led the batch was dropped.
            let lost = || {
                let doing = format!("terminate instance {id}: the batch was abandoned");
                Err(ProviderError::without_cause(ErrorClass::Transient, doing))
            };
            answered.insert(id.clone(), outcome.await.unwrap_or_else(|_| lost()));
        }
        answered
    }

    /// Waits for other callers, and makes the calls for all.
    async fn lead(&self) {
        let mut collecting = Collecting { of: self, is_open: true };
        sleep(COLLECT).await;
        let mut senders = collecting.close();
        let ids: Vec<String> = senders.keys().cloned().collect();
        for ids in ids.chunks(MAX_IDS) {
            for (id, outcome) in self.call(ids).await {
                for sender in senders.remove(&id).unwrap_or_default() {
                    // A dropped caller needs no answer.
                    let _ = sender.send(outcome.clone());
                }
            }
        }
    }

    /// Terminates instances; without unknown ones, if EC2 names some.
    async fn call(&self, ids: &[String]) -> BTreeMap<String, Outcome> {
        let mut outcomes = BTreeMap::new();
        let mut left: BTreeSet<String> = ids.iter().cloned().collect();
        while !left.is_empty() {
            self.pacing.wait(Action::Terminate).await;
            let ids: Vec<String> = left.iter().cloned().collect();
            match self.api.terminate_instances(&ids).await {
                Ok(states) => {
                    outcomes.extend(ids.into_iter().map(|id| {
                        let state = states.get(&id).copied();
                        (id, Ok(termination(state)))
                    }));
                    break;
                }
                Err(error) => {
                    let unknown = unknown_ids(&error, &left);
                    if unknown.is_empty() {
                        let failed = |id: String| {
                            let error = terminate_error(&id, &error);
                            (id, Err(error))
                        };
                        outcomes.extend(ids.into_iter().map(failed));
                        break;
                    }
                    for id in unknown {
                        left.remove(&id);
                        let error = terminate_error(&id, &error);
                        outcomes.insert(id, Err(error));
                    }
                }
            }
        }
        outcomes
    }
}

/// A batch that collects callers. If its leader is dropped, the others get an error.
struct Collecting<'a> {
    of: &'a Terminations,
    is_open: bool,
}

impl Collecting<'_> {
    /// Returns the callers. Later callers begin another batch.
    fn close(&mut self) -> BTreeMap<String, Vec<oneshot::Sender<Outcome>>> {
        self.is_open = false;
        std::mem::take(&mut *self.of.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Collecting<'_> {
    fn drop(&mut self) {
        if self.is_open {
            self.close();
        }
    }
}

/// Returns the progress of a termination. Without a state the instance is ending.
fn termination(state: Option<InstanceStateName>) -> Termination {
    match state {
        Some(InstanceStateName::Terminated) => Termination::Confirmed,
        _ => Termination::Accepted,
    }
}

/// Returns the ids that EC2's message names as unknown: then it has terminated none.
fn unknown_ids(error: &CallError, asked: &BTreeSet<String>) -> Vec<String> {
    let Failure::Refused { code, message } = &error.failure else { return Vec::new() };
    if code != NOT_FOUND {
        return Vec::new();
    }
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let named: BTreeSet<&str> = message.split(|c| !is_part(c)).collect();
    asked.iter().filter(|id| named.contains(id.as_str())).cloned().collect()
}

fn terminate_error(id: &str, error: &CallError) -> ProviderError {
    let class = classify(error).0;
    ProviderError::new(class, format!("terminate instance {id}"), error.clone())
}

#[cfg(test)]
mod tests {
    use super::{super::fake_api::FakeApi, *};

    fn ids(numbers: std::ops::Range<u32>) -> Vec<InstanceId> {
        numbers.map(|number| InstanceId(format!("i-{number:03}"))).collect()
    }

    fn terminations(api: FakeApi) -> (Arc<FakeApi>, Terminations) {
        let api = Arc::new(api);
        (Arc::clone(&api), Terminations::new(api, Arc::new(Pacing::default())))
    }

    fn knowing(ids: &[InstanceId]) -> FakeApi {
        FakeApi { known: ids.iter().map(|id| id.0.clone()).collect(), ..FakeApi::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn terminations_of_pods_that_end_together_are_one_call() {
        let all = ids(0..40);
        let (api, terminations) = terminations(knowing(&all));
        let calls = all.iter().map(|id| terminations.terminate(std::slice::from_ref(id)));
        for (id, outcomes) in all.iter().zip(futures::future::join_all(calls).await) {
            assert_eq!(outcomes[id].as_ref().unwrap(), &Termination::Accepted);
        }
        assert_eq!(api.calls.lock().unwrap().len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn unknown_id_spoils_no_termination() {
        let all = ids(0..5);
        let (api, terminations) = terminations(knowing(&all[1..]));
        let outcomes = terminations.terminate(&all).await;
        assert_eq!(outcomes[&all[0]].as_ref().unwrap_err().class, ErrorClass::NotFound);
        for id in &all[1..] {
            assert_eq!(outcomes[id].as_ref().unwrap(), &Termination::Accepted);
        }
        assert_eq!(api.calls.lock().unwrap().len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn failure_that_names_no_id_is_that_of_all() {
        let all = ids(0..3);
        let failure = Failure::Refused { code: "UnauthorizedOperation".into(), message: "".into() };
        let (_, terminations) = terminations(FakeApi { failure: Some(failure), ..knowing(&all) });
        let outcomes = terminations.terminate(&all).await;
        for id in &all {
            assert_eq!(outcomes[id].as_ref().unwrap_err().class, ErrorClass::Auth);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn dropped_leader_fails_its_followers_and_the_next_batch_goes_on() {
        let all = ids(0..2);
        let (api, terminations) = terminations(knowing(&all));
        let leader = terminations.terminate(&all[..1]);
        let follower = terminations.terminate(&all[1..]);
        tokio::pin!(follower);
        {
            tokio::pin!(leader);
            assert!(futures::poll!(leader.as_mut()).is_pending());
            assert!(futures::poll!(follower.as_mut()).is_pending());
        }
        let outcomes = follower.await;
        assert_eq!(outcomes[&all[1]].as_ref().unwrap_err().class, ErrorClass::Transient);
        assert_eq!(terminations.terminate(&all).await.len(), 2);
        assert_eq!(api.calls.lock().unwrap().len(), 1);
    }
}
