//! Calls of a cloud's API.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use super::{API_CALL_DURATION, API_CALLS, Page, Source};

/// Counters of calls, which all go over the network, so that a lock does not matter.
#[derive(Debug, Default)]
pub struct ApiCalls(Mutex<BTreeMap<(&'static str, &'static str), Calls>>);

/// Calls with the same labels.
#[derive(Debug, Clone, Copy, Default)]
struct Calls {
    count: u64,
    duration: Duration,
}

impl ApiCalls {
    /// Counts a call by its operation, such as `RunInstances`, and its outcome: `ok` or the class
    /// of the error. Both are names from the code, so that their number is bounded.
    pub fn count(&self, operation: &'static str, outcome: &'static str, duration: Duration) {
        let mut calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let calls = calls.entry((operation, outcome)).or_default();
        calls.count += 1;
        calls.duration = calls.duration.saturating_add(duration);
    }
}

impl Source for ApiCalls {
    fn write(&self, page: &mut Page<'_>) -> fmt::Result {
        let calls = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut family = page.family(&API_CALLS)?;
        for ((operation, outcome), calls) in &calls {
            family.counter(&[operation, outcome], calls.count)?;
        }
        let mut family = page.family(&API_CALL_DURATION)?;
        for ((operation, outcome), calls) in &calls {
            family.counter_f64(&[operation, outcome], calls.duration.as_secs_f64())?;
        }
        Ok(())
    }
}
