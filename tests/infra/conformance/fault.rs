//! Faults that a subject can play, and faults without a meaning for a provider.

use tokio::sync::watch;

/// A fault of a provider. It lasts until the subject heals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// A launch has begun and has no answer.
    HeldLaunch,
    /// A launch whose caller has given up takes effect when the fault ends.
    LateLaunch,
    /// No launch succeeds, and each launch is answered.
    RefusedLaunch,
    /// New instances are not found yet, within the declared age.
    UnseenInstance,
    /// Lists show the state at the beginning of the fault.
    StaleList,
    /// Instances are missing in lists, or unreadable.
    PartialList,
    /// Agents have not yet ended pods that they have to end.
    HeldShutdown,
    /// Terminations are not done yet.
    SlowEnd,
    /// Terminations fail.
    FailedEnd,
    /// Every running instance has a twin, an instance of the same cell.
    Twin,
    /// An instance of this owner was launched by a daemon with another certificate authority.
    OtherAuthority,
    /// Every running instance ends by itself.
    Interruption,
    /// No call is answered.
    Outage,
    /// No call is permitted.
    Denied,
    /// Too many calls are made, and no call has an effect.
    Throttled,
}

/// Faults without a meaning for a provider, with the reason.
pub(crate) const WITHOUT_MEANING: &[(&str, Fault, &str)] = &[
    ("netns", Fault::LateLaunch, "a call ends with its caller"),
    ("netns", Fault::UnseenInstance, "an instance is found as soon as its launch begins"),
    ("netns", Fault::StaleList, "each list reads the node itself"),
    ("netns", Fault::HeldShutdown, "a pod ends with its instance"),
    ("netns", Fault::Twin, "an instance has the id of its cell"),
    ("netns", Fault::OtherAuthority, "a state directory belongs to a single daemon"),
    ("netns", Fault::Denied, "calls need no permission"),
    ("netns", Fault::Throttled, "calls have no rate limit"),
    ("qemu", Fault::LateLaunch, "a call ends with its caller"),
    ("qemu", Fault::UnseenInstance, "an instance is found as soon as its launch begins"),
    ("qemu", Fault::StaleList, "each list reads the node itself"),
    ("qemu", Fault::HeldShutdown, "a pod ends with its instance"),
    ("qemu", Fault::Twin, "an instance has the id of its cell"),
    ("qemu", Fault::OtherAuthority, "a state directory belongs to a single daemon"),
    ("qemu", Fault::Denied, "calls need no permission"),
    ("qemu", Fault::Throttled, "calls have no rate limit"),
];

/// Returns the reason why a fault has no meaning for a provider.
pub(crate) fn reason_without_meaning(provider: &str, fault: Fault) -> Option<&'static str> {
    let found =
        WITHOUT_MEANING.iter().find(|(of, without, _)| (*of, *without) == (provider, fault));
    found.map(|(.., reason)| *reason)
}

/// A gate, at which calls wait while it is closed.
#[derive(Debug, Default)]
pub(crate) struct Gate(watch::Sender<bool>);

impl Gate {
    pub(crate) fn close(&self) {
        self.0.send_replace(true);
    }

    pub(crate) fn open(&self) {
        self.0.send_replace(false);
    }

    /// Returns whether a call waits.
    pub(crate) fn holds(&self) -> bool {
        self.0.receiver_count() > 0
    }

    pub(crate) async fn pass(&self) {
        let _ = self.0.subscribe().wait_for(|closed| !closed).await;
    }
}
