//! Explanation of the choice of an instance.

use kiyot_proto::cri;

use super::Lines;
use crate::{
    annotations::CellRequest,
    backends::milpa::placement::{
        Candidate, Catalogue, Market, Needs, NoFit, Offering, Requested, Rules, misses, rank,
    },
    config::ProviderKind,
};

/// Candidates that are named after the first.
const NAMED_NEXT: usize = 3;
/// Cheaper types that are named with the reason why they do not fit.
const NAMED_MISSES: usize = 3;

/// Checks that a provider without a catalogue in a file can make a cell for a pod.
pub(super) fn check(
    lines: &mut Lines,
    provider: ProviderKind,
    rules: &Rules,
    request: &CellRequest,
    sandbox: &cri::PodSandboxConfig,
) {
    // The largest size of a virtual machine is that of the node, which may be another machine.
    let instance_type = match provider {
        ProviderKind::Netns => "netns".to_owned(),
        ProviderKind::Qemu => "qemu".to_owned(),
    };
    let offering = Offering { instance_type, zone: String::new(), market: Market::OnDemand };
    let catalogue = Catalogue::any_size(offering);
    let needs = Needs::new(request, &Requested::of_sandbox(sandbox), &rules.defaults);
    if rank(&catalogue, &needs, rules, &()).is_empty() {
        lines.refuse(NoFit::new(&catalogue, &needs, rules));
    }
}

/// Explains which instance a pod gets by a catalogue, what it costs, and what comes next.
pub(super) fn explain(
    lines: &mut Lines,
    catalogue: &Catalogue,
    rules: &Rules,
    request: &CellRequest,
    sandbox: &cri::PodSandboxConfig,
) {
    let needs = Needs::new(request, &Requested::of_sandbox(sandbox), &rules.defaults);
    let ranked = rank(catalogue, &needs, rules, &());
    let Some((first, next)) = ranked.split_first() else {
        lines.refuse(NoFit::new(catalogue, &needs, rules));
        return;
    };
    lines.say(format!("its needs: {needs}"));
    lines.say(format!("its instance: {}", priced(first)));
    let named: Vec<String> = next.iter().take(NAMED_NEXT).map(priced).collect();
    if !named.is_empty() {
        lines.say(format!("next: {}", named.join(" | ")));
    }
    for miss in misses(catalogue, &needs, rules, Some(first.price), NAMED_MISSES) {
        let price = miss.price.map(|price| format!(", at {price} an hour")).unwrap_or_default();
        lines.say(format!("left out: {miss}{price}"));
    }
}

fn priced(candidate: &Candidate) -> String {
    let bound = if candidate.is_at_most { "at most" } else { "at" };
    format!("{} {bound} {} an hour", candidate.offering, candidate.price)
}
