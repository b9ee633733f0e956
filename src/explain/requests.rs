//! Requests of a pod, as the Kubernetes API would have them.

use kiyot_engine::placement::ApiRequests;
use kiyot_manifest::{Container, Pod};

/// Returns the requests that the API would have for a manifest's pod.
pub(super) fn requests_of(pod: &Pod) -> ApiRequests {
    let sums = pod.complete_resources();
    let has_any = |limit: &u64| *limit > 0;
    ApiRequests {
        milli_cpu_request: sums.cpu_request.unwrap_or_default(),
        milli_cpu_limit: sums.cpu_limit.filter(has_any),
        memory_request: sums.memory_request.unwrap_or_default(),
        memory_limit: sums.memory_limit.filter(has_any),
        storage_request: sums.storage_request.unwrap_or_default(),
        has_env_in_files: pod.all_containers().any(Container::has_env_in_files),
        gpus: pod.gpus(),
        ..ApiRequests::default()
    }
}
