//! The unit of the agent, on a machine with systemd that is a cell.

use std::net::Ipv4Addr;

use base64::{Engine, prelude::BASE64_STANDARD};
use kiyot_link::bootstrap::{Bootstrap, CellFile, GatewayAddress, Machine as CellMachine};

use crate::machine::Machine;

/// The time after which the machine would power off by itself, longer than the test.
const LONG_SECONDS: u64 = 24 * 60 * 60;
/// The address that the cell closes to its pod.
const CLOSED: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
/// Prints the PID of the cell's containerd, which is a child of the service.
const CONTAINERD: &str =
    "pgrep -P $(systemctl show -P MainPID kiyot-cell) -f '^[^ ]*containerd --config'";

/// Returns boot data whose gateway does not answer.
fn boot_data() -> CellFile {
    CellFile {
        bootstrap: Bootstrap {
            cell: "cell-aaaaaaaaaaaa".to_owned(),
            gateway: GatewayAddress::Tcp(([192, 0, 2, 1], 7700).into()),
            ca_sha256: "00".repeat(32),
            token: "token".to_owned(),
            orphan_timeout_secs: LONG_SECONDS,
            agent: None,
        },
        containerd: "containerd".into(),
        runc: "runc".into(),
        pause_image: "registry.invalid/pause:1".to_owned(),
        registry_config_dir: None,
        restrict_oom_score_adj: false,
        cri: Default::default(),
        machine: Some(CellMachine {
            pod_mac: None,
            link: None,
            power_off_after_secs: LONG_SECONDS,
            closed_addresses: vec![CLOSED.into()],
            node_networks: Vec::new(),
        }),
    }
}

/// Installs the agent as the service of a cell. The service runs, and the machine powers off after
/// the service is killed.
pub(crate) fn runs_a_cell_once_and_powers_the_machine_off_after_a_kill(mut machine: Machine) {
    machine.ok("cp /mnt/kiyot-cell /usr/local/bin/ \
                && cp /mnt/kiyot-cell.service /etc/systemd/system/ \
                && ip link add eth0 type veth peer name peer0 && ip link set eth0 up \
                && ip address add 192.0.2.2/24 dev eth0");
    let data = BASE64_STANDARD.encode(serde_json::to_vec(&boot_data()).unwrap());
    machine.ok(&format!(
        "umask 077 && mkdir /var/lib/kiyot-cell \
         && base64 -d <<< {data} > /var/lib/kiyot-cell/boot-data.json"
    ));
    machine.ok("systemctl is-active containerd");
    machine.ok("systemctl daemon-reload && systemctl enable --now kiyot-cell");
    machine.ok("[ $(systemctl is-active containerd) = inactive ]");
    let first = machine.eventually(CONTAINERD);
    machine.ok("systemctl is-active kiyot-cell && [ ! -e /var/lib/kiyot-cell/boot-data.json ]");
    machine.eventually("pgrep -f 'kiyot-cell agent'");
    machine.ok(&format!("[ $(ps -o unit= -p {}) = kiyot-cell.service ]", first.trim()));

    // No node ends this machine: it must end by itself when its kernel panics or hangs.
    machine.ok("[ $(sysctl -n kernel.panic) = 10 ] && [ $(sysctl -n kernel.panic_on_oops) = 1 ] \
                && [ $(systemctl show -P RuntimeWatchdogUSec) = 1min ]");
    // The agent restores a route that another program removed.
    machine.ok(&format!("ip route del unreachable {CLOSED}"));
    machine.eventually(&format!("ip route show type unreachable | grep {CLOSED}"));

    // The service restarts its containerd; systemd does not restart the service.
    machine.ok(&format!("kill -9 {}", first.trim()));
    machine.eventually(&format!("pid=$({CONTAINERD}) && [ $pid != {} ]", first.trim()));
    machine
        .ok("systemctl is-active kiyot-cell && [ $(systemctl show -P NRestarts kiyot-cell) = 0 ]");

    // systemd restarts the service, which finds that the cell has run and powers the machine off.
    machine.ok("[ -e /var/lib/kiyot-cell/booted ]");
    machine.ends("kill -9 $(systemctl show -P MainPID kiyot-cell)");
}
