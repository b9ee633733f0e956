//! Kiyot as a systemd service.

use crate::{
    cell_unit,
    machine::Machine,
    pods::{self, Place, RunningPod},
    strangers, vm_limits,
};

/// Prints the PIDs of all cells' processes.
const PROCESSES: &str = "pgrep -f 'kiyot-cell (launch|init|agent)' | sort -n | tr '\\n' ' '";
/// Prints the daemon's PID.
const DAEMON: &str = "systemctl show -P MainPID kiyot";
/// Shortens the time until the watchdog ends the daemon; the unit has a minute.
const SHORTEN_WATCHDOG: &str = "printf '[Service]\nWatchdogSec=20s\n' \
    > /etc/systemd/system/kiyot.service.d/watchdog.conf \
    && systemctl daemon-reload && systemctl restart kiyot";
/// Directory of the service's cgroup.
const CGROUP: &str = "/sys/fs/cgroup/system.slice/kiyot.service";
/// A memory limit of the cgroup below the daemon's memory, in bytes.
const TOO_LITTLE: u64 = 4 << 20;
/// Undoes [`SHORTEN_WATCHDOG`] for later starts.
const RESTORE_WATCHDOG: &str =
    "rm /etc/systemd/system/kiyot.service.d/watchdog.conf && systemctl daemon-reload";

/// Verifies C6, F17, O24, V11, V21, V101, V102, X4, X15, X45, X48, X50.
#[test]
fn cells_keep_their_limits_outlive_the_service_and_end_with_the_node() {
    // One test for all checks: booting the machine takes a quarter of the time.
    let mut machine = Machine::start();
    pods::install(&mut machine);
    let pod = pods::run(&mut machine, Place::Cell, "celled", 0);
    limits_outlive_a_reload(&mut machine, &pod);
    cells_outlive_the_service(&mut machine, &pod);
    strangers::delay_no_start(&mut machine, &pod);
    watchdog_restarts_a_hung_daemon(&mut machine, &pod);
    daemon_at_its_memory_limit_is_started_again(&mut machine, &pod);
    cells_end_with_the_node(&mut machine, &pod);
    vm_limits::processes_of_a_machine_are_limited(&mut machine);
    machine.ok("systemctl stop kiyot");
    cell_unit::runs_a_cell_once_and_powers_the_machine_off_after_a_kill(machine);
}

/// Asserts that systemd's changes to the pod's slice keep the limits of a cell's containers.
fn limits_outlive_a_reload(machine: &mut Machine, pod: &RunningPod) {
    let cgroup = &pod.cgroup;
    let slice = cgroup.rsplit('/').next().unwrap();
    let limited = format!("grep -lx 67108864 {cgroup}/kiyot/*/memory.max");
    let controllers = format!("cat {cgroup}/cgroup.subtree_control");
    let container = machine.ok(&limited);
    let before = machine.ok(&controllers);
    for controller in ["cpu", "cpuset", "io", "memory", "pids"] {
        assert!(before.split_whitespace().any(|known| known == controller), "{before}");
    }
    machine.ok("systemctl daemon-reload");
    assert_eq!(machine.ok(&controllers), before);
    machine.ok(&format!("systemctl set-property --runtime {slice} MemoryMax=512M CPUWeight=50"));
    assert_eq!(machine.ok(&controllers), before);
    assert_eq!(machine.ok(&limited), container);
    // systemd has units for containers on the node, but not for containers in a cell.
    machine.eventually(&format!("podctl stats {} | grep '\"memory_bytes\":[1-9]'", pod.container));
}

/// Restarts, kills and stops the service. Each time the cell's processes stay the same, and the
/// daemon still knows the pod.
fn cells_outlive_the_service(machine: &mut Machine, pod: &RunningPod) {
    let processes = machine.ok(PROCESSES);
    assert!(processes.split_whitespace().count() >= 3, "{processes}");
    // The service shares the host's mount namespace, so that its mounts propagate.
    machine.ok(&format!("[ $(readlink /proc/$({DAEMON})/ns/mnt) = $(readlink /proc/1/ns/mnt) ]"));

    let daemon = machine.ok(DAEMON);
    // The command returns after the daemon's READY=1.
    machine.ok("systemctl restart kiyot");
    assert_ne!(machine.ok(DAEMON), daemon);
    running(machine, pod);
    assert_eq!(machine.ok(PROCESSES), processes);

    machine.ok(&format!("kill -9 $({DAEMON})"));
    machine.eventually("[ $(systemctl show -P NRestarts kiyot) = 1 ] && systemctl is-active kiyot");
    running(machine, pod);
    assert_eq!(machine.ok(PROCESSES), processes);

    machine.ok("systemctl stop kiyot");
    assert_eq!(machine.ok(PROCESSES), processes);
    machine.ok("systemctl start kiyot");
    running(machine, pod);
    machine.eventually(&format!("podctl exec {} 'echo inside' | grep -x inside", pod.container));
}

/// Stops the daemon's process. systemd restarts the daemon after `WatchdogSec`, and only then:
/// until then the daemon has fed the watchdog.
fn watchdog_restarts_a_hung_daemon(machine: &mut Machine, pod: &RunningPod) {
    let restarts = |machine: &mut Machine| -> u32 {
        machine.ok("systemctl show -P NRestarts kiyot").trim().parse().unwrap()
    };
    let timeouts = "journalctl -u kiyot | grep -c 'Watchdog timeout'";
    assert_eq!(machine.run(timeouts).output.trim(), "0");
    assert_eq!(machine.ok("systemctl show -P WatchdogUSec kiyot").trim(), "1min");
    machine.ok(SHORTEN_WATCHDOG);
    running(machine, pod);
    let (processes, before) = (machine.ok(PROCESSES), restarts(machine));
    let daemon = machine.ok(DAEMON);
    machine.ok(&format!("kill -STOP {}", daemon.trim()));
    machine
        .eventually(&format!("[ $({DAEMON}) != {} ] && systemctl is-active kiyot", daemon.trim()));
    assert_eq!(machine.ok(timeouts).trim(), "1");
    assert_eq!(restarts(machine), before + 1);
    machine.ok(RESTORE_WATCHDOG);
    running(machine, pod);
    assert_eq!(machine.ok(PROCESSES), processes);
}

/// Lowers the memory limit of the cgroup below the daemon's memory. The kernel kills the daemon,
/// and systemd restarts it with the limit of the unit.
fn daemon_at_its_memory_limit_is_started_again(machine: &mut Machine, pod: &RunningPod) {
    let max = machine.ok("systemctl show -P MemoryMax kiyot");
    assert!(max.trim().parse::<u64>().is_ok(), "{max}");
    let of_cgroup = format!("cat {CGROUP}/memory.max");
    assert_eq!(machine.ok(&of_cgroup), max);
    let (processes, daemon) = (machine.ok(PROCESSES), machine.ok(DAEMON));
    // The daemon is the only process in the service's cgroup: all processes of cells are elsewhere.
    machine.eventually(&format!("diff <(cat {CGROUP}/cgroup.procs) <({DAEMON})"));
    let kills = "journalctl -u kiyot | grep -c 'killed by the OOM killer'";
    assert_eq!(machine.run(kills).output.trim(), "0");
    machine.ok(&format!("echo {TOO_LITTLE} > {CGROUP}/memory.max"));
    machine
        .eventually(&format!("[ $({DAEMON}) != {} ] && systemctl is-active kiyot", daemon.trim()));
    assert_ne!(machine.ok(kills).trim(), "0");
    assert_eq!(machine.ok(&of_cgroup), max);
    running(machine, pod);
    assert_eq!(machine.ok(PROCESSES), processes);
    machine.eventually(&format!("podctl exec {} 'echo inside' | grep -x inside", pod.container));
}

fn running(machine: &mut Machine, pod: &RunningPod) {
    let list = pods::list(machine);
    assert_eq!(pods::entry(&list, "sandboxes", &pod.sandbox)["ready"], true);
    let container = pods::entry(&list, "containers", &pod.container);
    assert_eq!(container["state"], "CONTAINER_RUNNING");
}

/// Reboots the machine. The cells end, and their pods read as lost.
fn cells_end_with_the_node(machine: &mut Machine, pod: &RunningPod) {
    let leases = format!("ls /var/lib/cni/networks/pods | grep -x {}", pod.address);
    machine.ok(&leases);
    machine.reboot();
    machine.ok("systemctl is-active kiyot");
    machine.eventually("[ -z \"$(ls /var/lib/kiyot/cells)\" ]");
    let list = pods::list(machine);
    assert_eq!(pods::entry(&list, "sandboxes", &pod.sandbox)["ready"], false);
    let container = pods::entry(&list, "containers", &pod.container);
    assert_eq!(container["state"], "CONTAINER_EXITED", "{container}");
    assert_eq!(container["reason"], "CellLost", "{container}");
    let message = container["message"].as_str().unwrap();
    assert!(message.contains("the node was rebooted"), "{message}");
    machine.ok(&format!("! {leases}"));

    let next = pods::run(machine, Place::Cell, "celled", 1);
    running(machine, &next);
    for sandbox in [&next.sandbox, &pod.sandbox] {
        machine.ok(&format!("podctl remove {sandbox}"));
    }
    assert_eq!(machine.run(PROCESSES).output.trim(), "");
    machine.ok("[ -z \"$(ls /var/lib/kiyot/cells)\" ] && [ ! -e /sys/fs/cgroup/kiyot ]");
    // The kubelet owns the pod's slice; no cgroup of ours is left beneath it.
    machine.eventually(&format!("! ls -d {}/*/", next.cgroup));
}
