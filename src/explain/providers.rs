//! Explanation of a pod that several providers may run.

use std::time::Duration;

use kiyot_engine::{
    engine::{ProviderKey, StartTimes},
    placement::{Candidate, Ranked},
};

use super::{Lines, choice::priced};

/// Offerings of the common ranking that are named.
const NAMED: usize = 4;

/// Joins the explanations of the providers. Facts of all providers come once, then the other facts
/// with the provider's name, then the common ranking. If the pod asks for a start within a time,
/// the ranking is by starts. The pod is refused if every provider refuses it.
pub(super) fn join(
    lines: &mut Lines,
    explained: Vec<(ProviderKey, Lines, Vec<Candidate>)>,
    start_within: Option<(Duration, Option<&StartTimes>)>,
) {
    let is_alone = explained.len() == 1;
    lines.refused |= explained.iter().all(|(_, own, _)| own.refused);
    let is_common = |fact: &String| explained.iter().all(|(_, own, _)| own.facts.contains(fact));
    let first = explained.first().into_iter().flat_map(|(_, own, _)| &own.facts);
    first.filter(|fact| is_common(fact)).for_each(|fact| lines.say(fact));
    for (provider, own, _) in &explained {
        lines.left_out += own.left_out;
        let rest = own.facts.iter().filter(|fact| !is_common(fact));
        rest.for_each(|fact| lines.say(format_args!("with {provider}: {fact}")));
    }
    if is_alone && start_within.is_none() {
        return;
    }
    let taken = explained.into_iter().filter(|(_, own, _)| !own.refused);
    let mut ranked = Ranked::merge(taken.map(|(provider, _, ranked)| (provider, ranked)));
    let times = start_within.and_then(|(_, times)| times);
    match start_within {
        Some((within, Some(times))) => {
            ranked = times.rank(ranked, within);
            if let Some(fastest) = times.beyond(&ranked, within) {
                lines.say(format_args!(
                    "note: no offering is known to start within {within:?}, the fastest in \
                     {fastest:.1?}"
                ));
            }
        }
        Some((_, None)) => lines.say(
            "note: starts are measured by a running daemon (`milpactl plan`): the ranking is by \
             price here",
        ),
        None => {}
    }
    let start = |it: &Ranked| match times.map(|times| times.of(it)) {
        Some(Some(time)) => format!(", starts in {time:.1?}"),
        Some(None) => ", start not measured".to_owned(),
        None => String::new(),
    };
    let shown = ranked.iter().take(NAMED);
    let shown =
        shown.map(|it| format!("{} of {}{}", priced(&it.candidate), it.provider, start(it)));
    let shown: Vec<String> = shown.collect();
    if !shown.is_empty() {
        lines.say(format_args!("ranking of all providers: {}", shown.join(" | ")));
    }
}
