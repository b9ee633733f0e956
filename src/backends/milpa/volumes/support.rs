//! Features that a request needs and that earlier versions of a cell's containerd ignore silently.
//! Pure.

use kiyot_proto::cri;

use crate::backends::milpa::failure::{Code, Failure};

/// The runtime of a cell.
#[derive(Debug)]
pub struct Runtime {
    /// Name and version, for errors.
    shown: String,
    /// The first two numbers of containerd's version. A version that can't be parsed counts as the
    /// highest, and is accepted.
    version: (u64, u64),
    features: cri::RuntimeFeatures,
}

impl Runtime {
    /// Reads the version of a cell's runtime. `features` is from its response to Status, or empty
    /// if no need of the container is a feature.
    pub fn new(version: &cri::VersionResponse, features: cri::RuntimeFeatures) -> Self {
        let cri::VersionResponse { runtime_name, runtime_version, .. } = version;
        let numbers =
            if runtime_name == "containerd" { parse_version(runtime_version) } else { None };
        Self {
            shown: format!("{runtime_name} {runtime_version}"),
            version: numbers.unwrap_or((u64::MAX, 0)),
            features,
        }
    }
}

/// A need of a container that not every runtime meets.
struct Need {
    /// Returns the text of the need, after "container NAME", if a container has it.
    of: fn(&cri::ContainerConfig) -> Option<String>,
    is_met: Condition,
    allowed: &'static str,
}

/// The condition under which a need is met.
enum Condition {
    /// Never.
    Never,
    /// This version of containerd, or a later one.
    Since(u64, u64),
    /// A feature of the response to Status.
    Feature(fn(&cri::RuntimeFeatures) -> bool),
}

impl Condition {
    fn is_met(&self, runtime: &Runtime) -> bool {
        match self {
            Self::Never => false,
            Self::Since(major, minor) => runtime.version >= (*major, *minor),
            Self::Feature(has) => has(&runtime.features),
        }
    }
}

/// All needs, in the order in which they are checked. User namespaces are not a need: under
/// policy.host_users a cell makes none.
const NEEDS: [Need; 6] = [
    Need {
        of: |container| {
            let maps = |mount: &&cri::Mount| {
                !mount.uid_mappings.is_empty() || !mount.gid_mappings.is_empty()
            };
            let mount = container.mounts.iter().find(maps)?;
            Some(mounts(mount, &format!("{:?} with mapped ids", mount.host_path)))
        },
        is_met: Condition::Never,
        allowed: "a volume of a pod without a user namespace of its own",
    },
    Need {
        of: |container| image_mount(container, |_| true),
        is_met: Condition::Since(2, 1),
        allowed: "containerd 2.1 or later",
    },
    Need {
        // containerd 2.1 mounts the whole image instead (containerd/containerd#11580).
        of: |container| image_mount(container, |mount| !mount.image_sub_path.is_empty()),
        is_met: Condition::Since(2, 2),
        allowed: "containerd 2.2 or later, or the whole image",
    },
    Need {
        of: |container| {
            let mount = container.mounts.iter().find(|mount| mount.recursive_read_only)?;
            Some(mounts(mount, &format!("{:?} recursively read-only", mount.host_path)))
        },
        is_met: Condition::Since(2, 0),
        allowed: "containerd 2.0 or later, or a mount that is read-only by itself",
    },
    Need {
        of: |container| {
            let mount = container.mounts.iter().find(|mount| !mount.mount_options.is_empty())?;
            let (volume, options) = (&mount.host_path, &mount.mount_options);
            Some(mounts(mount, &format!("{volume:?} with the options {options:?}")))
        },
        is_met: Condition::Feature(|features| features.mount_options),
        allowed: "a mount without options",
    },
    Need {
        of: |container| {
            let context = container.linux.as_ref()?.security_context.as_ref()?;
            let strict = cri::SupplementalGroupsPolicy::Strict;
            (context.supplemental_groups_policy() == strict)
                .then(|| "has the supplemental groups policy Strict".to_owned())
        },
        is_met: Condition::Feature(|features| features.supplemental_groups_policy),
        allowed: "the policy Merge",
    },
];

/// Returns whether a container has a need that a feature of its cell's runtime meets.
pub fn needs_features(container: &cri::ContainerConfig) -> bool {
    needs(container).any(|need| matches!(need.is_met, Condition::Feature(_)))
}

/// Returns whether the features meet all needs of a container, so that the version does not matter.
pub fn is_met_by(container: &cri::ContainerConfig, features: &cri::RuntimeFeatures) -> bool {
    needs(container).all(|need| matches!(need.is_met, Condition::Feature(has) if has(features)))
}

fn needs(container: &cri::ContainerConfig) -> impl Iterator<Item = &'static Need> {
    NEEDS.iter().filter(|need| (need.of)(container).is_some())
}

/// Refuses a container that the cell's runtime would not run as requested.
///
/// Fails with UNIMPLEMENTED, naming the container, the need, the runtime and what is allowed.
pub fn check(container: &cri::ContainerConfig, runtime: &Runtime) -> Result<(), Failure> {
    let unmet = NEEDS.iter().filter(|need| !need.is_met.is_met(runtime));
    let Some((what, allowed)) =
        unmet.filter_map(|need| Some(((need.of)(container)?, need.allowed))).next()
    else {
        return Ok(());
    };
    let name = container.metadata.as_ref().map_or("", |metadata| &metadata.name);
    Err(Failure::request(
        Code::Unimplemented,
        format!(
            "container {name:?} {what}, which the cell's {} does not do; allowed is {allowed}",
            runtime.shown
        ),
    ))
}

fn mounts(mount: &cri::Mount, what: &str) -> String {
    format!("mounts {what} at {}", mount.container_path)
}

/// Returns the text of the first wanted mount of an image.
fn image_mount(
    container: &cri::ContainerConfig,
    is_wanted: impl Fn(&cri::Mount) -> bool,
) -> Option<String> {
    let (mount, image) = container
        .mounts
        .iter()
        .filter(|mount| is_wanted(mount))
        .find_map(|mount| Some((mount, mount.image.as_ref()?)))?;
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
    Some(mounts(mount, &format!("{part}the image {named:?} as a volume")))
}

/// Returns the first two numbers of a version such as `1.6.20~ds1` or `v2.1.0`.
fn parse_version(text: &str) -> Option<(u64, u64)> {
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

    fn has_needs(container: &cri::ContainerConfig) -> bool {
        !is_met_by(container, &cri::RuntimeFeatures::default())
    }

    fn runtime(version: &str, features: Option<cri::RuntimeFeatures>) -> Runtime {
        let version = cri::VersionResponse {
            runtime_name: "containerd".into(),
            runtime_version: version.into(),
            ..Default::default()
        };
        Runtime::new(&version, features.unwrap_or_default())
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
            (&part, &["2.1.6"][..], vec!["registry.example/model:1", "weights", "2.2"]),
            (&recursive, &old[..2], vec!["recursively", "/v"]),
            (&mapped, &["1.6.20", "2.2.0", "unknown"][..], vec!["mapped ids"]),
        ] {
            assert!(has_needs(container) && !needs_features(container));
            for version in refusing {
                let failure = check(container, &runtime(version, None)).unwrap_err();
                assert!(
                    words
                        .iter()
                        .chain(&["main", "/data", version])
                        .all(|word| failure.message().contains(word)),
                    "{failure}"
                );
            }
        }
        for version in ["2.2.0", "v2.2.1-rc.0", "3.0", "unknown"] {
            for container in [&whole, &part, &recursive] {
                assert!(check(container, &runtime(version, None)).is_ok(), "{version}");
            }
        }
        assert!(check(&whole, &runtime("2.1.6", None)).is_ok());
        assert!(check(&recursive, &runtime("2.0.0", None)).is_ok());
        assert!(!has_needs(&containing(cri::Mount { readonly: true, ..Default::default() })));
    }

    /// Verifies D18.
    #[test]
    fn unsupported_mount_options_are_refused() {
        let container = containing(cri::Mount {
            host_path: "/v".into(),
            mount_options: vec!["noexec".into()],
            ..Default::default()
        });
        assert!(has_needs(&container) && needs_features(&container));
        let without =
            cri::RuntimeFeatures { supplemental_groups_policy: true, ..Default::default() };
        for features in [None, Some(without)] {
            let failure = check(&container, &runtime("2.3.4", features)).unwrap_err();
            assert!(
                ["main", "/v", "/data", "noexec"]
                    .iter()
                    .all(|word| failure.message().contains(word)),
                "{failure}"
            );
        }
        let knowing = cri::RuntimeFeatures { mount_options: true, ..Default::default() };
        assert!(check(&container, &runtime("2.3.4", Some(knowing))).is_ok());
        // The version of the runtime does not matter.
        assert!(is_met_by(&container, &knowing) && !is_met_by(&container, &without));
        let plain = containing(cri::Mount::default());
        assert!(!has_needs(&plain) && check(&plain, &runtime("1.6.20", None)).is_ok());
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
        let none = Some(cri::RuntimeFeatures::default());
        let failure = check(&strict, &runtime("1.6.20", none)).unwrap_err();
        let expected = "container \"main\" has the supplemental groups policy Strict, which the \
                        cell's containerd 1.6.20 does not do; allowed is the policy Merge";
        assert_eq!((failure.code(), failure.message()), (Code::Unimplemented, expected));
        let knowing =
            cri::RuntimeFeatures { supplemental_groups_policy: true, ..Default::default() };
        assert!(has_needs(&strict) && check(&strict, &runtime("2.3.4", Some(knowing))).is_ok());
        assert!(!has_needs(&with(cri::SupplementalGroupsPolicy::Merge)));
    }
}
