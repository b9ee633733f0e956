//! Kiyot on a real node: a virtual machine with Debian, systemd, cgroup version 2 only, and
//! containerd with the cgroup driver `systemd`. Kiyot is installed with its unit, and the machine
//! is rebooted.
//!
//! QEMU emulates the processor, so that tests do not need KVM. A machine is 10 to 20 times slower
//! than its host: limits are generous.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failed setup fails the test in place"
)]

mod cell_unit;
mod image;
mod machine;
mod pods;
mod service;
mod stock_debian;
mod strangers;
mod suite;
mod vm_limits;
