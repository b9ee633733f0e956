//! Paths by which a container reaches the kernel. A kubelet closes them for all containers that are
//! not privileged (1.36, pkg/securitycontext/util.go).

/// Paths that a kubelet masks, without the `thermal_throttle` directory of each CPU: it contains
/// only the temperature, and each would be another mount in every container. A kubelet that masks
/// these directories sends their paths.
pub const MASKED: [&str; 12] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
/// Paths that a kubelet makes read-only.
pub const READ_ONLY: [&str; 5] =
    ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];
