//! Variables and files in which the kubelet puts figures of the node.

use kiyot_engine::placement::{CellResources, NodeFigure};
use kiyot_proto::{cri, store::ReplacedFile};

/// Replaces the node's figures in a container's variables by the cell's.
pub(in crate::backends::milpa::cri) fn replace_node_variables(
    config: &mut cri::ContainerConfig,
    variables: &[NodeFigure],
    cell: CellResources,
) {
    let container = config.metadata.as_ref().map_or("", |metadata| metadata.name.as_str());
    for variable in variables.iter().filter(|variable| variable.holder == container) {
        for env in config.envs.iter_mut().filter(|env| env.key == variable.name) {
            env.value = variable.value_in(cell).into();
        }
    }
}

/// Returns the files of volumes, with the cell's figures.
pub(in crate::backends::milpa::cri) fn replaced_files(
    files: &[NodeFigure],
    cell: CellResources,
) -> Vec<ReplacedFile> {
    let replaced = |file: &NodeFigure| ReplacedFile {
        volume: file.holder.clone(),
        path: file.name.clone(),
        content: file.value_in(cell),
    };
    files.iter().map(replaced).collect()
}

#[cfg(test)]
mod tests {
    use kiyot_engine::placement::NodeResource;

    use super::*;

    /// Verifies K19.
    #[test]
    fn figures_of_the_cell_replace_only_variables_of_the_container() {
        let env = |key: &str, value: &str| cri::KeyValue { key: key.into(), value: value.into() };
        let config = |cpus: &str| cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: "main".into(), attempt: 0 }),
            envs: vec![env("CPUS", cpus), env("MEMORY", "1000"), env("OTHER", "1000")],
            ..Default::default()
        };
        let variable = |holder: &str, name: &str| NodeFigure {
            holder: holder.into(),
            name: name.into(),
            resource: NodeResource::Cpu,
            divisor: 1000,
        };
        let variables =
            [variable("main", "CPUS"), variable("side", "MEMORY"), variable("main", "ABSENT")];
        let mut replaced = config("1000");
        let cell = CellResources { milli_cpus: 4000, memory: 0 };
        replace_node_variables(&mut replaced, &variables, cell);
        assert_eq!(replaced, config("4"));
    }
}
