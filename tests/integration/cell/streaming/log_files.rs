//! Log files of pods in cells, compared with log files of the node's containerd.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use kiyot_testkit::{
    Container, Kiyot, Kubelet, LIMIT, LogLine, Node, Pod, RunningContainer, cri, wait_until,
};

use crate::cell::{WAIT, lifecycle::endings::Ending, options, pod, remove_and_assert_clean};

/// Returns the lines of one stream as bytes, without their times. The order of lines of different
/// streams is not defined.
fn stream_lines(log: &Path, stream: &str) -> Vec<Vec<u8>> {
    let content = fs::read(log).unwrap();
    let lines = content.split_inclusive(|byte| *byte == b'\n');
    let timeless =
        lines.map(|line| line[line.iter().position(|byte| *byte == b' ').unwrap() + 1..].to_vec());
    timeless.filter(|line| line.starts_with(stream.as_bytes())).collect()
}

/// Verifies D15.
#[tokio::test]
async fn log_files_equal_the_nodes_byte_for_byte() {
    // The output has lines of about 16 KiB, where lines are split, empty lines, bytes that are not
    // UTF-8, and no newline at the end.
    const SCRIPT: &str = "line() { head -c $1 /dev/zero | tr '\\0' $2; }
        echo first; echo; line 16383 a; echo; line 16384 b; echo; line 16385 c; echo; \
        line 40000 d; echo
        printf 'odd \\377\\001 bytes\\r\\n'; printf 'with\\ttab and  spaces \\n'
        echo bad >&2; line 33000 e >&2; echo >&2; echo that was it; echo that was it >&2; \
        printf 'bad end' >&2; printf 'no newline'; UNTIL";
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    for tty in [false, true] {
        let ending = Ending::new();
        let mut container = Container::script("main", &SCRIPT.replace("UNTIL", &ending.script()));
        container.tty = tty;
        let local = Pod::new(&format!("on-node-{tty}")).container(container.clone());
        let there = Pod::new(&format!("in-cell-{tty}")).in_cell().container(container);
        let pods = [kubelet.run_pod(&local).await.unwrap(), kubelet.run_pod(&there).await.unwrap()];
        let [local, there] = pods.map(|running| (running.container("main").clone(), running));
        for (main, _) in [&local, &there] {
            wait_until(format!("{} has almost all", main.log.display()), LIMIT, async || {
                let lines = kubelet.log_lines(main);
                (lines.iter().filter(|line| line.text.trim_end() == "that was it").count() == 2)
                    .then_some(())
            })
            .await;
        }
        ending.release().await;
        for (main, _) in [&local, &there] {
            assert_eq!(kubelet.exited(&main.id).await.exit_code, 0);
        }
        // The node's containerd reports the exit of a container before the log is complete. A
        // cell's log is complete at the exit.
        let expected = wait_until("the node's log is complete", LIMIT, async || {
            let ends = if tty { "no newline" } else { "bad end" };
            let lines = kubelet.log_lines(&local.0);
            let complete = [ends, "no newline"]
                .iter()
                .all(|end| lines.iter().any(|line| line.text.ends_with(end)));
            complete.then(|| ["stdout", "stderr"].map(|stream| stream_lines(&local.0.log, stream)))
        })
        .await;
        let found = ["stdout", "stderr"].map(|stream| stream_lines(&there.0.log, stream));
        assert_eq!(expected[1].is_empty(), tty);
        for (expected, found) in expected.iter().flatten().zip(found.iter().flatten()) {
            assert!(
                expected == found,
                "{}\nis not\n{}",
                String::from_utf8_lossy(found),
                String::from_utf8_lossy(expected)
            );
        }
        assert_eq!(expected.each_ref().map(Vec::len), found.each_ref().map(Vec::len));
        kubelet.stop_and_remove(&local.1).await.unwrap();
        remove_and_assert_clean(&mut kubelet, &kiyot, &there.1).await;
    }
}

/// Verifies D16.
#[tokio::test]
async fn previous_log_of_a_restarted_container_stays() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let ending = Ending::new();
    let script =
        format!("echo attempt of $(cat /proc/sys/kernel/random/uuid); {}", ending.script());
    let mut running = kubelet.run_pod(&pod("again", &script)).await.unwrap();
    let first = running.container("main").clone();
    let ends = async |kubelet: &mut Kubelet, container: &RunningContainer| {
        kubelet.logged(container, "attempt of").await;
        ending.release().await;
        assert_eq!(kubelet.exited(&container.id).await.exit_code, 0);
    };
    ends(&mut kubelet, &first).await;
    let before = fs::read(&first.log).unwrap();
    assert_eq!(LogLine::parse_all(&before).len(), 1);
    let second = kubelet.create_container(&running, &running.spec.containers[0], 1).await.unwrap();
    kubelet.start_container(&second.id).await.unwrap();
    ends(&mut kubelet, &second).await;
    assert_ne!(first.log, second.log);
    assert_eq!(kubelet.log_lines(&second).len(), 1);
    assert_eq!(fs::read(&first.log).unwrap(), before, "kubectl logs --previous reads this file");
    // The kubelet keeps one exited container and its log.
    kubelet
        .runtime
        .remove_container(cri::RemoveContainerRequest { container_id: first.id.clone() })
        .await
        .unwrap();
    assert_eq!(fs::read(&first.log).unwrap(), before, "only the kubelet removes the file");
    running.containers.insert("main".to_owned(), second);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D20.
#[tokio::test]
async fn log_is_appended_to_an_existing_file() {
    const BEFORE: &str = "2026-01-01T00:00:00.000000000Z stdout F of a container that had this \
        name before, and wrote more than the next one does at first\n";
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    for in_cell in [false, true] {
        let mut kubelet = kiyot.kubelet().await;
        let script =
            "echo line 1; until [ -e /tmp/go ]; do sleep 0.05; done; echo line 2; sleep 1000";
        let spec = if in_cell {
            pod("again", script)
        } else {
            Pod::new("again").container(Container::script("main", script))
        };
        let config = kubelet.prepare(&spec);
        let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
        let mut running = kubelet.running(&spec, config, sandbox);
        let file = kubelet.log_directory(&spec).join("main/0.log");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, BEFORE).unwrap();
        let main = kubelet.create_container(&running, &spec.containers[0], 0).await.unwrap();
        assert_eq!(main.log, file);
        kubelet.start_container(&main.id).await.unwrap();
        running.containers.insert("main".to_owned(), main.clone());
        kubelet.logged(&main, "line 1").await;
        if in_cell {
            kiyot.kill9();
            kiyot.start_again().await;
            kubelet = kiyot.kubelet().await;
        }
        wait_until("the log file is closed", LIMIT, async || {
            kubelet.exec_sync(&main.id, &["touch", "/tmp/go"]).await.ok()
        })
        .await;
        kubelet.logged(&main, "line 2").await;
        let all = fs::read_to_string(&file).unwrap();
        let log = all.strip_prefix(BEFORE).expect("earlier content stays");
        let texts: Vec<_> =
            LogLine::parse_all(log.as_bytes()).into_iter().map(|line| line.text).collect();
        assert_eq!(texts, ["line 1", "line 2"], "in a cell: {in_cell}");
        kubelet.stop_and_remove(&running).await.unwrap();
    }
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}

/// Verifies D16.
#[tokio::test]
async fn rotation_under_load_loses_nothing() {
    const ROTATIONS: usize = 5;
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    // The container writes some thousand lines a second until the last rotation.
    let script = format!(
        "i=0; until [ -e /tmp/enough ]; do n=0; while [ $n -lt 100 ]; do n=$((n+1)); i=$((i+1)); \
        echo line $i; done; sleep 0.01; done; echo $i lines; {WAIT}"
    );
    let running = kubelet.run_pod(&pod("rotating", &script)).await.unwrap();
    let main = running.container("main").clone();
    let mut files: Vec<PathBuf> = Vec::new();
    for rotation in 0..ROTATIONS {
        // Each rotated file has some lines.
        wait_until("the log continues", LIMIT, async || {
            (fs::metadata(&main.log).is_ok_and(|file| file.len() > 1000)).then_some(())
        })
        .await;
        let old = main.log.with_extension(format!("log.{rotation}"));
        fs::rename(&main.log, &old).unwrap();
        kubelet
            .runtime
            .reopen_container_log(cri::ReopenContainerLogRequest { container_id: main.id.clone() })
            .await
            .unwrap();
        files.push(old);
        if rotation + 1 == ROTATIONS {
            files.push(main.log.clone());
        }
    }
    assert_eq!(kubelet.exec_sync(&main.id, &["touch", "/tmp/enough"]).await.unwrap().code, 0);
    let last = kubelet.logged(&main, " lines").await.text;
    let mut all: Vec<_> = files
        .iter()
        .flat_map(|file| LogLine::parse_all(&fs::read(file).unwrap()))
        .map(|line| line.text)
        .collect();
    assert_eq!(all.pop().as_ref(), Some(&last));
    assert_eq!(last, format!("{} lines", all.len()));
    for (at, line) in all.iter().enumerate() {
        assert_eq!(*line, format!("line {}", at + 1), "no line is lost or duplicated");
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Returns the size of the disk blocks beneath a directory, in bytes.
fn disk_usage_bytes(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => disk_usage_bytes(&entry.path()),
            Ok(metadata) => metadata.blocks() * 512,
            Err(_) => 0,
        })
        .sum()
}

/// Returns all directories with the name `logs` beneath a directory.
fn log_directories(directory: &Path, depth: usize) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let directories = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let named = |path: PathBuf| {
        if path.ends_with("logs") {
            vec![path]
        } else if depth > 0 {
            log_directories(&path, depth - 1)
        } else {
            Vec::new()
        }
    };
    directories.flat_map(|entry| named(entry.path())).collect()
}

/// Verifies D17.
#[tokio::test]
async fn fetched_log_takes_no_disk_of_the_cell() {
    const MIB: u64 = 1 << 20;
    const LINES: u64 = 4096;
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    // Each line has 16 KiB with its newline: the log has 64 MiB.
    let script = format!(
        "l=$(head -c 16383 /dev/zero | tr '\\0' x); i=0; while [ $i -lt {LINES} ]; do echo $l; \
        i=$((i+1)); done; {WAIT}"
    );
    let running = kubelet.run_pod(&pod("long-winded", &script)).await.unwrap();
    let main = running.container("main").clone();
    let cell = kiyot.state().join("cells").join(kiyot.cells().remove(0));
    wait_until("64 MiB of log are on the node", 4 * LIMIT, async || {
        (fs::metadata(&main.log).ok()?.len() > 64 * MIB).then_some(())
    })
    .await;
    let logs = log_directories(&cell, 3);
    assert!(!logs.is_empty(), "the cell's logs are found in {}", cell.display());
    let on_disk = || logs.iter().map(|logs| disk_usage_bytes(logs)).sum::<u64>();
    wait_until("the cell frees the disk", LIMIT, async || (on_disk() < 24 * MIB).then_some(()))
        .await;
    assert_eq!(
        kubelet.log_lines(&main).iter().filter(|line| line.text.len() == 16383).count() as u64,
        LINES
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
