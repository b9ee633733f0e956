//! Amounts of `limits` or `requests`.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource as api;
use kiyot_values::quantity::Quantity;

use crate::place::Place;

/// Most extended resources of a list.
const MAX_EXTENDED: usize = 100;
/// Longest name of an extended resource, in characters: a domain, a slash and a name.
const MAX_NAME_CHARS: usize = 253 + 1 + 63;

const STORAGE: &str = "ephemeral-storage";
/// Prefix of huge pages; their size follows.
const HUGE_PAGES: &str = "hugepages-";
const QUANTITY: &str = "a quantity such as 500m, 2 or 1.5Gi, not negative";
const NAMES: &str = "cpu, memory, ephemeral-storage, hugepages-SIZE, or an extended resource as \
                     DOMAIN/NAME";

/// Amounts by the name of the resource.
pub(super) type Quantities = BTreeMap<String, api::Quantity>;

/// Amounts of `limits` or `requests`.
#[derive(Debug, Clone, Default)]
pub(super) struct Amounts {
    /// CPUs.
    pub(super) cpu: Option<Quantity>,
    /// Bytes of memory.
    pub(super) memory: Option<Quantity>,
    /// Bytes of `ephemeral-storage`.
    pub(super) storage: Option<Quantity>,
    /// Extended resources and huge pages, in units and bytes.
    pub(super) extended: BTreeMap<String, u64>,
}

impl Amounts {
    pub(super) fn read(at: &Place<'_>, quantities: &Quantities) -> Self {
        let mut amounts = Self::default();
        for (name, api::Quantity(text)) in quantities {
            let field = at.of(name).field(text.as_str());
            match name.as_str() {
                "cpu" => amounts.cpu = field.parsed(QUANTITY),
                "memory" => amounts.memory = field.parsed(QUANTITY),
                STORAGE => amounts.storage = field.parsed(QUANTITY),
                extended if is_extended(extended) => {
                    let whole =
                        |text: &str| text.parse().ok().filter(|read: &Quantity| read.is_whole());
                    let read = field.read("a whole number, not negative", whole);
                    amounts.extended.extend(read.map(|read| (name.clone(), read.units())));
                }
                _ => at.of(name).report(format!("is an unknown key; allowed: {NAMES}")),
            }
        }
        if amounts.extended.len() > MAX_EXTENDED {
            at.refuse(
                format!("{} extended resources", amounts.extended.len()),
                format!("has too many; allowed: {MAX_EXTENDED}"),
            );
        }
        amounts
    }

    /// Reports requests above their limits, and requests of extended resources that differ from
    /// their limits, because these can't be overcommitted (pkg/apis/core/validation). `given` has
    /// the texts of the requests, `most` the texts of the limits.
    pub(super) fn check_limits(
        &self,
        at: &Place<'_>,
        given: &Quantities,
        (limits, most): (&Self, &Quantities),
    ) {
        let amounts = |amounts: &Self| [amounts.cpu, amounts.memory, amounts.storage];
        let pairs = amounts(self).into_iter().zip(amounts(limits));
        for (name, (request, limit)) in ["cpu", "memory", STORAGE].into_iter().zip(pairs) {
            if limit.is_some_and(|limit| request > Some(limit)) {
                let rule = format!("is more than its limit; allowed: {} at most", most[name].0);
                at.of(name).refuse(&given[name].0, rule);
            }
        }
        for (name, amount) in &self.extended {
            let limit = limits.extended.get(name);
            if limit != Some(amount) {
                let allowed =
                    limit.map_or("the same limit, which is missing".to_owned(), u64::to_string);
                let rule = format!("differs from its limit; allowed: {allowed}");
                at.of(name).refuse(amount, rule);
            }
        }
    }
}

/// Returns whether a name belongs to huge pages or to an extended resource
/// (pkg/apis/core/v1/helper).
fn is_extended(name: &str) -> bool {
    if let Some(size) = name.strip_prefix(HUGE_PAGES) {
        return size.parse::<Quantity>().is_ok_and(|size| size > Quantity::default());
    }
    let fits = |part: &str| {
        let ends = part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.ends_with(|c: char| c.is_ascii_alphanumeric());
        ends && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    name.len() <= MAX_NAME_CHARS
        && name.split_once('/').is_some_and(|(domain, name)| fits(domain) && fits(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extended_names_have_a_domain() {
        for (name, extended) in [
            ("nvidia.com/gpu", true),
            ("nvidia.com/mig-1g.5gb", true),
            ("smarter-devices/fuse", true),
            ("hugepages-2Mi", true),
            ("hugepages-", false),
            ("hugepages-0", false),
            ("gpu", false),
            ("/gpu", false),
            ("nvidia.com/", false),
            ("a/b/c", false),
            ("a b/c", false),
        ] {
            assert_eq!(is_extended(name), extended, "{name}");
        }
    }
}
