//! Leases of nodes: which nodes are dead.
//!
//! A node renews its lease while its daemon runs. Clocks of nodes differ, so that a lease has run
//! out when its time of renewal has not changed for its duration by the observer's own clock, as
//! leader election of Kubernetes does it.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    label::{NODE_LABEL, hashed, node_value},
    time,
};

/// Prefix of the names of leases.
const PREFIX: &str = "kiyot-";
/// Longest name of a node that a lease's name has unchanged, in bytes: names have at most 253.
const MAX_NODE_BYTES: usize = 240;
/// Most leases that are observed: more than a cluster has nodes.
pub const MAX_LEASES: usize = 10_000;
/// Time that is given beyond the duration, for a renewal that is on its way.
const GRACE: Duration = Duration::from_secs(30);

/// A lease, as far as it is read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Lease {
    /// Its metadata.
    pub metadata: crate::object::Metadata,
    /// Its holder and times.
    pub spec: LeaseSpec,
}

/// The holder and the times of a lease.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LeaseSpec {
    /// The node.
    pub holder_identity: String,
    /// The time after which it has run out without a renewal.
    pub lease_duration_seconds: u32,
    /// The time of the last renewal, by the holder's clock.
    pub renew_time: String,
}

/// Returns the name of a node's lease.
pub fn lease_name(node: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_name = node.len() <= MAX_NODE_BYTES
        && node.bytes().all(|byte| is_plain(byte) || b"-.".contains(&byte))
        && !node.contains("..")
        && node.bytes().last().is_some_and(is_plain);
    let node = if is_name { node.to_owned() } else { hashed(node).to_lowercase() };
    format!("{PREFIX}{node}")
}

/// Returns the lease of a node, renewed now.
pub(crate) fn renewed(node: &str, namespace: &str, duration: Duration, unix_nanos: i64) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": lease_name(node),
            "namespace": namespace,
            "labels": { NODE_LABEL: node_value(node) },
        },
        "spec": {
            "holderIdentity": node,
            "leaseDurationSeconds": duration.as_secs().max(1),
            "renewTime": time::micros(unix_nanos),
        },
    })
}

/// The leases of all nodes, as this node saw them.
#[derive(Debug, Default)]
pub struct Observed(BTreeMap<String, (String, Instant)>);

impl Observed {
    /// Notes the leases of a list, and returns those that have run out.
    pub fn note(&mut self, leases: Vec<Lease>, now: Instant) -> Vec<Lease> {
        let mut observed = BTreeMap::new();
        let mut dead = Vec::new();
        for lease in leases.into_iter().take(MAX_LEASES) {
            let Lease { metadata, spec } = &lease;
            let earlier = self.0.get(&metadata.uid);
            let since = match earlier {
                Some((renewed, since)) if *renewed == spec.renew_time => *since,
                _ => now,
            };
            observed.insert(metadata.uid.clone(), (spec.renew_time.clone(), since));
            let duration = Duration::from_secs(spec.lease_duration_seconds.into());
            // A lease without a holder or a duration is not ours to judge.
            let is_judged = !spec.holder_identity.is_empty() && !duration.is_zero();
            let grace = GRACE.min(duration);
            if is_judged && now.saturating_duration_since(since) > duration + grace {
                dead.push(lease);
            }
        }
        self.0 = observed;
        dead
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Metadata;

    fn lease(node: &str, renew_time: &str) -> Lease {
        Lease {
            metadata: Metadata { uid: format!("uid of {node}"), ..Metadata::default() },
            spec: LeaseSpec {
                holder_identity: node.to_owned(),
                lease_duration_seconds: 300,
                renew_time: renew_time.to_owned(),
            },
        }
    }

    /// Verifies K7.
    #[test]
    fn lease_runs_out_by_the_own_clock_after_its_last_seen_renewal() {
        let (begin, mut observed) = (Instant::now(), Observed::default());
        let mut dead = |seconds: u64, leases: &[Lease]| -> Vec<String> {
            let now = begin + Duration::from_secs(seconds);
            let dead = observed.note(leases.to_vec(), now);
            dead.into_iter().map(|lease| lease.spec.holder_identity).collect()
        };
        // The first sight says nothing, however old the time of renewal is.
        assert!(dead(0, &[lease("a", "2001-01-01T00:00:00Z"), lease("b", "1")]).is_empty());
        assert!(dead(299, &[lease("a", "2001-01-01T00:00:00Z"), lease("b", "2")]).is_empty());
        assert_eq!(dead(331, &[lease("a", "2001-01-01T00:00:00Z"), lease("b", "2")]), ["a"]);
        // A lease that was absent is observed anew.
        assert!(dead(400, &[]).is_empty());
        assert!(dead(800, &[lease("a", "2001-01-01T00:00:00Z")]).is_empty());
        let no_duration = Lease { spec: LeaseSpec::default(), ..lease("c", "1") };
        assert!(dead(9000, std::slice::from_ref(&no_duration)).is_empty());
        assert!(dead(99_000, &[no_duration]).is_empty());
    }

    #[test]
    fn name_of_a_lease_is_a_name_of_an_object() {
        assert_eq!(lease_name("ip-10-0-0-1.ec2.internal"), "kiyot-ip-10-0-0-1.ec2.internal");
        for node in ["Worker_1", "a..b", "-x-", "\u{e4}", &"x".repeat(253)] {
            let name = lease_name(node);
            let is_letter = |byte: u8| {
                byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte)
            };
            assert!(name.len() <= 253 && name.bytes().all(is_letter), "{name}");
            assert!(!name.contains("..") && !name.ends_with('-'), "{name}");
        }
    }
}
