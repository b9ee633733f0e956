//! Killed processes, cut links and rebooted nodes.

mod clocks;
mod cuts;
pub(crate) mod faults;
pub(crate) mod freezes;
mod health;
mod journal_kills;
pub(crate) mod kills;
mod kubelet_restarts;
mod outages;
pub(crate) mod reboot;
mod restart;
mod slow_link;
