//! Processes of instances, and the resources that they hold.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use kiyot_engine::{
    id::CellId,
    provider::{ErrorClass, InstanceId, Provider},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::bench::{Bench, cell_file, cgroup_mounts, run, wait_for};

#[tokio::test]
async fn launch_with_the_same_token_is_idempotent() {
    let mut bench = Bench::new();
    let cell = bench.launch().await;
    let id = cell.instance.id.clone();
    let dir = bench.instance_dir(&id);
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(cell_file(&dir).bootstrap, cell.spec.bootstrap);
    wait_for("the console has output", async || {
        bench.provider.console(&id).await.unwrap().contains("stub of")
    })
    .await;
    let launcher = bench.launcher(&id);
    for _ in 0..2 {
        assert_eq!(bench.provider.launch(&cell.spec, "token").await.unwrap(), cell.instance);
        assert_eq!(bench.launcher(&id), launcher);
        assert_eq!(
            bench.provider.list_owned().await.unwrap(),
            std::slice::from_ref(&cell.instance)
        );
        bench.restart();
    }
    assert_eq!(bench.provider.launch(&cell.spec, "another token").await.unwrap(), cell.instance);
    assert_ne!(bench.launcher(&id), launcher, "another token launches another process");
    bench.end(&id).await.unwrap();
    bench.assert_clean(&id);
    bench.end(&id).await.unwrap();
    bench.end(&InstanceId(CellId::mint().unwrap().to_string())).await.unwrap();
    // The instance of another provider has not ended.
    let other = InstanceId("i-0123456789abcdef0".into());
    assert_eq!(bench.end(&other).await.unwrap_err().class, ErrorClass::Invalid);
    let described = bench.provider.describe(&other).await;
    assert_eq!(described.unwrap_err().class, ErrorClass::Invalid);
}

#[tokio::test]
async fn killed_launcher_ends_the_instance() {
    let bench = Bench::new();
    let cell = bench.launch().await;
    let launcher = bench.launcher(&cell.instance.id);
    kill(Pid::from_raw(launcher), Signal::SIGKILL).unwrap();
    wait_for("the instance has ended", async || {
        bench.provider.list_owned().await.unwrap().iter().all(|listed| !listed.state.is_alive())
    })
    .await;
    wait_for("the process is reaped", async || !Path::new(&format!("/proc/{launcher}")).exists())
        .await;
    assert_eq!(
        bench.provider.list_owned().await.unwrap().len(),
        1,
        "an ended instance is listed until it is terminated"
    );
    bench.end(&cell.instance.id).await.unwrap();
    bench.assert_clean(&cell.instance.id);
}

/// Verifies X3.
#[tokio::test]
async fn frozen_cell_is_detached_from_its_network() {
    let mut bench = Bench::new();
    bench.configure_cni("");
    let cell = bench.launch().await;
    bench.provider.attach(&cell.instance.id, &cell.attachment).await.unwrap();
    // In version 2 plugins freeze too, because they run in the cell's cgroup.
    let frozen: Vec<_> = cgroup_mounts()
        .into_iter()
        .map(|mount| mount.join("kiyot").join(&cell.instance.id.0).join("cgroup.freeze"))
        .filter(|file| fs::write(file, "1").is_ok())
        .collect();
    assert_eq!(frozen.len(), 1, "{frozen:?}");
    bench.end(&cell.instance.id).await.unwrap();
    bench.assert_clean(&cell.instance.id);
}

/// Verifies P6.
#[tokio::test]
async fn interrupted_launch_is_cleaned_up() {
    let mut bench = Bench::new();
    let cell = bench.launch().await;
    // An unrecorded process is found by its cgroups, which the stub joins before it prints.
    wait_for("the process has joined its cgroups", async || {
        bench.provider.console(&cell.instance.id).await.unwrap().contains("stub of")
    })
    .await;
    // The state of a daemon that was killed before it recorded the process.
    fs::remove_file(bench.instance_dir(&cell.instance.id).join("instance.json")).unwrap();
    bench.restart();
    assert!(!bench.provider.list_owned().await.unwrap()[0].state.is_alive());
    bench.end(&cell.instance.id).await.unwrap();
    bench.assert_clean(&cell.instance.id);
}

#[tokio::test]
async fn pid_namespace_ends_with_its_mounts_and_its_containers_cgroups() {
    let bench = Bench::new();
    fs::write(bench.config.state_dir.join("with-pid-namespace"), "").unwrap();
    let cell = bench.launch().await;
    let id = &cell.instance.id;
    bench.provider.attach(id, &cell.attachment).await.unwrap();
    let inside = async || {
        let found = fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| entry.unwrap().file_name().into_string().ok()?.parse::<i32>().ok());
        let own = |pid: &i32| {
            fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|text| text.contains(&id.0))
        };
        let sleeps = |pid: &i32| {
            fs::read_to_string(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|text| text == "sleep\x001000\0")
        };
        found.filter(|pid| own(pid) && sleeps(pid)).collect::<Vec<_>>()
    };
    wait_for("the namespace's processes run", async || inside().await.len() == 1).await;
    // A process is moved to a container's cgroup in the kubelet's hierarchy, and frozen there if
    // the freezer is available.
    let container = "0123456789abcdef".repeat(4);
    let mut pods: Vec<PathBuf> = Vec::new();
    for mount in cgroup_mounts().iter().filter(|mount| {
        mount.ends_with("freezer")
            || mount.ends_with("pids")
            || mount.join("cgroup.controllers").exists()
    }) {
        let pod = mount
            .join(format!("kiyot-test-{}", bench.name))
            .join(format!("pod{}", cell.attachment.pod_uid));
        let dir = pod.join(&container);
        fs::create_dir_all(dir.join("nested")).unwrap();
        fs::create_dir_all(pod.join("f".repeat(64))).unwrap();
        fs::write(dir.join("cgroup.procs"), inside_pid(&inside().await)).unwrap();
        if dir.join("freezer.state").exists() {
            fs::write(dir.join("freezer.state"), "FROZEN").unwrap();
        }
        pods.push(pod);
    }
    assert!(!pods.is_empty());
    bench.end(id).await.unwrap();
    for pod in &pods {
        assert!(pod.exists(), "the pod's own cgroup is the kubelet's");
        let left = fs::read_dir(pod)
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().file_type().unwrap().is_dir())
            .count();
        assert_eq!(left, 0, "{}", pod.display());
        fs::remove_dir(pod).unwrap();
        fs::remove_dir(pod.parent().unwrap()).unwrap();
    }
    bench.assert_clean(id);
}

fn inside_pid(pids: &[i32]) -> String {
    assert_eq!(pids.len(), 1);
    pids[0].to_string()
}

#[tokio::test]
async fn mounts_that_a_cell_left_on_the_node_are_removed() {
    let bench = Bench::new();
    let cell = bench.launch().await;
    let (lower, upper) = (
        bench.instance_dir(&cell.instance.id).join("a dir"),
        bench.instance_dir(&cell.instance.id).join("a dir/deeper"),
    );
    for dir in [&lower, &upper] {
        fs::create_dir_all(dir).unwrap();
        nix::mount::mount(
            Some("none"),
            dir,
            Some("tmpfs"),
            nix::mount::MsFlags::empty(),
            Some("size=1m"),
        )
        .unwrap();
    }
    bench.end(&cell.instance.id).await.unwrap();
    bench.assert_clean(&cell.instance.id);
}

#[tokio::test]
async fn missing_executable_is_named_in_the_error() {
    let mut bench = Bench::new();
    bench.provider.check().await.unwrap();
    bench.config.netns.cell_binary = Some("/no/such/kiyot-cell".into());
    bench.restart();
    let error = bench.provider.check().await.unwrap_err();
    assert_eq!(
        (error.class, error.to_string().contains("/no/such/kiyot-cell")),
        (ErrorClass::Invalid, true),
        "{error}"
    );
}

/// A program that forges an environment of [`FORGED_BYTES`]: an anonymous mapping without memory.
/// The kernel would allocate the memory for a reader of `/proc/<pid>/environ`.
const FORGER: &str = r#"
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <linux/prctl.h>
#include <unistd.h>

int main(void) {
    char line[4096];
    unsigned long at[53] = {0};
    FILE *stat = fopen("/proc/self/stat", "r");
    if (!stat || !fgets(line, sizeof line, stat)) return 1;
    int field = 2;
    for (char *word = strtok(strrchr(line, ')') + 1, " "); word && field < 52; word = strtok(NULL, " "))
        sscanf(word, "%lu", &at[++field]);
    char *forged = mmap(NULL, FORGED_BYTES, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (forged == MAP_FAILED) return 2;
    struct prctl_mm_map map = {
        .start_code = at[26], .end_code = at[27], .start_data = at[45], .end_data = at[46],
        .start_brk = at[47], .brk = (unsigned long)sbrk(0), .start_stack = at[28],
        .arg_start = at[48], .arg_end = at[49],
        .env_start = (unsigned long)forged, .env_end = (unsigned long)forged + FORGED_BYTES,
        .exe_fd = -1,
    };
    if (prctl(PR_SET_MM, PR_SET_MM_MAP, &map, sizeof map, 0)) { perror("PR_SET_MM_MAP"); return 3; }
    puts("ready");
    fflush(stdout);
    pause();
    return 0;
}
"#;
/// The length of the forged environment.
const FORGED_BYTES: u64 = 2 << 30;

/// A process that belongs to no cell. Killed when it is dropped.
struct Unrelated(Child);

impl Unrelated {
    /// Starts a program and waits for its first line.
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self(child)
    }

    fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Unrelated {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Verifies N15.
#[tokio::test]
async fn process_that_claims_a_cell_in_its_environment_is_left_alone() {
    let bench = Bench::new();
    let cell = bench.launch().await;
    let id = &cell.instance.id;
    let mut unrelated = Unrelated::start(
        Command::new("sh")
            .args(["-c", "echo ready; exec sleep 1000"])
            .env("KIYOT_INSTANCE", bench.instance_dir(id)),
    );
    bench.end(id).await.unwrap();
    bench.assert_clean(id);
    assert!(unrelated.is_running());
}

/// Verifies N16.
#[tokio::test]
async fn forged_environment_is_not_read() {
    let bench = Bench::new();
    let (source, program) = (bench.path().join("forger.c"), bench.path().join("forger"));
    fs::write(&source, FORGER).unwrap();
    let define = format!("-DFORGED_BYTES={FORGED_BYTES}UL");
    run("cc", &[&define, "-o", program.to_str().unwrap(), source.to_str().unwrap()]);
    let cell = bench.launch().await;
    let mut unrelated = Unrelated::start(&mut Command::new(program));
    bench.end(&cell.instance.id).await.unwrap();
    assert!(unrelated.is_running());
    let peak = kiyot_testkit::peak_resident_kib("self").unwrap();
    assert!(peak * 1024 < FORGED_BYTES, "peak memory of this process: {peak} KiB");
    bench.assert_clean(&cell.instance.id);
}

/// Verifies N15.
#[tokio::test]
async fn process_in_the_cells_cgroup_ends_with_it() {
    let bench = Bench::new();
    let cell = bench.launch().await;
    let id = &cell.instance.id;
    // A process that a killed daemon left. Only its cgroup shows that it belongs to the cell.
    let mut left = Unrelated::start(
        Command::new("sh").args(["-c", "echo ready; exec sleep 1000"]).env_clear(),
    );
    let groups = cgroup_mounts();
    let group = groups.last().unwrap().join("kiyot").join(&id.0);
    fs::write(group.join("cgroup.procs"), left.0.id().to_string()).unwrap();
    bench.end(id).await.unwrap();
    assert!(!left.is_running());
    bench.assert_clean(id);
}

/// Verifies N15.
#[tokio::test]
async fn plugin_runs_in_the_cells_cgroup() {
    let mut bench = Bench::new();
    bench.configure_cni(r#", {"type": "records-its-cgroup"}"#);
    let cgroups = bench.path().join("cgroups");
    let script = format!(
        r#"#!/bin/sh
read -r line
cat /proc/self/cgroup >> {}
[ $CNI_COMMAND = DEL ] || echo "$line" | sed 's/.*"prevResult"://; s/,"type":"records-its-cgroup".*//; s/}}$//'
"#,
        cgroups.display()
    );
    bench.add_plugin("records-its-cgroup", &script);
    let cell = bench.launch().await;
    let id = &cell.instance.id;
    let group = format!("/kiyot/{}", id.0);
    // The plugin's result does not matter.
    let _ = bench.provider.attach(id, &cell.attachment).await;
    bench.end(id).await.unwrap();
    let cgroups = fs::read_to_string(cgroups).unwrap();
    let in_group = cgroups.lines().filter(|line| line.ends_with(&group)).count();
    assert!(in_group >= 2, "ADD and DEL must both run in {group}:\n{cgroups}");
    bench.assert_clean(id);
}

/// Verifies N21, X18.
#[tokio::test]
async fn instance_with_an_unreadable_record_runs_until_its_processes_have_ended() {
    // A failing disk, and a file of a failed disk.
    for is_broken in [false, true] {
        let bench = Bench::new();
        let cell = bench.launch().await;
        let (id, launcher) = (&cell.instance.id, bench.launcher(&cell.instance.id));
        let in_its_cgroup = || bench.resources_of(id).iter().any(|held| held.contains("sleep"));
        wait_for("the process is in its cgroup", async || in_its_cgroup()).await;
        let record = bench.instance_dir(id).join("instance.json");
        fs::remove_file(&record).unwrap();
        if is_broken {
            fs::write(&record, "{").unwrap();
        } else {
            fs::create_dir(&record).unwrap();
        }
        for _ in 0..2 {
            assert!(bench.provider.list_owned().await.unwrap()[0].state.is_alive());
            assert!(bench.provider.describe(id).await.unwrap().state.is_alive());
        }
        kill(Pid::from_raw(launcher), Signal::SIGKILL).unwrap();
        wait_for("the end is listed", async || {
            !bench.provider.list_owned().await.unwrap()[0].state.is_alive()
        })
        .await;
        bench.end(id).await.unwrap();
        bench.assert_clean(id);
    }
}
