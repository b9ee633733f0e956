//! Network devices of a virtual machine in the cell's network namespace: the link to the launcher,
//! and the device that the provider joins with the pod's network.
//!
//! The namespace's own network stack serves the link and nothing else: every other packet is
//! dropped before it is routed, so that a guest reaches only the gateway and, once joined, the
//! network of its pod.

use std::{
    fs, io,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
};

use kiyot_link::vm_file::{
    LINK_GUEST, LINK_HOST, LINK_PORT, LINK_PREFIX, LINK_TAP, POD_TAP, VmFile, VmNetwork,
};
use kiyot_linux::tree::own;

/// Settings of the namespace that keep it from forwarding.
const SYSCTLS: [(&str, &str); 4] = [
    ("ipv4/ip_forward", "0"),
    ("ipv6/conf/all/forwarding", "0"),
    ("ipv6/conf/tap-pod/disable_ipv6", "1"),
    ("ipv6/conf/tap-link/disable_ipv6", "1"),
];

/// Arguments to wait for the node's lock of legacy tables, in seconds. Without them a program fails
/// at once while another program, for example kube-proxy's, has the lock.
const TABLES_WAIT: [&str; 2] = ["-w", "10"];

/// Errors of the network's preparation.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// A program can't be run.
    #[error("run {0}")]
    Run(&'static str, #[source] io::Error),
    /// A program failed.
    #[error("{program}: {status}: {said}")]
    Refused {
        /// The program.
        program: &'static str,
        /// Its exit status.
        status: ExitStatus,
        /// Its standard error.
        said: String,
    },
    /// A setting of the kernel can't be written.
    #[error("write {0:?}")]
    Sysctl(PathBuf, #[source] io::Error),
}

/// Creates the devices in the network namespace of the calling thread.
pub fn prepare(file: &VmFile, network: &VmNetwork) -> Result<(), NetworkError> {
    // The rules come first: nothing is served without them.
    set_rules(succeed)?;
    succeed("ip", &["-batch", "-"], devices(file, network).as_bytes())?;
    for (name, value) in SYSCTLS {
        let path = own(Path::new("/proc/sys/net"), name);
        match fs::write(&path, value) {
            // The kernel has no IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            written => written.map_err(|source| NetworkError::Sysctl(path, source))?,
        }
    }
    succeed("ip", &["-batch", "-"], format!("link set {LINK_TAP} up\n").as_bytes())
}

/// Sets the rules of both families by running programs with arguments and input.
fn set_rules(
    run: impl Fn(&'static str, &[&str], &[u8]) -> Result<(), NetworkError>,
) -> Result<(), NetworkError> {
    run("iptables-restore", &TABLES_WAIT, rules_v4().as_bytes())?;
    if Path::new("/proc/sys/net/ipv6").exists() {
        run("ip6tables-restore", &TABLES_WAIT, RULES_V6.as_bytes())?;
    }
    Ok(())
}

/// Returns rules that drop all incoming packets except the guest's connections to the relay.
fn rules_v4() -> String {
    format!(
        "*raw\n:PREROUTING DROP [0:0]\n:OUTPUT ACCEPT [0:0]\n-A PREROUTING -i {LINK_TAP} -s \
         {LINK_GUEST}/32 -d {LINK_HOST}/32 -p tcp -m tcp --dport {LINK_PORT} -j ACCEPT\nCOMMIT\n"
    )
}

/// Rules that drop all incoming packets.
const RULES_V6: &str = "*raw\n:PREROUTING DROP [0:0]\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n";

/// Returns the commands that create the devices. The pod's device is down until the provider joins
/// it with the pod's network.
fn devices(file: &VmFile, network: &VmNetwork) -> String {
    let VmFile { user, group, .. } = file;
    let mut lines = Vec::new();
    for device in [LINK_TAP, POD_TAP] {
        lines.push(format!("tuntap add dev {device} mode tap user {user} group {group}"));
    }
    // The stack answers no ARP requests there.
    lines.push(format!("link set {POD_TAP} arp off"));
    lines.push(format!("address add {LINK_HOST}/{LINK_PREFIX} dev {LINK_TAP}"));
    let mac = &network.link_mac;
    lines.push(format!("neighbour add {LINK_GUEST} lladdr {mac} dev {LINK_TAP} nud permanent"));
    lines.join("\n") + "\n"
}

/// Runs a short program with its input.
fn succeed(program: &'static str, arguments: &[&str], input: &[u8]) -> Result<(), NetworkError> {
    let failed = |source| NetworkError::Run(program, source);
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        // The exit status explains why a program does not read its input.
        let _broken_pipe = stdin.write_all(input);
    }
    let output = child.wait_with_output().map_err(failed)?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(NetworkError::Refused { program, status: output.status, said })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies N14.
    #[test]
    fn rules_are_set_by_programs_that_wait_for_the_nodes_lock() {
        // Fails as legacy programs do while another program has the lock.
        let locked = |program, arguments: &[&str], _: &[u8]| {
            let waits = arguments.windows(2).any(|pair| pair[0] == "-w" && pair[1] != "0");
            let refusal = || NetworkError::Run(program, io::Error::other("the lock is held"));
            waits.then_some(()).ok_or_else(refusal)
        };
        set_rules(locked).unwrap();
    }
}
