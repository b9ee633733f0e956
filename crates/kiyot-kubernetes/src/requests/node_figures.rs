//! Variables and files of a pod that show a limit which no container has (`resourceFieldRef`). The
//! kubelet fills them with the node's allocatable amount.

use std::collections::BTreeMap;

use kiyot_values::quantity::Quantity;
use serde::Deserialize;

use super::{Amount, Container, MAX_CONTAINERS, PodSpec};

/// Bounds the figures of a pod's variables, and of its files. Pods have far fewer.
const MAX_FIGURES: usize = 1000;

/// A variable of a container or a file of a volume that shows `limits.cpu` or `limits.memory`,
/// although neither the named container nor the pod has this limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeFigure {
    /// Name of the variable's container, or of the file's volume.
    pub holder: String,
    /// Name of the variable, or path of the file in its volume.
    pub name: String,
    /// True for memory, false for CPU.
    pub is_memory: bool,
    /// Unit of the value, in thousandths of a CPU or in bytes; not 0.
    pub divisor: u64,
}

/// A resource (true for memory) with the unit of its figure.
type Unit = (bool, u64);

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ResourceField {
    container_name: String,
    resource: String,
    divisor: Option<Amount>,
}

/// The parts of a volume that are read.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Volume {
    name: String,
    #[serde(rename = "downwardAPI")]
    downward_api: Option<DownwardApi>,
    projected: Option<Projected>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Projected {
    sources: Option<Vec<Source>>,
}

/// A source of files.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Source {
    #[serde(rename = "downwardAPI")]
    downward_api: Option<DownwardApi>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct DownwardApi {
    items: Option<Vec<Item>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Item {
    path: String,
    resource_field_ref: Option<ResourceField>,
}

impl PodSpec {
    /// Returns the figures of variables that the kubelet fills with the node's amounts.
    pub(super) fn node_variables(&self) -> Vec<NodeFigure> {
        let variables = self.all_containers().flat_map(|own| {
            own.env.iter().map(move |variable| {
                let source = variable.value_from.as_ref();
                let field = source.and_then(|source| source.resource_field_ref.as_ref());
                let unit = field.and_then(|field| self.unit(field, Some(own)));
                (own.name.as_str(), variable.name.clone(), unit)
            })
        });
        figures(variables)
    }

    /// Returns the figures of files that the kubelet fills with the node's amounts.
    pub(super) fn node_files(&self) -> Vec<NodeFigure> {
        let files = self.volumes.iter().flat_map(|volume| {
            let sources = volume.projected.iter().flat_map(|projected| &projected.sources);
            let projected = sources.flatten().flat_map(|source| &source.downward_api);
            let items = projected.chain(&volume.downward_api).flat_map(|api| &api.items);
            items.flatten().map(|item| {
                let field = item.resource_field_ref.as_ref();
                let unit = field.and_then(|field| self.unit(field, None));
                (volume.name.as_str(), cleaned(&item.path), unit)
            })
        });
        figures(files)
    }

    fn all_containers(&self) -> impl Iterator<Item = &Container> {
        self.containers.iter().chain(&self.init_containers).take(MAX_CONTAINERS)
    }

    /// Returns resource and unit of a field that the kubelet fills with the node's amount.
    fn unit(&self, field: &ResourceField, own: Option<&Container>) -> Option<Unit> {
        let (name, is_memory, divisor) = match field.resource.as_str() {
            "limits.cpu" => ("cpu", false, field.divisor(Quantity::milli, 1000)),
            "limits.memory" => ("memory", true, field.divisor(Quantity::units, 1)),
            _ => return None,
        };
        let container = match field.container_name.as_str() {
            "" => own,
            other => self.all_containers().find(|container| container.name == other),
        };
        let mut all = self.resources.iter().chain([&container?.resources]);
        // For the kubelet, a limit of 0 is no limit.
        let is_some = |limit: &Amount| limit.quantity() != Some(Quantity::default());
        let has_limit = all.any(|resources| resources.limits.get(name).is_some_and(is_some));
        (!has_limit).then_some((is_memory, divisor))
    }
}

/// Returns a bounded number of figures by holder and name. The last of equal names counts.
fn figures<'s>(all: impl Iterator<Item = (&'s str, String, Option<Unit>)>) -> Vec<NodeFigure> {
    let mut figures = BTreeMap::new();
    for (holder, name, unit) in all {
        match unit {
            Some(unit) if figures.len() < MAX_FIGURES => {
                figures.insert((holder, name), unit);
            }
            Some(_) => {}
            None => drop(figures.remove(&(holder, name))),
        }
    }
    let figure = |((holder, name), (is_memory, divisor)): ((&str, String), Unit)| NodeFigure {
        holder: holder.to_owned(),
        name,
        is_memory,
        divisor,
    };
    figures.into_iter().map(figure).collect()
}

/// Returns a path in the kubelet's form, without empty parts.
fn cleaned(path: &str) -> String {
    let parts: Vec<&str> = path.split('/').filter(|part| !["", "."].contains(part)).collect();
    parts.join("/")
}

impl ResourceField {
    /// Returns the unit of the field's value. An absent divisor, or 0, stands for the resource's
    /// own unit.
    fn divisor(&self, read: fn(Quantity) -> u64, own: u64) -> u64 {
        let divisor = self.divisor.as_ref().and_then(Amount::quantity).map(read);
        divisor.filter(|divisor| *divisor > 0).unwrap_or(own)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn spec(containers: Value, volumes: Value) -> PodSpec {
        serde_json::from_value(json!({ "containers": containers, "volumes": volumes })).unwrap()
    }

    fn shown(figures: &[NodeFigure]) -> Vec<String> {
        let shown = |NodeFigure { holder, name, is_memory, divisor }: &NodeFigure| {
            format!("{holder}/{name} {} {divisor}", if *is_memory { "memory" } else { "cpu" })
        };
        figures.iter().map(shown).collect()
    }

    /// Verifies K19.
    #[test]
    fn variable_has_the_nodes_figure_if_its_container_has_no_limit() {
        let variable = |name: &str, field: Value| {
            let source = json!({ "resourceFieldRef": field });
            json!({ "name": name, "valueFrom": source })
        };
        let limited = |name: &str, limits: Value, env: &[Value]| {
            let resources = json!({ "limits": limits });
            json!({ "name": name, "resources": resources, "env": env })
        };
        let main = [
            variable("CPUS", json!({ "resource": "limits.cpu", "divisor": "1m" })),
            variable("MEMORY", json!({ "resource": "limits.memory", "divisor": "0" })),
            variable("OTHER", json!({ "resource": "limits.cpu", "containerName": "side" })),
            variable("ASKED", json!({ "resource": "requests.memory" })),
            variable("TWICE", json!({ "resource": "limits.memory" })),
            json!({ "name": "TWICE", "value": "7" }),
        ];
        let side = [variable(
            "MAIN",
            json!({ "resource": "limits.memory", "containerName": "main", "divisor": "1Mi" }),
        )];
        let containers = json!([
            limited("main", json!({ "cpu": "0" }), &main),
            limited("side", json!({ "cpu": "2" }), &side),
        ]);
        let found = shown(&spec(containers.clone(), json!([])).node_variables());
        assert_eq!(found, ["main/CPUS cpu 1", "main/MEMORY memory 1", "side/MAIN memory 1048576"]);
        let limits = json!({ "limits": { "memory": "1Gi" } });
        let of_pod = json!({ "containers": containers, "resources": limits });
        let of_pod: PodSpec = serde_json::from_value(of_pod).unwrap();
        assert_eq!(shown(&of_pod.node_variables()), ["main/CPUS cpu 1"]);
    }

    /// Verifies K23.
    #[test]
    fn file_has_the_nodes_figure_if_its_container_has_no_limit() {
        let item = |path: &str, container: &str, resource: &str| {
            let field = json!({ "containerName": container, "resource": resource });
            json!({ "path": path, "resourceFieldRef": field })
        };
        let of_node = [
            item("cpus", "main", "limits.cpu"),
            item("limited", "side", "limits.cpu"),
            item("./a//b", "side", "limits.memory"),
            item("disk", "main", "limits.ephemeral-storage"),
            item("absent", "other", "limits.cpu"),
            json!({ "path": "labels", "fieldRef": { "fieldPath": "metadata.labels" } }),
        ];
        let sources = json!([
            { "secret": { "name": "s" } },
            { "downwardAPI": { "items": [item("memory", "main", "limits.memory")] } },
            { "downwardAPI": {} },
        ]);
        let volumes = json!([
            { "name": "own", "downwardAPI": { "items": of_node } },
            { "name": "all", "projected": { "sources": sources } },
            { "name": "empty", "projected": { "sources": null } },
            { "name": "disk", "emptyDir": {} },
        ]);
        let side = json!({ "name": "side", "resources": { "limits": { "cpu": 1 } } });
        let found = spec(json!([{ "name": "main" }, side]), volumes).node_files();
        let expected = ["all/memory memory 1", "own/a/b memory 1", "own/cpus cpu 1000"];
        assert_eq!(shown(&found), expected);
    }

    /// Verifies K23.
    #[test]
    fn number_of_figures_is_bounded() {
        let item = |n: usize| {
            let field = json!({ "containerName": "main", "resource": "limits.cpu" });
            json!({ "path": n.to_string(), "resourceFieldRef": field })
        };
        let items: Vec<_> = (0..=MAX_FIGURES).map(item).collect();
        let volumes = json!([{ "name": "v", "downwardAPI": { "items": items } }]);
        assert_eq!(spec(json!([{ "name": "main" }]), volumes).node_files().len(), MAX_FIGURES);
    }
}
