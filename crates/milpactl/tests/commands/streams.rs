//! exec, attach and port-forward.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    process::{Child, Stdio},
};

use kiyot_testkit::{LIMIT, Terminal, wait_for};
use rustix::{
    io::ioctl_fionread,
    pipe::fcntl_getpipe_size,
    process::{Pid, Signal, kill_process},
};
use tokio::runtime::Builder;

use super::{
    daemon::{Behaviour, Daemon},
    milpactl, run,
};

fn spawn(daemon: &Daemon, line: &str) -> Child {
    let mut command = milpactl(daemon);
    command.args(line.split(' ')).stdin(Stdio::piped());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for the end of a program, and returns its exit code and the rest of its standard error.
fn ended(child: Child) -> (Option<i32>, String) {
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

fn read_line(child: &mut Child) -> String {
    let mut line = Vec::new();
    let stdout = child.stdout.as_mut().unwrap();
    while !line.ends_with(b"\n") {
        let mut byte = [0];
        stdout.read_exact(&mut byte).unwrap();
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

#[test]
fn exec_passes_input_to_its_end_and_both_outputs() {
    let daemon = Daemon::start(Behaviour::default());
    let mut child = spawn(&daemon, "exec -i web-0 -u main -- cat");
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"first\n").unwrap();
    assert_eq!(read_line(&mut child), "first\n");
    let rest: Vec<u8> = (0..1 << 20).map(|number: u32| number as u8).collect();
    let sending = std::thread::spawn(move || {
        stdin.write_all(&rest).unwrap();
        rest
    });
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(output.stdout == sending.join().unwrap(), "{} bytes", output.stdout.len());
    assert_eq!(output.stderr, b"begun\n");
    let request = daemon.last_exec().unwrap();
    assert_eq!((request.namespace.as_str(), request.pod.as_str()), ("default", "web-0"));
    assert_eq!((request.unit.as_str(), request.stdin, request.tty), ("main", true, false));
}

#[test]
fn exec_exits_with_the_code_of_its_command_or_of_the_failure() {
    let daemon = Daemon::start(Behaviour::default());
    for (command, stdout, stderr, code) in [
        ("exit 5", "all of it\n", "", 5),
        ("exit 255", "all of it\n", "", 255),
        ("fail", "", "milpactl: no sh\n", 1),
        ("lose", "", "connection to default/web-0 lost: its pod or cell has ended\n", 1),
        ("refuse", "", "refuses with 502: no tunnel\n", 1),
    ] {
        let (out, error, found) = run(&daemon, &format!("exec web-0 -- {command}"));
        assert_eq!((out.as_str(), found), (stdout, code), "{command}: {error}");
        assert!(error.ends_with(stderr), "{command}: {error}");
    }
    for (line, code) in [
        ("exec web-0", 64),
        ("exec web-0 ls", 64),
        ("exec web-9 -- ls", 66),
        ("attach web-0 -u side", 66),
        ("port-forward web-0 :80 -u side", 66),
    ] {
        assert_eq!(run(&daemon, line).2, code, "{line}");
    }
    let denies = Daemon::start(Behaviour { denies: true, ..Behaviour::default() });
    let older = Daemon::start(Behaviour { lacks_methods: true, ..Behaviour::default() });
    for line in ["exec web-0 -- ls", "attach web-0", "port-forward web-0 :80 -u main"] {
        assert_eq!((run(&denies, line).2, run(&older, line).2), (77, 76), "{line}");
    }
}

#[test]
fn death_of_the_daemon_during_a_stream_is_reported() {
    for line in ["exec web-0 -- hang", "port-forward web-0 :80"] {
        let daemon = Daemon::start(Behaviour::default());
        let mut child = spawn(&daemon, line);
        read_line(&mut child);
        drop(daemon);
        let (code, error) = ended(child);
        assert_eq!(code, Some(69), "{line}: {error}");
        assert!(error.contains("connection to default/web-0 lost: no daemon answers"), "{error}");
    }
}

#[test]
fn signal_ends_a_stream_also_while_its_output_is_not_read() {
    let daemon = Daemon::start(Behaviour::default());
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let mut child = spawn(&daemon, "exec -i web-0 -- hang");
        // An input that stays open.
        let _stdin = child.stdin.take();
        read_line(&mut child);
        send(&child, signal);
        assert_eq!(ended(child), (Some(code), String::new()), "{signal:?}");
    }
    let mut child = spawn(&daemon, "exec web-0 -- yes");
    let stdout = child.stdout.take().unwrap();
    let room = fcntl_getpipe_size(&stdout).unwrap() as u64;
    let is_full = wait_for("the pipe is full", || ioctl_fionread(&stdout).unwrap() == room);
    Builder::new_current_thread().enable_time().build().unwrap().block_on(is_full);
    send(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    drop(stdout);
    // The reader of its output has closed it.
    let mut child = spawn(&daemon, "exec web-0 -- yes");
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 1 << 12]).unwrap();
    drop(stdout);
    assert_eq!(ended(child), (Some(0), String::new()));
}

#[test]
fn terminal_is_raw_while_it_is_used_and_restored_after_every_end() {
    let daemon = Daemon::start(Behaviour::default());
    for (end, code) in [("q", 0), ("l", 1), ("TERM", 143), ("KILLED", 69)] {
        let (daemon, other) = match end {
            "KILLED" => (None, Some(Daemon::start(Behaviour::default()))),
            _ => (Some(&daemon), None),
        };
        let mut terminal = Terminal::open();
        terminal.resize(81, 25);
        assert!(terminal.edits_lines());
        let used = daemon.or(other.as_ref()).unwrap();
        let mut command = milpactl(used);
        command.args(["exec", "-it", "web-0", "--", "terminal"]);
        let mut child = terminal.give(&mut command).spawn().unwrap();
        terminal.wait_for("ready");
        terminal.wait_for("{\"Width\":81,\"Height\":25}");
        assert!(!terminal.edits_lines());
        assert!(used.last_exec().unwrap().tty);
        terminal.resize(100, 30);
        send(&child, Signal::WINCH);
        terminal.wait_for("{\"Width\":100,\"Height\":30}");
        // Ctrl-C is a key for the command.
        terminal.press("\u{3}");
        terminal.wait_for("\u{3}");
        match end {
            "TERM" => send(&child, Signal::TERM),
            "KILLED" => drop(other),
            key => terminal.press(key),
        }
        assert_eq!(child.wait().unwrap().code(), Some(code), "{end}");
        assert!(terminal.edits_lines(), "{end}");
    }
}

#[test]
fn terminal_that_is_absent_is_reported_and_the_command_runs() {
    let daemon = Daemon::start(Behaviour::default());
    let (out, error, code) = run(&daemon, "exec -it web-0 -- cat");
    assert_eq!((out.as_str(), code), ("", 0), "{error}");
    assert!(error.contains("unable to use a TTY: input is not a terminal"), "{error}");
    assert!(!daemon.last_exec().unwrap().tty);
    let (_, error, code) = run(&daemon, "exec -t web-0 -- exit 3");
    assert_eq!(code, 3);
    assert!(error.contains("-t needs -i"), "{error}");
}

#[test]
fn attach_uses_the_streams_that_the_unit_has() {
    let daemon = Daemon::start(Behaviour::default());
    // The unit has neither an input nor a terminal.
    let (out, error, code) = run(&daemon, "attach -it web-0");
    assert_eq!((out.as_str(), code), ("all of it\n", 7), "{error}");
    assert!(error.contains("unit main has no stdin") && error.contains("none"), "{error}");
    let request = daemon.last_attach().unwrap();
    assert_eq!((request.unit.as_str(), request.stdin, request.tty), ("main", false, false));

    let has_both = Daemon::start(Behaviour { unit_has_terminal: true, ..Behaviour::default() });
    let mut terminal = Terminal::open();
    let mut command = milpactl(&has_both);
    command.args(["attach", "-i", "web-0", "-c", "main"]);
    let mut child = terminal.give(&mut command).spawn().unwrap();
    terminal.wait_for("press enter");
    terminal.wait_for("ready");
    terminal.press("q");
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(has_both.last_attach().unwrap().tty, "its own terminal is used without -t");
}

/// Starts a port-forward, and returns it with its local ports.
fn forward(daemon: &Daemon, ports: &str) -> (Child, Vec<u16>) {
    let mut child = spawn(daemon, &format!("port-forward web-0 --address 127.0.0.1 {ports}"));
    let local = ports.split(' ').map(|_| {
        let line = read_line(&mut child);
        let address = line.strip_prefix("Forwarding from 127.0.0.1:").unwrap();
        address.split_once(' ').unwrap().0.parse().unwrap()
    });
    let local = local.collect();
    (child, local)
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

#[test]
fn connections_are_forwarded_concurrently_and_fail_alone() {
    let daemon = Daemon::start(Behaviour::default());
    let (mut child, ports) = forward(&daemon, ":80 :81 :83");
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let (mut one, mut two) = (connect(ports[0]), connect(ports[0]));
    let mut refused = connect(ports[1]);
    let mut nothing = Vec::new();
    refused.read_to_end(&mut nothing).unwrap();
    assert_eq!(nothing, b"");
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    assert_eq!(line, "milpactl: connection to port 81: port 81: connection refused\n");
    let mut greeting = String::new();
    connect(ports[2]).read_to_string(&mut greeting).unwrap();
    assert_eq!(greeting, "hello\n");
    // Half-closed connections get all bytes back.
    two.write_all(b"two").unwrap();
    let large: Vec<u8> = (0..1 << 20).map(|number: u32| (number / 3) as u8).collect();
    let mut writer = one.try_clone().unwrap();
    let sent = large.clone();
    let writing = std::thread::spawn(move || {
        writer.write_all(&sent).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let mut back = Vec::new();
    one.read_to_end(&mut back).unwrap();
    writing.join().unwrap();
    assert!(back == large, "{} bytes", back.len());
    let mut echo = [0; 3];
    two.read_exact(&mut echo).unwrap();
    assert_eq!(&echo, b"two");
    send(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "");
}

#[test]
fn forward_ends_with_the_pod_and_names_it() {
    let daemon = Daemon::start(Behaviour::default());
    let (child, ports) = forward(&daemon, ":84");
    let _connection = connect(ports[0]);
    let (code, error) = ended(child);
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("connection to default/web-0 lost: its pod or cell"), "{error}");
}

#[test]
fn ports_and_addresses_that_are_wrong_or_taken_are_refused() {
    let daemon = Daemon::start(Behaviour::default());
    for ports in ["0", "80:http", "70000", ":0", "--address example.com 80"] {
        let (_, error, code) = run(&daemon, &format!("port-forward web-0 {ports}"));
        assert_eq!(code, 64, "{ports}: {error}");
        assert!(error.contains("allowed: "), "{error}");
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let (_, error, code) = run(&daemon, &format!("port-forward web-0 {port}:80"));
    assert_eq!(code, 1);
    assert!(error.contains(&format!("can't listen on 127.0.0.1:{port}")), "{error}");
}
