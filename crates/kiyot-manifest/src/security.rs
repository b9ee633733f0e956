//! `securityContext` of pods and containers.

use std::path::Path;

use k8s_openapi::api::core::v1::{PodSecurityContext, SeccompProfile, SecurityContext};
use kiyot_linux::tree::RelPath;
use kiyot_proto::cri::{SecurityProfile, security_profile::ProfileType};
use kiyot_values::problems::Field;

use super::{node::text, place::Place};

const SECCOMP_TYPES: [(&str, ProfileType); 3] = [
    ("RuntimeDefault", ProfileType::RuntimeDefault),
    ("Unconfined", ProfileType::Unconfined),
    ("Localhost", ProfileType::Localhost),
];
/// `procMount` of containers with an unmasked `/proc`.
pub(super) const UNMASKED: &str = "Unmasked";

/// Checks the security of a pod.
pub(super) fn check_pod(at: &Place<'_>, security: &PodSecurityContext) {
    check_ids(at, [("runAsUser", security.run_as_user), ("runAsGroup", security.run_as_group)]);
    check_ids(at, [("fsGroup", security.fs_group)]);
    let groups = security.supplemental_groups.clone();
    at.items("supplementalGroups", groups, |at, group| id(at.field(group)));
    at.items("sysctls", security.sysctls.clone(), |at, sysctl| {
        at.need("name", Some(sysctl.name), "a sysctl's name").map(drop)
    });
    check_seccomp(at, security.seccomp_profile.as_ref());
}

/// Checks the security of a container.
pub(super) fn check_container(at: &Place<'_>, security: &SecurityContext) {
    check_ids(at, [("runAsUser", security.run_as_user), ("runAsGroup", security.run_as_group)]);
    at.take("procMount", security.proc_mount.as_deref())
        .and_then(|field| field.choice(&[("Default", ()), (UNMASKED, ())]));
    check_seccomp(at, security.seccomp_profile.as_ref());
}

/// Checks users and groups.
fn check_ids<const N: usize>(at: &Place<'_>, ids: [(&str, Option<i64>); N]) {
    for (key, value) in ids {
        at.take(key, value).and_then(id);
    }
}

fn id(field: Field<'_>) -> Option<i64> {
    field.number(0..=i64::from(i32::MAX))
}

fn check_seccomp(at: &Place<'_>, profile: Option<&SeccompProfile>) {
    let Some(SeccompProfile { type_, localhost_profile }) = profile else { return };
    let at = at.of("seccompProfile");
    at.need("type", Some(type_.as_str()), "RuntimeDefault, Unconfined or Localhost")
        .and_then(|field| field.choice(&SECCOMP_TYPES));
    at.take("localhostProfile", localhost_profile.as_deref()).and_then(|field| {
        field.read("a relative path without \"..\"", |text| RelPath::parse(text).ok())
    });
}

/// Returns the runtime's profile. Its file is in the kubelet's seccomp directory.
pub(super) fn seccomp(profile: &SeccompProfile, kubelet_dir: &Path) -> SecurityProfile {
    let kind = SECCOMP_TYPES.iter().find(|(name, _)| *name == profile.type_);
    let kind = kind.map_or(ProfileType::RuntimeDefault, |(_, kind)| *kind);
    let file = profile.localhost_profile.as_ref().and_then(|path| RelPath::parse(path).ok());
    let file = file.map(|path| text(&path.beneath(&kubelet_dir.join("seccomp"))));
    SecurityProfile { profile_type: kind.into(), localhost_ref: file.unwrap_or_default() }
}

/// Returns the supplemental groups of all processes of a pod.
pub(super) fn groups(security: &PodSecurityContext) -> Vec<i64> {
    security.fs_group.iter().chain(security.supplemental_groups.iter().flatten()).copied().collect()
}

#[cfg(test)]
mod tests {
    use crate::tests::problems;

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
