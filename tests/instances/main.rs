//! Pods on instances of EC2, called as a kubelet calls. The instances are namespaces of a test
//! cloud (crates/kiyot-testcloud), which run the user data that the daemon launches them with.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "test code")]

mod ends;
mod faults;
mod launches;
mod life;
mod network;

use kiyot_testcloud::{Cloud, State};
use kiyot_testkit::{Container, KiyotOptions, Kubelet, LIMIT, Pod, cri, wait_until};

/// Script of a container that runs until SIGTERM.
const WAIT: &str = "trap 'exit 0' TERM; while :; do sleep 0.5; done";

/// A cloud whose consoles are printed if the test panics.
struct TestCloud(Cloud);

impl std::ops::Deref for TestCloud {
    type Target = Cloud;

    fn deref(&self) -> &Cloud {
        &self.0
    }
}

impl Drop for TestCloud {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for instance in self.launched() {
                let (id, state) = (&instance.id, instance.state);
                eprintln!("console of {id} ({state:?}):\n{}", self.console(id));
            }
        }
    }
}

impl TestCloud {
    async fn start() -> Self {
        Self(Cloud::start_with_instances().await)
    }

    /// Returns the options of the daemon under test.
    fn options(&self) -> KiyotOptions {
        self.daemon_options(env!("CARGO_BIN_EXE_kiyot"))
    }

    /// Makes a call with an instance, as the console of EC2 does.
    async fn change(&self, action: &str, id: &str) {
        let reply = self.call(action, &[("InstanceId.1", id)]).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
    }

    async fn reaches(&self, id: &str, state: State) {
        wait_until(format!("{id} is {state:?}"), LIMIT, async || {
            (self.instance(id)?.state == state).then_some(())
        })
        .await;
    }

    /// Waits until all launched instances are terminated.
    async fn has_no_cells(&self) {
        wait_until("no instance is left", LIMIT, async || self.running().is_empty().then_some(()))
            .await;
    }
}

/// Returns a pod in a cell with one container, `main`.
fn pod(name: &str, script: &str) -> Pod {
    Pod::new(name).in_cell().container(Container::script("main", script))
}

/// Runs a script in a container, which must succeed, and returns its standard output.
async fn run(kubelet: &mut Kubelet, container: &str, script: &str) -> String {
    let output = kubelet.exec_sync(container, &["sh", "-c", script]).await.unwrap();
    assert_eq!(output.code, 0, "{script}: {}{}", output.stdout, output.stderr);
    output.stdout
}

/// Waits until a sandbox is not ready.
async fn sandbox_ends(kubelet: &mut Kubelet, sandbox: &str) {
    wait_until("the sandbox has ended", LIMIT, async || {
        let status = kubelet.sandbox_status(sandbox).await.ok()?;
        (status.state() == cri::PodSandboxState::SandboxNotready).then_some(())
    })
    .await;
}
