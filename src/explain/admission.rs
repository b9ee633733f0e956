//! Explanation of admission: scheduler and kubelet count a pod's requests against the node, even if
//! its cell is another machine.

use kiyot_config::ProviderKind;
use kiyot_kubernetes::capacity::unit as unit_of_figure;
use kiyot_manifest::Pod;
use kiyot_values::names::{CELL, is_bytes};

use super::{Lines, Target};

/// A request of a pod: CPUs in thousandths, memory and storage in bytes, others in units.
struct Request {
    resource: String,
    amount: u64,
}

/// Explains how the requests of a pod in a cell fit the figures that the node declares.
pub(super) fn explain(lines: &mut Lines, target: &Target<'_>, pod: &Pod) {
    let (mut counted, mut undeclared) = (Vec::new(), Vec::new());
    let capacity = target.config.kubernetes.capacity.as_ref();
    for request in requests(pod) {
        let name = request.resource.as_str();
        let configured = capacity.and_then(|capacity| capacity.figures.get(name).copied());
        let cells =
            || (name == CELL && capacity.is_some()).then_some(target.milpa.max_cells as u64);
        let Some(figure) = configured.or_else(cells) else {
            // The daemon derives a declared figure that is not configured from a catalogue.
            if !capacity.is_some_and(|capacity| capacity.declares(name)) {
                undeclared.push(format!("{}{}", text(name, request.amount), unit(name)));
            }
            continue;
        };
        let declared = figure.saturating_mul(unit_of_figure(name));
        let (requested, has) = (text(name, request.amount), text(name, declared));
        if request.amount > declared {
            lines.refuse(format!("requests {requested}{}, the node declares {has}", unit(name)));
        } else {
            counted.push(format!("{requested} of {has}{}", unit(name)));
        }
    }
    if !counted.is_empty() {
        lines.say(format!("admission: {} that this node declares", counted.join(", ")));
    }
    // Cells of other providers use the node's resources, so that the count is right.
    if target.provider == ProviderKind::Ec2 && !undeclared.is_empty() {
        lines.say(format!(
            "note: scheduler and kubelet count its requests of {} against the node, although they \
             take nothing from it; the node can declare more (docs/kubernetes.md)",
            undeclared.join(", ")
        ));
    }
}

/// Returns the requests that scheduler and kubelet count for a pod.
fn requests(pod: &Pod) -> impl Iterator<Item = Request> {
    let (own, overhead) = (pod.resources(), &pod.overhead);
    let sum = |own: Option<u64>, more: Option<u64>| {
        own.unwrap_or_default().saturating_add(more.unwrap_or_default())
    };
    let of_all_pods = [
        ("cpu", sum(own.cpu_request, overhead.cpu_request)),
        ("memory", sum(own.memory_request, overhead.memory_request)),
        ("ephemeral-storage", sum(own.storage_request, overhead.storage_request)),
    ];
    let of_all_pods = of_all_pods.map(|(name, amount)| (name.to_owned(), amount)).into_iter();
    let requests = of_all_pods.chain(own.extended).filter(|(_, amount)| *amount > 0);
    requests.map(|(resource, amount)| Request { resource, amount })
}

/// Returns an amount as a quantity.
fn text(resource: &str, amount: u64) -> String {
    let is_bytes = is_bytes(resource) || resource.starts_with("hugepages-");
    let units: &[(u64, &str)] = match resource {
        "cpu" if amount.is_multiple_of(1000) => return (amount / 1000).to_string(),
        "cpu" => return format!("{amount}m"),
        _ if is_bytes => &[(1 << 40, "Ti"), (1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")],
        _ => &[],
    };
    let whole = units.iter().find(|(unit, _)| amount.is_multiple_of(*unit));
    whole.map_or_else(|| amount.to_string(), |(unit, name)| format!("{}{name}", amount / unit))
}

/// Returns the words after an amount of a resource.
fn unit(resource: &str) -> String {
    match resource {
        "cpu" => " CPUs".to_owned(),
        "memory" | "ephemeral-storage" => format!(" of {resource}"),
        _ => format!(" {resource}"),
    }
}
