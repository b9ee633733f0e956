//! Faults of the API, set by a test.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, PoisonError},
    time::Duration,
};

use crate::{instance::Instance, shared::Shared};

/// Market of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Market {
    /// On-Demand.
    OnDemand,
    /// Spot.
    Spot,
}

/// A refusal of all calls because of their credentials.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Credentials {
    /// `AuthFailure`: the key or the signature is wrong.
    Wrong,
    /// `RequestExpired`: temporary credentials or the signature's time have expired.
    Expired,
    /// `InvalidClientTokenId`: the key is unknown.
    Unknown,
}

/// A state of the API without service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outage {
    /// Connections are refused, and open connections closed.
    Refused,
    /// Connections are closed before a reply, and the call has no effect.
    Reset,
    /// 503 `Unavailable`, and the call has no effect.
    Unavailable,
    /// 500 `InternalError`, and the call has no effect.
    InternalError,
    /// No reply until the outage ends, and the call has no effect.
    Hang,
}

/// A part of a call that waits until a test ends the hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// The connection is closed without a reply, and the effect waits.
    Effect,
    /// The call has its effect, and the reply waits.
    Reply,
}

/// A fault of lists of instances. Calls that name an instance are not affected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lists {
    /// Lists show the instances as of the begin of the fault.
    Stale,
    /// Lists omit every second instance, beginning with the first.
    Partial,
}

/// The instances in lists during the fault.
#[derive(Debug, Clone)]
pub(crate) enum Listed {
    /// The visible instances when the fault began.
    Stale(BTreeMap<String, Instance>),
    /// Every second instance.
    Partial,
}

/// Current faults.
#[derive(Debug, Clone, Default)]
pub(crate) struct FaultSet {
    pub(crate) visible_after: Duration,
    /// Set if actions that change an instance know it before it is visible.
    pub(crate) changes_unseen: bool,
    pub(crate) pending_for: Duration,
    pub(crate) shutting_down_for: Duration,
    pub(crate) console_after: Option<Duration>,
    pub(crate) no_capacity: BTreeSet<(String, String, Market)>,
    pub(crate) not_offered: BTreeSet<(String, String)>,
    /// Code and message of the refusal, by type.
    pub(crate) refused_types: BTreeMap<String, (String, String)>,
    /// Types that the account may launch; empty: all.
    pub(crate) free_plan: BTreeSet<String>,
    pub(crate) denied_keys: BTreeSet<String>,
    pub(crate) full_subnets: BTreeSet<String>,
    pub(crate) vcpu_limit: Option<u32>,
    pub(crate) spot_limit: Option<usize>,
    pub(crate) denied: BTreeSet<String>,
    pub(crate) credentials: Option<Credentials>,
    pub(crate) throttled: bool,
    pub(crate) outage: Option<Outage>,
    pub(crate) lost_replies: BTreeMap<String, usize>,
    pub(crate) delays: BTreeMap<String, Duration>,
    pub(crate) failures: BTreeMap<String, (u16, String, usize)>,
    pub(crate) holds: BTreeMap<String, Hold>,
    pub(crate) lists: Option<Listed>,
    pub(crate) prices: BTreeMap<String, String>,
    pub(crate) broken_products: usize,
}

/// Sets and clears the faults of a cloud. [`Duration::MAX`] means for ever.
#[derive(Debug, Clone)]
pub struct Faults(pub(crate) Arc<Shared>);

impl Faults {
    fn change(&self, change: impl FnOnce(&mut FaultSet)) {
        change(&mut self.0.state.lock().unwrap_or_else(PoisonError::into_inner).faults);
        self.0.changed.notify_waiters();
    }

    /// Ends all faults.
    pub fn clear(&self) {
        self.change(|faults| *faults = FaultSet::default());
    }

    /// Makes instances visible this long after their launch. Until then they are absent from lists,
    /// and `InvalidInstanceID.NotFound` by id.
    pub fn set_visible_after(&self, delay: Duration) {
        self.change(|faults| faults.visible_after = delay);
    }

    /// Sets whether actions that change an instance know it before it is visible: in EC2 the
    /// consistency of each action differs.
    pub fn set_changes_unseen(&self, does: bool) {
        self.change(|faults| faults.changes_unseen = does);
    }

    /// Keeps instances launched from now on `pending` for this long.
    pub fn set_pending_for(&self, time: Duration) {
        self.change(|faults| faults.pending_for = time);
    }

    /// Keeps instances ended from now on `shutting-down` for this long.
    pub fn set_shutting_down_for(&self, time: Duration) {
        self.change(|faults| faults.shutting_down_for = time);
    }

    /// Posts console output this long after the launch, instead of 4 minutes. `Latest` shows the
    /// current output at once.
    pub fn set_console_after(&self, delay: Duration) {
        self.change(|faults| faults.console_after = Some(delay));
    }

    /// Refuses launches of a type with this error, as EC2 does if the image can't boot on the type.
    pub fn refuse_type(&self, instance_type: &str, code: &str, message: &str) {
        let refused = (instance_type.to_owned(), (code.to_owned(), message.to_owned()));
        self.change(|faults| faults.refused_types.extend([refused]));
    }

    /// Allows only launches of these types, as for an account with the free plan; empty: all types.
    pub fn set_free_plan(&self, types: &[&str]) {
        let types = types.iter().map(|&name| name.to_owned()).collect();
        self.change(|faults| faults.free_plan = types);
    }

    /// Ends launches with this KMS key after their reply, as if the caller had no rights on the
    /// key.
    pub fn set_key_denied(&self, kms_key: &str) {
        let kms_key = kms_key.to_owned();
        self.change(|faults| faults.denied_keys.extend([kms_key]));
    }

    /// Sets or clears the lack of capacity for a type in a zone and a market; `*` means all types
    /// or all zones.
    pub fn set_no_capacity(&self, instance_type: &str, zone: &str, market: Market, lacks: bool) {
        let key = (instance_type.to_owned(), zone.to_owned(), market);
        self.change(|faults| {
            if lacks {
                faults.no_capacity.insert(key);
            } else {
                faults.no_capacity.remove(&key);
            }
        });
    }

    /// Withdraws a type from a zone's offerings.
    pub fn set_not_offered(&self, instance_type: &str, zone: &str) {
        let key = (instance_type.to_owned(), zone.to_owned());
        self.change(|faults| faults.not_offered.extend([key]));
    }

    /// Sets or clears the lack of free addresses in a subnet.
    pub fn set_subnet_full(&self, subnet: &str, full: bool) {
        self.change(|faults| {
            if full {
                faults.full_subnets.insert(subnet.to_owned());
            } else {
                faults.full_subnets.remove(subnet);
            }
        });
    }

    /// Limits the virtual CPUs of the existing On-Demand instances.
    pub fn set_vcpu_limit(&self, limit: Option<u32>) {
        self.change(|faults| faults.vcpu_limit = limit);
    }

    /// Limits the number of existing spot instances.
    pub fn set_spot_limit(&self, limit: Option<usize>) {
        self.change(|faults| faults.spot_limit = limit);
    }

    /// Denies or allows an action; `*` means all actions.
    pub fn set_denied(&self, action: &str, denied: bool) {
        self.change(|faults| {
            if denied {
                faults.denied.insert(action.to_owned());
            } else {
                faults.denied.remove(action);
            }
        });
    }

    /// Refuses all calls because of their credentials, or accepts them.
    pub fn set_credentials(&self, refusal: Option<Credentials>) {
        self.change(|faults| faults.credentials = refusal);
    }

    /// Applies the documented request limits, or no limits.
    pub fn set_throttled(&self, throttled: bool) {
        self.change(|faults| faults.throttled = throttled);
    }

    /// Begins or ends an outage of the API.
    pub fn set_outage(&self, outage: Option<Outage>) {
        self.change(|faults| faults.outage = outage);
    }

    /// Drops the replies of the next calls of an action. The calls have their effect.
    pub fn lose_replies(&self, action: &str, count: usize) {
        self.change(|faults| faults.lost_replies.extend([(action.to_owned(), count)]));
    }

    /// Delays the replies of an action, but not its effect.
    pub fn set_reply_delay(&self, action: &str, delay: Duration) {
        self.change(|faults| faults.delays.extend([(action.to_owned(), delay)]));
    }

    /// Replies to the next calls of an action with this status and error code. The calls have no
    /// effect.
    pub fn fail(&self, action: &str, status: u16, code: &str, count: usize) {
        let failure = (status, code.to_owned(), count);
        self.change(|faults| faults.failures.extend([(action.to_owned(), failure)]));
    }

    /// Holds the calls of an action, or releases them. Held calls have the outcome
    /// [`Held`](crate::Outcome::Held).
    pub fn set_hold(&self, action: &str, hold: Option<Hold>) {
        self.change(|faults| match hold {
            Some(hold) => drop(faults.holds.insert(action.to_owned(), hold)),
            None => drop(faults.holds.remove(action)),
        });
    }

    /// Sets a type's on-demand price in the price list, in dollars an hour. A type that is absent
    /// from the daemon's file can then be launched.
    pub fn set_price(&self, instance_type: &str, price: &str) {
        let price = (instance_type.to_owned(), price.to_owned());
        self.change(|faults| faults.prices.extend([price]));
    }

    /// Adds unusable products to the front of the price list.
    pub fn set_broken_products(&self, count: usize) {
        self.change(|faults| faults.broken_products = count);
    }

    /// Makes lists of instances stale or partial, or correct again.
    pub fn set_lists(&self, fault: Option<Lists>) {
        let mut state = self.0.lock();
        state.faults.lists = fault.map(|fault| match fault {
            Lists::Stale => Listed::Stale(state.all_visible()),
            Lists::Partial => Listed::Partial,
        });
    }
}
