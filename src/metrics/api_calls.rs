//! Calls of an API over the network.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use super::{
    API_CALL_DURATION, API_CALLS, Definition, KUBERNETES_CALL_DURATION, KUBERNETES_CALLS, Page,
    Source,
};

/// Counters of calls. Each call goes over the network, so that the cost of a lock does not matter.
#[derive(Debug)]
pub struct ApiCalls {
    calls: Mutex<BTreeMap<(&'static str, &'static str), Calls>>,
    count: &'static Definition,
    duration: &'static Definition,
}

/// Calls with the same labels.
#[derive(Debug, Clone, Copy, Default)]
struct Calls {
    count: u64,
    duration: Duration,
}

impl ApiCalls {
    /// Returns counters of the calls of EC2's API.
    pub fn of_ec2() -> Self {
        Self { calls: Mutex::default(), count: &API_CALLS, duration: &API_CALL_DURATION }
    }

    /// Returns counters of the calls of the Kubernetes API.
    pub fn of_kubernetes() -> Self {
        let (count, duration) = (&KUBERNETES_CALLS, &KUBERNETES_CALL_DURATION);
        Self { calls: Mutex::default(), count, duration }
    }

    /// Counts a call by its operation and outcome. Both are names from the code, so that their
    /// number is bounded.
    pub fn count(&self, operation: &'static str, outcome: &'static str, duration: Duration) {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let calls = calls.entry((operation, outcome)).or_default();
        calls.count += 1;
        calls.duration = calls.duration.saturating_add(duration);
    }
}

impl kiyot_ec2::provider::Counter for ApiCalls {
    fn called(&self, operation: &'static str, outcome: &'static str, duration: Duration) {
        self.count(operation, outcome, duration);
    }
}

impl Source for ApiCalls {
    fn write(&self, page: &mut Page<'_>) -> fmt::Result {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut family = page.family(self.count)?;
        for ((operation, outcome), calls) in &calls {
            family.counter(&[operation, outcome], calls.count)?;
        }
        let mut family = page.family(self.duration)?;
        for ((operation, outcome), calls) in &calls {
            family.counter_f64(&[operation, outcome], calls.duration.as_secs_f64())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::metrics::Exposition;

    /// Verifies O3.
    #[test]
    fn page_has_calls_by_operation_and_outcome() {
        let calls = Arc::new(ApiCalls::of_ec2());
        for outcome in ["ok", "ok", "not_found"] {
            calls.count("TerminateInstances", outcome, Duration::from_millis(1));
        }
        let text = Exposition::new(vec![calls]).text();
        for (outcome, count) in [("ok", 2), ("not_found", 1)] {
            let labels = format!("operation=\"TerminateInstances\",outcome=\"{outcome}\"");
            let line = format!("kiyot_api_calls_total{{{labels}}} {count}");
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
