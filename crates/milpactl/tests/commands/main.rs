//! The program against a daemon that the test plays.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed setup fails its test")]

mod daemon;

use std::{
    fs::Permissions,
    io::{BufRead, BufReader, Read},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::{Command, Output, Stdio},
    time::Instant,
};

use daemon::{Behaviour, Daemon};
use serde_json::Value;

fn milpactl(daemon: &Daemon) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_milpactl"));
    command.arg("--socket").arg(daemon.socket()).stdin(Stdio::null());
    command
}

fn output(daemon: &Daemon, line: &str) -> Output {
    milpactl(daemon).args(line.split(' ')).output().unwrap()
}

/// Returns standard output, standard error and exit code.
fn run(daemon: &Daemon, line: &str) -> (String, String, i32) {
    let output = output(daemon, line);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (text(output.stdout), text(output.stderr), output.status.code().unwrap())
}

#[test]
fn lists_have_the_columns_of_the_original() {
    let daemon = Daemon::start(Behaviour::default());
    for (line, first) in [
        ("get pods", "NAME UNITS RUNNING STATUS RESTARTS NODE IP AGE"),
        ("get nodes", "NAME STATUS INSTANCE-TYPE INSTANCE IP AGE"),
        ("get cells", "NAME STATUS INSTANCE-TYPE INSTANCE IP AGE"),
        ("get events", "TIMESTAMP NAME KIND STATUS SOURCE MESSAGE"),
        ("get metrics", "NAME TIMESTAMP CPU MEMORY DISK WINDOW"),
        ("get usage", "USAGE TYPE HOURS"),
        ("get backends", "NAME TYPE PROVIDER STATUS CELLS BOOTING WAITING"),
        ("pool", "NAME WANTED IDLE BOOTING HITS MISSES HIT%"),
    ] {
        let (text, error, code) = run(&daemon, line);
        let names: Vec<_> = text.lines().next().unwrap_or_default().split_whitespace().collect();
        assert_eq!((names.join(" ").as_str(), code), (first, 0), "{line}: {error}");
        assert!(!text.contains('\u{1b}'), "{line}: colours without a terminal");
    }
    let (text, ..) = run(&daemon, "version");
    assert!(text.starts_with("Milpa server version: {\"Major\": \"0\", "), "{text}");
}

#[test]
fn objects_are_json_yaml_and_names() {
    let daemon = Daemon::start(Behaviour::default());
    let (text, ..) = run(&daemon, "get pod web-0 -ojson");
    let object: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&object["kind"], &object["metadata"]["name"]), (&"Pod".into(), &"web-0".into()));
    let (text, ..) = run(&daemon, "get pods -o json");
    let list: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(list["items"].as_array().unwrap().len(), 3);
    let (text, ..) = run(&daemon, "get pod web-0 -o yaml");
    assert!(text.contains("kind: Pod") && text.contains("name: web-0"), "{text}");
    let (text, ..) = run(&daemon, "get pods -o name -l app=even");
    assert_eq!(text, "pod/default/web-0\npod/default/web-2\n");
    let (text, ..) = run(&daemon, "get pods -o name -n other");
    assert_eq!(text, "");
}

#[test]
fn unknown_and_ambiguous_names_name_the_nearest() {
    let daemon = Daemon::start(Behaviour::default());
    let (_, error, code) = run(&daemon, "get pod web-O");
    assert_eq!(code, 66);
    assert!(error.contains("did you mean: default/web-0"), "{error}");
    let (_, error, code) = run(&daemon, "describe cell cell-");
    assert_eq!(code, 66);
    assert!(error.contains("is not unique: cell-0"), "{error}");
    let (text, _, code) = run(&daemon, "describe pod web-1");
    assert_eq!(code, 0);
    for part in ["web-1", "Timeline", "t3.nano", "Events"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}

#[test]
fn forms_of_the_original_without_a_meaning_say_what_to_use() {
    let daemon = Daemon::start(Behaviour::default());
    for line in ["deploy -f app.yaml", "update x", "get services", "get secrets"] {
        let (_, error, code) = run(&daemon, line);
        assert_eq!(code, 64, "{line}");
        assert!(error.contains("kubectl"), "{line}: {error}");
    }
    assert_eq!(run(&daemon, "get pods -l a=(").2, 64);
    assert_eq!(run(&daemon, "get nothing").2, 64);
}

#[test]
fn daemon_that_is_down_closed_or_older_has_an_exit_code_of_its_own() {
    let daemon = Daemon::start(Behaviour { is_older: true, ..Behaviour::default() });
    let (_, error, code) = run(&daemon, "cordon");
    assert_eq!(code, 76);
    assert!(error.contains("0.0.1") && error.contains("upgrade the daemon"), "{error}");

    let denies = Daemon::start(Behaviour { denies: true, ..Behaviour::default() });
    assert_eq!(run(&denies, "cordon").2, 77);

    std::fs::set_permissions(daemon.socket(), Permissions::from_mode(0o600)).unwrap();
    if rustix::process::geteuid().is_root() {
        let closed = milpactl(&daemon).arg("version").uid(65_534).output().unwrap();
        assert_eq!(closed.status.code(), Some(77), "{closed:?}");
    }
    let missing = Command::new(env!("CARGO_BIN_EXE_milpactl"))
        .args(["--socket", "/nowhere/admin.sock", "version"])
        .output()
        .unwrap();
    assert_eq!(missing.status.code(), Some(69));
    let error = String::from_utf8(missing.stderr).unwrap();
    assert!(error.contains("/nowhere/admin.sock"), "{error}");
}

#[test]
fn first_line_of_ten_thousand_pods_comes_before_the_last_pod() {
    // The daemon sends the last part only when the first line was read.
    let daemon =
        Daemon::start(Behaviour { pods: 10_000, holds_the_end: true, ..Behaviour::default() });
    let begun = Instant::now();
    let mut child = milpactl(&daemon).args(["get", "pods"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().starts_with("NAME"));
    println!("first line after {:?}", begun.elapsed());
    daemon.release();
    assert_eq!(lines.count(), 10_000);
    assert!(child.wait().unwrap().success());
}

#[test]
fn closed_output_ends_the_program_quietly() {
    let daemon = Daemon::start(Behaviour { pods: 10_000, ..Behaviour::default() });
    let mut child = milpactl(&daemon)
        .args(["get", "pods"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 4];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut first).unwrap();
    drop(stdout);
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr), (Some(0), Vec::new()));
}

#[test]
fn log_is_followed_until_its_pod_ends() {
    let daemon = Daemon::start(Behaviour::default());
    let (stdout, stderr, code) = run(&daemon, "logs web-0 -f --lines 5 --since 10m");
    assert_eq!((stdout.as_str(), stderr.as_str(), code), ("out\n", "err\n", 0));
    let request = daemon.last_log().unwrap();
    assert_eq!((request.pod.as_str(), request.follow, request.lines), ("web-0", true, Some(5)));
    assert!(request.since_unix_nanos > 0);
    let (_, error, code) = run(&daemon, "logs web-0 --since yesterday");
    assert_eq!(code, 64, "{error}");
    run(&daemon, "logs cell-1");
    assert_eq!(daemon.last_log().unwrap().pod, "cell-1");
}

#[test]
fn watch_prints_changes_until_the_pod_has_ended() {
    let daemon = Daemon::start(Behaviour { pods: 1, ends_after: Some(3), ..Behaviour::default() });
    let (text, error, code) = run(&daemon, "get pod web-0 --watch");
    assert_eq!(code, 0, "{error}");
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert!(lines[1].contains("Dispatching") && lines[2].contains("Running"), "{text}");
    let (_, _, code) = run(&daemon, "get pods --watch -ojson");
    assert_eq!(code, 64);
}

#[test]
fn drain_ends_every_cell() {
    let daemon = Daemon::start(Behaviour::default());
    let (text, error, code) = run(&daemon, "drain --end --timeout 20s");
    assert_eq!(code, 0, "{error}");
    assert!(text.ends_with("no cell is left\n"), "{text}");
    assert_eq!(daemon.ended(), ["cell-0", "cell-1", "cell-2"]);

    let stays = Daemon::start(Behaviour::default());
    let (_, error, code) = run(&stays, "drain --timeout 1s");
    assert_eq!(code, 1);
    assert!(error.contains("3 cells are left") && error.contains("default/web-0"), "{error}");
}

#[test]
fn bundle_is_text_or_an_archive_that_replaces_no_file() {
    let daemon = Daemon::start(Behaviour::default());
    let (text, ..) = run(&daemon, "dump all");
    assert_eq!(text, "==> pods.txt <==\nfirst second==> log.txt <==\nlines");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("dump.tar");
    let line = format!("dump all --output {}", path.display());
    assert_eq!(run(&daemon, &line).2, 0);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let mut archive = tar::Archive::new(std::fs::File::open(&path).unwrap());
    let mut files = Vec::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut content = String::new();
        entry.read_to_string(&mut content).unwrap();
        files.push((entry.path().unwrap().display().to_string(), content));
    }
    let file = |name: &str, content: &str| (name.to_owned(), content.to_owned());
    assert_eq!(
        files,
        [file("kiyot-dump/pods.txt", "first second"), file("kiyot-dump/log.txt", "lines")]
    );
    assert_eq!(run(&daemon, &line).2, 1, "the file is there");
}

#[test]
fn top_without_a_terminal_prints_plain_lines_once() {
    let daemon = Daemon::start(Behaviour::default());
    let (text, error, code) = run(&daemon, "top");
    assert_eq!(code, 0, "{error}");
    assert!(text.starts_with("3 cells, 0.0156 $/h; starts "), "{text}");
    assert!(text.contains("default/web-1") && text.contains("12m"), "{text}");
    assert!(!text.contains('\u{1b}'), "{text}");
}

#[test]
fn completions_and_the_manual_need_no_daemon() {
    for line in [&["completion", "bash"][..], &["man"][..]] {
        let output = Command::new(env!("CARGO_BIN_EXE_milpactl")).args(line).output().unwrap();
        assert!(output.status.success() && output.stdout.len() > 500, "{line:?}");
    }
}

#[test]
fn pods_of_manifests_are_created_and_deleted_by_name() {
    let daemon = Daemon::start(Behaviour::default());
    let dir = tempfile::tempdir().unwrap();
    for name in ["first", "second"] {
        std::fs::write(dir.path().join(format!("{name}.yaml")), name).unwrap();
    }
    let (text, error, code) = run(&daemon, &format!("create -f {}", dir.path().display()));
    assert_eq!(
        (text.as_str(), code),
        ("pod/default/first created\npod/default/second created\n", 0),
        "{error}"
    );
    let (_, error, code) = run(&daemon, "create -f /nowhere.yaml");
    assert_eq!(code, 64);
    assert!(error.contains("/nowhere.yaml"), "{error}");

    let (text, ..) = run(&daemon, "delete first slow --grace-period 1");
    assert_eq!(text, "pod/default/first deleted\npod/slow deleted\n");
    let (text, error, code) = run(&daemon, "delete kubelets other");
    assert_eq!((text.as_str(), code), ("pod/default/other deleted\n", 1));
    assert!(error.contains("kubelets: it is the kubelet's pod"), "{error}");
}
