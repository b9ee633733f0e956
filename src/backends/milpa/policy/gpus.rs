//! GPUs. No cell has GPUs yet, and a pod must not pay for an instance whose devices it can't use.

use kiyot_engine::{
    placement::ApiRequests,
    request::{CellRequest, keys::GPU},
};

use super::Refusal;

/// Refuses a pod with GPUs by its annotation, or by a resource in the Kubernetes API.
pub fn check_gpus(request: &CellRequest, api: Option<&ApiRequests>) -> Result<(), Refusal> {
    let annotated = request.gpu.as_ref().filter(|gpus| gpus.count > 0);
    let annotated = annotated.map(|gpus| format!("{GPU} ({gpus})"));
    let resource = || api.and_then(|api| api.gpus.clone());
    match annotated.or_else(resource) {
        None => Ok(()),
        Some(what) => Err(Refusal(format!(
            "{what}: pods in cells have no devices yet; allowed: 0, or the pod on the node"
        ))),
    }
}
