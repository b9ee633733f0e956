//! Variables and files with facts of the node.

use super::*;

/// Verifies C7, K19, K23, U26.
#[test]
fn variables_with_facts_of_the_node_are_noted_for_other_machines() {
    let pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n  containers:\n  \
               - name: c\n    image: i\n    resources: {limits: {memory: 1Gi}}\n    env:\n    \
               - {name: CPUS, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}\n    \
               - {name: MEM, valueFrom: {resourceFieldRef: {resource: limits.memory}}}\n    \
               - {name: OTHER, valueFrom: {resourceFieldRef: {containerName: o, resource: \
               limits.memory}}}\n    \
               - {name: ASKED, valueFrom: {resourceFieldRef: {resource: requests.cpu}}}\n    \
               - {name: NODE, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}\n    \
               - {name: POD, valueFrom: {fieldRef: {fieldPath: status.podIP}}}\n  \
               - {name: o, image: i, resources: {limits: {cpu: 1}}}\n  volumes:\n  \
               - name: d\n    downwardAPI: {items: [{path: cpus, resourceFieldRef: {containerName: \
               c, resource: limits.cpu}}, {path: memory, resourceFieldRef: {containerName: c, \
               resource: limits.memory}}, {path: labels, fieldRef: {fieldPath: \
               metadata.labels}}]}\n  \
               - name: p\n    projected: {sources: [{downwardAPI: {items: [{path: a/b, \
               resourceFieldRef: {containerName: o, resource: limits.ephemeral-storage}}]}}]}\n";
    let cpus = "note: container \"c\": CPUS has limits.cpu: without a limit it is the amount that \
                the node can allocate, not the amount of its cell";
    let other = "note: container \"c\": OTHER has limits.memory of container \"o\": without a \
                 limit it is the amount that the node can allocate, not the amount of its cell";
    let file = "note: volume \"d\": cpus has limits.cpu of container \"c\": without a limit it is \
                the amount that the node can allocate, not the amount of its cell";
    let projected = "note: volume \"p\": a/b has limits.ephemeral-storage of container \"o\": \
                     without a limit it is the amount that the node can allocate, not the amount \
                     of its cell";
    let address = "note: container \"c\": NODE has status.hostIP, which is an address of the node, \
                   not of its instance";
    let is_note = |line: &&str| {
        ["note: container", "note: volume"].iter().any(|start| line.starts_with(start))
    };
    let of_ec2 = vec![cpus, other, address, file, projected];
    let of_qemu = vec![cpus, other, file, projected];
    for (provider, notes) in [("netns", vec![]), ("qemu", of_qemu), ("ec2", of_ec2)] {
        let (text, _) = explained(&config_of(provider), pod);
        let found: Vec<_> = text.lines().map(str::trim).filter(|line| is_note(line)).collect();
        assert_eq!(found, notes, "{text}");
    }
    // Cells of netns are parts of the node, which declares another figure.
    let declared = "[kubernetes]\nkubeconfig = \"in-cluster\"\n[kubernetes.capacity]\nmemory = \
                    \"4000Gi\"\n";
    let (text, _) = explained(&format!("{declared}{}", config_of("netns")), pod);
    let found: Vec<_> = text.lines().map(str::trim).filter(|line| is_note(line)).collect();
    assert_eq!(found, [other.replace("can allocate", "declares")], "{text}");
    // With access to the API the daemon gives variables and files the figures of a machine.
    let access = "[kubernetes]\nkubeconfig = \"in-cluster\"\n";
    let (text, _) = explained(&format!("{access}{}", config_of("qemu")), pod);
    let found: Vec<_> = text.lines().map(str::trim).filter(|line| is_note(line)).collect();
    assert_eq!(found, [projected], "{text}");
}
