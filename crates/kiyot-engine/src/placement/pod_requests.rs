//! The requests and limits of a pod by the Kubernetes API.

use std::{fmt, time::Duration};

use async_trait::async_trait;

use crate::placement::{Amount, Requested, Source};

/// Bounds the time for which a call waits for its pod's requests from the API: the kubelet's own
/// watch may be a moment ahead of ours.
pub const REQUESTS_TIMEOUT: Duration = Duration::from_millis(100);

/// The requests and limits of a pod; 0 and `None` for absent ones.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ApiRequests {
    /// The sum of CPU requests, in thousandths.
    pub milli_cpu_request: u64,
    /// The sum of CPU limits, if every container has one.
    pub milli_cpu_limit: Option<u64>,
    /// The sum of memory requests, in bytes.
    pub memory_request: u64,
    /// The sum of memory limits, if every container has one.
    pub memory_limit: Option<u64>,
    /// The sum of requests of ephemeral storage, in bytes.
    pub storage_request: u64,
    /// True if a container has variables in files of volumes (`fileKeyRef`).
    pub has_env_in_files: bool,
    /// The first resource of GPUs by name, such as `nvidia.com/gpu`.
    pub gpus: Option<String>,
    /// The variables that the kubelet fills in with the node's figures.
    pub node_variables: Vec<NodeFigure>,
    /// The files of volumes that the kubelet fills in likewise.
    pub node_files: Vec<NodeFigure>,
}

/// A variable of a container, or a file of a volume, that refers to an absent limit
/// (`resourceFieldRef`). The kubelet fills in what the node can allocate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeFigure {
    /// The name of the variable's container, or of the file's volume.
    pub holder: String,
    /// The name of the variable, or the path of the file in its volume.
    pub name: String,
    /// The resource.
    pub resource: NodeResource,
    /// The unit of its value, in thousandths of a CPU or in bytes; not 0.
    pub divisor: u64,
}

/// A resource of a [`NodeFigure`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeResource {
    /// `limits.cpu`.
    Cpu,
    /// `limits.memory`.
    Memory,
}

/// The resources of a cell for the containers of its pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CellResources {
    /// Thousandths of a CPU.
    pub milli_cpus: u64,
    /// Memory in bytes.
    pub memory: u64,
}

impl NodeFigure {
    /// Returns the value in a cell, rounded up as the kubelet does.
    pub fn value_in(&self, cell: CellResources) -> String {
        let amount = match self.resource {
            NodeResource::Cpu => cell.milli_cpus,
            NodeResource::Memory => cell.memory,
        };
        amount.div_ceil(self.divisor.max(1)).to_string()
    }
}

/// A reader of the Kubernetes API.
#[async_trait]
pub trait PodRequests: fmt::Debug + Send + Sync {
    /// Returns the requests of a pod by its uid, within [`REQUESTS_TIMEOUT`]; `None` without access
    /// or for an unknown pod.
    async fn of_pod(&self, uid: &str) -> Option<ApiRequests>;

    /// Returns the requests of a pod by its uid, if they are known now.
    fn known(&self, uid: &str) -> Option<ApiRequests>;
}

impl Requested {
    /// Replaces CRI's resources by the API's. CRI lacks memory requests, and its sums of limits
    /// leave out containers without a limit.
    pub fn with_api(self, api: &ApiRequests) -> Self {
        let amount = |request: u64, limit: Option<u64>| match limit {
            Some(limit) if limit >= request => {
                Some(Amount { value: limit, source: Source::Limits })
            }
            _ => (request > 0).then_some(Amount { value: request, source: Source::Requests }),
        };
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        Self {
            milli_cpus: amount(api.milli_cpu_request, api.milli_cpu_limit),
            memory_mib: amount(mib(api.memory_request), api.memory_limit.map(mib)),
            overhead_mib: self.overhead_mib,
            storage_bytes: api.storage_request,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies K19, K23.
    #[test]
    fn figure_of_the_cell_is_rounded_up() {
        let cell = CellResources { milli_cpus: 1500, memory: (1 << 30) + 1 };
        let value = |resource, divisor| {
            let (holder, name) = ("main".to_owned(), "LIMIT".to_owned());
            NodeFigure { holder, name, resource, divisor }.value_in(cell)
        };
        assert_eq!([1000, 1, 400].map(|unit| value(NodeResource::Cpu, unit)), ["2", "1500", "4"]);
        assert_eq!(
            [1, 1 << 20].map(|unit| value(NodeResource::Memory, unit)),
            ["1073741825", "1025"]
        );
    }

    /// Verifies K10.
    #[test]
    fn api_requests_replace_cri_requests_except_the_overhead() {
        let by_limits = |value| Some(Amount { value, source: Source::Limits });
        let by_requests = |value| Some(Amount { value, source: Source::Requests });
        let of_cri =
            Requested { memory_mib: by_limits(64), overhead_mib: 120, ..Requested::default() };
        let api = ApiRequests {
            milli_cpu_request: 1500,
            milli_cpu_limit: None,
            memory_request: (2 << 30) - 1,
            memory_limit: Some((3 << 30) - 1),
            ..ApiRequests::default()
        };
        let both = of_cri.with_api(&api);
        assert_eq!((both.milli_cpus, both.memory_mib), (by_requests(1500), by_limits(3072)));
        assert_eq!(both.overhead_mib, 120);
        let below = ApiRequests { memory_limit: Some(1 << 30), ..api.clone() };
        assert_eq!(of_cri.with_api(&below).memory_mib, by_requests(2048));
        // A sum without the limit of a container does not bound the pod's need.
        let partial = ApiRequests { memory_limit: None, ..api };
        assert_eq!(of_cri.with_api(&partial).memory_mib, by_requests(2048));
        let absent = of_cri.with_api(&ApiRequests::default());
        assert_eq!((absent.milli_cpus, absent.memory_mib), (None, None));
    }
}
