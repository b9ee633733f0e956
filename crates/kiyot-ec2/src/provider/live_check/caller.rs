//! Calls of a live check. Their time is bounded. The first call that shows that the API is down
//! ends the check, so that the outage is reported once.

use std::{collections::BTreeSet, future::Future, time::Duration};

use kiyot_engine::provider::ErrorClass;
use tokio::time::{Instant, timeout_at};

use crate::{
    CallError, Failure,
    provider::{
        error_codes::{SERVICE_LINKED_ROLE, classify},
        live_check::{
            policy,
            report::{LiveReport, Outcome},
        },
    },
};

/// Bounds the time of a call.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Bounds the time of a list, which has several pages.
const LIST_TIMEOUT: Duration = Duration::from_secs(20);
/// Bounds the time of all calls.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(60);
/// Bounds a message, in characters.
const MAX_MESSAGE_CHARS: usize = 600;
/// Replaces the text of an error that equals the previous check's.
const SAME_ERROR: &str = "the same error";
/// Begins the warning about the price list.
const BUILT_IN_PRICES: &str = "the built-in on-demand prices are used (ec2.prices)";
/// Begins the encoded part of a message, which only `aws sts decode-authorization-message` reads.
const ENCODED: &str = "Encoded authorization failure message";

/// Call that failed or was not made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Failed {
    /// True if the policy does not permit the call.
    pub(super) is_denied: bool,
}

/// Makes calls one after the other, and reports their failures.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) report: LiveReport,
    ends: Instant,
    /// The reason why no further call is made.
    stopped: Option<&'static str>,
    /// True if the last call was a list that was not answered in time.
    was_slow: bool,
    not_made: BTreeSet<String>,
    /// The text of the last failure.
    last_failure: String,
}

/// The meaning of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// The policy does not permit the action.
    Denied,
    /// No other call would succeed, for this reason.
    Stop(&'static str),
    /// The offering has no capacity at present; the configuration is not wrong.
    NoRoom,
    /// Another error.
    Failed,
}

impl Caller {
    pub(super) fn new(report: LiveReport) -> Self {
        let ends = Instant::now() + TOTAL_TIMEOUT;
        Self {
            report,
            ends,
            stopped: None,
            was_slow: false,
            not_made: BTreeSet::new(),
            last_failure: String::new(),
        }
    }

    /// Makes a call and reports its failure. The caller reports a success.
    pub(super) async fn call<T>(
        &mut self,
        name: &str,
        call: impl Future<Output = Result<T, CallError>>,
    ) -> Result<T, Failed> {
        self.call_within(CALL_TIMEOUT, false, name, call).await
    }

    /// Makes the calls of a list. A single slow list does not end the check; the second in a row
    /// does.
    pub(super) async fn list<T>(
        &mut self,
        name: &str,
        call: impl Future<Output = Result<T, CallError>>,
    ) -> Result<T, Failed> {
        self.call_within(LIST_TIMEOUT, true, name, call).await
    }

    async fn call_within<T>(
        &mut self,
        limit: Duration,
        is_list: bool,
        name: &str,
        call: impl Future<Output = Result<T, CallError>>,
    ) -> Result<T, Failed> {
        if self.stopped.is_some() {
            self.not_made.insert(action(name).to_owned());
            return Err(Failed { is_denied: false });
        }
        let started = Instant::now();
        let called = timeout_at(self.ends.min(started + limit), call).await;
        let was_slow = std::mem::replace(&mut self.was_slow, is_list && called.is_err());
        let error = match called {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => error,
            Err(_) => {
                let failure = Failure::TooSlow(started.elapsed());
                CallError { operation: "call", failure }
            }
        };
        let verdict = match verdict(&error) {
            Verdict::Stop(_) if self.was_slow && !was_slow => Verdict::Failed,
            verdict => verdict,
        };
        let text = message(&error);
        match verdict {
            Verdict::NoRoom => self.add(Outcome::Warning, name, &format!("no room now: {text}")),
            // Launches in other zones often fail for the same reason.
            _ if text == self.last_failure => self.add(Outcome::Failed, name, SAME_ERROR),
            _ => self.add(Outcome::Failed, name, &text),
        }
        self.last_failure.clone_from(&text);
        match verdict {
            Verdict::Denied => {
                let denied = match error.code() {
                    Some(SERVICE_LINKED_ROLE) => "iam:CreateServiceLinkedRole".to_owned(),
                    _ => policy::denied_action(&text)
                        .unwrap_or_else(|| format!("ec2:{}", action(name))),
                };
                self.report.deny(denied);
            }
            Verdict::Stop(why) => self.stopped = Some(why),
            Verdict::NoRoom | Verdict::Failed => {}
        }
        Err(Failed { is_denied: verdict == Verdict::Denied })
    }

    /// Makes a call of the price list. Its failure is only a warning, because EC2 may work
    /// nevertheless.
    pub(super) async fn call_optional<T>(
        &mut self,
        name: &str,
        call: impl Future<Output = Result<T, CallError>>,
    ) -> Option<T> {
        if self.stopped.is_some() {
            self.not_made.insert(action(name).to_owned());
            return None;
        }
        let ends = self.ends.min(Instant::now() + CALL_TIMEOUT);
        let failure = match timeout_at(ends, call).await {
            Ok(Ok(answer)) => return Some(answer),
            Ok(Err(error)) => {
                if verdict(&error) == Verdict::Denied {
                    self.report.deny(format!("pricing:{}", action(name)));
                }
                message(&error)
            }
            Err(_) => "not answered in time".to_owned(),
        };
        self.add(Outcome::Warning, name, &format!("{BUILT_IN_PRICES}: {failure}"));
        None
    }

    /// Reports a check.
    pub(super) fn add(&mut self, outcome: Outcome, name: &str, text: &str) {
        self.report.add(outcome, name, text);
    }

    /// Reports a check that was not made.
    pub(super) fn skip(&mut self, name: &str, why: &str) {
        if self.stopped.is_some() {
            self.not_made.insert(name.to_owned());
        } else {
            self.add(Outcome::NotChecked, name, why);
        }
    }

    /// Reports the calls that were not made, in a line.
    pub(super) fn finish(&mut self) {
        if let Some(why) = self.stopped {
            let names: Vec<&str> = self.not_made.iter().map(String::as_str).collect();
            let text = format!("{why}; not called: {}", names.join(", "));
            self.report.add(Outcome::NotChecked, "everything else", &text);
        }
    }
}

/// Returns the action of a check, such as `RunInstances` of `RunInstances (Spot, subnet-1)`.
fn action(name: &str) -> &str {
    name.split(' ').next().unwrap_or(name)
}

fn verdict(error: &CallError) -> Verdict {
    if error.is_denied() || error.code() == Some(SERVICE_LINKED_ROLE) {
        return Verdict::Denied;
    }
    match (&error.failure, classify(error).0) {
        (Failure::NotSent(_) | Failure::Unanswered(_) | Failure::TooSlow(_), _) => {
            Verdict::Stop("EC2 was not reached")
        }
        (_, ErrorClass::Auth) => Verdict::Stop("EC2 refuses the credentials"),
        (_, ErrorClass::Unanswered) => Verdict::Stop("EC2 does not work now"),
        (_, ErrorClass::Throttled) => Verdict::Stop("EC2 limits the rate of calls now"),
        (_, ErrorClass::Capacity) if error.code() != Some("Unsupported") => Verdict::NoRoom,
        _ => Verdict::Failed,
    }
}

/// Returns code and message on one line, without the long encoded part.
fn message(error: &CallError) -> String {
    let text = error.failure.to_string();
    let text = text.split(ENCODED).next().unwrap_or_default();
    let plain = text.chars().map(|char| if char.is_control() { ' ' } else { char });
    let plain: String = plain.take(MAX_MESSAGE_CHARS).collect();
    plain.trim().trim_end_matches(':').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(code: &str, message: &str) -> CallError {
        let failure = Failure::Refused { code: Some(code.into()), message: message.into() };
        CallError { operation: "RunInstances", failure }
    }

    fn caller() -> Caller {
        Caller::new(LiveReport::new(policy::Values::default()))
    }

    async fn failing(caller: &mut Caller, name: &str, error: CallError) -> Failed {
        caller.call(name, async { Err::<(), _>(error) }).await.unwrap_err()
    }

    #[tokio::test]
    async fn denied_action_is_of_the_message_or_of_the_call() {
        let mut caller = caller();
        let named = "You are not authorized to perform this operation. User: u is not authorized \
                     to perform: iam:PassRole on resource: r. Encoded authorization failure \
                     message: AAAA";
        let error = refused("UnauthorizedOperation", named);
        assert!(failing(&mut caller, "RunInstances (Spot, s)", error).await.is_denied);
        let error = refused("UnauthorizedOperation", "no");
        assert!(failing(&mut caller, "CreateTags", error).await.is_denied);
        let text = caller.report.to_string();
        assert!(text.contains("iam:PassRole") && text.contains("ec2:CreateTags"), "{text}");
        assert!(!text.contains("AAAA") && !text.contains("ec2:RunInstances"), "{text}");
        assert!(!caller.report.is_fine());
    }

    #[tokio::test]
    async fn api_that_is_down_is_reported_once() {
        for failure in [
            Failure::NotSent("refused".into()),
            Failure::Unanswered("reset".into()),
            Failure::Failed { code: Some("Unavailable".into()), message: String::new() },
            Failure::Refused { code: Some("AuthFailure".into()), message: String::new() },
            Failure::Refused { code: Some("RequestLimitExceeded".into()), message: String::new() },
        ] {
            let mut caller = caller();
            let error = CallError { operation: "DescribeSubnets", failure };
            failing(&mut caller, "DescribeSubnets", error).await;
            for name in ["DescribeImages", "RunInstances (Spot, a)", "RunInstances (Spot, b)"] {
                let next = caller.call(name, async { Ok(()) }).await;
                assert_eq!(next, Err(Failed { is_denied: false }));
            }
            caller.finish();
            let text = caller.report.to_string();
            assert_eq!(text.lines().count(), 2, "{text}");
            assert!(text.ends_with("not called: DescribeImages, RunInstances\n"), "{text}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn call_without_an_answer_ends_within_its_time() {
        let mut caller = caller();
        let started = Instant::now();
        let never = std::future::pending::<Result<(), CallError>>();
        assert!(caller.call("DescribeSubnets", never).await.is_err());
        assert_eq!(started.elapsed(), CALL_TIMEOUT);
        assert!(caller.report.to_string().contains("not answered within 10 s"));
    }

    #[tokio::test(start_paused = true)]
    async fn slow_list_is_a_failure_and_the_other_calls_are_made() {
        let mut caller = caller();
        let never = || std::future::pending::<Result<(), CallError>>();
        let started = Instant::now();
        assert!(caller.list("DescribeSpotPriceHistory", never()).await.is_err());
        assert_eq!(started.elapsed(), LIST_TIMEOUT);
        assert_eq!(caller.call("DescribeInstances", async { Ok(7) }).await, Ok(7));
        assert!(caller.list("DescribeInstanceTypeOfferings", never()).await.is_err());
        caller.finish();
        let text = caller.report.to_string();
        assert_eq!(text.matches("failed").count(), 2, "{text}");
        assert!(!text.contains("not called"), "{text}");
    }

    #[tokio::test(start_paused = true)]
    async fn second_slow_list_in_a_row_stops_the_check() {
        let mut caller = caller();
        for name in ["DescribeInstanceTypeOfferings", "DescribeSpotPriceHistory"] {
            let never = std::future::pending::<Result<(), CallError>>();
            assert!(caller.list(name, never).await.is_err());
        }
        assert!(caller.call("DescribeInstances", async { Ok(()) }).await.is_err());
        caller.finish();
        let text = caller.report.to_string();
        assert!(text.contains("EC2 was not reached; not called: DescribeInstances"), "{text}");
    }

    /// Verifies V42.
    #[tokio::test(start_paused = true)]
    async fn all_calls_together_end_within_their_time() {
        let (mut caller, started) = (caller(), Instant::now());
        for _ in 0..10 {
            let never = std::future::pending::<Result<(), CallError>>();
            assert!(caller.list("DescribeInstances", never).await.is_err());
            caller.call("DescribeImages", async { Ok(()) }).await.unwrap();
        }
        assert_eq!(started.elapsed(), TOTAL_TIMEOUT);
    }

    #[tokio::test]
    async fn absent_role_of_spot_instances_is_a_missing_permission() {
        let mut caller = caller();
        let error = refused(SERVICE_LINKED_ROLE, "no permission to create the role");
        assert!(failing(&mut caller, "RunInstances (Spot, s)", error).await.is_denied);
        let text = caller.report.to_string();
        assert!(text.contains("\"iam:CreateServiceLinkedRole\""), "{text}");
        assert!(!text.contains("no room"), "{text}");
    }

    #[tokio::test]
    async fn missing_capacity_is_a_warning_and_an_unsupported_type_a_failure() {
        let mut caller = caller();
        failing(&mut caller, "RunInstances", refused("InsufficientInstanceCapacity", "none")).await;
        assert!(caller.report.is_fine());
        failing(&mut caller, "RunInstances", refused("Unsupported", "no such type")).await;
        assert!(!caller.report.is_fine());
    }

    #[test]
    fn message_is_one_line_of_bounded_length() {
        let text = message(&refused("Code", &format!("a\n\u{1b}[31m{}", "x".repeat(5000))));
        assert!(text.starts_with("Code: a  [31mxxx") && text.len() <= MAX_MESSAGE_CHARS, "{text}");
    }
}
