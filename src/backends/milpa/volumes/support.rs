//! Features that earlier versions of a cell's containerd ignore silently. Pure.

use crate::backends::milpa::failure::{Class, Failure};
use kiyot_proto::cri;

/// First containerd with image volumes and parts of them (`Mount.image`, `image_sub_path`).
const IMAGE_VOLUMES_SINCE: (u64, u64) = (2, 1);

/// First containerd with `Mount.recursive_read_only`.
const RECURSIVE_READ_ONLY_SINCE: (u64, u64) = (2, 0);

/// Returns true if a container's mounts need a certain version of the cell's runtime.
pub fn needs_version(container: &cri::ContainerConfig) -> bool {
    container.mounts.iter().any(|mount| refusal(mount, (0, 0)).is_some())
}

/// Returns true if a container needs features that the cell's runtime may lack.
pub fn needs_features(container: &cri::ContainerConfig) -> bool {
    check_features(container, None).is_err()
}

/// Refuses mount options (`noexec` and others), which no known version knows, and the supplemental
/// groups policy Strict, which containerd 2.0 knows, if the runtime would ignore them.
///
/// Fails with UNIMPLEMENTED, naming the container, the feature and what is allowed.
pub fn check_features(
    container: &cri::ContainerConfig,
    features: Option<&cri::RuntimeFeatures>,
) -> Result<(), Failure> {
    let features = features.copied().unwrap_or_default();
    let with_options = container.mounts.iter().find(|mount| !mount.mount_options.is_empty());
    let context = container.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    let is_strict = context.is_some_and(|context| {
        context.supplemental_groups_policy() == cri::SupplementalGroupsPolicy::Strict
    });
    let (what, allowed) = if let Some(mount) = with_options.filter(|_| !features.mount_options) {
        let (path, options) = (&mount.container_path, &mount.mount_options);
        (format!("mounts {path} with the options {options:?}"), "a mount without options")
    } else if is_strict && !features.supplemental_groups_policy {
        ("has the supplemental groups policy Strict".to_owned(), "the policy Merge")
    } else {
        return Ok(());
    };
    let name = container.metadata.as_ref().map_or("", |metadata| &metadata.name);
    Err(Failure::request(
        Class::Unimplemented,
        format!(
            "container {name:?} {what}, which the cell's runtime does not know; allowed is \
             {allowed}"
        ),
    ))
}

/// Refuses mounts that the cell's containerd would not make as requested. A version that can't be
/// parsed is accepted.
///
/// Fails with UNIMPLEMENTED, naming the container, the mount and what is allowed.
pub fn check_version(
    container: &cri::ContainerConfig,
    runtime: &cri::VersionResponse,
) -> Result<(), Failure> {
    let version =
        if runtime.runtime_name == "containerd" { version(&runtime.runtime_version) } else { None }
            .unwrap_or((u64::MAX, 0));
    let Some((mount, (what, allowed))) =
        container.mounts.iter().find_map(|mount| Some((mount, refusal(mount, version)?)))
    else {
        return Ok(());
    };
    let name = container.metadata.as_ref().map_or("", |metadata| &metadata.name);
    let (at, runtime) =
        (&mount.container_path, format!("{} {}", runtime.runtime_name, runtime.runtime_version));
    Err(Failure::request(
        Class::Unimplemented,
        format!(
            "container {name:?} mounts {what} at {at}, which the cell's {runtime} does not do; \
         allowed is {allowed}"
        ),
    ))
}

/// Returns the feature that a version of containerd lacks, and what is allowed.
fn refusal(mount: &cri::Mount, version: (u64, u64)) -> Option<(String, &'static str)> {
    if !mount.uid_mappings.is_empty() || !mount.gid_mappings.is_empty() {
        return Some((
            format!("{:?} with mapped ids", mount.host_path),
            "a volume of a pod without a user namespace of its own",
        ));
    }
    match &mount.image {
        Some(image) if version < IMAGE_VOLUMES_SINCE => {
            let named = if image.user_specified_image.is_empty() {
                &image.image
            } else {
                &image.user_specified_image
            };
            let part = if mount.image_sub_path.is_empty() {
                String::new()
            } else {
                format!("{:?} of ", mount.image_sub_path)
            };
            Some((format!("{part}the image {named:?} as a volume"), "containerd 2.1 or later"))
        }
        _ if mount.recursive_read_only && version < RECURSIVE_READ_ONLY_SINCE => Some((
            format!("{:?} recursively read-only", mount.host_path),
            "containerd 2.0 or later, or a mount that is read-only by itself",
        )),
        _ => None,
    }
}

/// Returns the first two numbers of a version such as `1.6.20~ds1` or `v2.1.0`.
fn version(text: &str) -> Option<(u64, u64)> {
    let mut numbers = text
        .trim_start_matches('v')
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn containing(mount: cri::Mount) -> cri::ContainerConfig {
        let metadata = Some(cri::ContainerMetadata { name: "main".into(), attempt: 0 });
        cri::ContainerConfig {
            metadata,
            mounts: vec![
                cri::Mount::default(),
                cri::Mount { container_path: "/data".into(), ..mount },
            ],
            ..Default::default()
        }
    }

    fn runtime(version: &str) -> cri::VersionResponse {
        cri::VersionResponse {
            runtime_name: "containerd".into(),
            runtime_version: version.into(),
            ..Default::default()
        }
    }

    /// Verifies D18.
    #[test]
    fn unsupported_mount_feature_is_refused_by_name() {
        let image = Some(cri::ImageSpec {
            image: "sha256:00".into(),
            user_specified_image: "registry.example/model:1".into(),
            ..Default::default()
        });
        let whole = containing(cri::Mount { image: image.clone(), ..Default::default() });
        let part = containing(cri::Mount {
            image,
            image_sub_path: "weights".into(),
            ..Default::default()
        });
        let recursive = containing(cri::Mount {
            host_path: "/v".into(),
            readonly: true,
            recursive_read_only: true,
            ..Default::default()
        });
        let mapped = containing(cri::Mount {
            host_path: "/v".into(),
            uid_mappings: vec![cri::IdMapping::default()],
            ..Default::default()
        });
        let old = ["1.6.20~ds1", "v1.7.27", "2.0.5"];
        for (container, refusing, words) in [
            (&whole, &old[..], vec!["registry.example/model:1", "2.1"]),
            (&part, &old[..], vec!["registry.example/model:1", "weights"]),
            (&recursive, &old[..2], vec!["recursively", "/v"]),
            (&mapped, &["1.6.20", "2.2.0", "unknown"][..], vec!["mapped ids"]),
        ] {
            assert!(needs_version(container));
            for version in refusing {
                let failure = check_version(container, &runtime(version)).unwrap_err();
                assert!(
                    words
                        .iter()
                        .chain(&["main", "/data", version])
                        .all(|word| failure.message().contains(word)),
                    "{failure}"
                );
            }
        }
        for version in ["2.1.0", "v2.2.1-rc.0", "3.0", "unknown"] {
            assert!(
                [&whole, &part, &recursive].iter().all(|container| check_version(
                    container,
                    &runtime(version)
                )
                .is_ok()),
                "{version}"
            );
        }
        assert!(check_version(&recursive, &runtime("2.0.0")).is_ok());
        assert!(!needs_version(&containing(cri::Mount { readonly: true, ..Default::default() })));
    }

    /// Verifies D18.
    #[test]
    fn unsupported_mount_options_are_refused() {
        let container = containing(cri::Mount {
            host_path: "/v".into(),
            mount_options: vec!["noexec".into()],
            ..Default::default()
        });
        assert!(needs_features(&container) && !needs_version(&container));
        let without =
            cri::RuntimeFeatures { supplemental_groups_policy: true, ..Default::default() };
        for features in [None, Some(&without)] {
            let failure = check_features(&container, features).unwrap_err();
            assert!(
                ["main", "/data", "noexec"].iter().all(|word| failure.message().contains(word)),
                "{failure}"
            );
        }
        assert!(
            check_features(
                &container,
                Some(&cri::RuntimeFeatures { mount_options: true, ..Default::default() })
            )
            .is_ok()
        );
        let plain = containing(cri::Mount::default());
        assert!(!needs_features(&plain) && check_features(&plain, None).is_ok());
    }

    /// Verifies U19.
    #[test]
    fn policy_of_groups_is_refused_if_the_runtime_ignores_it() {
        let with = |policy: cri::SupplementalGroupsPolicy| {
            let mut container = containing(cri::Mount::default());
            let linux = container.linux.get_or_insert_default();
            linux.security_context.get_or_insert_default().set_supplemental_groups_policy(policy);
            container
        };
        let strict = with(cri::SupplementalGroupsPolicy::Strict);
        let failure = check_features(&strict, Some(&cri::RuntimeFeatures::default())).unwrap_err();
        let expected = "container \"main\" has the supplemental groups policy Strict, which the \
                        cell's runtime does not know; allowed is the policy Merge";
        assert_eq!((failure.class(), failure.message()), (Class::Unimplemented, expected));
        let knowing =
            cri::RuntimeFeatures { supplemental_groups_policy: true, ..Default::default() };
        assert!(needs_features(&strict) && check_features(&strict, Some(&knowing)).is_ok());
        assert!(!needs_features(&with(cri::SupplementalGroupsPolicy::Merge)));
    }
}
