//! Sockets of shims, and the containerd that owns them.
//!
//! A shim of the node's containerd that is killed between the creation of its socket and its first
//! call leaves the socket. Shims in cells have their own `/run`.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use kiyot_testkit::Node;
use ring::digest::{SHA256, digest};

/// The shim of containerd's default runtime.
const SHIM: &str = "containerd-shim-runc-v2";
/// The directory of all sockets of shims (containerd, `socketRoot`).
const SOCKETS: &str = "/run/containerd/s";

/// Records the arguments of all shims of the node's containerd in a file.
#[derive(Debug)]
pub(crate) struct ShimRecorder(PathBuf);

/// The sockets of shims that the node's containerd has started.
#[derive(Debug, Default)]
pub(crate) struct ShimSockets(BTreeSet<String>);

impl ShimRecorder {
    /// Makes the node's containerd run a shim that records its arguments. Takes effect at the next
    /// start of containerd.
    pub(crate) fn prepare(node: &Node) -> Self {
        let calls = node.directory().join("shims");
        let program = node.programs().join(SHIM);
        fs::create_dir_all(node.programs()).unwrap();
        let script = format!(
            "#!/bin/sh\necho \"$*\" >> {}\nPATH={} exec {SHIM} \"$@\"\n",
            calls.display(),
            kiyot_testkit::command::PATH
        );
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        Self(calls)
    }

    /// Returns the sockets of all recorded shims.
    pub(crate) fn sockets(&self) -> ShimSockets {
        ShimSockets::of(&fs::read_to_string(&self.0).unwrap_or_default())
    }
}

impl ShimSockets {
    /// Returns the sockets of shims from their arguments, one shim a line.
    pub(crate) fn of(calls: &str) -> Self {
        Self(calls.lines().filter_map(socket).collect())
    }

    pub(crate) fn contains(&self, path: &str) -> bool {
        self.0.contains(path)
    }
}

/// Returns the socket of a shim with these arguments (containerd 1.6, `shim.SocketAddress`).
fn socket(arguments: &str) -> Option<String> {
    let words: Vec<&str> = arguments.split(' ').collect();
    let value = |name: &str| {
        let at = words.iter().position(|word| *word == name)?;
        words.get(at + 1).copied()
    };
    let of = Path::new(value("-address")?).join(value("-namespace")?).join(value("-id")?);
    let hash = digest(&SHA256, of.to_string_lossy().as_bytes());
    Some(format!("{SOCKETS}/{}", hex::encode(hash)))
}

#[cfg(test)]
mod tests {
    use kiyot_testkit::Pod;

    use super::*;

    const CALL: &str = "-namespace k8s.io -address /n/containerd.sock -publish-binary \
                        /usr/bin/containerd -id 12ab start";
    const HASH: &str = "ddd860fec9a3fd8aab85ea4ccc9f702324b33748e319c15c931ada8c9c60bacf";

    #[tokio::test]
    async fn socket_of_a_running_shim_is_found() {
        let node = Node::start_for_long().await;
        let shims = ShimRecorder::prepare(&node);
        node.restart_containerd().await;
        let mut kubelet = node.kubelet(&node.socket()).await.unwrap();
        let pod = kubelet.run_pod(&Pod::new("one")).await.unwrap();
        let ShimSockets(sockets) = shims.sockets();
        assert_eq!(sockets.iter().filter(|socket| Path::new(socket).exists()).count(), 1);
        kubelet.stop_and_remove(&pod).await.unwrap();
    }

    #[test]
    fn socket_of_a_shim_has_the_name_from_containerd() {
        let sockets = ShimSockets::of(CALL);
        assert!(sockets.contains(&format!("{SOCKETS}/{HASH}")));
        assert!(!sockets.contains(&format!("{SOCKETS}/00")));
        assert!(ShimSockets::of("-address /a start\n\n").0.is_empty());
    }
}
