//! `[kubernetes]`: access to the Kubernetes API.

use std::path::PathBuf;

use kiyot_values::{
    names::is_label,
    problems::{Problem, Table},
};

use super::{
    capacity::{self, Capacity},
    read,
};

/// Value that stands for the service account of the daemon's pod.
const IN_CLUSTER: &str = "in-cluster";

/// Address and credentials of the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KubernetesAccess {
    /// A kubeconfig file.
    Kubeconfig(PathBuf),
    /// The service account of the pod that the daemon runs in.
    InCluster,
}

/// Access to the Kubernetes API, and its uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kubernetes {
    /// Address and credentials; `None` disables all calls.
    pub kubeconfig: Option<KubernetesAccess>,
    /// Shows the node's cells as objects of the kind Cell.
    pub cells: bool,
    /// Reports events of pods.
    pub events: bool,
    /// Reads the requests and limits of the node's pods, to size their cells.
    pub requests: bool,
    /// Keeps the cells of each namespace within its CellBudgets.
    pub budgets: bool,
    /// The node's capacity that the daemon declares; `None` leaves the machine's.
    pub capacity: Option<Capacity>,
}

impl Default for Kubernetes {
    fn default() -> Self {
        Self {
            kubeconfig: None,
            cells: true,
            events: true,
            requests: true,
            budgets: false,
            capacity: None,
        }
    }
}

impl Kubernetes {
    /// Returns whether the API's requests size the cells of pods.
    pub fn reads_requests(&self) -> bool {
        self.kubeconfig.is_some() && self.requests
    }

    /// Returns whether the node declares the capacity of its cells.
    pub(super) fn derives_capacity(&self) -> bool {
        self.capacity.as_ref().is_some_and(|capacity| capacity.is_derived)
    }

    pub(super) fn read(mut table: Table<'_>) -> Self {
        let mut kubernetes = Self::default();
        table.set("kubeconfig", &mut kubernetes.kubeconfig, |field| {
            let allowed =
                "\"in-cluster\", or the absolute path of a kubeconfig without \".\" and \"..\"";
            field.read(allowed, |text| {
                if text == IN_CLUSTER {
                    return Some(Some(KubernetesAccess::InCluster));
                }
                let path = read::plain_path(text)?;
                Some(Some(KubernetesAccess::Kubeconfig(path)))
            })
        });
        table.set("cells", &mut kubernetes.cells, |field| field.flag());
        table.set("events", &mut kubernetes.events, |field| field.flag());
        table.set("requests", &mut kubernetes.requests, |field| field.flag());
        table.set("budgets", &mut kubernetes.budgets, |field| field.flag());
        if kubernetes.budgets && kubernetes.kubeconfig.is_none() {
            let rule = "needs kubernetes.kubeconfig: without the API no budget is known";
            table.report().add(Problem::new(table.path_of("budgets"), rule));
        }
        let problems = table.report().len();
        table.set("capacity", &mut kubernetes.capacity, |field| Some(Some(capacity::read(field))));
        if let Some(capacity) = &kubernetes.capacity {
            let refuse = |rule| table.report().add(Problem::new(table.path_of("capacity"), rule));
            if capacity.is_empty() && table.report().len() == problems {
                refuse(
                    "has no figures; allowed: one or more, such as cpu = 1000, or derived = true",
                );
            }
            // The declared figures are at least the requests of the pods that run.
            if !kubernetes.reads_requests() {
                refuse("needs kubernetes.kubeconfig, and kubernetes.requests = true");
            }
        }
        // Configurations of earlier versions, which held leases, stay valid.
        table.set("lease_namespace", &mut String::new(), |field| {
            field.read("the name of a namespace: 1 to 63 of a-z, 0-9 and -", |text| {
                is_label(text).then(|| text.to_owned())
            })
        });
        table.finish();
        kubernetes
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::parse;

    const BACKEND: &str = "[backends.containerd]\ntype = \"cri\"\n";

    fn kubernetes(section: &str) -> Kubernetes {
        parse("test", &format!("[kubernetes]\n{section}{BACKEND}"), []).unwrap().kubernetes
    }

    /// Verifies K1.
    #[test]
    fn kubernetes_api_is_off_without_configured_access() {
        assert_eq!(parse("test", BACKEND, []).unwrap().kubernetes, Kubernetes::default());
        assert_eq!(Kubernetes::default().kubeconfig, None);
        let in_cluster = kubernetes("kubeconfig = \"in-cluster\"\nevents = false\n");
        assert_eq!(in_cluster.kubeconfig, Some(KubernetesAccess::InCluster));
        assert!(in_cluster.cells && !in_cluster.events);
        let by_file = kubernetes("kubeconfig = \"/etc/kiyot/kubeconfig\"\n");
        let file = Path::new("/etc/kiyot/kubeconfig").to_owned();
        assert_eq!(by_file.kubeconfig, Some(KubernetesAccess::Kubeconfig(file)));
    }

    /// Verifies K1.
    #[test]
    fn wrong_access_is_refused_by_key() {
        for (section, expected) in [
            ("kubeconfig = \"kubeconfig\"\n", "kubernetes.kubeconfig"),
            ("kubeconfig = \"/etc/../kubeconfig\"\n", "\"in-cluster\""),
            ("cells = \"yes\"\n", "kubernetes.cells"),
            ("budgets = 1\n", "kubernetes.budgets"),
            ("budgets = true\n", "kubernetes.budgets: needs kubernetes.kubeconfig"),
            ("lease_namespace = \"Kube_System\"\n", "kubernetes.lease_namespace"),
            ("token = \"x\"\n", "kubernetes.token"),
        ] {
            let text = format!("[kubernetes]\n{section}{BACKEND}");
            let problems = parse("test", &text, []).unwrap_err().to_string();
            assert!(problems.contains(expected), "{problems}");
        }
    }
}
