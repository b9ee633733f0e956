//! Test of init's supervisor, in a separate binary because the reaper takes every child of the
//! process.

use std::process::Command;

use kiyot_cell::init::{
    bounded_log::BoundedLog,
    supervisor::{Service, Supervisor},
};

#[test]
fn service_is_restarted_and_its_orphans_are_reaped_until_it_powers_off() {
    // As PID 1 of a cell, the process becomes the parent of orphans.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let console = BoundedLog::open(dir.path().join("console.log"), 1 << 20).unwrap();
    let [runs, orphan, reaped] = ["runs", "orphan", "reaped"].map(|name| dir.path().join(name));
    let mut command = Command::new("sh");
    // In its last run the service leaves a process to init, and waits until init has reaped it.
    command.arg("-c").arg(format!(
        "echo run >> {0}; [ $(wc -l < {0}) -ge 3 ] || exit 7
        sh -c 'sleep 0.1 & echo $! > {1}'
        for i in $(seq 1200); do [ -e /proc/$(cat {1}) ] || break; sleep 0.05; done
        [ -e /proc/$(cat {1}) ] || touch {2}; exit 42",
        runs.display(),
        orphan.display(),
        reaped.display()
    ));
    let mut supervisor = Supervisor::start().unwrap();
    supervisor
        .add(Service::new("nothing", Command::new("/nowhere/at/all"), None, &console).unwrap());
    supervisor.add(Service::new("it", command, Some(42), &console).unwrap());
    supervisor.run(&console);
    assert_eq!(std::fs::read_to_string(&runs).unwrap().lines().count(), 3);
    assert!(reaped.exists(), "the orphan is a zombie");
    let printed = std::fs::read_to_string(dir.path().join("console.log")).unwrap();
    assert!(printed.contains("service exited service=it exit=code:7"), "{printed}");
    assert!(printed.contains("service not started service=nothing"), "{printed}");
}
