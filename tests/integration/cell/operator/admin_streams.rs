//! exec, attach and port-forward by milpactl.

use std::{
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
};

use kiyot_testkit::{Container, Kiyot, LIMIT, Node, Pod, Terminal};
use rustix::process::{Pid, Signal, kill_process};

use crate::cell::{WAIT, options, remove_and_assert_clean};

pub(crate) fn milpactl(kiyot: &Kiyot<'_>, words: &[&str]) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_kiyot")).with_file_name("milpactl");
    assert!(program.exists(), "{} is missing: cargo build --workspace --bins", program.display());
    let mut command = Command::new(program);
    command.arg("--socket").arg(kiyot.socket().with_file_name("admin.sock")).args(words);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

/// Runs milpactl with an input. Returns its two outputs and its exit code.
fn run(kiyot: &Kiyot<'_>, words: &[&str], input: &[u8]) -> (String, String, i32) {
    let mut child = milpactl(kiyot, words).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    (text(output.stdout), text(output.stderr), output.status.code().unwrap())
}

fn start(terminal: &Terminal, kiyot: &Kiyot<'_>, words: &[&str]) -> Child {
    terminal.give(&mut milpactl(kiyot, words)).spawn().unwrap()
}

/// Starts a port-forward. Returns the process and its local ports.
fn forward(kiyot: &Kiyot<'_>, remote: &[&str]) -> (Child, Vec<u16>) {
    let words = [&["port-forward", "web"], remote].concat();
    let mut child = milpactl(kiyot, &words).spawn().unwrap();
    let stdout = child.stdout.as_mut().unwrap();
    let mut ports = Vec::new();
    while ports.len() < remote.len() {
        let mut line = Vec::new();
        while !line.ends_with(b"\n") {
            let mut byte = [0];
            stdout.read_exact(&mut byte).unwrap();
            line.push(byte[0]);
        }
        let line = text(line);
        // A second line has the same port on ::1.
        if let Some(address) = line.strip_prefix("Forwarding from 127.0.0.1:") {
            ports.push(address.split_once(' ').unwrap().0.parse().unwrap());
        }
    }
    (child, ports)
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

/// Verifies O30, O31, O32, O33.
#[tokio::test]
async fn operator_runs_commands_and_forwards_ports_until_the_pod_ends() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let server = format!(
        "nc -ll -p 9001 -e cat & until netstat -ltn | grep -q 9001; do sleep 0.1; done; \
         echo ready; {WAIT}"
    );
    let mut shell = Container::script("shell", "exec sh");
    (shell.stdin, shell.tty) = (true, true);
    let wanted =
        Pod::new("web").in_cell().container(Container::script("main", &server)).container(shell);
    let running = kubelet.run_pod(&wanted).await.unwrap();
    kubelet.logged(running.container("main"), "ready").await;

    // exec passes the input, both outputs and the exit code of a command.
    let script = "cat; echo bad >&2; exit 7";
    let words = ["exec", "-i", "web", "--", "sh", "-c", script];
    let input: Vec<u8> = (0..200_000).map(|number| b'a' + (number % 26) as u8).collect();
    let (stdout, stderr, code) = run(&kiyot, &words, &input);
    assert!(stdout.as_bytes() == input, "{} bytes", stdout.len());
    assert_eq!((stderr.as_str(), code), ("bad\n", 7));
    let (_, stderr, code) = run(&kiyot, &["exec", "web", "--", "/no/such/program"], b"");
    assert!(code == 1 && stderr.contains("/no/such/program"), "{code}: {stderr}");

    // exec passes a terminal and its changes of size.
    let mut terminal = Terminal::open();
    terminal.resize(81, 25);
    let mut child = start(&terminal, &kiyot, &["exec", "-it", "web", "-u", "main", "--", "sh"]);
    let size = |size| {
        format!("until [ \"$(stty size)\" = '{size}' ]; do sleep 0.05; done; echo ok-$((6*7))\n")
    };
    terminal.wait_for("#");
    terminal.press(&size("25 81"));
    terminal.wait_for("ok-42");
    terminal.resize(100, 30);
    kill_process(Pid::from_child(&child), Signal::WINCH).unwrap();
    terminal.press(&size("30 100"));
    terminal.wait_for("ok-42");
    // Ctrl-C interrupts the program in the pod.
    terminal.press(
        "sh -c 'trap \"echo heard-$((6*7)); exit\" INT; echo waits-$((6*7)); \
         while :; do sleep 0.1; done'\n",
    );
    terminal.wait_for("waits-42");
    terminal.press("\u{3}");
    terminal.wait_for("heard-42");
    terminal.press("exit 3\n");
    assert_eq!(child.wait().unwrap().code(), Some(3));
    assert!(terminal.edits_lines());

    // Ports are forwarded independently: a port without a listener fails alone.
    let (mut forwarding, ports) = forward(&kiyot, &[":9001", ":9999"]);
    let (mut one, mut two) = (connect(ports[0]), connect(ports[0]));
    let mut nothing = Vec::new();
    connect(ports[1]).read_to_end(&mut nothing).unwrap();
    assert!(nothing.is_empty());
    for (connection, sent) in [(&mut one, b"forth"), (&mut two, b"again")] {
        connection.write_all(sent).unwrap();
        let mut echo = [0; 5];
        connection.read_exact(&mut echo).unwrap();
        assert_eq!(&echo, sent);
    }

    // attach uses the terminal of the container, and ends when the pod ends.
    let mut attached = start(&terminal, &kiyot, &["attach", "-it", "web", "-u", "shell"]);
    terminal.wait_for("press enter");
    terminal.press("echo answer-$((6*7))\n");
    terminal.wait_for("answer-42");
    let stopped = std::time::Instant::now();
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    println!("stopped after {:?}", stopped.elapsed());
    let code = attached.wait().unwrap().code();
    assert!(matches!(code, Some(0 | 1)), "{code:?}");
    println!("attach ended with {code:?} after {:?}", stopped.elapsed());
    assert!(terminal.edits_lines());
    let mut rest = Vec::new();
    one.read_to_end(&mut rest).unwrap();
    let mut stderr = String::new();
    forwarding.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    println!("port-forward ended after {:?}: {stderr}", stopped.elapsed());
    assert!(stderr.contains("connection to port 9999: "), "{stderr}");
    assert!(
        stderr.contains("connection to default/web lost: its pod or cell has ended"),
        "{stderr}"
    );
    assert_eq!(forwarding.wait().unwrap().code(), Some(1));
}
