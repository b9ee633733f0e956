//! A shell for milpactl while the pods of the demo run.

use std::{env, path::Path};

use kiyot_testkit::{Kiyot, Node};
use tokio::process::Command;

/// Address of the metrics, in the demo's own network namespace.
pub(crate) const METRICS: &str = "127.0.0.1:9440";
/// Warm pool that `milpactl pool` shows.
pub(crate) const WARM_POOL: &str = "[[backends.milpa.warm]]\ncount = 1\n";
/// Log message of a cell that waits in its pool.
pub(crate) const IS_WARM: &str = "cell waits in its warm pool";

/// Runs the user's shell until it ends, with the daemon's milpactl and kiyot in its PATH, in the
/// namespaces of the demo. Its standard input may be a script.
pub(crate) async fn run(kiyot: &Kiyot<'_>, node: &Node) {
    let daemon = crate::binary();
    let binaries = daemon.parent().expect("the daemon is in a directory");
    let paths = env::var_os("PATH").unwrap_or_default();
    let paths = [binaries.to_owned()].into_iter().chain(env::split_paths(&paths));
    println!("milpactl works on this demo; `exit` or Ctrl-D ends the pods and everything else");
    let shell = env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into());
    let ended = Command::new(&shell)
        .env("PATH", env::join_paths(paths).expect("a path has no colon"))
        .env("MILPACTL_SOCKET", kiyot.socket().with_file_name("admin.sock"))
        .env("MILPACTL_STATIC_POD_PATH", node.static_pods())
        .env("DEMO_METRICS", format!("http://{METRICS}/metrics"))
        .env("DEMO_CONFIG", kiyot.configuration())
        .status()
        .await;
    if let Err(error) = ended {
        println!("the shell {} can't be run: {error}", Path::new(&shell).display());
    }
}
