//! Pods on a machine, controlled by `podctl`.

use serde_json::Value;

use crate::machine::Machine;

/// Script of a container that runs until SIGTERM.
pub(crate) const WAIT: &str = "trap 'exit 0' TERM; echo up; while :; do sleep 1; done";

/// A running pod with one container.
#[derive(Debug)]
pub(crate) struct RunningPod {
    pub(crate) sandbox: String,
    pub(crate) container: String,
    pub(crate) address: String,
    /// Directory of the pod's cgroup.
    pub(crate) cgroup: String,
}

/// The place where a pod runs.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Place {
    Cell,
    Node,
}

/// Installs kiyot as an administrator does, and starts it. A drop-in has the settings for this
/// machine.
pub(crate) fn install(machine: &mut Machine) {
    machine.ok("cd /mnt && cp kiyot kiyot-cell milpactl /usr/bin/ && mkdir -p /etc/kiyot \
        && cp kiyot.toml /etc/kiyot/ \
        && cp kiyot.service /etc/systemd/system/ && mkdir -p /etc/systemd/system/kiyot.service.d");
    // An emulated machine is slow: a cell may take longer to enrol.
    machine.ok("cat > /etc/systemd/system/kiyot.service.d/test.conf << END
[Service]
Environment='KIYOT_BACKENDS__MILPA__PAUSE_IMAGE=\"kiyot.test/pause:1\"'
Environment='KIYOT_BACKENDS__MILPA__LAUNCH_TIMEOUT=\"8m\"'
END
        cp /mnt/podctl /usr/local/bin/
        ctr -n k8s.io images import /mnt/pause.tar && ctr -n k8s.io images import /mnt/busybox.tar
        systemctl daemon-reload && systemctl enable --now kiyot");
}

/// Runs a pod with one container and waits until the container has written `up`.
pub(crate) fn run(machine: &mut Machine, place: Place, name: &str, attempt: u32) -> RunningPod {
    let place = match place {
        Place::Cell => "cell",
        Place::Node => "node",
    };
    // The kubelet retries until the pod runs.
    let output = machine.eventually(&format!("podctl run {place} {name} {attempt} {WAIT:?}"));
    let output: Value = serde_json::from_str(output.trim()).unwrap_or_else(|_| panic!("{output}"));
    let text = |key: &str| output[key].as_str().unwrap().to_owned();
    machine.eventually(&format!("podctl logs {name} | grep -w up"));
    RunningPod {
        sandbox: text("sandbox"),
        container: text("container"),
        address: text("address"),
        cgroup: format!("/sys/fs/cgroup{}", text("cgroup")),
    }
}

/// Returns all pods, with their lists and statuses.
pub(crate) fn list(machine: &mut Machine) -> Value {
    let output = machine.ok("podctl list");
    serde_json::from_str(output.trim()).unwrap_or_else(|_| panic!("{output}"))
}

/// Returns the entry of an id in the result of [`list`].
pub(crate) fn entry<'a>(list: &'a Value, kind: &str, id: &str) -> &'a Value {
    let found = list[kind].as_array().unwrap().iter().find(|entry| entry["id"] == id);
    found.unwrap_or_else(|| panic!("{id} is not among the {kind}: {list:#}"))
}
