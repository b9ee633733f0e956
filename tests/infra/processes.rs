//! Instances' processes, and all that they hold.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use kiyot::backends::milpa::providers::{ErrorClass, InstanceId, Provider};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::bench::{Bench, cell_file, cgroup_mounts, eventually, run};

#[tokio::test]
async fn a_launch_with_the_same_token_is_the_same_launch() {
    let mut bench = Bench::new();
    let cell = bench.launch().await;
    let id = cell.instance.id.clone();
    let dir = bench.instance_dir(&id);
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(cell_file(&dir).bootstrap, cell.spec.bootstrap);
    eventually("its console", async || {
        bench.provider.console(&id).await.unwrap().contains("stand-in of")
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
    assert_ne!(bench.launcher(&id), launcher, "another token makes another launch");
    bench.provider.terminate(std::slice::from_ref(&id)).await.unwrap();
    bench.assert_clean(&id);
    bench.provider.terminate(&[id, InstanceId("unknown".into())]).await.unwrap();
}

#[tokio::test]
async fn a_killed_launcher_is_noticed() {
    let bench = Bench::new();
    let cell = bench.launch().await;
    let launcher = bench.launcher(&cell.instance.id);
    kill(Pid::from_raw(launcher), Signal::SIGKILL).unwrap();
    eventually("the end of the instance", async || {
        bench.provider.list_owned().await.unwrap().iter().all(|listed| !listed.running)
    })
    .await;
    eventually("nothing of the process", async || {
        !Path::new(&format!("/proc/{launcher}")).exists()
    })
    .await;
    assert_eq!(
        bench.provider.list_owned().await.unwrap().len(),
        1,
        "it is listed until it is terminated"
    );
    bench.provider.terminate(std::slice::from_ref(&cell.instance.id)).await.unwrap();
    bench.assert_clean(&cell.instance.id);
}

/// Verifies P6.
#[tokio::test]
async fn a_launch_that_was_cut_short_is_cleaned_up() {
    let mut bench = Bench::new();
    let cell = bench.launch().await;
    // As if the daemon had been killed before it wrote down the process.
    fs::remove_file(bench.instance_dir(&cell.instance.id).join("instance.json")).unwrap();
    bench.restart();
    assert!(!bench.provider.list_owned().await.unwrap()[0].running);
    bench.provider.terminate(std::slice::from_ref(&cell.instance.id)).await.unwrap();
    bench.assert_clean(&cell.instance.id);
}

#[tokio::test]
async fn a_whole_pid_namespace_ends_with_its_mounts_and_its_containers_cgroups() {
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
    eventually("the namespace's processes", async || inside().await.len() == 1).await;
    // One of them is moved to where the kubelet has a pod's containers, and frozen there if it can
    // be.
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
    bench.provider.terminate(std::slice::from_ref(id)).await.unwrap();
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
async fn mounts_that_a_cell_left_on_the_node_go() {
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
    bench.provider.terminate(std::slice::from_ref(&cell.instance.id)).await.unwrap();
    bench.assert_clean(&cell.instance.id);
}

#[tokio::test]
async fn a_program_that_is_missing_is_named() {
    let mut bench = Bench::new();
    bench.provider.check().await.unwrap();
    bench.config.netns.cell_binary = Some("/no/such/kiyot-cell".into());
    bench.restart();
    let error = bench.provider.check().await.unwrap_err();
    assert_eq!(
        (error.class.clone(), error.to_string().contains("/no/such/kiyot-cell")),
        (ErrorClass::Invalid, true),
        "{error}"
    );
}

/// A program that says in its environment that it is of a cell, which is [`LONGEST`] bytes long and
/// nowhere: what it points at is never read by the program itself.
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
    char *forged = mmap(NULL, LONGEST, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (forged == MAP_FAILED) return 2;
    struct prctl_mm_map map = {
        .start_code = at[26], .end_code = at[27], .start_data = at[45], .end_data = at[46],
        .start_brk = at[47], .brk = (unsigned long)sbrk(0), .start_stack = at[28],
        .arg_start = at[48], .arg_end = at[49],
        .env_start = (unsigned long)forged, .env_end = (unsigned long)forged + LONGEST,
        .exe_fd = -1,
    };
    if (prctl(PR_SET_MM, PR_SET_MM_MAP, &map, sizeof map, 0)) { perror("PR_SET_MM_MAP"); return 3; }
    puts("ready");
    fflush(stdout);
    pause();
    return 0;
}
"#;
/// How long the forged environment is, in bytes.
const LONGEST: u64 = 2 << 30;

/// A process of another one than the cells, which is killed when it is dropped.
struct Stranger(Child);

impl Stranger {
    /// Starts a program and waits for its first line.
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self(child)
    }

    fn runs(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Stranger {
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
    let mut stranger = Stranger::start(
        Command::new("sh")
            .args(["-c", "echo ready; exec sleep 1000"])
            .env("KIYOT_INSTANCE", bench.instance_dir(id)),
    );
    bench.provider.terminate(std::slice::from_ref(id)).await.unwrap();
    bench.assert_clean(id);
    assert!(stranger.runs());
}

/// Verifies N16.
#[tokio::test]
async fn forged_environment_is_not_read() {
    let bench = Bench::new();
    let (source, program) = (bench.path().join("forger.c"), bench.path().join("forger"));
    fs::write(&source, FORGER).unwrap();
    let longest = format!("-DLONGEST={LONGEST}UL");
    run("cc", &[&longest, "-o", program.to_str().unwrap(), source.to_str().unwrap()]);
    let cell = bench.launch().await;
    let mut stranger = Stranger::start(&mut Command::new(program));
    bench.provider.terminate(std::slice::from_ref(&cell.instance.id)).await.unwrap();
    assert!(stranger.runs());
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak * 1024 < LONGEST, "the most memory that this process had: {peak} KiB");
    bench.assert_clean(&cell.instance.id);
}

/// Verifies N15.
#[tokio::test]
async fn process_in_the_cells_group_ends_with_it() {
    let bench = Bench::new();
    let cell = bench.launch().await;
    let id = &cell.instance.id;
    // As what a killed daemon leaves: no parent, no namespace and no word of it says whose it is.
    let mut left =
        Stranger::start(Command::new("sh").args(["-c", "echo ready; exec sleep 1000"]).env_clear());
    let groups = cgroup_mounts();
    let group = groups.last().unwrap().join("kiyot").join(&id.0);
    fs::write(group.join("cgroup.procs"), left.0.id().to_string()).unwrap();
    bench.provider.terminate(std::slice::from_ref(id)).await.unwrap();
    assert!(!left.runs());
    bench.assert_clean(id);
}

/// Verifies N15.
#[tokio::test]
async fn plugin_gets_its_input_in_the_cells_group() {
    let mut bench = Bench::new();
    bench.configure_cni(r#", {"type": "tells-its-group"}"#);
    let told = bench.path().join("told");
    let script = format!(
        r#"#!/bin/sh
read -r line
cat /proc/self/cgroup >> {}
[ $CNI_COMMAND = DEL ] || echo "$line" | sed 's/.*"prevResult"://; s/,"type":"tells-its-group".*//; s/}}$//'
"#,
        told.display()
    );
    bench.add_plugin("tells-its-group", &script);
    let cell = bench.launch().await;
    let id = &cell.instance.id;
    let group = format!("/kiyot/{}", id.0);
    // What it answers is of no interest, and is thrown away with the cell.
    let _ = bench.provider.attach(id, &cell.attachment).await;
    bench.provider.terminate(std::slice::from_ref(id)).await.unwrap();
    let told = fs::read_to_string(told).unwrap();
    let in_group = told.lines().filter(|line| line.ends_with(&group)).count();
    assert!(in_group >= 2, "both for ADD and DEL it was in {group}:\n{told}");
    bench.assert_clean(id);
}
