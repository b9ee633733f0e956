//! Kiyot as a service of systemd.

use crate::{
    machine::Machine,
    pods::{self, Place},
};

/// The ids of a cell's processes: its launcher, its first process, its agent and its containerd.
const CELL: &str =
    "pgrep -f 'kiyot-cell (launch|init|agent)|containerd .*cells/' | sort -n | tr '\\n' ' '";

#[test]
fn cells_outlive_the_service_and_end_with_the_node() {
    let mut machine = Machine::start();
    pods::install(&mut machine);
    let local = pods::run(&mut machine, Place::Node, "local", 0);
    let cell = pods::run(&mut machine, Place::Cell, "celled", 0);
    eprintln!("{local:?} {cell:?}");
    eprintln!("{}", machine.ok("systemd-cgls --no-pager; systemctl status kiyot --no-pager"));
    eprintln!("{}", machine.ok(CELL));
    eprintln!("{:#}", pods::list(&mut machine));
}
