//! Pacing of calls, so that a burst of pods does not exhaust the account's rate, which other nodes
//! share.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kiyot_values::token_bucket::{Rate, TokenBucket};
use tokio::time::{Instant, sleep};

/// Upper bound on [`Pace::slowdown`]: a hundred nodes then launch three instances a second.
const MAX_SLOWDOWN: u32 = 64;
/// Refusals within this time belong to calls at the same pace, so they slow the pace only once.
const SLOWING_INTERVAL: Duration = Duration::from_secs(1);
/// Time without a refusal after which the pace doubles.
const RECOVERY_INTERVAL: Duration = Duration::from_secs(15);

/// Paced action of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// RunInstances.
    Launch,
    /// TerminateInstances.
    Terminate,
    /// Describe calls.
    Describe,
    /// CreateTags.
    Tag,
    /// CreateRoute, DeleteRoute, ModifyInstanceAttribute.
    Route,
    /// GetProducts, which has a separate limit.
    Prices,
    /// ModifyInstanceMetadataOptions.
    Metadata,
}

impl Action {
    /// The number of actions: the index of the last action plus one.
    const COUNT: usize = Self::Metadata as usize + 1;

    /// Returns the rate: EC2's documented rate of an account ("Request throttling for the Amazon
    /// EC2 API"), which other nodes share.
    fn rate(self) -> Rate {
        let (burst, millis) = match self {
            Self::Launch => (5, 500),
            Self::Terminate => (20, 200),
            Self::Describe => (50, 100),
            Self::Tag => (20, 200),
            Self::Route => (20, 200),
            Self::Prices => (5, 200),
            Self::Metadata => (50, 100),
        };
        Rate { burst, period: Duration::from_millis(millis) }
    }
}

/// Pace of all actions. Waiting calls continue in order.
#[derive(Debug, Default)]
pub(super) struct Pacing {
    paces: [Mutex<Pace>; Action::COUNT],
}

impl Pacing {
    /// Waits until a call may be made.
    pub(super) async fn wait(&self, action: Action) {
        let wait = self.pace(action).reserve(action.rate(), Instant::now());
        if !wait.is_zero() {
            sleep(wait).await;
        }
    }

    /// Adapts the pace to an answer.
    pub(super) fn learn(&self, action: Action, is_throttled: bool) {
        self.pace(action).learn(is_throttled, Instant::now());
    }

    fn pace(&self, action: Action) -> MutexGuard<'_, Pace> {
        self.paces[action as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The pace of an action.
#[derive(Debug)]
struct Pace {
    bucket: TokenBucket,
    /// Factor by which the pace is slower than the documented rate.
    slowdown: u32,
    /// Time of the last change of the slowdown, or of the last throttled call.
    changed: Option<Instant>,
}

impl Default for Pace {
    fn default() -> Self {
        Self { bucket: TokenBucket::default(), slowdown: 1, changed: None }
    }
}

impl Pace {
    /// Reserves a call, and returns the time to wait for it.
    fn reserve(&mut self, rate: Rate, now: Instant) -> Duration {
        let rate = Rate {
            burst: (rate.burst / self.slowdown).max(1),
            period: rate.period * self.slowdown,
        };
        self.bucket.take(1, rate, now);
        self.bucket.pause(rate, now)
    }

    /// Halves the pace at a throttled call, and doubles it again while no call is throttled.
    fn learn(&mut self, is_throttled: bool, now: Instant) {
        let elapsed = self.changed.map(|changed| now.saturating_duration_since(changed));
        let is_due = |interval| elapsed.is_none_or(|elapsed| elapsed >= interval);
        if is_throttled && is_due(SLOWING_INTERVAL) {
            self.slowdown = (self.slowdown * 2).min(MAX_SLOWDOWN);
            self.changed = Some(now);
        } else if !is_throttled && is_due(RECOVERY_INTERVAL) {
            self.slowdown = (self.slowdown / 2).max(1);
            self.changed = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const LAUNCH: Rate = Rate { burst: 5, period: Duration::from_millis(500) };

    fn waits(pace: &mut Pace, calls: usize, now: Instant) -> Vec<u64> {
        let millis = |wait: Duration| u64::try_from(wait.as_millis()).unwrap();
        (0..calls).map(|_| millis(pace.reserve(LAUNCH, now))).collect()
    }

    #[test]
    fn burst_passes_at_once_and_further_calls_at_the_rate() {
        assert_eq!(
            waits(&mut Pace::default(), 8, Instant::now()),
            [0, 0, 0, 0, 0, 500, 1000, 1500]
        );
    }

    #[test]
    fn bucket_fills_while_no_call_is_made() {
        let (mut pace, now) = (Pace::default(), Instant::now());
        waits(&mut pace, 5, now);
        assert_eq!(waits(&mut pace, 3, now + Duration::from_secs(1)), [0, 0, 500]);
        let much_later = now + Duration::from_secs(3600);
        assert_eq!(waits(&mut pace, 6, much_later), [0, 0, 0, 0, 0, 500]);
    }

    #[test]
    fn throttled_calls_slow_the_pace_and_others_restore_it() {
        let (mut pace, mut now) = (Pace::default(), Instant::now());
        // Calls that are refused together count once.
        pace.learn(true, now);
        pace.learn(true, now);
        assert_eq!(pace.slowdown, 2);
        for _ in 0..10 {
            now += SLOWING_INTERVAL;
            pace.learn(true, now);
        }
        assert_eq!(pace.slowdown, MAX_SLOWDOWN);
        now += Duration::from_secs(3600);
        assert_eq!(waits(&mut pace, 2, now), [0, 32_000]);
        for slowdown in [32, 16, 8, 4, 2, 1, 1] {
            pace.learn(false, now);
            pace.learn(false, now);
            assert_eq!(pace.slowdown, slowdown);
            now += RECOVERY_INTERVAL;
        }
    }

    /// Verifies V103.
    #[test]
    fn hundred_nodes_share_the_rate_of_their_account() {
        const NODES: usize = 100;
        const CALLS_OF_NODE: u32 = 20;
        let begun = Instant::now();
        // The account's bucket counts as full whenever it has no debt.
        let mut account = TokenBucket::default();
        let (mut paces, mut left) = (vec![], vec![CALLS_OF_NODE; NODES]);
        paces.resize_with(NODES, Pace::default);
        let mut due: BTreeSet<(Instant, usize)> = (0..NODES).map(|node| (begun, node)).collect();
        let (mut refused, mut ended) = (0, begun);
        while let Some((now, node)) = due.pop_first() {
            let has_tokens = account.pause(LAUNCH, now + LAUNCH.period).is_zero();
            if has_tokens {
                account.take(1, LAUNCH, now);
                left[node] -= 1;
                ended = now;
            } else {
                refused += 1;
            }
            paces[node].learn(!has_tokens, now);
            if left[node] > 0 {
                due.insert((now + paces[node].reserve(LAUNCH, now), node));
            }
        }
        let calls = u32::try_from(NODES).unwrap() * CALLS_OF_NODE;
        let least = LAUNCH.period * calls;
        println!("{refused} of {calls} calls refused, {:?} of {least:?}", ended - begun);
        assert!(ended - begun < 2 * least && refused < 2 * calls);
    }
}
