//! Exec in containers of cells, compared with containers on the node.

use kiyot_testkit::{
    Container, Kiyot, Kubelet, LIMIT, Node, Pod, RunningPod, cri, spdy, wait_until,
};
use tonic::{Code, Request};

use crate::cell::{
    WAIT,
    isolation::processes::EXEC_TIMEOUT_SECONDS,
    lifecycle::endings::{Ending, wait_for_cell_log},
    options, pod, remove_and_assert_clean,
};

/// Runs two pods with the same container, one on the node and one in a cell.
async fn run_on_both(kubelet: &mut Kubelet, container: &Container) -> [RunningPod; 2] {
    let here = kubelet.run_pod(&Pod::new("here").container(container.clone())).await.unwrap();
    let there =
        kubelet.run_pod(&Pod::new("there").in_cell().container(container.clone())).await.unwrap();
    [here, there]
}

async fn remove_both(kubelet: &mut Kubelet, kiyot: &Kiyot<'_>, pods: &[RunningPod; 2]) {
    kubelet.stop_and_remove(&pods[0]).await.unwrap();
    remove_and_assert_clean(kubelet, kiyot, &pods[1]).await;
}

/// Runs a program in the container of a pod, with an input that ends.
async fn exec(
    kubelet: &mut Kubelet,
    pod: &RunningPod,
    command: &[&str],
    input: &[u8],
) -> spdy::ExecOutput {
    let id = &pod.container("main").id;
    let output = spdy::exec(kubelet, id, command, input).await;
    let plain = |text: String| text.replace(id, "<id>");
    spdy::ExecOutput {
        stdout: plain(output.stdout),
        stderr: plain(output.stderr),
        status: plain(output.status),
    }
}

/// Verifies D35.
#[tokio::test]
async fn input_and_exec_ends_are_reported_as_on_the_node() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let pods = run_on_both(&mut kubelet, &Container::script("main", WAIT)).await;
    for code in [0, 1, 137, 255] {
        let script = format!("cat; echo over; echo bad >&2; exit {code}");
        let result = exec(&mut kubelet, &pods[1], &["sh", "-c", &script], b"some input ").await;
        assert_eq!(
            (result.stdout.as_str(), result.stderr.as_str()),
            ("some input over\n", "bad\n")
        );
        assert!(
            if code == 0 {
                result.status.contains("Success")
            } else {
                result.status.contains(&format!("\"{code}\""))
            },
            "{result:?}"
        );
        assert_eq!(
            result,
            exec(&mut kubelet, &pods[0], &["sh", "-c", &script], b"some input ").await
        );
        let result =
            kubelet.exec_sync(&pods[1].container("main").id, &["sh", "-c", &script]).await.unwrap();
        assert_eq!(
            (result.stdout.as_str(), result.stderr.as_str(), result.code),
            ("over\n", "bad\n", code)
        );
    }
    remove_both(&mut kubelet, &kiyot, &pods).await;
}

/// Verifies D35.
#[tokio::test]
async fn exec_of_an_absent_program_fails_as_on_the_node() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let pods = run_on_both(&mut kubelet, &Container::script("main", WAIT)).await;
    let mut failures = Vec::new();
    for pod in &pods {
        let id = pod.container("main").id.clone();
        let by_stream = exec(&mut kubelet, pod, &["/no/such/program"], b"").await.status;
        let error = kubelet.exec_sync(&id, &["/no/such/program"]).await.unwrap_err();
        // Ids of execs and containers are random, and are replaced.
        let plain = |text: &str| {
            let words = text.replace(&id, "<id>");
            let words: Vec<_> =
                words
                    .split(['"', ' ', '\\'])
                    .map(|word| {
                        if word.len() == 64 && hex::decode(word).is_ok() { "<exec>" } else { word }
                    })
                    .collect();
            words.join(" ")
        };
        failures.push((error.code(), plain(error.message()), plain(&by_stream)));
    }
    assert!(
        failures[0].1.contains("/no/such/program") && failures[0].2.contains("/no/such/program"),
        "{failures:?}"
    );
    assert_eq!(failures[1], failures[0]);
    remove_both(&mut kubelet, &kiyot, &pods).await;
}

/// Verifies D36.
#[tokio::test]
async fn container_with_stdin_once_ends_with_its_input() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("listening").in_cell();
    let config = kubelet.prepare(&spec);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(&spec, config, sandbox);
    // containerd passes input to a container before it passes output to the attached client. Once
    // output has arrived, input is passed as well.
    let ending = Ending::new();
    let script = format!(
        "until [ -e /tmp/attached ]; do echo here; sleep 0.1; done; while read line; \
        do echo heard $line; done; echo over; {}; exit 5",
        ending.script()
    );
    let mut main = Container::script("main", &script);
    main.stdin = true;
    let made = kubelet
        .create_container_with(&running, &main, 0, |config| config.stdin_once = true)
        .await
        .unwrap();
    kubelet.start_container(&made.id).await.unwrap();
    running.containers.insert("main".to_owned(), made.clone());

    let request = cri::AttachRequest {
        container_id: made.id.clone(),
        stdin: true,
        tty: false,
        stdout: true,
        stderr: true,
    };
    let url = kubelet.runtime.attach(request).await.unwrap().into_inner().url;
    let (mut sender, mut receiver) = spdy::open(&url, "v4.channel.k8s.io").await.unwrap();
    let mut streams = Vec::new();
    for kind in ["error", "stdin", "stdout", "stderr"] {
        streams.push(sender.begin(&[("streamtype", kind)]).await);
    }
    assert!(receiver.read_until(streams[2], "here").await.contains("here"));
    assert_eq!(kubelet.exec_sync(&made.id, &["touch", "/tmp/attached"]).await.unwrap().code, 0);
    sender.send(streams[1], b"one\ntwo\n").await;
    let output = receiver.read_until(streams[2], "heard two").await;
    assert!(output.contains("heard one"), "{output}");
    sender.end(streams[1]).await;
    wait_for_cell_log(&kiyot, &made, "over").await;
    ending.release().await;
    assert_eq!(kubelet.exited(&made.id).await.exit_code, 5);
    let lines: Vec<_> = kubelet
        .log_lines(&made)
        .into_iter()
        .map(|line| line.text)
        .filter(|text| text != "here")
        .collect();
    assert_eq!(lines, ["heard one", "heard two", "over"]);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D37.
#[tokio::test]
async fn process_over_its_timeout_is_dead_before_the_error() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("slow", WAIT)).await.unwrap();
    let main = running.container("main").id.clone();
    let request = cri::ExecSyncRequest {
        container_id: main.clone(),
        cmd: ["sleep", "98765"].map(str::to_owned).to_vec(),
        timeout: EXEC_TIMEOUT_SECONDS,
    };
    let status = kubelet.runtime.exec_sync(Request::new(request)).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    wait_until("the program has ended", LIMIT, async || {
        let processes = kubelet.exec_sync(&main, &["ps", "-o", "args"]).await.ok()?.stdout;
        (!processes.contains("98765")).then_some(())
    })
    .await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D37.
#[tokio::test]
async fn output_within_the_limit_of_a_call_is_returned_and_more_fails_as_on_the_node() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let pods = run_on_both(&mut kubelet, &Container::script("main", WAIT)).await;
    for bytes in [15 << 20, 20 << 20] {
        let mut results = Vec::new();
        for pod in &pods {
            let command = format!("head -c {bytes} /dev/zero | tr '\\0' x; echo end >&2; exit 3");
            let output =
                kubelet.exec_sync(&pod.container("main").id, &["sh", "-c", &command]).await;
            results.push(
                output
                    .map(|output| (output.stdout.len(), output.stderr, output.code))
                    .map_err(|status| status.code()),
            );
        }
        assert_eq!(results[1], results[0], "{bytes} bytes");
        assert!(
            bytes > 16 << 20 || results[1] == Ok((bytes, "end\n".to_owned(), 3)),
            "{results:?}"
        );
    }
    // The link still works.
    assert_eq!(
        kubelet.exec_sync(&pods[1].container("main").id, &["echo", "well"]).await.unwrap().stdout,
        "well\n"
    );
    remove_both(&mut kubelet, &kiyot, &pods).await;
}
