//! Mounts of containers that are not plain volumes, with their edge cases.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Node, Pod, RunningContainer, RunningPod,
    Source, cri, wait_until,
};
use tonic::{Code, Status};

use crate::cell::{
    WAIT,
    lifecycle::endings::{Ending, wait_for_cell_log},
    options, remove_and_assert_clean,
};

async fn run_sandbox(kubelet: &mut Kubelet, spec: &Pod) -> RunningPod {
    let config = kubelet.prepare(spec);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    kubelet.running(spec, config, sandbox)
}

fn mount(host_path: &Path, container_path: &str, readonly: bool) -> cri::Mount {
    cri::Mount {
        host_path: host_path.display().to_string(),
        container_path: container_path.to_owned(),
        readonly,
        ..Default::default()
    }
}

/// Returns the error of a container with this mount.
async fn create_refused(kubelet: &mut Kubelet, running: &RunningPod, mount: cri::Mount) -> Status {
    let mut main = Container::script("main", WAIT);
    main.more_mounts.push(mount);
    let status =
        kubelet.create_container(running, &main, 0).await.expect_err("the container is refused");
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    status
}

#[track_caller]
fn assert_names(status: &Status, words: &[&str]) {
    for word in words {
        assert!(status.message().contains(word), "{word:?} is not in {:?}", status.message());
    }
}

async fn start_container(
    kubelet: &mut Kubelet,
    running: &mut RunningPod,
    container: &Container,
    attempt: u32,
) -> RunningContainer {
    let made = kubelet.create_container(running, container, attempt).await.unwrap();
    kubelet.start_container(&made.id).await.unwrap();
    running.containers.insert(format!("{}-{attempt}", container.name), made.clone());
    made
}

fn options_with_copies() -> KiyotOptions {
    KiyotOptions {
        sections: "[backends.milpa.policy]\nhost_path = \"copy-read-only\"\n".to_owned(),
        ..options()
    }
}

/// Verifies D27.
#[tokio::test]
async fn volumes_of_plugins_and_huge_pages_are_refused_by_name_and_policy() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("attached").in_cell().volume("pages", Source::EmptyDir { memory: false });
    let running = run_sandbox(&mut kubelet, &spec).await;
    let volumes = kubelet.pod_directory(&spec.uid).join("volumes");
    let csi = volumes.join("kubernetes.io~csi/pvc-7d1f/mount");
    fs::create_dir_all(&csi).unwrap();
    let status = create_refused(&mut kubelet, &running, mount(&csi, "/data", true)).await;
    assert_names(
        &status,
        &["main", "/data", "kubernetes.io~csi/pvc-7d1f", "host_path = \"refuse\"", "emptyDir"],
    );
    // The kubelet has bound a subpath of the volume.
    let part = kubelet.pod_directory(&spec.uid).join("volume-subpaths/pvc-7d1f/main/0");
    fs::create_dir_all(&part).unwrap();
    let status = create_refused(&mut kubelet, &running, mount(&part, "/part", false)).await;
    assert_names(
        &status,
        &["main", "/part", "pvc-7d1f", "kubernetes.io~csi", "host_path = \"refuse\""],
    );

    let pages = volumes.join("kubernetes.io~empty-dir/pages");
    rustix::mount::mount(
        "hugetlbfs",
        &pages,
        "hugetlbfs",
        rustix::mount::MountFlags::empty(),
        None,
    )
    .unwrap();
    let status = create_refused(&mut kubelet, &running, mount(&pages, "/pages", false)).await;
    rustix::mount::unmount(&pages, rustix::mount::UnmountFlags::DETACH).unwrap();
    assert_names(&status, &["pages", "huge pages", "disk and memory"]);
    assert!(kubelet.containers().await.unwrap().is_empty());
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D28.
#[tokio::test]
async fn absent_file_mount_becomes_no_directory() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options_with_copies()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("fileless").in_cell();
    let mut running = run_sandbox(&mut kubelet, &spec).await;
    let missing = node.directory().join("not-there.conf");
    let status =
        create_refused(&mut kubelet, &running, mount(&missing, "/etc/app.conf", true)).await;
    assert_names(&status, &["not-there.conf", "No such file"]);
    assert!(!missing.exists());
    // The kubelet's hosts file is treated in the same way.
    let hosts = kubelet.pod_directory(&spec.uid).join("etc-hosts");
    let content = fs::read(&hosts).unwrap();
    fs::remove_file(&hosts).unwrap();
    let status =
        kubelet.create_container(&running, &Container::script("main", WAIT), 0).await.unwrap_err();
    assert_names(&status, &["etc-hosts", "No such file"]);
    assert!(!hosts.exists());
    // When both files exist, the same container can be created, and both mounts are files.
    fs::write(&hosts, content).unwrap();
    fs::write(&missing, "setting").unwrap();
    let mut main = Container::script("main", WAIT);
    main.more_mounts.push(mount(&missing, "/etc/app.conf", true));
    let main = start_container(&mut kubelet, &mut running, &main, 0).await;
    let output = kubelet
        .exec_sync(
            &main.id,
            &[
                "sh",
                "-c",
                "cat /etc/app.conf; stat -c %F /etc/app.conf /etc/hosts /dev/termination-log",
            ],
        )
        .await
        .unwrap();
    assert_eq!(output.stdout, "settingregular file\nregular file\nregular empty file\n");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D29.
#[tokio::test]
async fn copies_of_the_nodes_paths_are_bounded_and_renewed_for_each_attempt() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options_with_copies()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut running = run_sandbox(&mut kubelet, &Pod::new("copying").in_cell()).await;
    let of_the_node = |name: &str| -> PathBuf {
        let directory = node.directory().join(name);
        fs::create_dir(&directory).unwrap();
        directory
    };
    let (large, many, socket) = (of_the_node("large"), of_the_node("many"), of_the_node("socket"));
    fs::File::create(large.join("file")).unwrap().set_len((64 << 20) + 1).unwrap();
    for n in 0..=10_000 {
        fs::write(many.join(n.to_string()), "").unwrap();
    }
    let _listener = std::os::unix::net::UnixListener::bind(socket.join("daemon.sock")).unwrap();
    let status = create_refused(&mut kubelet, &running, mount(&large, "/large", true)).await;
    assert_names(&status, &["large", "67108864 bytes"]);
    let status = create_refused(&mut kubelet, &running, mount(&many, "/many", true)).await;
    assert_names(&status, &["many", "10000 entries"]);
    let status = create_refused(&mut kubelet, &running, mount(&socket, "/socket", true)).await;
    assert_names(&status, &["daemon.sock", "a socket"]);

    let tree = of_the_node("tree");
    fs::create_dir(tree.join("sub")).unwrap();
    fs::write(tree.join("sub/old"), "old").unwrap();
    fs::set_permissions(tree.join("sub"), fs::Permissions::from_mode(0o750)).unwrap();
    let list_script = "cd /tree; find . | sort; cat sub/old sub 2>/dev/null; echo";
    let ending = Ending::new();
    let mut one = Container::script(
        "one",
        &format!(
            "{list_script}; until [ -e /tmp/go ]; do sleep 0.1; done; {list_script}; {}",
            ending.script()
        ),
    );
    one.more_mounts.push(mount(&tree, "/tree", true));
    let first = start_container(&mut kubelet, &mut running, &one, 0).await;
    kubelet.logged(&first, "old").await;
    fs::remove_dir_all(tree.join("sub")).unwrap();
    fs::write(tree.join("sub"), "a file").unwrap();
    // The copy for another container has the current content. The copy of the running container
    // does not change.
    let mut other = Container::script("other", &format!("{list_script}; {WAIT}"));
    other.more_mounts.push(mount(&tree, "/tree", true));
    let other = start_container(&mut kubelet, &mut running, &other, 0).await;
    kubelet.logged(&other, "a file").await;
    kubelet.exec_sync(&first.id, &["touch", "/tmp/go"]).await.unwrap();
    let texts = |kubelet: &Kubelet, of: &RunningContainer| {
        kubelet.log_lines(of).into_iter().map(|line| line.text).collect::<Vec<_>>()
    };
    wait_until("the container has listed again", LIMIT, async || {
        (texts(&kubelet, &first).len() >= 8).then_some(())
    })
    .await;
    ending.release().await;
    kubelet.exited(&first.id).await;
    assert_eq!(
        texts(&kubelet, &first),
        [".", "./sub", "./sub/old", "old", ".", "./sub", "./sub/old", "old"]
    );
    // The next attempt gets a new copy, without content of the previous one.
    let second = start_container(&mut kubelet, &mut running, &one, 1).await;
    kubelet.logged(&second, "a file").await;
    assert_eq!(texts(&kubelet, &second)[..3], [".", "./sub", "a file"]);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D30.
#[tokio::test]
async fn termination_message_is_copied_from_any_path_to_its_end() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("talkative").in_cell();
    let mut running = run_sandbox(&mut kubelet, &spec).await;
    // The message is longer than the limit of the copy, and ends with bytes that are not UTF-8.
    let script = "head -c 100000 /dev/zero | tr '\\0' a > /var/run/words; \
        printf '\\377\\000the end' >> /var/run/words; exit 3";
    let elsewhere = |config: &mut cri::ContainerConfig| {
        config
            .mounts
            .iter_mut()
            .filter(|mount| mount.container_path == "/dev/termination-log")
            .for_each(|mount| mount.container_path = "/var/run/words".to_owned());
    };
    let made = kubelet
        .create_container_with(&running, &Container::script("main", script), 0, elsewhere)
        .await
        .unwrap();
    kubelet.start_container(&made.id).await.unwrap();
    running.containers.insert("main".to_owned(), made.clone());
    assert_eq!(kubelet.exited(&made.id).await.exit_code, 3);
    let message = fs::read(&made.termination).unwrap();
    assert_eq!(message.len(), 64 << 10, "of 100,010 bytes");
    // The kubelet reads the last 4096 bytes (kubelet/container,
    // MaxContainerTerminationMessageLength).
    let last = &message[message.len() - 4096..];
    assert!(
        last.ends_with(b"aaa\xff\x00the end") && last[..4000].iter().all(|byte| *byte == b'a'),
        "{}",
        String::from_utf8_lossy(last)
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D31.
#[tokio::test]
async fn files_of_a_removed_container_are_removed_from_its_cell() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut running = run_sandbox(&mut kubelet, &Pod::new("crashing").in_cell()).await;
    let main =
        Container::script("main", "echo something; echo words > /dev/termination-log; exit 1");
    let pod_dir = kiyot.state().join("cells").join(kiyot.cells().remove(0)).join("pod");
    let files =
        || kiyot_testkit::output("find", &[&pod_dir.display().to_string(), "-type", "f"]).unwrap();
    for attempt in 0..3 {
        let made = start_container(&mut kubelet, &mut running, &main, attempt).await;
        assert_eq!(kubelet.exited(&made.id).await.exit_code, 1);
        assert!(
            files().contains(&format!("logs/{}/0.log", made.id))
                && files().contains(&format!("containers/main/{attempt:08x}")),
            "{}",
            files()
        );
        running.containers.remove(&format!("main-{attempt}"));
        kubelet
            .runtime
            .remove_container(cri::RemoveContainerRequest { container_id: made.id.clone() })
            .await
            .unwrap();
        assert!(!files().contains("logs/") && !files().contains("containers/"), "{}", files());
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Binds a subpath of an emptyDir as the kubelet does for an absent subpath
/// (pkg/volume/util/subpath).
fn bind_subpath(pod: &Path, volume: &str, below: &str, at: &str) -> PathBuf {
    let (placeholder, target) = (
        pod.join("volumes/kubernetes.io~empty-dir").join(volume).join(below),
        pod.join("volume-subpaths").join(volume).join(at),
    );
    fs::create_dir_all(&placeholder).unwrap();
    fs::create_dir_all(&target).unwrap();
    rustix::mount::mount_bind(&placeholder, &target).unwrap();
    target
}

/// Verifies D32.
#[tokio::test]
async fn empty_dir_subpath_is_current_and_never_behind_a_link() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("linked").in_cell().volume("scratch", Source::EmptyDir { memory: false });
    let mut running = run_sandbox(&mut kubelet, &spec).await;
    let pod = kubelet.pod_directory(&spec.uid);
    let maker = Container::script(
        "maker",
        &format!(
            "cd /scratch; echo one > file; ln -s /etc out; ln -s ../../.. up; mkdir -p d/e; \
            ln -s d in; {WAIT}"
        ),
    );
    let maker =
        start_container(&mut kubelet, &mut running, &maker.mount("scratch", "/scratch"), 0).await;
    wait_until("all files exist", LIMIT, async || {
        kubelet
            .exec_sync(&maker.id, &["readlink", "/scratch/in"])
            .await
            .ok()
            .filter(|output| output.code == 0)
    })
    .await;
    let mut targets = Vec::new();
    for (index, below) in ["out", "up", "out/ssl", "in/e"].into_iter().enumerate() {
        let target = bind_subpath(&pod, "scratch", below, &format!("main/{index}"));
        let mut main = Container::script("main", WAIT);
        main.more_mounts.push(mount(&target, "/part", false));
        let status =
            kubelet.create_container(&running, &main, 0).await.expect_err("a link is not followed");
        assert_names(&status, &["scratch"]);
        targets.push(target);
    }
    // A path that was replaced since the previous attempt is read again.
    let target = bind_subpath(&pod, "scratch", "file", "main/9");
    let ending = Ending::new();
    let mut main = Container::script("main", &format!("cat /part; {}", ending.script()));
    main.more_mounts.push(mount(&target, "/part", false));
    for (attempt, text) in ["one", "two", "two"].into_iter().enumerate() {
        kubelet
            .exec_sync(
                &maker.id,
                &[
                    "sh",
                    "-c",
                    &format!("echo {text} > /scratch/new; mv /scratch/new /scratch/file"),
                ],
            )
            .await
            .unwrap();
        let made =
            start_container(&mut kubelet, &mut running, &main, u32::try_from(attempt).unwrap())
                .await;
        wait_for_cell_log(&kiyot, &made, text).await;
        ending.release().await;
        kubelet.exited(&made.id).await;
        assert_eq!(kubelet.log_lines(&made)[0].text, text);
    }
    targets.push(target);
    for target in targets {
        let _ = rustix::mount::unmount(&target, rustix::mount::UnmountFlags::DETACH);
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
