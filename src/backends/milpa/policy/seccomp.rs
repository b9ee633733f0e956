//! Seccomp profiles of the node (`localhostProfile`). A cell's containerd can't read the node's
//! files, so the profile of a container or sandbox is copied to its cell.

use std::{
    fs::File,
    io::{self, Read},
};

use kiyot_proto::cri::{self, security_profile::ProfileType};

/// Largest profile, in bytes. A profile that lists every system call has a tenth of this size.
const MAX_PROFILE_BYTES: u64 = 1 << 20;
/// Prefix of the path in older kubelets.
const PREFIX: &str = "localhost/";

/// Returns the path on the node of a container's profile.
pub(crate) fn node_profile(config: &cri::ContainerConfig) -> Option<&str> {
    let context = config.linux.as_ref()?.security_context.as_ref()?;
    #[expect(deprecated, reason = "sent by kubelets older than the field `seccomp`")]
    path(context.seccomp.as_ref(), &context.seccomp_profile_path)
}

/// Returns the path on the node of a sandbox's profile. Kubelets give all sandboxes the default
/// profile; other clients of CRI may name one.
pub(crate) fn node_profile_of_sandbox(config: &cri::PodSandboxConfig) -> Option<&str> {
    let context = config.linux.as_ref()?.security_context.as_ref()?;
    #[expect(deprecated, reason = "sent by clients older than the field `seccomp`")]
    path(context.seccomp.as_ref(), &context.seccomp_profile_path)
}

/// Returns the path of a profile in either form of CRI.
fn path<'a>(profile: Option<&'a cri::SecurityProfile>, old: &'a str) -> Option<&'a str> {
    match profile {
        Some(profile) if profile.profile_type() == ProfileType::Localhost => {
            Some(profile.localhost_ref.strip_prefix(PREFIX).unwrap_or(&profile.localhost_ref))
        }
        Some(_) => None,
        None => old.strip_prefix(PREFIX),
    }
}

/// Reads a profile. The path must be absolute and have no "..", and the file must not be too large.
pub(crate) fn read(path: &str) -> io::Result<Vec<u8>> {
    let file = File::open(kiyot_linux::tree::absolute(path)?)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let mut content = Vec::new();
    file.take(MAX_PROFILE_BYTES + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAX_PROFILE_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("it has more than {MAX_PROFILE_BYTES} bytes"),
        ));
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(seccomp: Option<cri::SecurityProfile>, old: &str) -> cri::ContainerConfig {
        #[expect(deprecated, reason = "an old kubelet")]
        let context = cri::LinuxContainerSecurityContext {
            seccomp,
            seccomp_profile_path: old.to_owned(),
            ..Default::default()
        };
        let linux = Some(cri::LinuxContainerConfig {
            security_context: Some(context),
            ..Default::default()
        });
        cri::ContainerConfig { linux, ..Default::default() }
    }

    fn profile(profile_type: ProfileType, path: &str) -> Option<cri::SecurityProfile> {
        Some(cri::SecurityProfile {
            profile_type: profile_type.into(),
            localhost_ref: path.to_owned(),
        })
    }

    /// Verifies U14.
    #[test]
    fn profile_of_the_node_is_found_in_all_its_forms() {
        let path = "/var/lib/kubelet/seccomp/a.json";
        assert_eq!(node_profile(&config(profile(ProfileType::Localhost, path), "")), Some(path));
        assert_eq!(
            node_profile(&config(
                profile(ProfileType::Localhost, &format!("localhost/{path}")),
                ""
            )),
            Some(path)
        );
        assert_eq!(node_profile(&config(None, &format!("localhost/{path}"))), Some(path));
        for other in [
            config(profile(ProfileType::RuntimeDefault, path), ""),
            config(profile(ProfileType::Unconfined, path), ""),
            config(None, "runtime/default"),
        ] {
            assert_eq!(node_profile(&other), None);
        }
        assert_eq!(node_profile(&cri::ContainerConfig::default()), None);
    }

    /// Verifies X61.
    #[test]
    fn profile_that_is_absent_large_relative_or_leads_upwards_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(path("fine"), "{}").unwrap();
        std::fs::write(path("large"), vec![b' '; 1 + (1 << 20)]).unwrap();
        assert_eq!(read(&path("fine")).unwrap(), b"{}");
        let around = path("../") + dir.path().file_name().unwrap().to_str().unwrap() + "/fine";
        for bad in
            [path("none"), path("large"), path(""), "relative".to_owned(), String::new(), around]
        {
            assert!(read(&bad).is_err(), "{bad}");
        }
    }
}
