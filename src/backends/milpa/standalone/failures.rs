//! Steps of a pod that failed, each part of the pod with a pause of its own: a container that can't
//! start keeps no other from running.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::Errors;
use crate::backoff::doubled;

/// The pause after a step that failed, which doubles.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
/// The longest pause.
const MAX_PAUSE: Duration = Duration::from_secs(300);

/// The steps that failed, by container; `None` stands for the pod.
#[derive(Debug, Default)]
pub(super) struct Failures(BTreeMap<Option<String>, Failure>);

#[derive(Debug)]
struct Failure {
    /// Failures since a step that succeeded.
    in_a_row: u32,
    until: Instant,
    error: String,
}

impl Failures {
    /// Notes a failed step. Returns the pause before it is repeated.
    pub(super) fn add(&mut self, of: Option<&str>, error: &str, now: Instant) -> Duration {
        let key = of.map(str::to_owned);
        let in_a_row = self.0.get(&key).map_or(0, |failure| failure.in_a_row);
        let pause = doubled(FIRST_PAUSE, in_a_row, MAX_PAUSE);
        let in_a_row = in_a_row.saturating_add(1);
        let failure = Failure { in_a_row, until: now + pause, error: error.to_owned() };
        self.0.insert(key, failure);
        pause
    }

    /// Forgets the failures after a step that succeeded.
    pub(super) fn clear(&mut self, of: Option<&str>) {
        self.0.remove(&of.map(str::to_owned));
    }

    /// Returns what is left of the pause; zero without one.
    pub(super) fn left(&self, of: Option<&str>, now: Instant) -> Duration {
        let failure = self.0.get(&of.map(str::to_owned));
        failure.map_or(Duration::ZERO, |failure| failure.until.saturating_duration_since(now))
    }

    /// Returns the errors.
    pub(super) fn errors(&self) -> Errors {
        let of_container = |(of, failure): (&Option<String>, &Failure)| {
            of.clone().map(|container| (container, failure.error.clone()))
        };
        Errors { text: self.text(), containers: self.0.iter().filter_map(of_container).collect() }
    }

    fn text(&self) -> String {
        let text = |(of, failure): (&Option<String>, &Failure)| match of {
            Some(container) => format!("container {container}: {}", failure.error),
            None => failure.error.clone(),
        };
        self.0.iter().map(text).collect::<Vec<_>>().join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_of_a_container_grows_its_own_pause() {
        let (mut failures, now) = (Failures::default(), Instant::now());
        let seconds = [0; 9].map(|_| failures.add(Some("bad"), "no image", now).as_secs());
        assert_eq!(seconds, [2, 4, 8, 16, 32, 64, 128, 256, 300]);
        assert_eq!(failures.add(None, "no cell", now).as_secs(), 2);
        assert_eq!(failures.left(Some("bad"), now + Duration::from_secs(299)).as_secs(), 1);
        assert!(failures.left(Some("good"), now).is_zero());
        assert_eq!(failures.text(), "no cell; container bad: no image");
        let of_containers = [("bad".to_owned(), "no image".to_owned())];
        assert_eq!(failures.errors().containers, of_containers.into());
        failures.clear(Some("bad"));
        assert!(failures.left(Some("bad"), now).is_zero());
        assert_eq!(failures.text(), "no cell");
    }
}
