//! Integration tests on a machine with systemd and cgroup version 2.

use std::{env, path::Path, process::Command};

use crate::{image, machine::Machine, pods, pods::Place};

/// Core of the integration tests: a test for each area of pods in cells. `NODE_TESTS` limits a run
/// to the tests whose names contain its value.
const CORE: [&str; 21] = [
    "cell::lifecycle::life::pod_runs_in_a_cell_of_its_own",
    "cell::lifecycle::life::exit_is_reported_with_its_code_and_message",
    "cell::lifecycle::life::repeated_stop_and_removal_succeed",
    "cell::lifecycle::stops::cell_in_a_frozen_cgroup_is_ended",
    "cell::lifecycle::stops::containers_of_a_cell_are_in_the_slice_of_their_pod",
    "cell::lifecycle::stops::lost_cell_leaves_no_cgroup_wherever_its_containers_were",
    "cell::isolation::processes::too_much_memory_is_an_oom_kill",
    "cell::failures::reboot::reboot_ends_pods_and_releases_addresses",
    "daemon::cell_is_outside_of_the_cgroup_of_the_daemon",
    "kit::pod_on_containerd_runs_and_leaves_nothing",
    "kit::node_stop_removes_running_pods",
    "cell::streaming::logs::log_is_complete_and_in_order",
    "cell::streaming::execs::input_and_exec_ends_are_reported_as_on_the_node",
    "cell::streaming::execs::process_over_its_timeout_is_dead_before_the_error",
    "cell::streaming::network::host_port_leads_to_the_cell_and_is_released_with_it",
    "cell::storage::volumes::files_of_the_kubelet_have_their_modes_in_the_cell",
    "cell::storage::volumes::empty_dir_lives_as_long_as_its_cell",
    "cell::lifecycle::usage::usage_names_its_pod_and_container",
    "cell::failures::restart::pods_outlive_a_killed_daemon",
    "cell::failures::restart::exit_during_the_outage_is_reported_afterwards",
    "cell::failures::restart::half_made_pod_is_joined_by_the_kubelets_retry",
];

/// Factor on the time limits of tests on an emulated machine.
const SLOWNESS: &str = "10";

/// Puts the programs where the tests expect them, which is where cargo built them.
fn unpack(machine: &mut Machine) {
    let (built, sources) = (image::build_directory(), Path::new(env!("CARGO_MANIFEST_DIR")));
    machine.ok(&format!(
        "mkdir -p {0}/examples {1} && cp /mnt/kiyot /mnt/kiyot-cell {0}/ \
         && cp /mnt/demo {0}/examples/ && cp -R /mnt/examples {1}/",
        built.display(),
        sources.display()
    ));
}

fn environment() -> String {
    format!("OWN_NAMESPACES=yes KIYOT_TEST_CGROUP_DRIVER=systemd KIYOT_TEST_SLOWNESS={SLOWNESS}")
}

#[test]
fn core_of_the_suite_names_present_tests() {
    let listed = Command::new(image::integration_tests()).arg("--list").output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let absent: Vec<_> = CORE
        .into_iter()
        .filter(|test| !listed.lines().any(|line| line == format!("{test}: test")))
        .collect();
    assert!(absent.is_empty(), "{absent:?}");
}

#[test]
#[ignore = "takes half an hour without KVM: make test-node"]
fn core_of_the_suite_passes_with_systemd_and_cgroups_of_version_2() {
    let mut machine = Machine::start();
    unpack(&mut machine);
    let mut failed = Vec::new();
    let only = env::var("NODE_TESTS").unwrap_or_default();
    for test in CORE.into_iter().filter(|test| test.contains(&only)) {
        let ran = machine.run(&format!("{} /mnt/integration --exact {test} 2>&1", environment()));
        // A renamed test would not run.
        if ran.code != 0 || !ran.output.contains("1 passed") {
            eprintln!("{}", ran.output);
            failed.push(test);
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
#[ignore = "takes minutes without KVM: make test-node"]
fn demo_runs_with_systemd_and_cgroups_of_version_2() {
    let mut machine = Machine::start();
    unpack(&mut machine);
    let demo = image::build_directory().join("examples/demo");
    let output = machine.ok(&format!("{} {}", environment(), demo.display()));
    assert!(output.contains("no process, mount, link, rule, cgroup or file is left"), "{output}");
}

#[test]
#[ignore = "takes minutes without KVM: make test-node"]
fn pod_on_the_node_runs_in_the_nodes_containerd() {
    let mut machine = Machine::start();
    pods::install(&mut machine);
    let local = pods::run(&mut machine, Place::Node, "local", 0);
    let found = machine.ok(&format!("ls -d {}/cri-containerd-*.scope", local.cgroup));
    assert!(found.contains(&local.container), "{found}");
    machine.ok(&format!("podctl exec {} 'echo inside' | grep -x inside", local.container));
    machine.ok(&format!("podctl remove {}", local.sandbox));
}
