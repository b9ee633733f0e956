//! The user data of an instance of EC2 on a stock Debian. The daemon and the cloud run in a test of
//! tests/instances, in namespaces of their own. This test gives that test the disk, which is built
//! from packages of the network.

use std::{path::Path, process::Command};

use crate::{
    image::{self, Variant},
    machine,
};

/// Name of the test in tests/instances.
const TEST: &str = "stock_debian::user_data_makes_a_cell_of_a_stock_debian";
/// Factor on the time limits of that test, because the machine is emulated.
const SLOWNESS: &str = "10";

/// Verifies V82.
#[test]
#[ignore = "takes minutes without KVM: make test-node"]
fn user_data_makes_a_cell_of_a_stock_debian() {
    let _turn = machine::turn();
    let output = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/runner"))
        .arg(image::instance_tests())
        .args(["--ignored", "--nocapture", "--exact", TEST])
        .env("KIYOT_TEST_DISK", image::debian(Variant::Stock))
        .env("KIYOT_TEST_SLOWNESS", SLOWNESS)
        .output()
        .unwrap();
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    eprintln!("{stdout}{stderr}");
    // A renamed test would not run.
    assert!(output.status.success() && stdout.contains("1 passed"), "{}", output.status);
}
