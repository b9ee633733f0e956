//! Amounts of `limits` or `requests`.

use std::collections::BTreeMap;

use super::quantity;
use crate::{
    annotations::Quantity,
    problems::{Field, Problem, Report},
};

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

/// Amounts of `limits` or `requests`.
#[derive(Debug, Default)]
pub(super) struct Amounts {
    /// Milli-CPUs.
    pub(super) cpu: Option<u64>,
    /// Bytes of memory.
    pub(super) memory: Option<u64>,
    /// Bytes of `ephemeral-storage`.
    pub(super) storage: Option<u64>,
    /// Extended resources and huge pages, in units and bytes.
    pub(super) extended: BTreeMap<String, u64>,
}

impl Amounts {
    pub(super) fn read(field: Field<'_>) -> Self {
        let (at, report) = (field.at().to_owned(), field.report());
        let mut amounts = Self::default();
        for (name, field) in field.entries().into_iter().filter(|(_, field)| !field.is_null()) {
            match name.as_str() {
                "cpu" => amounts.cpu = quantity(field, QUANTITY).map(Quantity::milli),
                "memory" => amounts.memory = quantity(field, QUANTITY).map(Quantity::units),
                STORAGE => amounts.storage = quantity(field, QUANTITY).map(Quantity::units),
                extended if is_extended(extended) => {
                    let whole = |text: &str| {
                        text.parse().ok().filter(|quantity: &Quantity| quantity.is_whole())
                    };
                    let read = field.read_text_or_number("a whole number, not negative", whole);
                    amounts.extended.extend(read.map(|quantity| (name, quantity.units())));
                }
                _ => report
                    .add(Problem::new(field.at(), format!("is an unknown key; allowed: {NAMES}"))),
            }
        }
        if amounts.extended.len() > MAX_EXTENDED {
            report.add(Problem::with_value(
                at,
                format!("{} extended resources", amounts.extended.len()),
                format!("has too many; allowed: {MAX_EXTENDED}"),
            ));
        }
        amounts
    }

    /// Reports requests of extended resources that differ from the limits
    /// (pkg/apis/core/validation: they can't be overcommitted).
    pub(super) fn check_extended(&self, at: &str, limits: &Self, report: &Report) {
        for (name, amount) in &self.extended {
            let limit = limits.extended.get(name);
            if limit != Some(amount) {
                let allowed =
                    limit.map_or("the same limit, which is missing".to_owned(), u64::to_string);
                report.add(Problem::with_value(
                    format!("{at}.{name}"),
                    amount,
                    format!("differs from its limit; allowed: {allowed}"),
                ));
            }
        }
    }
}

/// Says if a name is that of huge pages or of an extended resource (pkg/apis/core/v1/helper).
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
