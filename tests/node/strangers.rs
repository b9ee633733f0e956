//! Local users at the daemon's files and ports, with the shipped unit.

use crate::{
    machine::Machine,
    pods::{self, RunningPod},
};

/// Opens the admin API to a group of Debian, and reduces the ports for exec, attach and
/// port-forward.
const SET_UP: &str = r#"
set -e
cat > /etc/systemd/system/kiyot.service.d/group.conf << 'END'
[Service]
Environment='KIYOT_ADMIN__GROUP="operator"'
END
systemctl daemon-reload
sysctl -q net.ipv4.ip_local_port_range='40000 40099'"#;
/// Undoes [`SET_UP`] for later starts.
const TEAR_DOWN: &str = "systemctl stop stranger member \
    && sysctl -q net.ipv4.ip_local_port_range='32768 60999' \
    && rm /etc/systemd/system/kiyot.service.d/group.conf && systemctl daemon-reload";
/// Listens on ports of the loopback, locks the files of its arguments, prints what it holds, and
/// sleeps. Written for a unit, where a dollar sign is doubled.
const HOLDER: &str = r#"use IO::Socket::INET; $$| = 1;
for $$port (9464, 40000..40099) {
    $$socket = IO::Socket::INET->new(LocalAddr => "127.0.0.1", LocalPort => $$port, Listen => 1);
    push(@held, $$socket) and print "listens $$port\n" if $$socket;
}
for $$path (@ARGV) {
    push(@held, $$file) and print "locks $$path\n" if open($$file, "<", $$path) and flock($$file, 6);
    undef $$file;
}
print "holds all\n";
sleep;"#;
/// Every file that could delay a start if it is locked.
const PATHS: &str = "/run/kiyot /run/kiyot/kiyot.sock.lock /run/kiyot/admin.sock.d \
    /run/kiyot/admin.sock.d/socket.lock /var/lib/kiyot /var/lib/kiyot/store.redb /run/xtables.lock";

/// Restarts the daemon while a member of `admin.group` and the user `nobody` hold all ports and
/// locks that they can get. Asserts which calls each may make.
pub(crate) fn delay_no_start(machine: &mut Machine, pod: &RunningPod) {
    machine.ok(SET_UP);
    // After the stop, the daemon's files exist and its ports are free.
    machine.ok("systemctl restart kiyot && systemctl stop kiyot");
    let (socket_dir, no_lock) = ("/run/kiyot/admin.sock.d", "");
    for (unit, group, locks) in
        [("stranger", "nogroup", no_lock), ("member", "operator", socket_dir)]
    {
        machine.ok(&format!(
            "systemd-run -q --unit {unit} -p User=nobody -p Group={group} \
             perl -e '{HOLDER}' {PATHS}"
        ));
        let log = machine.eventually(&format!("journalctl -o cat -u {unit} | grep -B1000 'holds'"));
        let locked: Vec<_> = log.lines().filter_map(|line| line.strip_prefix("locks ")).collect();
        assert_eq!(locked.join(" "), locks, "{unit}: {log}");
        assert_eq!(log.contains("listens 9464"), unit == "stranger", "{log}");
    }
    // The command returns after the daemon's READY=1.
    machine.ok("systemctl start kiyot");
    let list = pods::list(machine);
    assert_eq!(pods::entry(&list, "sandboxes", &pod.sandbox)["ready"], true);
    machine.ok("! journalctl -u kiyot | grep 'is locked'");

    let milpactl = |group: &str, verb: &str| {
        format!("setpriv --reuid nobody --regid {group} --clear-groups milpactl {verb}")
    };
    let pods = machine.eventually(&milpactl("operator", "get pods -o name"));
    assert!(pods.contains("celled"), "{pods}");
    for (group, verb) in [("operator", "cordon"), ("nogroup", "get pods"), ("nogroup", "cordon")] {
        let refused = machine.run(&milpactl(group, verb));
        assert_eq!(refused.code, 77, "{group}: {verb}: {}", refused.output);
    }
    machine.ok(TEAR_DOWN);
    machine.ok("systemctl restart kiyot");
}
