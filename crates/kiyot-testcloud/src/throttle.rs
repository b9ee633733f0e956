//! Token buckets of the API's request limits.

use std::{collections::BTreeMap, time::Instant};

/// Size of a bucket and its refill.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// Calls that a full bucket allows.
    pub bucket: f64,
    /// Calls that are added a second.
    pub per_second: f64,
}

impl Rate {
    /// Returns the documented rate of a call. An unfiltered, unpaginated list has a lower rate.
    pub fn documented(action: &str, narrowed: bool) -> Self {
        let (bucket, per_second) = match action {
            "RunInstances" | "StartInstances" => (5.0, 2.0),
            "TerminateInstances" => (100.0, 5.0),
            "CreateTags" | "ModifyInstanceMetadataOptions" => (100.0, 10.0),
            _ if action.starts_with("Describe") && narrowed => (100.0, 20.0),
            _ if action.starts_with("Describe") => (50.0, 10.0),
            _ => (50.0, 5.0),
        };
        Self { bucket, per_second }
    }
}

/// Buckets by action.
#[derive(Debug, Default)]
pub(crate) struct Buckets(BTreeMap<String, (f64, Instant)>);

impl Buckets {
    /// Takes a token from the action's bucket. Returns whether it had one.
    pub(crate) fn take(&mut self, action: &str, rate: Rate, now: Instant) -> bool {
        let (tokens, since) = self.0.entry(action.to_owned()).or_insert((rate.bucket, now));
        let refilled = now.saturating_duration_since(*since).as_secs_f64() * rate.per_second;
        *tokens = (*tokens + refilled).min(rate.bucket);
        *since = now;
        let allowed = *tokens >= 1.0;
        if allowed {
            *tokens -= 1.0;
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{Buckets, Rate};

    #[test]
    fn bucket_refills_at_its_rate_to_its_size() {
        let rate = Rate { bucket: 2.0, per_second: 2.0 };
        let (mut buckets, begun) = (Buckets::default(), Instant::now());
        let mut taken = |millis| buckets.take("A", rate, begun + Duration::from_millis(millis));
        assert_eq!([0, 0, 0].map(&mut taken), [true, true, false]);
        assert_eq!([500, 500, 60_000, 60_000, 60_000].map(&mut taken), {
            [true, false, true, true, false]
        });
    }
}
