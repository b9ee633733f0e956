//! `[kubernetes.capacity]`: figures that the node declares instead of its machine's.

use std::collections::BTreeMap;

use kiyot_values::{
    names::{CELL, is_bytes, is_label},
    problems::Field,
};

/// Key of derived figures.
const DERIVED: &str = "derived";
/// Resources whose figures are derived.
const DERIVED_FIGURES: [&str; 3] = ["cpu", "memory", "pods"];
/// Largest number of a figure: six digits.
const MAX_NUMBER: u64 = 999_999;
/// Most characters of all figures as text: the policy on nodes reads no longer annotations.
const MAX_TEXT_CHARS: usize = 1024;
/// Most characters of a figure beside its name: `=`, six digits, a unit and `,`.
const MAX_AMOUNT_CHARS: usize = 10;
/// Longest name of a resource, in characters.
const MAX_NAME_CHARS: usize = 128;
/// Longest part of an extended resource's name after its domain, in characters.
const MAX_OWN_NAME_CHARS: usize = 63;

/// Figures by the names of their resources: memory and ephemeral storage in MiB, others in whole
/// numbers.
pub type Figures = BTreeMap<String, u64>;

/// The capacity that the node declares.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Capacity {
    /// Figures of its own.
    pub figures: Figures,
    /// True if the node also declares the CPUs, the memory and the pods that its cells can have.
    pub is_derived: bool,
}

impl Capacity {
    /// Returns whether the node declares a figure of a resource.
    pub fn declares(&self, name: &str) -> bool {
        self.figures.contains_key(name) || self.is_derived && DERIVED_FIGURES.contains(&name)
    }

    /// Returns whether the node declares more than its machine has. The kubelet keeps extended
    /// resources (`example.com/name`) without a device plugin, so that they need no policy.
    pub fn exceeds_machine(&self) -> bool {
        self.is_derived || self.figures.keys().any(|name| !name.contains('/'))
    }

    /// Returns whether there are no figures.
    pub(super) fn is_empty(&self) -> bool {
        self.figures.is_empty() && !self.is_derived
    }
}

pub(super) fn read(field: Field<'_>) -> Capacity {
    let (derived, entries): (Vec<_>, Vec<_>) =
        field.entries().into_iter().partition(|(name, _)| name == DERIVED);
    let is_derived = derived.into_iter().filter_map(|(_, field)| field.flag()).any(|flag| flag);
    Capacity { figures: figures(entries), is_derived }
}

fn figures(entries: Vec<(String, Field<'_>)>) -> Figures {
    let chars = entries.iter().map(|(name, _)| name.len() + MAX_AMOUNT_CHARS).sum::<usize>();
    if chars > MAX_TEXT_CHARS
        && let Some((_, last)) = entries.last()
    {
        last.refuse(format!("is too much; allowed: figures of {MAX_TEXT_CHARS} characters"));
        return Figures::new();
    }
    let entries = entries.into_iter();
    entries.filter_map(|(name, field)| amount(&name, field).map(|amount| (name, amount))).collect()
}

fn amount(name: &str, field: Field<'_>) -> Option<u64> {
    match name {
        "cpu" | "pods" => field.number(1..=MAX_NUMBER),
        name if is_bytes(name) => field.read(
            "a whole number from 1 to 999999 with Mi, Gi or Ti, such as \"4000Gi\"",
            mebibytes,
        ),
        CELL => {
            field.refuse("is declared as max_cells of the backend; allowed: no figure");
            None
        }
        name if is_extended(name) => field.number(1..=MAX_NUMBER),
        _ => {
            field.refuse(
                "is an unknown resource; allowed: cpu, memory, ephemeral-storage, pods, or an \
                 extended resource such as \"nvidia.com/gpu\"",
            );
            None
        }
    }
}

fn mebibytes(text: &str) -> Option<u64> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(2)?)?;
    let shift = ["Mi", "Gi", "Ti"].iter().position(|own| *own == unit)? * 10;
    let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.starts_with('0');
    let number: u64 = digits.parse().ok().filter(|number| *number <= MAX_NUMBER && is_plain)?;
    Some(number << shift)
}

/// Returns whether a text is the name of an extended resource, by the rules of the policy on nodes.
fn is_extended(name: &str) -> bool {
    let Some((domain, own)) = name.split_once('/') else { return false };
    let is_inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let is_edge = |c: char| c.is_ascii_alphanumeric();
    name.len() <= MAX_NAME_CHARS
        && domain.split('.').all(is_label)
        && own.len() <= MAX_OWN_NAME_CHARS
        && own.chars().all(is_inner)
        && own.starts_with(is_edge)
        && own.ends_with(is_edge)
        && !name.contains("kubernetes.io/")
        && !name.starts_with("requests.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse;

    fn read(section: &str) -> Result<Option<Capacity>, String> {
        let text = format!(
            "[kubernetes]\nkubeconfig = \"in-cluster\"\n[kubernetes.capacity]\n{section}\n\
             [backends.containerd]\ntype = \"cri\"\n"
        );
        let parsed = parse("test", &text, []).map_err(|problems| problems.to_string());
        parsed.map(|config| config.kubernetes.capacity)
    }

    /// Verifies K14.
    #[test]
    fn figures_are_read_by_the_names_of_their_resources() {
        let figures = read(
            "cpu = 1000\nmemory = \"4000Gi\"\nephemeral-storage = \"20Ti\"\npods = 250\n\
             \"nvidia.com/gpu\" = 8\n\"pod.elotl.co/memory\" = \"2Ti\"",
        );
        let expected = [
            ("cpu", 1000),
            ("ephemeral-storage", 20 << 20),
            ("memory", 4000 << 10),
            ("nvidia.com/gpu", 8),
            ("pod.elotl.co/memory", 2 << 20),
            ("pods", 250),
        ];
        let expected = expected.map(|(name, amount)| (name.to_owned(), amount));
        let capacity = Capacity { figures: expected.into(), is_derived: false };
        assert_eq!(figures, Ok(Some(capacity)));
        assert_eq!(
            read("cpu = 5\nderived = true"),
            Ok(Some(Capacity {
                figures: Figures::from([("cpu".to_owned(), 5)]),
                is_derived: true
            }))
        );
    }

    /// Returns figures of 16 characters each.
    fn many(count: usize) -> String {
        (10..10 + count).map(|number| format!("\"a.b/{number}\" = 5\n")).collect()
    }

    /// Verifies K14.
    #[test]
    fn wrong_figure_is_refused_by_key() {
        let most = read(&many(64)).unwrap().unwrap();
        assert_eq!(most.figures.len(), 64, "1024 characters");
        for (section, expected) in [
            ("", "kubernetes.capacity: has no figures"),
            (&many(65), "figures of 1024 characters"),
            ("cpu = 0", "a whole number from 1 to 999999"),
            ("cpu = -5", "kubernetes.capacity.cpu"),
            ("cpu = 1.5", "kubernetes.capacity.cpu"),
            ("cpu = \"5\"", "kubernetes.capacity.cpu"),
            ("pods = 1000000", "kubernetes.capacity.pods"),
            ("memory = 5", "kubernetes.capacity.memory"),
            ("memory = \"5\"", "with Mi, Gi or Ti"),
            ("memory = \"5G\"", "with Mi, Gi or Ti"),
            ("memory = \"05Gi\"", "with Mi, Gi or Ti"),
            ("memory = \"+5Gi\"", "with Mi, Gi or Ti"),
            ("memory = \"-5Gi\"", "with Mi, Gi or Ti"),
            ("memory = \"1.5Gi\"", "with Mi, Gi or Ti"),
            ("memory = \"1000000Mi\"", "with Mi, Gi or Ti"),
            ("memory = \"Gi\"", "with Mi, Gi or Ti"),
            ("memory = \"5\u{e9}\"", "with Mi, Gi or Ti"),
            ("\"pod.elotl.co/ephemeral-storage\" = 5", "with Mi, Gi or Ti"),
            ("storage = 5", "is an unknown resource"),
            ("\"hugepages-2Mi\" = 5", "is an unknown resource"),
            ("\"example.kubernetes.io/a\" = 5", "is an unknown resource"),
            ("\"requests.a/b\" = 5", "is an unknown resource"),
            ("\"a..b/c\" = 5", "is an unknown resource"),
            ("\"-a/c\" = 5", "is an unknown resource"),
            ("\"a/-c\" = 5", "is an unknown resource"),
            ("\"a/b/c\" = 5", "is an unknown resource"),
            ("\"a.b/c\" = 1.5", "a whole number"),
            ("derived = false", "has no figures"),
            ("derived = 5", "kubernetes.capacity.derived"),
            ("\"pod.elotl.co/cell\" = 5", "is declared as max_cells"),
        ] {
            let problems = read(section).unwrap_err();
            assert!(problems.contains(expected), "{section}: {problems}");
        }
    }

    /// Verifies K14.
    #[test]
    fn derived_figures_need_cells_on_other_machines() {
        let problems = |provider: &str| {
            let text = format!(
                "[kubernetes]\nkubeconfig = \"in-cluster\"\n[kubernetes.capacity]\nderived = true\n\
                 [backends.containerd]\ntype = \"cri\"\n[backends.milpa]\ntype = \"milpa\"\n\
                 provider = \"{provider}\"\n"
            );
            parse("test", &text, []).map_err(|problems| problems.to_string()).err()
        };
        let refused = "kubernetes.capacity.derived: needs cells on other machines";
        for provider in ["netns", "qemu"] {
            let problems = problems(provider).unwrap_or_default();
            assert!(problems.contains(refused), "{provider}: {problems}");
        }
        assert!(!problems("ec2").unwrap_or_default().contains(refused));
    }

    /// Verifies K14.
    #[test]
    fn capacity_needs_access_and_the_requests_of_pods() {
        for access in ["", "kubeconfig = \"in-cluster\"\nrequests = false\n"] {
            let text = format!(
                "[kubernetes]\n{access}[kubernetes.capacity]\ncpu = 5\n[backends.containerd]\n\
                 type = \"cri\"\n"
            );
            let problems = parse("test", &text, []).unwrap_err().to_string();
            assert!(problems.contains("needs kubernetes.kubeconfig"), "{problems}");
        }
    }
}
