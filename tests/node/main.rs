//! Kiyot on a real node: a virtual machine with Debian, systemd as its first process, version 2 of
//! control groups alone, and containerd with the cgroup driver `systemd`. Kiyot is installed by its
//! unit, and the machine is booted anew for real.
//!
//! QEMU emulates the processor: no test needs KVM. So a machine is 10 to 20 times slower than the
//! one that it is on, and the limits here are generous.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "what a test cannot set up fails the test, at the place"
)]

mod image;
mod machine;
mod pods;
mod service;
mod suite;
