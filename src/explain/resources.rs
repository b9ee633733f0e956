//! Explanation of resources that a cell's pod requests outside of the CRI request.

use kiyot_config::ProviderKind;
use kiyot_engine::{
    placement::Requested,
    request::keys::{MEMORY, VOLUME_SIZE},
};
use kiyot_manifest::Pod;
use kiyot_values::names::{CELL, EXTENDED_CPU, EXTENDED_MEMORY, EXTENDED_STORAGE, is_gpu};

use super::Lines;

/// Prefix of huge pages.
const HUGE_PAGES: &str = "hugepages-";

/// Notes resources that don't choose the cell, with the annotation that does. GPUs are refused if
/// the daemon reads requests.
pub(super) fn note(lines: &mut Lines, pod: &Pod, provider: ProviderKind, reads_requests: bool) {
    let resources = pod.resources();
    let has = |key: &str| pod.metadata.annotations.contains_key(key);
    let is_read = |name: &str| {
        name == CELL
            || reads_requests && [EXTENDED_CPU, EXTENDED_MEMORY, EXTENDED_STORAGE].contains(&name)
    };
    let extended = resources.extended.iter().filter(|(_, amount)| **amount > 0);
    for name in extended.map(|(name, _)| name).filter(|name| !is_read(name)) {
        if name.starts_with(HUGE_PAGES) {
            lines.say(format!("note: {name} is in the CRI request, and chooses no cell"));
        } else if !is_gpu(name) {
            lines.say(format!("note: {name} is not in the CRI request, and chooses no cell"));
        } else if !reads_requests {
            lines.say(format!(
                "note: {name} is not in the CRI request, and pods in cells have no devices yet; \
                 with kubernetes.kubeconfig the daemon refuses such a pod"
            ));
        }
    }
    let has_storage = resources.storage_request > Some(0) || resources.storage_limit > Some(0);
    let counts = provider == ProviderKind::Ec2 && reads_requests;
    if has_storage && !counts && !has(VOLUME_SIZE) {
        lines.say(format!(
            "note: ephemeral-storage is not in the CRI request; the annotation {VOLUME_SIZE} \
             chooses the size of the cell's disk"
        ));
    }
    if !pod.claims.is_empty() {
        lines.say(format!(
            "note: cells have no resource claims ({}), and refuse their devices",
            pod.claims.join(", ")
        ));
    }
}

/// Notes a memory request that is larger than the memory in the CRI request.
pub(super) fn note_memory_request(lines: &mut Lines, of_cri: &Requested, of_api: &Requested) {
    let value = |requested: &Requested| requested.memory_mib.map_or(0, |amount| amount.value);
    let wanted = value(of_api);
    if wanted > value(of_cri) {
        lines.say(format!(
            "note: its memory request ({wanted} MiB) is not in the CRI request; the annotation \
             {MEMORY} chooses the memory of its cell, or kubernetes.kubeconfig has the daemon read \
             requests"
        ));
    }
}
