//! Seccomp profiles of the node (`localhostProfile`): a cell's containerd can't read the node's
//! files, so a container's profile is copied to its cell.

use std::{
    fs::File,
    io::{self, Read},
};

use kiyot_proto::{
    cell::{FileChange, MakeDir, Root, WriteFile, file_change::Change},
    cri::{self, security_profile::ProfileType},
};
use ring::digest::{SHA256, digest};
use tonic::Status;

use super::{Verbs, calls};
use crate::backends::milpa::cells::Cell;

/// The largest profile, in bytes. One that names every system call by itself is a tenth of it.
const LARGEST: u64 = 1 << 20;
/// What older kubelets write before the path.
const PREFIX: &str = "localhost/";
/// Root's alone: containers don't read it.
const MODE: u32 = 0o600;
const DIR_MODE: u32 = 0o700;

impl Verbs {
    /// Copies the profile that a container names, and says where it is in its cell; `None` if it
    /// names none of the node's.
    pub(super) async fn bring_profile(
        &self,
        cell: &Cell,
        pod_dir: &str,
        config: &cri::ContainerConfig,
    ) -> Result<Option<String>, Status> {
        let Some(path) = of_node(config).map(str::to_owned) else { return Ok(None) };
        let from = path.clone();
        let read = tokio::task::spawn_blocking(move || read(&from)).await;
        let read = read
            .map_err(|error| Status::internal(format!("the thread that reads {path}: {error}")))?;
        let content = read.map_err(|error| {
            Status::failed_precondition(format!(
                "the seccomp profile {path:?} of the node: {error}"
            ))
        })?;
        // By its content: the same one is there once, however often its container is started.
        let file = format!("seccomp/{}.json", hex::encode(digest(&SHA256, &content)));
        let change = Change::WriteFile(WriteFile {
            mode: MODE,
            content: content.into(),
            ..Default::default()
        });
        let directory = FileChange {
            root: Root::Pod.into(),
            path: "seccomp".to_owned(),
            change: Some(Change::MakeDir(MakeDir { mode: DIR_MODE, ..Default::default() })),
        };
        let changes = tokio_stream::iter([
            directory,
            FileChange { root: Root::Pod.into(), path: file.clone(), change: Some(change) },
        ]);
        let mut agent = calls::agent(cell);
        calls::answered(
            calls::CALL,
            "ChangeFiles",
            agent.change_files(calls::within(calls::CALL, changes)),
        )
        .await?;
        Ok(Some(format!("{}/{file}", pod_dir.trim_end_matches('/'))))
    }
}

/// The path on the node of a container's profile.
fn of_node(config: &cri::ContainerConfig) -> Option<&str> {
    let context = config.linux.as_ref()?.security_context.as_ref()?;
    match &context.seccomp {
        Some(profile) if profile.profile_type() == ProfileType::Localhost => {
            Some(profile.localhost_ref.strip_prefix(PREFIX).unwrap_or(&profile.localhost_ref))
        }
        Some(_) => None,
        #[expect(deprecated, reason = "what a kubelet sent before there was `seccomp`")]
        None => context.seccomp_profile_path.strip_prefix(PREFIX),
    }
}

fn read(path: &str) -> io::Result<Vec<u8>> {
    if !path.starts_with('/') {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "allowed are absolute paths"));
    }
    let file = File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file"));
    }
    let mut content = Vec::new();
    file.take(LARGEST + 1).read_to_end(&mut content)?;
    if content.len() as u64 > LARGEST {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("it has more than {LARGEST} bytes"),
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
    fn only_profiles_of_the_node_are_brought() {
        let path = "/var/lib/kubelet/seccomp/a.json";
        assert_eq!(of_node(&config(profile(ProfileType::Localhost, path), "")), Some(path));
        assert_eq!(
            of_node(&config(profile(ProfileType::Localhost, &format!("localhost/{path}")), "")),
            Some(path)
        );
        assert_eq!(of_node(&config(None, &format!("localhost/{path}"))), Some(path));
        for other in [
            config(profile(ProfileType::RuntimeDefault, path), ""),
            config(profile(ProfileType::Unconfined, path), ""),
            config(None, "runtime/default"),
        ] {
            assert_eq!(of_node(&other), None);
        }
        assert_eq!(of_node(&cri::ContainerConfig::default()), None);
    }

    #[test]
    fn what_can_not_be_a_profile_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(path("fine"), "{}").unwrap();
        std::fs::write(path("large"), vec![b' '; 1 + (1 << 20)]).unwrap();
        assert_eq!(read(&path("fine")).unwrap(), b"{}");
        for bad in [path("none"), path("large"), path(""), "relative".to_owned(), String::new()] {
            assert!(read(&bad).is_err(), "{bad}");
        }
    }
}
