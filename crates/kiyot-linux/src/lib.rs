//! Kernel interfaces that the daemon and the agent share: file trees, mountinfo and unmounting,
//! netlink with network devices, inotify, and the fields of a process's stat.
//!
//! Existing crates don't fit. `procfs` reads mountinfo as UTF-8, but a mount point may have any
//! bytes, and an unreadable line must not hide the other lines. The netlink crates are larger than
//! the few messages used here. rustix reads inotify events without another dependency.

pub mod inotify;
pub mod link;
pub mod mountinfo;
pub mod netlink;
pub mod process_stat;
pub mod tree;
mod unmount;

pub use unmount::unmount_beneath;
