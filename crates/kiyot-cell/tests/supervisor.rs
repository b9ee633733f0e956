//! Test of init's supervisor, in a binary of its own: its reaper takes every child of the process.

use std::process::Command;

use kiyot_cell::init::{
    bounded_log::BoundedLog,
    supervisor::{Service, Supervisor},
};

#[test]
fn service_is_restarted_until_it_exits_with_the_power_off_code() {
    let dir = tempfile::tempdir().unwrap();
    let console = BoundedLog::open(dir.path().join("console.log"), 1 << 20).unwrap();
    let runs = dir.path().join("runs");
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!(
        "echo run >> {0}; [ $(wc -l < {0}) -ge 3 ] && exit 42; exit 7",
        runs.display()
    ));
    let mut supervisor = Supervisor::start().unwrap();
    supervisor
        .add(Service::new("nothing", Command::new("/nowhere/at/all"), None, &console).unwrap());
    supervisor.add(Service::new("it", command, Some(42), &console).unwrap());
    supervisor.run(&console);
    assert_eq!(std::fs::read_to_string(&runs).unwrap().lines().count(), 3);
    let printed = std::fs::read_to_string(dir.path().join("console.log")).unwrap();
    assert!(printed.contains("service exited service=it exit=code:7"), "{printed}");
    assert!(printed.contains("service not started service=nothing"), "{printed}");
}
