//! Instances made from virtual machines.

use std::path::{Path, PathBuf};

/// Memory in MiB for all instance types: enough for containerd and a pod.
const MEMORY_MIB: &str = "2048";
/// Hexadecimal digits of a UUID.
const UUID_DIGITS: usize = 32;

/// A disk for virtual machines, and the kernel that boots it. Machines share the disk; the changes
/// of a machine are lost with it.
#[derive(Debug, Clone)]
pub struct Disk {
    /// The kernel. It needs drivers for NVMe disks and the serial port, because there is no
    /// initramfs.
    pub kernel: PathBuf,
    /// A file system without partitions.
    pub root: PathBuf,
}

/// The names of a virtual machine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Machine<'a> {
    /// Instance id.
    pub(super) id: &'a str,
    /// MAC address of its interface.
    pub(super) mac: &'a str,
    /// Tap device of its interface.
    pub(super) tap: &'a str,
}

impl Disk {
    /// Returns the command that boots a machine without KVM, with the changes of its disk in a
    /// directory. The command ends when the machine powers off or reboots.
    pub(super) fn command(
        &self,
        machine: Machine<'_>,
        console: &Path,
        changes: &Path,
    ) -> Vec<String> {
        let Machine { id, mac, tap } = machine;
        let uuid = uuid(id);
        let mut command = vec!["env".to_owned(), format!("TMPDIR={}", changes.display())];
        let fixed = [
            "qemu-system-x86_64 -accel tcg,thread=multi -smp 2 -cpu Nehalem -machine q35",
            "-nodefaults -no-user-config -display none -no-reboot",
            "-device nvme,drive=root,serial=root",
        ];
        command.extend(fixed.iter().flat_map(|words| words.split(' ')).map(str::to_owned));
        let root = self.root.display();
        command.extend(
            [
                ("-m", MEMORY_MIB.to_owned()),
                // cloud-init recognises an instance of EC2 by these values.
                ("-smbios", format!("type=1,uuid={uuid},serial={uuid}")),
                ("-kernel", self.kernel.display().to_string()),
                (
                    "-append",
                    "root=/dev/nvme0n1 rw console=ttyS0 quiet mitigations=off cryptomgr.notests \
                     net.ifnames=0"
                        .to_owned(),
                ),
                ("-drive", format!("file={root},if=none,id=root,format=raw,snapshot=on")),
                ("-netdev", format!("tap,id=net,ifname={tap},script=no,downscript=no")),
                ("-device", format!("virtio-net-pci,netdev=net,mac={mac}")),
                ("-chardev", format!("file,id=console,path={},append=on", console.display())),
                ("-serial", "chardev:console".to_owned()),
            ]
            .into_iter()
            .flat_map(|(option, value)| [option.to_owned(), value]),
        );
        command
    }
}

/// Returns the UUID of an instance's hardware. It begins with `ec2`.
fn uuid(id: &str) -> String {
    let digits: String = id.chars().filter(char::is_ascii_hexdigit).collect();
    let mut digits = format!("ec2{digits:0>width$}", width = UUID_DIGITS - 3);
    digits.truncate(UUID_DIGITS);
    for at in [20, 16, 12, 8] {
        digits.insert(at, '-');
    }
    digits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_of_an_instance_begins_with_ec2() {
        let expected = "ec200000-0000-0005-276e-1594d00477dc";
        assert_eq!(uuid("i-5276e1594d00477dc"), expected);
    }
}
