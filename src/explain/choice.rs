//! Explanation of the choice of an instance.

use kiyot_config::ProviderKind;
use kiyot_engine::{
    placement::{
        Accuracy, AllRefused, Candidate, Catalogue, CatalogueFile, Market, Needs, NoFit, Offering,
        Rules, Size, misses, rank, rank_refused,
    },
    request::Architecture,
};

use super::{Lines, Live, Target};

/// Candidates that are named after the first.
const NAMED_NEXT: usize = 3;
/// Cheaper types that are named with the reason why they do not fit.
const NAMED_MISSES: usize = 3;

/// Size of an unknown node: the command may run on any machine.
const ANY_NODE: Size = Size { cpus: u32::MAX, memory_mib: u64::MAX / 2 };

/// Checks that a provider can make a cell for a pod, without a catalogue in a file.
pub(super) fn check(
    lines: &mut Lines,
    target: &Target<'_>,
    rules: &Rules,
    needs: &Needs,
) -> Vec<Candidate> {
    let catalogue = match target.provider {
        ProviderKind::Netns => {
            let (instance_type, zone) = ("netns".to_owned(), String::new());
            Catalogue::any_size(Offering { instance_type, zone, market: Market::OnDemand })
        }
        ProviderKind::Qemu => Catalogue::sized("node", "node", ANY_NODE, Architecture::Amd64),
        ProviderKind::Ec2 => {
            // The command makes no call: zones and live prices are not known.
            let catalogue = CatalogueFile::built_in_for(&target.milpa.ec2.region);
            return explain(lines, &catalogue, rules, needs);
        }
    };
    let ranked = rank(&catalogue, needs, rules, &());
    if ranked.is_empty() {
        lines.refuse(NoFit::new(&catalogue, needs, rules));
    }
    ranked
}

/// Explains which instance a pod gets by a catalogue, what it costs, and what comes next.
pub(super) fn explain(
    lines: &mut Lines,
    catalogue: &Catalogue,
    rules: &Rules,
    needs: &Needs,
) -> Vec<Candidate> {
    let ranked = rank(catalogue, needs, rules, &());
    let Some(first) = ranked.first() else {
        lines.refuse(NoFit::new(catalogue, needs, rules));
        return ranked;
    };
    if is_estimated(lines, needs, &ranked) {
        lines.say("prices are estimates from us-east-1: the daemon reads the region's prices");
    }
    name_misses(lines, catalogue, needs, rules, first);
    ranked
}

/// Explains the choice of a running daemon, which avoids offerings that were refused lately.
pub(super) fn explain_live(
    lines: &mut Lines,
    (catalogue, live): (&Catalogue, &Live),
    rules: &Rules,
    needs: &Needs,
) -> Vec<Candidate> {
    let fitting = rank_refused(catalogue, needs, rules);
    let ranked = rank(catalogue, needs, rules, &live.refusals.at(live.now));
    if ranked.is_empty() {
        match AllRefused::new(&fitting, &live.refusals, live.now) {
            Some(refused) => lines.refuse(refused),
            None => lines.refuse(NoFit::new(catalogue, needs, rules)),
        }
    } else if is_estimated(lines, needs, &ranked) {
        lines.say("prices are estimates from us-east-1");
    }
    let avoided = fitting.iter().filter_map(|candidate| {
        let reason = live.refusals.reason(&candidate.offering, live.now)?;
        Some(format!("avoided for now: {}: {reason}", priced(candidate)))
    });
    avoided.take(NAMED_NEXT).for_each(|line| lines.say(line));
    if let Some(first) = fitting.first() {
        name_misses(lines, catalogue, needs, rules, first);
    }
    ranked
}

/// Names the candidates. Returns whether a price is an estimate.
fn is_estimated(lines: &mut Lines, needs: &Needs, ranked: &[Candidate]) -> bool {
    let Some((first, next)) = ranked.split_first() else { return false };
    lines.say(format!("its needs: {needs}"));
    lines.say(format!("its instance: {}", priced(first)));
    let named: Vec<String> = next.iter().take(NAMED_NEXT).map(priced).collect();
    if !named.is_empty() {
        lines.say(format!("next: {}", named.join(" | ")));
    }
    ranked.iter().any(|candidate| candidate.accuracy == Accuracy::Estimate)
}

/// Names the types that are cheaper than a candidate but do not fit.
fn name_misses(
    lines: &mut Lines,
    catalogue: &Catalogue,
    needs: &Needs,
    rules: &Rules,
    first: &Candidate,
) {
    for miss in misses(catalogue, needs, rules, Some(first.price), NAMED_MISSES) {
        let price = miss.price.map(|price| format!(", at {price} an hour")).unwrap_or_default();
        lines.say(format!("left out: {miss}{price}"));
    }
}

pub(super) fn priced(candidate: &Candidate) -> String {
    let Candidate { offering, price, accuracy } = candidate;
    format!("{offering} {accuracy} {price} an hour")
}
