//! `[backends.NAME.qemu]`: cells made of virtual machines of this node.

use std::path::PathBuf;

use kiyot_values::problems::Table;

use super::{LocalMachine, LocalNetwork, MAX_CELLS_LIMIT, read};

const IMAGE_DIR: &str = "/usr/share/kiyot/cell-image";
const PROGRAM: &str = "qemu-system-x86_64";
const DISK_SIZE: u64 = 10 << 30;
/// Measured: 60 MiB in use before the pod (docs/reports/2026-11-28-cell-image.md), 11 MiB for its
/// shim, and 42 MiB of programs mapped from files.
const MEMORY_OVERHEAD: u64 = 128 << 20;
/// Range of a disk's size: an empty file system, and the largest of ext4 with blocks of 4 KiB.
const DISK_BYTES: std::ops::RangeInclusive<u64> = 64 << 20..=16 << 40;
/// A number that neither distributions nor systemd assign (systemd, UIDS-GIDS.md).
const USER: u32 = 65521;
/// Highest user or group; the next number stands for no user or group.
const MAX_ID: u32 = u32::MAX - 1;
/// First of the users of cells: neither distributions, nor systemd (UIDS-GIDS.md), nor the kubelet
/// and shadow for user namespaces, nor SSSD assign these numbers.
const FIRST_USER: u32 = 2_100_000_000;
/// Range of [`FIRST_USER`]: above the users of 16 bits, so that each cell has one.
const FIRST_USERS: std::ops::RangeInclusive<u32> = 65_536..=MAX_ID - MAX_CELLS_LIMIT as u32;

/// Cells made of virtual machines of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qemu {
    /// Program `kiyot-cell`. By default the one beside kiyot, otherwise
    /// `/usr/libexec/kiyot/kiyot-cell`.
    pub cell_binary: Option<PathBuf>,
    /// Directory of the image's `kernel`, `initramfs` and `root.squashfs`.
    pub image_dir: PathBuf,
    /// Memory in bytes that the image's processes need beside a pod.
    pub memory_overhead: u64,
    /// Program QEMU: a name on PATH or a path.
    pub program: PathBuf,
    /// Accelerator of the virtual machines.
    pub accel: AcceleratorChoice,
    /// Size of a cell's disk in bytes. The file is sparse.
    pub disk_size: u64,
    /// User of the QEMU that probes the accelerator.
    pub user: u32,
    /// First of the [`MAX_CELLS_LIMIT`] users of cells' QEMU processes.
    pub first_user: u32,
    /// Group of the QEMU processes.
    pub group: u32,
    /// Network of cells.
    pub network: LocalNetwork,
    /// Part of this node that cells may have.
    pub machine: LocalMachine,
}

/// Accelerator of virtual machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AcceleratorChoice {
    /// `auto`: KVM if a guest runs under it, otherwise TCG.
    Auto,
    /// `kvm`.
    Kvm,
    /// `tcg`.
    Tcg,
}

impl Default for Qemu {
    fn default() -> Self {
        Self {
            cell_binary: None,
            image_dir: IMAGE_DIR.into(),
            memory_overhead: MEMORY_OVERHEAD,
            program: PROGRAM.into(),
            accel: AcceleratorChoice::Auto,
            disk_size: DISK_SIZE,
            user: USER,
            first_user: FIRST_USER,
            group: USER,
            network: LocalNetwork::default(),
            machine: LocalMachine::default(),
        }
    }
}

impl Qemu {
    pub(super) fn read(mut table: Table<'_>) -> Self {
        let mut qemu = Self::default();
        table.set("cell_binary", &mut qemu.cell_binary, |field| read::path(field).map(Some));
        table.set("image_dir", &mut qemu.image_dir, read::path);
        table.set("memory_overhead", &mut qemu.memory_overhead, read::memory_overhead);
        table.set("program", &mut qemu.program, read::program);
        table.set("accel", &mut qemu.accel, |field| {
            field.choice(&[
                ("auto", AcceleratorChoice::Auto),
                ("kvm", AcceleratorChoice::Kvm),
                ("tcg", AcceleratorChoice::Tcg),
            ])
        });
        table.set("disk_size", &mut qemu.disk_size, |field| {
            read::bytes_in(field, "from \"64Mi\" to \"16Ti\"", DISK_BYTES)
        });
        for (key, target) in [("user", &mut qemu.user), ("group", &mut qemu.group)] {
            table.set(key, target, |field| field.number(1..=MAX_ID));
        }
        table.set("first_user", &mut qemu.first_user, |field| field.number(FIRST_USERS));
        qemu.network = LocalNetwork::read(&mut table);
        qemu.machine = LocalMachine::read(&mut table);
        table.finish();
        qemu
    }
}
