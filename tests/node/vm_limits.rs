//! Limits of a virtual machine's processes. A plain process replaces QEMU.

use crate::machine::Machine;

/// Installs a program in place of QEMU that prints its arguments to the console, an image of empty
/// files, and settings with which the service uses both.
const INSTALL: &str = r#"
set -e
cat > /usr/local/bin/played-qemu << 'END'
#!/bin/sh
echo "$@"
exec sleep infinity
END
chmod 755 /usr/local/bin/played-qemu
mkdir -p /usr/share/kiyot/cell-image && cd /usr/share/kiyot/cell-image
touch kernel initramfs root.squashfs
empty="{\"sha256\": \"$(sha256sum < kernel | cut -d ' ' -f 1)\", \"size\": 0}"
echo "{\"architecture\": \"amd64\", \"files\": {\"kernel\": $empty, \"initramfs\": $empty, \
\"root.squashfs\": $empty}}" > image.json
cat > /etc/systemd/system/kiyot.service.d/qemu.conf << 'END'
[Service]
Environment='KIYOT_BACKENDS__MILPA__PROVIDER="qemu"'
Environment='KIYOT_BACKENDS__MILPA__QEMU__PROGRAM="/usr/local/bin/played-qemu"'
Environment='KIYOT_BACKENDS__MILPA__QEMU__ACCEL="tcg"'
Environment='KIYOT_BACKENDS__MILPA__QEMU__DISK_SIZE="64Mi"'
END
systemctl daemon-reload && systemctl restart kiyot"#;
/// The maximal limit on the processes of a machine.
const MAX_PIDS: u64 = 512;
/// The maximal limit on the memory of the processes beyond the memory of the guest, in MiB.
const MAX_MARGIN_MIB: u64 = 1024;

/// Launches a machine and asserts that the kernel limits its processes. The replaced QEMU runs no
/// agent, so the pod never runs.
pub(crate) fn processes_of_a_machine_are_limited(machine: &mut Machine) {
    machine.ok(INSTALL);
    machine.ok("podctl run cell limited 0 true > /dev/null 2>&1 &");
    let arguments = machine.eventually("grep -h -- ' -m ' /var/lib/kiyot/cells/*/console.log");
    let guest_mib = arguments.split_once("-m ").and_then(|(_, size)| size.split_once("M "));
    let (guest_mib, _) = guest_mib.unwrap_or_else(|| panic!("{arguments}"));
    let guest_mib: u64 = guest_mib.parse().unwrap();

    let cgroup = machine.ok("ls -d /sys/fs/cgroup/kiyot/cell-*");
    let cgroup = cgroup.trim();
    machine.eventually(&format!("grep -x $(pgrep -fx 'sleep infinity') {cgroup}/cgroup.procs"));
    let limit = |machine: &mut Machine, file: &str| -> u64 {
        let text = machine.ok(&format!("cat {cgroup}/{file}"));
        text.trim().parse().unwrap_or_else(|_| panic!("{file}: {text}: is no limit"))
    };
    let memory_mib = limit(machine, "memory.max") >> 20;
    let allowed = guest_mib..guest_mib + MAX_MARGIN_MIB;
    assert!(allowed.contains(&memory_mib), "{memory_mib} MiB; allowed: {allowed:?}");
    let pids = limit(machine, "pids.max");
    assert!(pids <= MAX_PIDS, "{pids} processes; allowed: at most {MAX_PIDS}");
}
