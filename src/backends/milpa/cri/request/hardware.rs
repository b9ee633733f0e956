//! Resources in requests that depend on the node's hardware, which another machine lacks.

use kiyot_proto::cri;

/// Prefixes of cgroup files for processors, memory nodes and huge pages.
const CONTROLLERS: [&str; 2] = ["cpuset.", "hugetlb."];

/// A request with resources of a pod or container.
pub(in crate::backends::milpa::cri) trait HasResources {
    /// Returns all resources of the request.
    fn resources(&mut self) -> impl Iterator<Item = &mut cri::LinuxContainerResources>;

    /// Removes the kubelet's choices by the node's hardware: processors, memory nodes and limits of
    /// huge pages.
    fn without_node_hardware(mut self) -> Self
    where
        Self: Sized,
    {
        for resources in self.resources() {
            resources.cpuset_cpus.clear();
            resources.cpuset_mems.clear();
            resources.hugepage_limits.clear();
            resources
                .unified
                .retain(|file, _| !CONTROLLERS.iter().any(|prefix| file.starts_with(prefix)));
        }
        self
    }
}

fn of_pod(
    pod: &mut Option<cri::PodSandboxConfig>,
) -> impl Iterator<Item = &mut cri::LinuxContainerResources> {
    let linux = pod.iter_mut().flat_map(|pod| &mut pod.linux);
    linux.flat_map(|linux| linux.overhead.iter_mut().chain(&mut linux.resources))
}

impl HasResources for cri::RunPodSandboxRequest {
    fn resources(&mut self) -> impl Iterator<Item = &mut cri::LinuxContainerResources> {
        of_pod(&mut self.config)
    }
}

impl HasResources for cri::CreateContainerRequest {
    fn resources(&mut self) -> impl Iterator<Item = &mut cri::LinuxContainerResources> {
        let linux = self.config.iter_mut().flat_map(|config| &mut config.linux);
        linux.flat_map(|linux| &mut linux.resources).chain(of_pod(&mut self.sandbox_config))
    }
}

impl HasResources for cri::UpdateContainerResourcesRequest {
    fn resources(&mut self) -> impl Iterator<Item = &mut cri::LinuxContainerResources> {
        self.linux.iter_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies U26.
    #[test]
    fn hardware_of_the_node_is_in_no_request_to_another_machine() {
        let limit = cri::HugepageLimit { page_size: "2MB".to_owned(), limit: 4 << 20 };
        let unified = |files: &[&str]| {
            files.iter().map(|file| ((*file).to_owned(), "0-1".to_owned())).collect()
        };
        let kept = cri::LinuxContainerResources {
            cpu_shares: 512,
            memory_limit_in_bytes: 64 << 20,
            unified: unified(&["memory.high"]),
            ..Default::default()
        };
        let chosen = cri::LinuxContainerResources {
            cpuset_cpus: "62-63".to_owned(),
            cpuset_mems: "1".to_owned(),
            hugepage_limits: vec![limit],
            unified: unified(&["memory.high", "cpuset.cpus", "hugetlb.2MB.max"]),
            ..kept.clone()
        };
        let pod = |resources: &cri::LinuxContainerResources| {
            let linux = cri::LinuxPodSandboxConfig {
                overhead: Some(resources.clone()),
                resources: Some(resources.clone()),
                ..Default::default()
            };
            Some(cri::PodSandboxConfig { linux: Some(linux), ..Default::default() })
        };
        let run =
            |resources| cri::RunPodSandboxRequest { config: pod(resources), ..Default::default() };
        let create = |resources: &cri::LinuxContainerResources| {
            let linux = cri::LinuxContainerConfig {
                resources: Some(resources.clone()),
                ..Default::default()
            };
            cri::CreateContainerRequest {
                config: Some(cri::ContainerConfig { linux: Some(linux), ..Default::default() }),
                sandbox_config: pod(resources),
                ..Default::default()
            }
        };
        let update =
            |resources: &cri::LinuxContainerResources| cri::UpdateContainerResourcesRequest {
                linux: Some(resources.clone()),
                ..Default::default()
            };
        assert_eq!(run(&chosen).without_node_hardware(), run(&kept));
        assert_eq!(create(&chosen).without_node_hardware(), create(&kept));
        assert_eq!(update(&chosen).without_node_hardware(), update(&kept));
    }
}
