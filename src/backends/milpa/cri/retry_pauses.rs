//! Pauses between the cells of a pod with failing sandboxes.
//!
//! A kubelet repeats a failed RunPodSandbox every few seconds, and each call would launch a cell,
//! which costs money in a cloud. The first repetition has no pause, because most failures do not
//! last.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use kiyot_values::backoff::doubled;
use tonic::Status;

/// The pause after the second failure, which doubles (the kubelet's for containers).
const FIRST_PAUSE: Duration = Duration::from_secs(10);
const MAX_PAUSE: Duration = Duration::from_secs(300);
/// The time after which a failure is dropped.
const MEMORY: Duration = Duration::from_secs(900);
/// Bounds the remembered pods. The oldest failure is dropped.
const MAX_PODS: usize = 1024;

/// The uid of a pod, and the digest of the annotations that choose its machine.
pub(super) type PodKey = (String, String);

/// Pods with failed sandboxes.
#[derive(Debug, Default)]
pub(super) struct RetryPauses(Mutex<HashMap<PodKey, Failed>>);

#[derive(Debug)]
struct Failed {
    /// Failures since the last success.
    in_a_row: u32,
    at: Instant,
    until: Instant,
    status: Status,
}

impl RetryPauses {
    /// Returns the last error of a pod during its pause.
    pub(super) fn check(&self, pod: &PodKey, now: Instant) -> Result<(), Status> {
        let failed = self.failed();
        let Some(last) = failed.get(pod).filter(|last| now < last.until) else { return Ok(()) };
        Err(Status::new(
            last.status.code(),
            format!(
                "{}; {} cells of the pod failed in a row, the next is launched in {} s",
                last.status.message(),
                last.in_a_row,
                (last.until - now).as_secs() + 1
            ),
        ))
    }

    /// Records that the sandbox of a pod failed.
    pub(super) fn add(&self, pod: PodKey, status: &Status, now: Instant) {
        let mut failed = self.failed();
        failed.retain(|_, last| now.saturating_duration_since(last.at) < MEMORY);
        let in_a_row = failed.get(&pod).map_or(0, |last| last.in_a_row);
        let pause = match in_a_row.checked_sub(1) {
            Some(doublings) => doubled(FIRST_PAUSE, doublings, MAX_PAUSE),
            None => Duration::ZERO,
        };
        if failed.len() >= MAX_PODS && !failed.contains_key(&pod) {
            let first = failed.iter().min_by_key(|(_, last)| last.at).map(|(pod, _)| pod.clone());
            first.map(|first| failed.remove(&first));
        }
        let in_a_row = in_a_row.saturating_add(1);
        let last = Failed { in_a_row, at: now, until: now + pause, status: status.clone() };
        failed.insert(pod, last);
    }

    /// Drops the failures of a pod after its sandbox was created.
    pub(super) fn clear(&self, pod: &PodKey) {
        self.failed().remove(pod);
    }

    fn failed(&self) -> MutexGuard<'_, HashMap<PodKey, Failed>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn pod(number: usize) -> PodKey {
        (format!("uid-{number}"), "digest".to_owned())
    }

    /// Verifies X46.
    #[test]
    fn pause_begins_with_the_second_failure_and_doubles() {
        let (pauses, mut now) = (RetryPauses::default(), Instant::now());
        let mut seconds = Vec::new();
        for _ in 0..8 {
            pauses.add(pod(1), &Status::not_found("no pause image"), now);
            let begun = now;
            while pauses.check(&pod(1), now).is_err() {
                now += Duration::from_secs(1);
            }
            seconds.push((now - begun).as_secs());
        }
        assert_eq!(seconds, [0, 10, 20, 40, 80, 160, 300, 300]);
    }

    /// Verifies X46.
    #[test]
    fn pausing_pod_gets_its_last_error_and_other_pods_launch() {
        let (pauses, now) = (RetryPauses::default(), Instant::now());
        for _ in 0..2 {
            pauses.add(pod(1), &Status::not_found("no pause image"), now);
        }
        let refused = pauses.check(&pod(1), now + Duration::from_secs(3)).unwrap_err();
        assert_eq!(refused.code(), Code::NotFound);
        assert_eq!(
            refused.message(),
            "no pause image; 2 cells of the pod failed in a row, the next is launched in 8 s"
        );
        assert!(pauses.check(&pod(2), now).is_ok());
        let other_machine = ("uid-1".to_owned(), "other".to_owned());
        assert!(pauses.check(&other_machine, now).is_ok(), "its annotations have changed");
        pauses.clear(&pod(1));
        assert!(pauses.check(&pod(1), now).is_ok());
    }

    #[test]
    fn failures_are_bounded_and_forgotten() {
        let (pauses, now) = (RetryPauses::default(), Instant::now());
        for number in 0..MAX_PODS + 10 {
            let at = now + Duration::from_millis(number.try_into().unwrap());
            pauses.add(pod(number), &Status::internal(""), at);
        }
        assert_eq!(pauses.failed().len(), MAX_PODS);
        assert!(!pauses.failed().contains_key(&pod(9)) && pauses.failed().contains_key(&pod(10)));
        pauses.add(pod(0), &Status::internal(""), now + MEMORY * 2);
        assert_eq!(pauses.failed().len(), 1);
    }
}
