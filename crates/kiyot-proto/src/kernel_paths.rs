//! Paths by which a container reaches the kernel, as a kubelet closes them for all but privileged
//! containers (1.36, pkg/securitycontext/util.go).

/// Paths that a kubelet masks. The `thermal_throttle` directories of each CPU are left out: only
/// the temperature is in them, and each is a further mount in every container. A kubelet that masks
/// them sends them.
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
