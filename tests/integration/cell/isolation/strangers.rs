//! Local users at the daemon's sockets. The directory has the mode that the shipped unit sets.

use std::{
    fs::{self, File, OpenOptions},
    io::ErrorKind,
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    thread,
};

use hyper_util::rt::TokioIo;
use kiyot_proto::admin;
use kiyot_testkit::{Kiyot, KiyotOptions, LIMIT, Node, wait_until};
use rustix::{
    fs::{FlockOperation, flock},
    process::{Gid, Uid},
    thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid},
};
use tonic::{Code, Response, transport::Endpoint};
use tower::service_fn;

use crate::cell::{operator::admin_versions::call, options, pod, remove_and_assert_clean};

/// The user and the group `nobody`.
const STRANGER: (u32, u32) = (65_534, 65_534);
/// A user whose group is `daemon`.
const MEMBER: (u32, u32) = (65_534, 1);
/// The methods that members of the group may call.
const READING: [&str; 9] = [
    "Version",
    "ListPods",
    "ListCells",
    "ListEvents",
    "ListUsage",
    "ListBackends",
    "ListOfferings",
    "ListPools",
    "Plan",
];

/// Runs a function with only the rights of a user.
fn run_as<T: Send>((user, group): (u32, u32), run: impl FnOnce() -> T + Send) -> T {
    let limited = || {
        let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
        set_thread_groups(&[]).unwrap();
        set_thread_res_gid(group, group, group).unwrap();
        set_thread_res_uid(user, user, user).unwrap();
        run()
    };
    thread::scope(|scope| scope.spawn(limited).join().unwrap())
}

/// Gives a daemon's directory the mode that the unit gives to /run/kiyot. Returns the path of the
/// directory.
pub(crate) fn as_shipped(kiyot: &Kiyot<'_>) -> PathBuf {
    let directory = kiyot.socket().parent().unwrap().to_owned();
    let set_mode = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    let unit = include_str!("../../../../config/kiyot.service");
    let mode = unit.lines().find_map(|line| line.strip_prefix("RuntimeDirectoryMode=")).unwrap();
    set_mode(&directory, u32::from_str_radix(mode, 8).unwrap());
    // The parent directory has the mode of /run.
    set_mode(directory.parent().unwrap(), 0o755);
    directory
}

/// Starts a daemon with `admin.group`.
async fn start(node: &Node) -> (Kiyot<'_>, PathBuf) {
    let sections = "[admin]\ngroup = \"daemon\"\n".to_owned();
    let kiyot = Kiyot::start(node, KiyotOptions { sections, ..options() }).await;
    let directory = as_shipped(&kiyot);
    (kiyot, directory)
}

/// Returns the locks that a user can get of files in a daemon's directory.
fn locks(user: (u32, u32), directory: &Path) -> Vec<(&'static str, File)> {
    let names = [".", "kiyot.sock.lock", "admin.sock.d", "admin.sock.d/socket.lock"];
    run_as(user, || {
        let opened = names.into_iter().filter_map(|name| {
            let file = File::open(directory.join(name)).ok()?;
            flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
            Some((name, file))
        });
        opened.collect()
    })
}

/// Verifies O24.
#[tokio::test]
async fn member_of_the_group_reads_and_changes_nothing() {
    let node = Node::start().await;
    let (_kiyot, directory) = start(&node).await;
    let path = directory.join("admin.sock");
    let modes = ["admin.sock.d", "admin.sock"].map(|name| {
        let found = fs::metadata(directory.join(name)).unwrap();
        (found.mode() & 0o777, found.uid(), found.gid())
    });
    assert_eq!(modes, [(0o750, 0, 1), (0o660, 0, 1)]);
    let connector = service_fn(move |_| {
        let stream = run_as(MEMBER, || UnixStream::connect(&path));
        async move {
            let stream = stream?;
            stream.set_nonblocking(true)?;
            tokio::net::UnixStream::from_std(stream).map(TokioIo::new)
        }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    let channel = endpoint.connect_with_connector(connector).await.unwrap();
    let methods =
        include_str!("../../../../proto/admin/v1/admin.proto").lines().filter_map(|line| {
            line.trim().strip_prefix("rpc ")?.split_once('(').map(|(method, _)| method)
        });
    let mut allowed = Vec::new();
    for method in methods {
        let called: Result<Response<admin::CordonResponse>, _> =
            call(&channel, method, admin::CordonRequest {}).await;
        match called {
            Err(refused) if refused.code() == Code::PermissionDenied => {
                let reason = format!("{method} is for root; user {} may read only", MEMBER.0);
                assert_eq!(refused.message(), reason);
            }
            _ => allowed.push(method),
        }
    }
    assert_eq!(allowed, READING);
}

/// Verifies O24, X50.
#[tokio::test]
async fn stranger_opens_locks_and_creates_nothing() {
    let node = Node::start().await;
    let (_kiyot, directory) = start(&node).await;
    assert!(locks(STRANGER, &directory).is_empty());
    for user in [STRANGER, MEMBER] {
        let denied = run_as(user, || {
            let sockets = ["kiyot.sock", "admin.sock"].into_iter();
            let sockets = sockets.filter(|name| user == STRANGER || *name == "kiyot.sock");
            let mut tried: Vec<_> =
                sockets.map(|name| UnixStream::connect(directory.join(name)).err()).collect();
            for name in ["kiyot.sock.lock", "new", "admin.sock.d/new"] {
                let mut options = OpenOptions::new();
                tried.push(options.create(true).append(true).open(directory.join(name)).err());
            }
            for name in ["kiyot.sock", "kiyot.sock.lock", "admin.sock"] {
                tried.push(fs::remove_file(directory.join(name)).err());
            }
            tried.push(fs::read_dir(&directory).err());
            tried
        });
        let kinds: Vec<_> = denied.iter().map(|error| error.as_ref().map(|e| e.kind())).collect();
        assert!(kinds.iter().all(|kind| *kind == Some(ErrorKind::PermissionDenied)), "{kinds:?}");
    }
}

/// Verifies X11, X50.
#[tokio::test]
async fn locks_that_users_get_delay_no_start() {
    let node = Node::start().await;
    let (mut kiyot, directory) = start(&node).await;
    let mut held = locks(STRANGER, &directory);
    held.extend(locks(MEMBER, &directory));
    let names: Vec<_> = held.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["admin.sock.d"], "a member may list it");
    kiyot.restart().await;
    kiyot.kubelet().await.sandboxes().await.unwrap();
    assert!(!kiyot.log().contains("is locked"), "{}", kiyot.log());
    assert_eq!(kiyot.log().matches("listening for milpactl").count(), 2, "{}", kiyot.log());
}

/// Verifies O24, X50.
#[tokio::test]
async fn admin_socket_that_waits_or_is_taken_prevents_no_pod() {
    let node = Node::start().await;
    let (mut kiyot, directory) = start(&node).await;
    kiyot.stop().await;
    assert!(fs::symlink_metadata(directory.join("admin.sock")).is_err(), "the link is removed");

    // The lock is held by root, as by another daemon.
    let lock = File::open(directory.join("admin.sock.d/socket.lock")).unwrap();
    flock(&lock, FlockOperation::LockExclusive).unwrap();
    kiyot.start_again().await;
    let log = kiyot.log();
    let (_, log) = log.rsplit_once("daemon starting").unwrap();
    let at = |message| log.find(message).unwrap_or_else(|| panic!("{message}: {log}"));
    assert!(at("listening for the kubelet") < at("admin API can't be served"), "{log}");
    assert!(log.contains("socket.lock is locked: another process kept its lock"), "{log}");
    drop(lock);

    kiyot.stop().await;
    let _other = UnixListener::bind(directory.join("admin.sock")).unwrap();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("unaffected", "sleep 1000")).await.unwrap();
    wait_until("the taken socket is logged", LIMIT, async || {
        kiyot.log().contains("admin.sock is in use: another process listens there").then_some(())
    })
    .await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
