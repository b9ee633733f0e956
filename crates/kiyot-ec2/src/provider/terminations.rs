//! Terminations in batches: pods that end together need one call. An id that EC2 refuses does not
//! keep the others from ending: a refused batch is divided down to single ids.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use kiyot_engine::provider::{ErrorClass, InstanceId, ProviderError, Termination};
use tokio::{sync::oneshot, time::sleep};

use crate::{CallError, Ec2Api, Failure, InstanceStateName, provider::error_codes::classify};

/// The time in which terminations are collected for one call.
const COLLECT: Duration = Duration::from_millis(200);
/// Bounds the ids of a call, as EC2 advises.
const MAX_IDS: usize = 50;
/// Bounds the calls of a batch. A single refused id of 50 needs 12.
const MAX_CALLS: usize = 60;
/// Consecutive refusals after which the whole batch counts as refused.
const MAX_REFUSALS: usize = 10;
/// Bounds the remembered ids that EC2 refuses individually.
const MAX_ALONE: usize = 1000;
/// The code of the error that names unknown ids.
pub(super) const NOT_FOUND: &str = "InvalidInstanceID.NotFound";

type Outcome = Result<Termination, ProviderError>;

/// Collects the terminations of several callers.
#[derive(Debug)]
pub(super) struct Terminations {
    api: Arc<dyn Ec2Api>,
    waiting: Mutex<BTreeMap<String, Vec<oneshot::Sender<Outcome>>>>,
    /// Ids that EC2 refused individually, the last tried at the end. They are in no batch.
    alone: Mutex<VecDeque<String>>,
}

impl Terminations {
    pub(super) fn new(api: Arc<dyn Ec2Api>) -> Self {
        Self { api, waiting: Mutex::default(), alone: Mutex::default() }
    }

    /// Terminates instances, together with other callers' instances.
    pub(super) async fn terminate(
        &self,
        ids: &[InstanceId],
    ) -> kiyot_engine::provider::Terminations {
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
        let mut answered = kiyot_engine::provider::Terminations::new();
        for (id, outcome) in outcomes {
            // The leading caller of the batch was dropped.
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

    /// Terminates instances. A batch that EC2 refuses is repeated without the ids that EC2 calls
    /// unknown, or in halves: an instance may be protected, or belong to another owner by its tags.
    async fn call(&self, ids: &[String]) -> BTreeMap<String, Outcome> {
        let mut outcomes = BTreeMap::new();
        let mut parts = self.parts(ids);
        let (mut calls, mut refusals) = (0, 0);
        let mut refusal: Option<CallError> = None;
        while let Some(part) = parts.pop_front() {
            if let Some(error) = refusal.as_ref().filter(|_| refusals >= MAX_REFUSALS) {
                outcomes.extend(failed(part, error));
                continue;
            }
            calls += 1;
            let error = match self.api.terminate_instances(&part).await {
                Ok(states) => {
                    // A success shows that the refusals are about single ids.
                    (refusals, refusal) = (0, None);
                    self.keep_alone(&part, false);
                    outcomes.extend(part.into_iter().map(|id| {
                        let state = states.get(&id).copied();
                        (id, Ok(termination(state)))
                    }));
                    continue;
                }
                Err(error) => error,
            };
            let asked: BTreeSet<String> = part.iter().cloned().collect();
            let unknown = unknown_ids(&error, &asked);
            let is_divided =
                is_of_ids(&error) && part.len() > 1 && calls + parts.len() + 2 <= MAX_CALLS;
            if !unknown.is_empty() {
                let left: Vec<String> =
                    asked.into_iter().filter(|id| !unknown.contains(id)).collect();
                self.keep_alone(&unknown, false);
                outcomes.extend(failed(unknown, &error));
                parts.extend((!left.is_empty()).then_some(left));
            } else if is_divided {
                let (first, second) = part.split_at(part.len() / 2);
                parts.push_front(second.to_vec());
                parts.push_front(first.to_vec());
                (refusals, refusal) = (refusals + 1, Some(error));
            } else {
                if is_of_ids(&error) {
                    self.keep_alone(&part, true);
                }
                outcomes.extend(failed(part, &error));
                (refusals, refusal) = (refusals + 1, Some(error));
            }
        }
        outcomes
    }

    /// Returns the parts of the first calls: a batch of ids, and then each id that EC2 refused
    /// individually.
    fn parts(&self, ids: &[String]) -> VecDeque<Vec<String>> {
        let alone = self.alone();
        let together = ids.iter().filter(|id| !alone.contains(*id)).cloned().collect();
        let singly = alone.iter().filter(|id| ids.contains(*id)).map(|id| vec![id.clone()]);
        let parts = std::iter::once(together).chain(singly);
        parts.filter(|part: &Vec<String>| !part.is_empty()).collect()
    }

    /// Records that an id was refused individually, or that ids were accepted.
    fn keep_alone(&self, ids: &[String], is_refused: bool) {
        let mut alone = self.alone();
        alone.retain(|id| !ids.contains(id));
        if let ([id], true) = (ids, is_refused) {
            if alone.len() >= MAX_ALONE {
                alone.pop_front();
            }
            alone.push_back(id.clone());
        }
    }

    fn alone(&self) -> std::sync::MutexGuard<'_, VecDeque<String>> {
        self.alone.lock().unwrap_or_else(PoisonError::into_inner)
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

/// Returns the progress of a termination. An instance without a state is ending.
fn termination(state: Option<InstanceStateName>) -> Termination {
    match state {
        Some(InstanceStateName::Terminated) => Termination::Confirmed,
        _ => Termination::Accepted,
    }
}

/// Returns the ids that EC2's message names as unknown. EC2 has then terminated no instance.
fn unknown_ids(error: &CallError, asked: &BTreeSet<String>) -> Vec<String> {
    let Failure::Refused { code, message } = &error.failure else { return Vec::new() };
    if code.as_deref() != Some(NOT_FOUND) {
        return Vec::new();
    }
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let named: BTreeSet<&str> = message.split(|c| !is_part(c)).collect();
    asked.iter().filter(|id| named.contains(id.as_str())).cloned().collect()
}

/// Returns whether the refusal may be about some of the ids, not about rate or credentials.
fn is_of_ids(error: &CallError) -> bool {
    let is_answered = matches!(error.failure, Failure::Refused { .. });
    is_answered
        && match classify(error).0 {
            ErrorClass::Throttled => false,
            ErrorClass::Auth => error.is_denied(),
            _ => true,
        }
}

fn failed(
    ids: Vec<String>,
    error: &CallError,
) -> impl Iterator<Item = (String, Outcome)> + use<'_> {
    ids.into_iter().map(move |id| {
        let failed = terminate_error(&id, error);
        (id, Err(failed))
    })
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
        (Arc::clone(&api), Terminations::new(api))
    }

    fn knowing(ids: &[InstanceId]) -> FakeApi {
        FakeApi { known: ids.iter().map(|id| id.0.clone()).collect(), ..FakeApi::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn terminations_of_pods_that_end_together_share_a_call() {
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
    async fn refused_ids_spoil_no_termination() {
        for code in ["OperationNotPermitted", "UnauthorizedOperation", "IncorrectInstanceState"] {
            let all = ids(0..50);
            let protected: Vec<String> = [0, 7, 49].map(|index: usize| all[index].0.clone()).into();
            let api = FakeApi {
                protected: protected.iter().map(|id| (id.clone(), code)).collect(),
                ..knowing(&all)
            };
            let (api, terminations) = terminations(api);
            let outcomes = terminations.terminate(&all).await;
            for id in &all {
                let is_refused = outcomes[id].is_err();
                assert_eq!(is_refused, protected.contains(&id.0), "{code}: {id}");
            }
            let first = std::mem::take(&mut *api.calls.lock().unwrap());
            assert!(first.len() <= MAX_CALLS, "{code}: {}", first.len());
            // Refused ids are then called individually.
            let outcomes = terminations.terminate(&all).await;
            assert_eq!(outcomes.values().filter(|it| it.is_err()).count(), 3, "{code}");
            assert_eq!(api.calls.lock().unwrap().len(), 4, "{code}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn other_ids_end_after_some_batches_despite_many_refused_ids() {
        let all = ids(0..50);
        let protected = all[..30].iter().map(|id| (id.0.clone(), "OperationNotPermitted"));
        let (api, terminations) =
            terminations(FakeApi { protected: protected.collect(), ..knowing(&all) });
        let mut ended = BTreeSet::new();
        for _ in 0..30 {
            let outcomes = terminations.terminate(&all).await;
            ended.extend(outcomes.into_iter().filter(|(_, it)| it.is_ok()).map(|(id, _)| id));
            let calls = std::mem::take(&mut *api.calls.lock().unwrap());
            assert!(calls.len() <= MAX_CALLS, "{}", calls.len());
        }
        assert_eq!(ended, all[30..].iter().cloned().collect());
    }

    #[tokio::test(start_paused = true)]
    async fn refusal_of_every_id_ends_the_batch_after_few_calls() {
        let all = ids(0..50);
        let failure =
            Failure::Refused { code: Some("UnauthorizedOperation".into()), message: "".into() };
        let (api, terminations) = terminations(FakeApi { failure: Some(failure), ..knowing(&all) });
        let outcomes = terminations.terminate(&all).await;
        for id in &all {
            assert_eq!(outcomes[id].as_ref().unwrap_err().class, ErrorClass::Auth);
        }
        assert_eq!(api.calls.lock().unwrap().len(), MAX_REFUSALS);
    }

    #[tokio::test(start_paused = true)]
    async fn failure_about_no_single_id_ends_the_batch_at_once() {
        let all = ids(0..3);
        for (failure, class) in [
            (Failure::TooSlow(Duration::from_secs(30)), ErrorClass::Unanswered),
            (
                Failure::Refused { code: Some("RequestLimitExceeded".into()), message: "".into() },
                ErrorClass::Throttled,
            ),
            (
                Failure::Refused { code: Some("AuthFailure".into()), message: "".into() },
                ErrorClass::Auth,
            ),
        ] {
            let api = FakeApi { failure: Some(failure), ..knowing(&all) };
            let (api, terminations) = terminations(api);
            let outcomes = terminations.terminate(&all).await;
            assert!(outcomes.values().all(|it| it.as_ref().unwrap_err().class == class));
            assert_eq!(api.calls.lock().unwrap().len(), 1);
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
