//! `securityContext` of pods and containers.

use std::collections::BTreeMap;

use kiyot_proto::cri;
use kiyot_tree::RelPath;

use crate::problems::{Field, Table};

/// Fields of both contexts that the requests lack.
const NOT_IN_THE_REQUEST: [&str; 3] = ["appArmorProfile", "seLinuxOptions", "windowsOptions"];

/// Seccomp profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seccomp {
    /// Kind of profile.
    pub kind: SeccompType,
    /// File beneath the kubelet's seccomp directory, for [`SeccompType::Localhost`] only.
    pub localhost_profile: Option<RelPath>,
}

/// Kind of a seccomp profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeccompType {
    /// `RuntimeDefault`
    RuntimeDefault,
    /// `Unconfined`
    Unconfined,
    /// `Localhost`
    Localhost,
}

/// `spec.securityContext`
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodSecurity {
    /// `runAsUser`
    pub run_as_user: Option<i64>,
    /// `runAsGroup`
    pub run_as_group: Option<i64>,
    /// `runAsNonRoot`
    pub run_as_non_root: Option<bool>,
    /// `fsGroup`
    pub fs_group: Option<i64>,
    /// `supplementalGroups`
    pub supplemental_groups: Vec<i64>,
    /// `sysctls`
    pub sysctls: BTreeMap<String, String>,
    /// `seccompProfile`
    pub seccomp: Option<Seccomp>,
}

/// `securityContext` of a container.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerSecurity {
    /// `privileged`
    pub privileged: bool,
    /// `runAsUser`
    pub run_as_user: Option<i64>,
    /// `runAsGroup`
    pub run_as_group: Option<i64>,
    /// `runAsNonRoot`
    pub run_as_non_root: Option<bool>,
    /// `readOnlyRootFilesystem`
    pub read_only_root_filesystem: bool,
    /// `allowPrivilegeEscalation`
    pub allow_privilege_escalation: Option<bool>,
    /// `capabilities`
    pub capabilities: Capabilities,
    /// Set for `procMount: Unmasked`.
    pub unmasked_proc: bool,
    /// `seccompProfile`
    pub seccomp: Option<Seccomp>,
}

/// `capabilities`
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Capabilities {
    /// `add`
    pub add: Vec<String>,
    /// `drop`
    pub drop: Vec<String>,
}

/// Reads a user or group id.
fn id(field: Field<'_>) -> Option<i64> {
    field.number(0..=i64::from(i32::MAX))
}

fn seccomp(field: Field<'_>) -> Option<Seccomp> {
    let mut table = field.table()?;
    let kinds = [
        ("RuntimeDefault", SeccompType::RuntimeDefault),
        ("Unconfined", SeccompType::Unconfined),
        ("Localhost", SeccompType::Localhost),
    ];
    let kind = table
        .need("type", "RuntimeDefault, Unconfined or Localhost")
        .and_then(|field| field.choice(&kinds));
    let localhost_profile = table.take("localhostProfile").and_then(|field| {
        field.read("a relative path without \"..\"", |text| RelPath::parse(text).ok())
    });
    table.finish();
    Some(Seccomp { kind: kind?, localhost_profile })
}

impl Seccomp {
    /// Returns the runtime's security context.
    pub(super) fn to_cri(&self, kubelet_dir: &std::path::Path) -> cri::SecurityProfile {
        let kind = match self.kind {
            SeccompType::RuntimeDefault => cri::security_profile::ProfileType::RuntimeDefault,
            SeccompType::Unconfined => cri::security_profile::ProfileType::Unconfined,
            SeccompType::Localhost => cri::security_profile::ProfileType::Localhost,
        };
        let file = self
            .localhost_profile
            .as_ref()
            .map(|file| super::node::text(&file.beneath(&kubelet_dir.join("seccomp"))));
        cri::SecurityProfile { profile_type: kind.into(), localhost_ref: file.unwrap_or_default() }
    }
}

impl PodSecurity {
    pub(super) fn read(mut table: Table<'_>) -> Self {
        let security = Self {
            run_as_user: table.take("runAsUser").and_then(id),
            run_as_group: table.take("runAsGroup").and_then(id),
            run_as_non_root: table.take("runAsNonRoot").and_then(Field::flag),
            fs_group: table.take("fsGroup").and_then(id),
            supplemental_groups: table
                .take("supplementalGroups")
                .map(|field| field.items().into_iter().filter_map(id).collect())
                .unwrap_or_default(),
            sysctls: table
                .take("sysctls")
                .map(|field| field.items().into_iter().filter_map(sysctl).collect())
                .unwrap_or_default(),
            seccomp: table.take("seccompProfile").and_then(seccomp),
        };
        // The kubelet applies them to volumes, not the runtime.
        table.ignore(&["fsGroupChangePolicy", "seLinuxChangePolicy"]);
        table.ignore(&NOT_IN_THE_REQUEST);
        table.take("supplementalGroupsPolicy");
        table.finish();
        security
    }

    /// Returns the supplemental groups of all processes of the pod.
    pub(super) fn groups(&self) -> Vec<i64> {
        self.fs_group.iter().chain(&self.supplemental_groups).copied().collect()
    }
}

fn sysctl(field: Field<'_>) -> Option<(String, String)> {
    let mut table = field.table()?;
    let name = table.need("name", "a sysctl's name").and_then(Field::text);
    let value = table.need("value", "a text").and_then(Field::text);
    table.finish();
    Some((name?, value?))
}

impl ContainerSecurity {
    pub(super) fn read(mut table: Table<'_>) -> Self {
        let security = Self {
            privileged: table.take("privileged").and_then(Field::flag).unwrap_or_default(),
            run_as_user: table.take("runAsUser").and_then(id),
            run_as_group: table.take("runAsGroup").and_then(id),
            run_as_non_root: table.take("runAsNonRoot").and_then(Field::flag),
            read_only_root_filesystem: table
                .take("readOnlyRootFilesystem")
                .and_then(Field::flag)
                .unwrap_or_default(),
            allow_privilege_escalation: table
                .take("allowPrivilegeEscalation")
                .and_then(Field::flag),
            capabilities: table
                .take("capabilities")
                .and_then(Field::table)
                .map(Capabilities::read)
                .unwrap_or_default(),
            unmasked_proc: table
                .take("procMount")
                .and_then(|field| field.choice(&[("Default", false), ("Unmasked", true)]))
                .unwrap_or_default(),
            seccomp: table.take("seccompProfile").and_then(seccomp),
        };
        table.ignore(&NOT_IN_THE_REQUEST);
        table.finish();
        security
    }
}

impl Capabilities {
    fn read(mut table: Table<'_>) -> Self {
        let [add, drop] =
            ["add", "drop"].map(|key| table.take(key).map(Field::texts).unwrap_or_default());
        table.finish();
        Self { add, drop }
    }
}

#[cfg(test)]
mod tests {
    use crate::manifest::tests::problems;

    /// Verifies X61.
    #[test]
    fn profile_that_leads_out_of_the_kubelets_directory_is_refused() {
        for profile in ["../../../../etc/shadow", "/etc/shadow", "a/../../b"] {
            let found = problems(&format!(
                "apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec:\n  containers: [{{name: \
                 c, image: i}}]\n  securityContext: {{seccompProfile: {{type: Localhost, \
                 localhostProfile: {profile}}}}}\n"
            ));
            let [problem] = &found[..] else { panic!("{found:?}") };
            assert!(problem.contains("localhostProfile") && problem.contains(profile), "{problem}");
        }
    }
}
