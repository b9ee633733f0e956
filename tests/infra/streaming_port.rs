//! The port of exec, attach and port-forward, while a user of the node has taken all ports.

use std::{fs, net::TcpListener, process::Command, thread};

use kiyot::backends::milpa::streaming::Streaming;
use kiyot_testkit::{LIMIT, wait_until};
use nix::sched::{CloneFlags, unshare};

/// Verifies X50.
#[test]
fn taken_ports_of_the_loopback_delay_no_start_and_a_free_port_is_used() {
    let in_namespace = || {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
        assert!(up.success());
        fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40001").unwrap();
        let taken = [40_000, 40_001].map(|port| TcpListener::bind(("127.0.0.1", port)).unwrap());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let streaming = Streaming::start().await;
            assert_eq!(streaming.address(), None);
            drop(taken);
            wait_until("a port is listened on", LIMIT, async || streaming.address()).await;
        });
    };
    thread::spawn(in_namespace).join().unwrap();
}
