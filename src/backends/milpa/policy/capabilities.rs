//! Linux capabilities: how far each reaches. The namespaces of a cell contain some; others reach
//! the kernel, which is the node's unless the cell has its own.
//!
//! A cell without its own users has the node's user namespace, so that a container's capability
//! there is a capability on the node. It is contained because it reaches no other namespace of the
//! node.

/// Prefix of a capability in capabilities(7), which CRI leaves out.
const PREFIX: &str = "CAP_";
/// All capabilities, in CRI.
const ALL: &str = "ALL";

/// How far a capability reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// Contained by the namespaces, mounts and control groups of the cell and its containers.
    Cell,
    /// Contained while the container sees only its own processes. A container that sees the cell's
    /// processes reaches their open files, which are the node's files if cells share them.
    OwnProcesses,
    /// Not contained: the kernel, its devices, its clock, or the node's files.
    Kernel,
}

/// The capabilities of Linux 6.12 by their names in CRI, in the kernel's order, with reasons.
const TABLE: [(&str, Reach); 41] = [
    // File owners and modes, in the container's own mounts. Containers have them by default.
    ("CHOWN", Reach::Cell),
    ("DAC_OVERRIDE", Reach::Cell),
    // open_by_handle_at(2) opens any file of a file system with a visible mount.
    ("DAC_READ_SEARCH", Reach::Kernel),
    ("FOWNER", Reach::Cell),
    ("FSETID", Reach::Cell),
    // Processes of the container's PID namespace.
    ("KILL", Reach::Cell),
    ("SETGID", Reach::Cell),
    ("SETUID", Reach::Cell),
    ("SETPCAP", Reach::Cell),
    // Files that the node can't remove when the cell ends.
    ("LINUX_IMMUTABLE", Reach::Kernel),
    // The cell's network namespace.
    ("NET_BIND_SERVICE", Reach::Cell),
    ("NET_BROADCAST", Reach::Cell),
    ("NET_ADMIN", Reach::Cell),
    ("NET_RAW", Reach::Cell),
    // Counts towards the container's memory limit.
    ("IPC_LOCK", Reach::Cell),
    // The cell's IPC namespace.
    ("IPC_OWNER", Reach::Cell),
    // Code in the kernel; its ports and memory.
    ("SYS_MODULE", Reach::Kernel),
    ("SYS_RAWIO", Reach::Kernel),
    ("SYS_CHROOT", Reach::Cell),
    ("SYS_PTRACE", Reach::OwnProcesses),
    // Accounting of the container's PID namespace.
    ("SYS_PACCT", Reach::Cell),
    // Mounts of block devices, setns(2), and much else.
    ("SYS_ADMIN", Reach::Kernel),
    // kexec_load(2).
    ("SYS_BOOT", Reach::Kernel),
    // No CPU limit of a pod bounds real-time scheduling.
    ("SYS_NICE", Reach::Kernel),
    // The reserved blocks of the node's disk, and its OOM killer.
    ("SYS_RESOURCE", Reach::Kernel),
    // The node's clock.
    ("SYS_TIME", Reach::Kernel),
    // The node's consoles.
    ("SYS_TTY_CONFIG", Reach::Kernel),
    // The device control group decides which device nodes can be opened. Containers have the
    // capability by default.
    ("MKNOD", Reach::Cell),
    // Files that the container opens.
    ("LEASE", Reach::Cell),
    ("AUDIT_WRITE", Reach::Cell),
    // The node's audit rules.
    ("AUDIT_CONTROL", Reach::Kernel),
    // File capabilities, in the container's own mounts.
    ("SETFCAP", Reach::Cell),
    // The node's security modules.
    ("MAC_OVERRIDE", Reach::Kernel),
    ("MAC_ADMIN", Reach::Kernel),
    // The kernel's log and its addresses.
    ("SYSLOG", Reach::Kernel),
    // The node's power management.
    ("WAKE_ALARM", Reach::Kernel),
    ("BLOCK_SUSPEND", Reach::Kernel),
    // The node's audit log.
    ("AUDIT_READ", Reach::Kernel),
    // Activity of the whole node, and programs in its kernel.
    ("PERFMON", Reach::Kernel),
    ("BPF", Reach::Kernel),
    // /proc/PID/map_files of the processes that it sees.
    ("CHECKPOINT_RESTORE", Reach::OwnProcesses),
];

/// Returns how far a capability of a container reaches. `ALL` and unknown names reach the kernel.
///
/// containerd accepts names in any case. The prefix is removed because a later version may accept
/// it.
pub(super) fn reach(name: &str) -> Reach {
    let upper = name.to_ascii_uppercase();
    let plain = upper.strip_prefix(PREFIX).unwrap_or(&upper);
    TABLE.iter().find(|(known, _)| *known == plain).map_or(Reach::Kernel, |(_, reach)| *reach)
}

/// Returns whether the name means all capabilities.
pub(super) fn is_all(name: &str) -> bool {
    let upper = name.to_ascii_uppercase();
    upper.strip_prefix(PREFIX).unwrap_or(&upper) == ALL
}

#[cfg(test)]
mod tests {
    use super::*;

    /// containerd's default capabilities (oci/spec.go, defaultUnixCaps).
    const DEFAULT: [&str; 14] = [
        "CHOWN",
        "DAC_OVERRIDE",
        "FSETID",
        "FOWNER",
        "MKNOD",
        "NET_RAW",
        "SETGID",
        "SETUID",
        "SETFCAP",
        "SETPCAP",
        "NET_BIND_SERVICE",
        "SYS_CHROOT",
        "KILL",
        "AUDIT_WRITE",
    ];

    /// Verifies R9.
    #[test]
    fn capability_has_the_documented_reach() {
        let contained = [
            "CHOWN",
            "DAC_OVERRIDE",
            "FOWNER",
            "FSETID",
            "KILL",
            "SETGID",
            "SETUID",
            "SETPCAP",
            "NET_BIND_SERVICE",
            "NET_BROADCAST",
            "NET_ADMIN",
            "NET_RAW",
            "IPC_LOCK",
            "IPC_OWNER",
            "SYS_CHROOT",
            "SYS_PACCT",
            "MKNOD",
            "LEASE",
            "AUDIT_WRITE",
            "SETFCAP",
        ];
        for (name, listed) in TABLE {
            let expected = match name {
                name if contained.contains(&name) => Reach::Cell,
                "SYS_PTRACE" | "CHECKPOINT_RESTORE" => Reach::OwnProcesses,
                _ => Reach::Kernel,
            };
            assert_eq!((listed, reach(name)), (expected, expected), "{name}");
        }
    }

    /// Verifies R9.
    #[test]
    fn default_capabilities_stay_in_the_cell() {
        for name in DEFAULT {
            assert_eq!(reach(name), Reach::Cell, "{name}");
        }
    }

    /// Verifies R9.
    #[test]
    fn capability_names_are_accepted_in_any_case_with_and_without_prefix() {
        for name in ["NET_ADMIN", "net_admin", "CAP_NET_ADMIN", "cap_net_admin", "Cap_Net_Admin"] {
            assert_eq!(reach(name), Reach::Cell, "{name}");
        }
        for name in ["SYS_ADMIN", "sys_admin", "CAP_SYS_ADMIN", "cap_Sys_admin", "ALL", "all"] {
            assert_eq!(reach(name), Reach::Kernel, "{name}");
        }
        assert!(["ALL", "all", "All", "CAP_ALL"].iter().all(|name| is_all(name)));
        assert!(!is_all("ALLOW") && !is_all("SYS_ADMIN"));
    }

    /// Verifies R9.
    #[test]
    fn unknown_capability_reaches_the_kernel() {
        // In Go, the upper case of the long s and of the dotless i is an ASCII letter.
        for name in [
            "",
            "CAP_",
            "CAP_CAP_NET_ADMIN",
            " NET_ADMIN",
            "NET_ADMIN ",
            "LATER",
            "\u{17f}ys_admin",
            "k\u{131}ll",
        ] {
            assert_eq!(reach(name), Reach::Kernel, "{name:?}");
        }
    }

    #[test]
    fn capabilities_of_this_kernel_are_known() {
        let last = std::fs::read_to_string("/proc/sys/kernel/cap_last_cap").unwrap();
        assert!(last.trim().parse::<usize>().unwrap() < TABLE.len(), "{last}");
    }
}
