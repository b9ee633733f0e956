//! `check-config --live`: proves ids and permissions over the provider's API, and names what hurts
//! cells in the configuration of the node's kubelet and in the Kubernetes API.

use std::{fmt::Write as _, path::Path, process::ExitCode};

use kiyot_config::{BackendConfig, Config, Kubernetes, KubernetesAccess, MilpaBackend};
use kiyot_kubernetes::{
    Access,
    capacity_check::{self, Declared},
};
use kiyot_proto::text::counted;
use kiyot_values::problems::shown;
use tokio::runtime::Builder;

use super::Output;
use crate::backends::milpa::live_check::{NoLiveCheck, check_live, node_name};

mod findings;
mod kubelet;
mod kubelet_config;

/// The processes of this node.
const PROC: &str = "/proc";
/// Limit on the characters of a finding, which quotes values of the kubelet's configuration.
const MAX_FINDING_CHARS: usize = 1024;

/// Checks the kubelet and the backend with cells, and adds the report to the summary of the
/// configuration.
pub(super) fn run(config: &Config, summary: String) -> Output {
    let failed = |text: &str, why: &str| Output {
        text: format!("{text}\ncheck-config --live: {why}\n"),
        code: ExitCode::FAILURE,
    };
    let milpa = config.backends.iter().find_map(|(name, backend)| match backend {
        BackendConfig::Milpa(milpa) => Some((name, milpa)),
        BackendConfig::Cri(_) => None,
    });
    let Some((name, milpa)) = milpa else {
        return failed(&summary, "no backend has the type \"milpa\"");
    };
    let runtime = match Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&summary, &format!("runtime can't be started: {error}")),
    };
    let (mut text, mut code) = (summary, ExitCode::SUCCESS);
    let node = node_name(milpa);
    for (of, checked) in [
        ("kubelet", check_kubelet(Path::new(PROC), config, milpa)),
        ("Kubernetes API", runtime.block_on(check_api(&config.kubernetes, &node))),
    ] {
        let report = checked.unwrap_or_else(|error| {
            code = ExitCode::FAILURE;
            format!("{of}: not checked: {}\n", shown(MAX_FINDING_CHARS, error))
        });
        let _ = write!(text, "\n{report}");
    }
    match runtime.block_on(check_live(milpa)) {
        Ok(report) => {
            let _ = write!(text, "\n{report}");
            if !report.is_fine() {
                code = ExitCode::FAILURE;
            }
        }
        Err(NoLiveCheck::OtherProvider) => {}
        Err(error) => return failed(&text, &format!("backend {name}: {error}")),
    }
    Output { text, code }
}

/// Returns the findings about the kubelet, a line each.
fn check_kubelet(proc: &Path, config: &Config, milpa: &MilpaBackend) -> Result<String, String> {
    let Some(kubelet) = kubelet::read(proc)? else {
        return Ok("kubelet: no process of this name runs here, nothing was checked\n".to_owned());
    };
    let findings = findings::findings(&kubelet.config, config, milpa);
    Ok(report(&format!("kubelet (process {})", kubelet.pid), &findings))
}

/// Returns the findings about the Node object and the API server, a line each.
async fn check_api(kubernetes: &Kubernetes, node: &str) -> Result<String, String> {
    let access = match &kubernetes.kubeconfig {
        Some(KubernetesAccess::Kubeconfig(path)) => Access::Kubeconfig(path.clone()),
        Some(KubernetesAccess::InCluster) => Access::InCluster,
        None => {
            let absent = "Kubernetes API: no access (kubernetes.kubeconfig), nothing was checked\n";
            return Ok(absent.to_owned());
        }
    };
    let declared = kubernetes.capacity.as_ref().map(|capacity| Declared {
        figures: &capacity.figures,
        exceeds_machine: capacity.exceeds_machine(),
    });
    let findings = capacity_check::check(&access, node, declared).await?;
    Ok(report("Kubernetes API", &findings))
}

fn report(of: &str, findings: &[String]) -> String {
    let count = counted(findings.len(), "warning", "warnings");
    let lines = findings
        .iter()
        .map(|finding| format!("{:<11}  {}\n", "warning", shown(MAX_FINDING_CHARS, finding)));
    format!("{of}: {count}\n{}", lines.collect::<String>())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Verifies K31.
    #[test]
    fn findings_are_warnings_and_an_unreadable_file_is_an_error() {
        let text = "[backends.containerd]\ntype = \"cri\"\n[backends.milpa]\ntype = \"milpa\"\n";
        let config = kiyot_config::parse("test", text, []).unwrap();
        let Some(BackendConfig::Milpa(milpa)) = config.backends.get("milpa") else { panic!() };
        let proc = tempfile::tempdir().unwrap();
        let check = || check_kubelet(proc.path(), &config, milpa);
        assert!(check().unwrap().starts_with("kubelet: no process"));
        let dir = proc.path().join("12");
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("comm"), "kubelet\n").unwrap();
        fs::write(dir.join("cmdline"), "kubelet\0--max-pods=250\0").unwrap();
        let report = check().unwrap();
        assert_eq!(report.lines().count(), 2, "{report}");
        assert!(
            report.starts_with("kubelet (process 12): 1 warning\nwarning      containerRuntime")
        );
        fs::write(dir.join("cmdline"), "kubelet\0--config\0/absent\0").unwrap();
        assert!(check().unwrap_err().contains("12/root/absent can't be read"));
    }
}
