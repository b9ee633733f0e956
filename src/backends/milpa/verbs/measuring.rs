//! Metrics of pods in cells. They are many, so cells tell them only while somebody reads them here:
//! asking for them is what has them told.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;

use super::Verbs;
use crate::backends::{Method, milpa::cells::Cell};

/// How long after a list of metrics the next one is still looked for.
const WANTED: Duration = Duration::from_secs(60);
/// How often cells are asked to go on, at most.
const RENEWAL: Duration = Duration::from_secs(20);
/// How long a cell tells them after it was asked: the last time may be a renewal ago.
const TOLD: Duration = Duration::from_secs(80);

/// Who asked when.
#[derive(Debug, Clone, Copy)]
struct Asked {
    /// Nobody had asked for long before.
    first: Instant,
    last: Instant,
    /// When cells were asked.
    cells: Instant,
}

/// Whether metrics are wanted.
#[derive(Debug, Default)]
pub(super) struct Measuring(Mutex<Option<Asked>>);

impl Measuring {
    /// Notes that somebody asks. Answers with whether cells are to be asked, and since when they
    /// are.
    fn ask(&self, now: Instant) -> (bool, Instant) {
        let mut asked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = asked.filter(|asked| now < asked.last + WANTED);
        let renews = before.is_none_or(|asked| now >= asked.cells + RENEWAL);
        let (first, cells) = before.map_or((now, now), |asked| (asked.first, asked.cells));
        *asked = Some(Asked { first, last: now, cells: if renews { now } else { cells } });
        (renews, first)
    }

    fn is_wanted(&self, now: Instant) -> bool {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some_and(|asked| now < asked.last + WANTED)
    }
}

impl Verbs {
    /// `ListPodSandboxMetrics`, by the node's encoded `ListMetricDescriptorsResponse`.
    pub(super) async fn metrics(&self, descriptors: &[u8]) -> Bytes {
        let (renews, since) = self.measuring.ask(Instant::now());
        if renews {
            self.view
                .all_sandboxes()
                .iter()
                .filter_map(|sandbox| self.parts.cells.get(&sandbox.cell))
                .for_each(|cell| cell.link.control.measure(TOLD));
        }
        self.await_usage(Method::ListPodSandboxMetrics, &[]).await;
        let left = (since + self.parts.measure_within).saturating_duration_since(Instant::now());
        self.view.wait(left, |view| (!view.awaits_metrics(Instant::now())).then_some(())).await;
        self.view.list_metrics(descriptors, Instant::now())
    }

    /// Has a cell that has just connected tell them, if they are wanted.
    pub(super) fn measure(&self, cell: &Cell) {
        if self.measuring.is_wanted(Instant::now()) {
            cell.link.control.measure(TOLD);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies U25.
    #[test]
    fn cells_are_asked_for_as_long_as_somebody_asks() {
        let (measuring, began) = (Measuring::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        assert!(!measuring.is_wanted(at(0)));
        let mut told_until = at(0);
        // Every 15 s, then as seldom as it goes on: at no time in between are cells without the
        // wish.
        for second in (0..=300).step_by(15).chain([319, 378, 437]) {
            assert!(
                second == 0 || (measuring.is_wanted(at(second)) && told_until >= at(second)),
                "{second}"
            );
            let (renews, since) = measuring.ask(at(second));
            assert_eq!(since, at(0));
            if renews {
                told_until = at(second) + TOLD;
            }
        }
        let last = at(437) + WANTED;
        assert!(!measuring.is_wanted(last));
        assert_eq!(measuring.ask(last), (true, last));
        assert_eq!(measuring.ask(last + Duration::from_secs(1)), (false, last));
    }
}
