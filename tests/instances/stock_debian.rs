//! The user data on a stock Debian: a virtual machine with systemd and cloud-init. cloud-init reads
//! the user data from the metadata service, and apt installs packages.

use std::{env, path::PathBuf};

use kiyot_testcloud::Disk;
use kiyot_testkit::wait_for;
use tokio::time::Instant;

use super::{World, pod, run_in_the_end};

/// The variable with the directory of the disk and its kernel, which tests/node builds.
const DISK: &str = "KIYOT_TEST_DISK";

/// Verifies V82.
#[tokio::test]
#[ignore = "takes minutes without KVM, and needs a disk: make test-node"]
async fn user_data_makes_a_cell_of_a_stock_debian() {
    let directory = env::var_os(DISK).expect("tests/node sets KIYOT_TEST_DISK");
    let directory = PathBuf::from(directory);
    let world = World::start().await;
    let (kernel, root) = (directory.join("kernel"), directory.join("root.ext4"));
    world.boot_from(Disk { kernel, root });
    let mut options = world.options();
    // An emulated machine is slow and may take longer to enrol.
    options.milpa.push_str("launch_timeout = \"30m\"\ntoken_ttl = \"30m\"\n");
    let (_kiyot, mut kubelet) = world.daemon(options).await;
    let begun = Instant::now();
    let script = "echo hello from $(uname -r); trap 'exit 0' TERM; while :; do sleep 0.5; done";
    let running = run_in_the_end(&mut kubelet, &pod("stock", script)).await;
    let main = running.container("main");
    kubelet.logged(main, "hello from ").await;
    eprintln!("the pod has logged after {:.0} s", begun.elapsed().as_secs_f64());
    let account = kubelet.cell_account(&running.sandbox).await.unwrap().unwrap();
    eprintln!("its cell: {account}");

    let instance = world.instance_of("stock");
    let status = kubelet.sandbox_status(&running.sandbox).await.unwrap();
    assert_eq!(status.network.unwrap().ip, instance.address);
    let kernel = kubelet.log_lines(main).remove(0).text;
    assert!(kernel.ends_with("-cloud-amd64"), "{kernel}");
    wait_for("cloud-init has ended, and names its source", || {
        world.console(&instance.id).contains("Datasource DataSourceEc2Local")
    })
    .await;
    assert_eq!(world.launched().len(), 1);
    world.ends(&mut kubelet, &[&running]).await;
}
