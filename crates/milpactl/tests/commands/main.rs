//! The program against a daemon that the test plays.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed setup fails its test")]

mod daemon;
mod spdy_server;
mod streams;
mod versions;

use std::{
    fs::Permissions,
    io::{BufRead, BufReader, Read},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::{Child, Command, Output, Stdio},
    time::Instant,
};

use daemon::{Behaviour, Daemon};
use kiyot_testkit::Terminal;
use rustix::process::{Pid, Signal, kill_process};
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

/// Sends SIGINT.
fn interrupt(child: &Child) {
    kill_process(Pid::from_child(child), Signal::INT).unwrap();
}

/// Waits until a condition holds.
fn wait(what: &str, holds: impl FnMut() -> bool) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(kiyot_testkit::wait_for(what, holds));
}

#[test]
fn lists_have_the_columns_of_the_original() {
    let daemon = Daemon::start(Behaviour::default());
    for (line, first) in [
        ("get pods", "NAME UNITS RUNNING STATUS RESTARTS NODE IP AGE"),
        ("get nodes", "NAME STATUS INSTANCE-TYPE INSTANCE IP AGE"),
        (
            "get cells -o wide",
            "NAME STATUS INSTANCE-TYPE INSTANCE IP AGE POD ZONE $/H COST POOL PROVIDER",
        ),
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
    let (text, ..) = run(&daemon, "get cell cell-0 -o json");
    let object: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(object["status"]["provider"], "ec2");
    let (text, ..) = run(&daemon, "get pod web-0 -o yaml");
    assert!(text.contains("kind: Pod") && text.contains("name: web-0"), "{text}");
    let (text, ..) = run(&daemon, "get pods -o name -l app=even");
    assert_eq!(text, "pod/default/web-0\npod/default/web-2\n");
    let (text, ..) = run(&daemon, "get pods -o name -n other");
    assert_eq!(text, "");
}

#[test]
fn errors_of_unknown_and_ambiguous_names_list_near_names() {
    let daemon = Daemon::start(Behaviour::default());
    let (_, error, code) = run(&daemon, "get pod web-O");
    assert_eq!(code, 66);
    assert!(error.contains("did you mean: default/web-0"), "{error}");
    let (_, error, code) = run(&daemon, "describe cell cell-");
    assert_eq!(code, 66);
    assert!(error.contains("is not unique: cell-0"), "{error}");
    let (text, _, code) = run(&daemon, "describe pod web-1");
    assert_eq!(code, 0);
    for part in [
        "web-1",
        "Timeline",
        "Provider:          ec2",
        "t3.nano",
        "Console ends:\n    out\n",
        "Events",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let request = daemon.last_log().unwrap();
    assert_eq!((request.pod.as_str(), request.lines), ("cell-1", Some(10)));
    // Without rights to read the console, or with an older daemon, the rest is shown.
    let denies = Daemon::start(Behaviour { denies: true, ..Behaviour::default() });
    let older = Daemon::start(Behaviour { lacks_methods: true, ..Behaviour::default() });
    for daemon in [&denies, &older] {
        let (text, error, code) = run(daemon, "describe cell cell-1");
        assert_eq!((code, error.as_str()), (0, ""));
        assert!(text.contains("Timeline") && !text.contains("Console"), "{text}");
    }
}

#[test]
fn forms_of_the_original_without_a_meaning_say_what_to_use() {
    let daemon = Daemon::start(Behaviour::default());
    for (line, instead) in [
        ("deploy -f app.yaml", "`milpactl create -f`"),
        ("update x", "`kubectl apply`"),
        ("apply -f app.yaml", "`milpactl create -f`"),
        ("get services", "`kubectl get services`"),
        ("get secrets", "`kubectl get secrets`"),
    ] {
        let (_, error, code) = run(&daemon, line);
        assert_eq!(code, 64, "{line}");
        assert!(error.contains(instead), "{line}: {error}");
    }
}

#[test]
fn wrong_arguments_are_refused_with_allowed_values_before_a_call() {
    for (line, allowed) in [
        ("get", "<pods|cells|events|metrics|usage|backends|offerings|pools>"),
        ("get nothing", "possible values: pods, cells, events"),
        ("get podz", "a similar value exists: 'pods'"),
        ("get pods -l a=(", "tier in (a,b)"),
        ("get pods -o xml", "possible values: table, wide, json, yaml, name"),
        ("describe", "<pod|cell>"),
        ("dump", "<all>"),
        ("delete", "<PODS|--filename <FILE>>"),
        ("logs web --since soon", "10m"),
        ("drain --timeout soon", "90s or 10m"),
        ("port-forward web 99999", "REMOTE, LOCAL:REMOTE or :REMOTE"),
        ("exec web ls", "-- <COMMAND>"),
        ("plan -f /nowhere/pod.yaml", "/nowhere/pod.yaml"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_milpactl"))
            .args(["--socket", "/nowhere/admin.sock"])
            .args(line.split(' '))
            .output()
            .unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(64), "{line}: {error}");
        assert!(error.contains(allowed), "{line}: {error}");
    }
}

#[test]
fn exit_code_tells_a_stopped_daemon_from_a_denied_caller() {
    let daemon = Daemon::start(Behaviour::default());
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
    // The daemon sends the last part only after the first line was read.
    let daemon =
        Daemon::start(Behaviour { pods: 10_000, holds_the_end: true, ..Behaviour::default() });
    let begun = Instant::now();
    let mut child = milpactl(&daemon).args(["get", "pods"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().starts_with("NAME"));
    println!("first line after {:?}", begun.elapsed());
    // The list has 79 parts.
    assert_eq!((daemon.lists(), daemon.sent_parts()), (1, 1));
    daemon.release();
    assert_eq!((lines.count(), daemon.sent_parts()), (10_000, 79));
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
}

#[test]
fn watched_objects_are_documents_of_their_own() {
    let phases = |objects: &[Value]| -> Vec<String> {
        objects.iter().map(|object| object["status"]["phase"].as_str().unwrap().into()).collect()
    };
    let behaviour = Behaviour { pods: 1, ends_after: Some(3), ..Behaviour::default() };
    let daemon = Daemon::start(behaviour.clone());
    let (text, error, code) = run(&daemon, "get pod web-0 --watch -ojson");
    assert_eq!(code, 0, "{error}");
    let objects = serde_json::Deserializer::from_str(&text).into_iter::<Value>();
    let objects: Vec<_> = objects.collect::<Result<_, _>>().unwrap();
    assert_eq!(phases(&objects), ["Dispatching", "Running"]);
    let daemon = Daemon::start(behaviour);
    let (text, error, code) = run(&daemon, "get pod web-0 --watch -oyaml");
    assert_eq!(code, 0, "{error}");
    let documents: Vec<_> = text.split("\n---\n").collect();
    assert_eq!(documents.len(), 2, "{text}");
    for (document, phase) in documents.iter().zip(["Dispatching", "Running"]) {
        for line in ["kind: Pod", &format!("  phase: {phase}")] {
            assert!(document.lines().any(|own| own == line), "{line} is not in {document}");
        }
    }
}

#[test]
fn drain_ends_every_cell() {
    let daemon = Daemon::start(Behaviour::default());
    let (text, error, code) = run(&daemon, "drain --end --timeout 20s");
    assert_eq!(code, 0, "{error}");
    assert!(text.ends_with("no cell is left\n"), "{text}");
    assert_eq!(daemon.ended(), ["cell-0", "cell-1", "cell-2"]);

    let slow = Daemon::start(Behaviour { end_is_slow: true, ..Behaviour::default() });
    let (text, error, code) = run(&slow, "drain --end --timeout 20s");
    assert_eq!(code, 0, "{error}");
    assert!(!text.contains("cell-0 ended") && text.ends_with("no cell is left\n"), "{text}");
    assert_eq!(slow.cell_lists(), 3);

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
    assert_eq!(run(&daemon, &line).2, 1, "the file exists");
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

/// Verifies O50, O51, O52.
#[test]
fn pods_of_manifests_are_created_and_deleted_as_files_of_the_kubelet() {
    let daemon = Daemon::start(Behaviour::default());
    let (dir, static_pods) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let run = |line: &str| {
        let mut command = milpactl(&daemon);
        command.env("MILPACTL_STATIC_POD_PATH", static_pods.path()).args(line.split(' '));
        let output = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (text(output.stdout), text(output.stderr), output.status.code().unwrap())
    };
    let files = || {
        let entries = std::fs::read_dir(static_pods.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    };
    let file = dir.path().join("pods.yaml");
    let pod = |name: &str| format!("{{apiVersion: v1, kind: Pod, metadata: {{name: {name}}}}}\n");
    let create = format!("create -f {}", file.display());

    // A file that milpactl or the daemon refuses creates no pod.
    let target = dir.path().join("written");
    let climbs = format!("a/../../../../../../..{}", target.display());
    let map = format!("{{apiVersion: v1, kind: ConfigMap, data: {{{climbs}: x}}}}\n");
    for (text, expected, code) in [
        (format!("{}---\n{map}", pod("web")), "is of the kind \"ConfigMap\"", 64),
        (pod("web").replace("web", "../web"), "name \"../web\"; allowed", 64),
        (format!("{}---\n{}", pod("web"), pod("bad")), "Pod default/web: no room", 1),
    ] {
        std::fs::write(&file, text).unwrap();
        let (text, error, found) = run(&create);
        assert_eq!((text.as_str(), found), ("", code), "{error}");
        assert!(error.contains(expected), "{expected} is not in {error}");
        assert_eq!((files(), target.exists()), (Vec::<String>::new(), false));
    }
    let (_, error, code) = run("create -f /nowhere.yaml");
    assert_eq!(code, 64);
    assert!(error.contains("/nowhere.yaml"), "{error}");

    std::fs::write(&file, format!("{}---\n{}", pod("web"), pod("cart"))).unwrap();
    let (text, error, code) = run(&create);
    let created = "pod/default/web created\npod/default/cart created\n";
    assert_eq!((text.as_str(), code), (created, 0), "{error}");
    let both = ["kiyot-default_cart.json", "kiyot-default_web.json"];
    assert_eq!(files(), both);
    let written = std::fs::read_to_string(static_pods.path().join(both[1])).unwrap();
    let object: Value = serde_json::from_str(&written).unwrap();
    assert_eq!(object["metadata"]["annotations"]["kubernetes.io/target-runtime"], "kiyot");
    let (text, error, code) = run(&create);
    assert_eq!((text.as_str(), code), ("", 1));
    assert!(error.contains("pod default/web exists: "), "{error}");

    let (text, error, code) = run("delete web absent");
    assert_eq!((text.as_str(), code), ("pod/default/web deleted\n", 1));
    assert!(error.contains("no static pod default/absent"), "{error}");
    assert_eq!(run("delete ../web").2, 64);
    assert_eq!(run("delete web -n shop").2, 66);
    std::fs::write(&file, pod("cart")).unwrap();
    let (text, error, code) = run(&format!("delete -f {}", file.display()));
    assert_eq!((text.as_str(), code), ("pod/default/cart deleted\n", 0), "{error}");
    assert_eq!(files(), Vec::<String>::new());
    assert_eq!(run("delete").2, 64);
}

#[test]
fn name_means_the_pod_that_waits_for_another_cell_and_its_watch_goes_on() {
    let behaviour =
        Behaviour { pods: 1, replaces: true, ends_after: Some(3), ..Behaviour::default() };
    let daemon = Daemon::start(behaviour);
    let (text, error, code) = run(&daemon, "get pod web-0 --watch -o wide");
    assert_eq!(code, 0, "{error}");
    // The list in which the pod has no cell is shown, and does not end the watch.
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[1].contains("cell-0") && lines[2].contains("<none>"), "{text}");
    assert!(daemon.lists() > 3, "{}", daemon.lists());

    let daemon = Daemon::start(Behaviour { replaces: true, ..Behaviour::default() });
    run(&daemon, "get pods");
    let (text, ..) = run(&daemon, "get pods -o name");
    assert_eq!(text, "pod/default/web-0\npod/default/web-1\npod/default/web-2\n");
    for (name, pod) in [("web-0", "web-0"), ("milpaa", "milpaa")] {
        let (_, error, code) = run(&daemon, &format!("logs {name}"));
        assert_eq!((daemon.last_log().unwrap().pod.as_str(), code), (pod, 0), "{error}");
    }
}

#[test]
fn names_of_other_kinds_select_their_objects() {
    let daemon = Daemon::start(Behaviour::default());
    for (line, expected) in [
        ("get backends milpa -o name", "backend/milpa\n"),
        ("get pools small -o name", "pool/small\n"),
        ("get usage t3.nano -o name", "usage/t3.nano\n"),
        (
            "get offerings t3.nano -o name",
            "offering/t3.nano/us-east-1a\noffering/t3.nano/us-east-1b\n",
        ),
        ("get events web-0 -o name", "event/1\n"),
        ("get events cell-0 -o name", "event/2\n"),
        ("get events ended -o name", "event/3\n"),
        ("get events -n shop -o name", "event/3\n"),
        // A pod without events.
        ("get events web-1 -o name", ""),
    ] {
        let (text, error, code) = run(&daemon, line);
        assert_eq!((text.as_str(), code), (expected, 0), "{line}: {error}");
    }
    for (line, near) in [
        ("get backends milpo", "milpa"),
        ("get pools smal", "small"),
        ("get usage t3.nan", "t3.nano"),
        ("get offerings t3.nan", "t3.nano"),
        ("get events web-O", "default/web-0"),
    ] {
        let (text, error, code) = run(&daemon, line);
        assert_eq!((text.as_str(), code), ("", 66), "{line}");
        assert!(error.contains(&format!("did you mean: {near}")), "{line}: {error}");
    }
    let (_, error, _) = run(&daemon, "get usage nothing-alike");
    assert!(error.contains("`milpactl get usages` lists all"), "{error}");
    assert_eq!(run(&daemon, "get usages").2, 0);
    let (text, ..) = run(&daemon, "get metrics --no-headers");
    assert!(text.trim_end().ends_with(" 10s"), "{text}");
}

#[test]
fn watch_prints_the_offerings_of_two_zones_once() {
    let daemon = Daemon::start(Behaviour::default());
    let mut command = milpactl(&daemon);
    command.args(["get", "offerings", "--watch", "--no-headers"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let lists = || daemon.offering_lists();
    wait("four lists are printed", || lists() >= 4);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(output.lines().count(), 2);
}

#[test]
fn interrupt_ends_a_top_that_waits_for_the_daemon() {
    let daemon = Daemon::start(Behaviour { hangs: true, ..Behaviour::default() });
    let mut child = milpactl(&daemon).args(["top", "--watch"]).spawn().unwrap();
    wait("the cells are requested", || daemon.cell_lists() > 0);
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn interrupted_bundle_leaves_no_file() {
    let daemon = Daemon::start(Behaviour { dump_hangs: true, ..Behaviour::default() });
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("dump.tar");
    let mut command = milpactl(&daemon);
    let mut child = command.args(["dump", "all", "--output"]).arg(&path).spawn().unwrap();
    let files = || std::fs::read_dir(directory.path()).unwrap().count();
    wait("the bundle is begun", || files() == 1);
    assert!(!path.exists(), "an unfinished bundle has another name");
    interrupt(&child);
    assert_eq!((child.wait().unwrap().code(), files()), (Some(130), 0));
}

#[test]
fn manual_and_completions_have_all_verbs_with_their_options() {
    let program = || Command::new(env!("CARGO_BIN_EXE_milpactl"));
    let output = program().arg("man").output().unwrap();
    let page = String::from_utf8(output.stdout).unwrap();
    for part in ["MILPACTL PORT", "MILPACTL DRAIN", "static\\-pod\\-path", "selector", "Exit codes"]
    {
        assert!(page.contains(part), "{part} is not in {page}");
    }
    assert!(!page.contains("MILPACTL DEPLOY"), "{page}");
    let directory = tempfile::tempdir().unwrap();
    assert!(program().arg("man").arg(directory.path()).status().unwrap().success());
    let text = std::fs::read_to_string(directory.path().join("milpactl-delete.1")).unwrap();
    assert!(text.contains("static\\-pod\\-path"), "{text}");
    assert!(directory.path().join("milpactl.1").exists());
    for (shell, parts) in [
        ("bash", ["port-forward", "--static-pod-path"]),
        ("zsh", ["port-forward", "--static-pod-path"]),
        ("fish", ["port-forward", "-l static-pod-path"]),
    ] {
        let output = program().args(["completion", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        for part in parts {
            assert!(script.contains(part), "{shell}: {part}");
        }
    }
}

#[test]
fn plan_prints_what_the_daemon_explains_and_fails_for_a_refused_pod() {
    let daemon = Daemon::start(Behaviour::default());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pod.yaml");
    let line = format!("plan -f {}", path.display());
    assert_eq!(run(&daemon, &line).2, 64, "the file is absent");
    for (text, code) in [("good", 0), ("bad", 1)] {
        std::fs::write(&path, text).unwrap();
        let (out, error, found) = run(&daemon, &line);
        let refused = if text == "bad" { "  refused: no room\n" } else { "" };
        let expected =
            format!("Pod default/web\n  goes to milpa: {text} \n{refused}note: a Role\n");
        assert_eq!((out, found), (expected, code), "{error}");
    }
    let older = Daemon::start(Behaviour { lacks_methods: true, ..Behaviour::default() });
    assert_eq!(run(&older, &line).2, 76);
}

#[test]
fn progress_of_a_drain_is_shown_only_on_a_terminal_and_erased() {
    let daemon = Daemon::start(Behaviour::default());
    let (text, error, code) = run(&daemon, "drain --end");
    assert_eq!((code, error.as_str()), (0, ""), "{text}");
    assert!(!text.contains("ending"), "{text}");

    let daemon = Daemon::start(Behaviour::default());
    let mut terminal = Terminal::open();
    terminal.resize(120, 24);
    let mut command = milpactl(&daemon);
    let mut child = terminal.give(command.args(["drain", "--end"])).spawn().unwrap();
    terminal.wait_for("ending 3 cells");
    let until_end = terminal.wait_for("no cell is left");
    // The line is erased before the last line is written.
    assert!(until_end.contains("cell-0 ended") && until_end.contains("\u{1b}[2K"), "{until_end:?}");
    assert!(child.wait().unwrap().success());
}

#[test]
fn interrupted_drain_erases_its_line_and_reports_the_cordon() {
    let daemon = Daemon::start(Behaviour { end_hangs: true, ..Behaviour::default() });
    for (line, progress) in
        [("drain", "waiting for the end of 3 cells"), ("drain --end", "ending 3 cells")]
    {
        let mut terminal = Terminal::open();
        terminal.resize(120, 24);
        let mut command = milpactl(&daemon);
        let mut child = terminal.give(command.args(line.split(' '))).spawn().unwrap();
        terminal.wait_for(progress);
        interrupt(&child);
        let until_end = terminal.wait_for("still cordoned");
        let end = until_end.rsplit(progress.split(' ').next().unwrap()).next().unwrap();
        assert!(end.contains("\u{1b}[2K"), "{line}: {until_end:?}");
        assert_eq!(child.wait().unwrap().code(), Some(130), "{line}");
    }
}

#[test]
fn terminal_has_colours_and_a_refreshed_top() {
    let daemon = Daemon::start(Behaviour::default());
    let shown = |line: &str, variable: Option<&str>, end: &str| {
        let mut terminal = Terminal::open();
        terminal.resize(160, 24);
        let mut command = milpactl(&daemon);
        command.env_remove("NO_COLOR").args(line.split(' '));
        if let Some(variable) = variable {
            command.env(variable, "1");
        }
        let mut child = terminal.give(&mut command).spawn().unwrap();
        let shown = terminal.wait_for(end);
        assert!(child.wait().unwrap().success());
        shown
    };
    let coloured = shown("get pods", None, "web-2");
    assert!(coloured.contains("\u{1b}[32mRunning\u{1b}[0m"), "{coloured:?}");
    let plain = shown("get pods", Some("NO_COLOR"), "web-2");
    assert!(plain.contains("Running") && !plain.contains('\u{1b}'), "{plain:?}");
    let once = shown("top --once", None, "cell-2");
    assert!(!once.contains("\u{1b}[J"), "{once:?}");

    let mut terminal = Terminal::open();
    terminal.resize(160, 24);
    let mut command = milpactl(&daemon);
    let mut child = terminal.give(command.arg("top")).spawn().unwrap();
    for _ in 0..2 {
        terminal.wait_for("\u{1b}[H\u{1b}[J3 cells");
        let picture = terminal.wait_for("cell-2");
        assert!(picture.contains("\u{1b}[32mBound"), "{picture:?}");
    }
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
