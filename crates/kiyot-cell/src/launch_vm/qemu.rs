//! Command line of QEMU. It has no secret: the boot data is a file.

use std::{ffi::OsString, os::fd::RawFd};

use kiyot_link::{
    mac_address::MacAddress,
    vm_file::{Accelerator, LINK_TAP, POD_TAP, TCG_CACHE_MIB, VmFile},
};

/// Paths in the jail, which `jail` makes.
pub mod paths {
    /// The kernel.
    pub const KERNEL: &str = "/image/kernel";
    /// The initramfs.
    pub const INITRAMFS: &str = "/image/initramfs";
    /// The file system of the root.
    pub const ROOT: &str = "/image/root";
    /// The machine's own disk.
    pub const DISK: &str = "/disk";
    /// The boot data.
    pub const CELL_FILE: &str = "/cell.json";
}

/// Name under which the guest finds the boot data (QEMU, docs/specs/fw_cfg).
const FW_CFG_NAME: &str = "opt/org.kiyot/cell.json";
/// Setting of QEMU's seccomp filter, which denies system calls that QEMU does not need.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
/// CPU model under TCG. It announces no fast string instructions, because guests would use `rep
/// movsb` instead of vectors to copy memory: see the report on starts in a virtual machine in
/// docs/reports.
const TCG_CPU: &str = "max,erms=off,fsrm=off";
/// Devices of the board that a cell does not use.
const BOARD: &str = "q35,usb=off,sata=off,smbus=off,vmport=off,graphics=off,dump-guest-core=off";

/// Returns the arguments of QEMU. The list of processes shows `name` to people; `monitor` is the
/// socket on which QEMU takes commands.
pub fn arguments(file: &VmFile, name: &str, monitor: RawFd) -> Vec<OsString> {
    let mut line = Line::default();
    line.set("-name", &format!("guest={name}"));
    line.flag("-nodefaults").flag("-no-user-config").flag("-no-reboot");
    line.set("-sandbox", SANDBOX).set("-display", "none");
    line.set("-machine", BOARD);
    match file.accelerator {
        Accelerator::Kvm => line.set("-accel", "kvm").set("-cpu", "host"),
        Accelerator::Tcg => {
            line.set("-accel", &format!("tcg,tb-size={TCG_CACHE_MIB}")).set("-cpu", TCG_CPU)
        }
    };
    line.set("-smp", &file.cpus.to_string()).set("-m", &format!("{}M", file.memory_mib));
    line.set("-kernel", paths::KERNEL).set("-append", &file.command_line);
    if file.initramfs.is_some() {
        line.set("-initrd", paths::INITRAMFS);
    }
    line.set("-chardev", "stdio,id=console,signal=off").set("-serial", "chardev:console");
    line.set("-chardev", &format!("socket,id=monitor,fd={monitor},server=on,wait=off"));
    line.set("-mon", "chardev=monitor,mode=control");
    line.set("-object", "rng-builtin,id=random").set("-device", "virtio-rng-pci,rng=random");
    if file.root.is_some() {
        line.disk("root", &format!("file={},readonly=on", paths::ROOT));
    }
    if file.disk_bytes.is_some() {
        line.disk("disk", &format!("file={},discard=unmap", paths::DISK));
    }
    if let Some(network) = &file.network {
        line.network("pod", POD_TAP, network.pod_mac);
        line.network("link", LINK_TAP, network.link_mac);
        line.set("-fw_cfg", &format!("name={FW_CFG_NAME},file={}", paths::CELL_FILE));
    }
    line.0
}

#[derive(Default)]
struct Line(Vec<OsString>);

impl Line {
    fn flag(&mut self, flag: &str) -> &mut Self {
        self.0.push(flag.into());
        self
    }

    fn set(&mut self, option: &str, value: &str) -> &mut Self {
        self.flag(option).flag(value)
    }

    /// Adds a disk that the guest finds by its serial number. If the node has no space for a write,
    /// the write fails in the guest: by default QEMU would pause the machine forever.
    fn disk(&mut self, name: &str, options: &str) {
        self.set(
            "-drive",
            &format!("if=none,id={name},format=raw,werror=report,rerror=report,{options}"),
        );
        self.set("-device", &format!("virtio-blk-pci,drive={name},serial={name}"));
    }

    fn network(&mut self, name: &str, tap: &str, mac: MacAddress) {
        self.set("-netdev", &format!("tap,id={name},ifname={tap},script=no,downscript=no"));
        // Without a ROM the firmware does not try to boot from the network.
        self.set("-device", &format!("virtio-net-pci,netdev={name},mac={mac},romfile="));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> VmFile {
        VmFile {
            program: "/usr/bin/qemu".into(),
            accelerator: Accelerator::Tcg,
            kernel: "/k".into(),
            initramfs: None,
            root: None,
            disk_bytes: None,
            command_line: "panic=-1 -- machine".into(),
            cpus: 2,
            memory_mib: 704,
            user: 1,
            group: 1,
            network: None,
        }
    }

    fn text(file: &VmFile) -> String {
        let arguments: Vec<String> = arguments(file, "a", 3)
            .into_iter()
            .map(|argument| argument.into_string().unwrap())
            .collect();
        arguments.join("|")
    }

    #[test]
    fn machine_of_a_probe_has_neither_disks_nor_network() {
        let line = text(&VmFile { accelerator: Accelerator::Kvm, ..file() });
        assert!(line.contains("|-accel|kvm|-cpu|host|") && line.contains("|-m|704M|"), "{line}");
        assert!(line.contains("|-append|panic=-1 -- machine|"), "{line}");
        for absent in ["-drive", "-netdev", "-fw_cfg", "-initrd"] {
            assert!(!line.contains(absent), "{line}");
        }
    }

    #[test]
    fn sandbox_denies_privileges_and_processes() {
        let line = text(&file());
        assert!(line.contains("elevateprivileges=deny,spawn=deny,resourcecontrol=deny"), "{line}");
    }
}
