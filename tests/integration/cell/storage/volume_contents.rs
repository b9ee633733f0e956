//! Contents of volumes in cells, and what remains of them after failures.

use std::{collections::BTreeMap, fs, io, os::unix::fs::MetadataExt, path::Path};

use kiyot_testkit::{Container, Kiyot, Node, Pod, Source, cri};
use ring::digest::{SHA256, digest};

use crate::cell::{
    WAIT,
    lifecycle::endings::{Ending, wait_for_cell_log},
    options, remove_and_assert_clean, run_script, wait_for_output,
};

fn sum<'a>(contents: impl IntoIterator<Item = &'a Vec<u8>>) -> String {
    let all: Vec<u8> = contents.into_iter().flatten().copied().collect();
    format!("{}  -\n", hex::encode(digest(&SHA256, &all)))
}

/// Verifies D7.
#[tokio::test]
async fn contents_of_all_kinds_arrive_unchanged() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let binary: Vec<u8> = (0..=255_u8).cycle().take(5000).collect();
    let large: Vec<u8> =
        (0..1_u32 << 20).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let odd: BTreeMap<String, Vec<u8>> = [
        ("binary".to_owned(), binary),
        ("empty".to_owned(), Vec::new()),
        ("sub/deep/er".to_owned(), b"deep".to_vec()),
    ]
    .into();
    let large: BTreeMap<String, Vec<u8>> = [("large".to_owned(), large)].into();
    let many: BTreeMap<String, Vec<u8>> = (0..2000)
        .map(|key| (format!("key-{key:04}"), format!("value of {key}\n").into_bytes()))
        .collect();
    let main = Container::script("main", WAIT)
        .mount("odd", "/odd")
        .mount("large", "/large")
        .mount("many", "/many")
        .mount("optional", "/optional")
        .mount("optional-secret", "/optional-secret");
    let spec = Pod::new("contents")
        .in_cell()
        .volume("odd", Source::ConfigMap(odd.clone()))
        .volume("large", Source::Secret(large.clone()))
        .volume("many", Source::Secret(many.clone()))
        .volume("optional", Source::ConfigMap(BTreeMap::new()))
        .volume("optional-secret", Source::Secret(BTreeMap::new()))
        .container(main);
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").id.clone();
    assert_eq!(
        run_script(&mut kubelet, &main, "cd /odd; cat binary empty sub/deep/er | sha256sum").await,
        sum(odd.values())
    );
    assert_eq!(
        run_script(&mut kubelet, &main, "cat /large/large | sha256sum").await,
        sum(large.values())
    );
    assert_eq!(
        run_script(&mut kubelet, &main, "ls /many | wc -l; cat /many/* | sha256sum").await,
        format!("2000\n{}", sum(many.values()))
    );
    assert_eq!(
        run_script(
            &mut kubelet,
            &main,
            "ls /optional /optional-secret; stat -L -c %s /odd/empty; readlink /odd/sub"
        )
        .await,
        "/optional:\n\n/optional-secret:\n0\n..data/sub\n"
    );

    // All keys of a large volume arrive, and optional keys appear.
    let many: BTreeMap<String, Vec<u8>> = (1000..3000)
        .map(|key| (format!("key-{key:04}"), format!("new value of {key}\n").into_bytes()))
        .collect();
    kubelet.update_volume(&spec, "many", &many);
    wait_for_output(
        &mut kubelet,
        &main,
        "ls /many | wc -l; cat /many/* | sha256sum",
        &format!("2000\n{}", sum(many.values())),
    )
    .await;
    kubelet.update_volume(&spec, "optional-secret", &Source::files(&[("late", "come")]));
    wait_for_output(&mut kubelet, &main, "cat /optional-secret/late", "come").await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D9.
#[tokio::test]
async fn read_only_volume_is_read_only_and_memory_volume_has_its_size() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut main =
        Container::script("main", WAIT).mount("fast", "/fast").mount("scratch", "/scratch");
    main.mounts.push(("scratch".to_owned(), "/read-only".to_owned(), true));
    let mut spec = Pod::new("bounded")
        .in_cell()
        .volume("fast", Source::EmptyDir { memory: true })
        .volume("scratch", Source::EmptyDir { memory: false });
    let config = kubelet.prepare(&spec);
    let volumes = kubelet.pod_directory(&spec.uid).join("volumes/kubernetes.io~empty-dir");
    // The kubelet mounts a volume with a sizeLimit in this way.
    kiyot_testkit::output(
        "mount",
        &["-o", "remount,size=2m", &volumes.join("fast").display().to_string()],
    )
    .unwrap();
    spec.containers.push(main);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(&spec, config, sandbox);
    let made = kubelet.create_container(&running, &spec.containers[0], 0).await.unwrap();
    kubelet.start_container(&made.id).await.unwrap();
    let main = made.id.clone();
    assert!(
        kubelet.container_status(&main).await.unwrap().mounts.iter().any(|mount| mount.readonly)
    );
    running.containers.insert("main".to_owned(), made);

    run_script(&mut kubelet, &main, "echo written > /scratch/file").await;
    assert_eq!(run_script(&mut kubelet, &main, "cat /read-only/file").await, "written\n");
    let output = run_script(&mut kubelet, &main, "echo x > /read-only/x").await;
    assert!(output.contains("Read-only file system"), "{output}");
    assert_eq!(
        run_script(&mut kubelet, &main, "df -k /fast | tail -n 1 | awk '{print $2}'").await,
        "2048\n"
    );
    let output =
        run_script(&mut kubelet, &main, "dd if=/dev/zero of=/fast/x bs=64k count=100").await;
    assert!(output.contains("No space left"), "{output}");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Returns the files beneath a directory that contain these bytes. Mounts are skipped, because they
/// are not on the disk of the directory.
///
/// # Panics
/// For unreadable files, except files that are removed meanwhile.
pub(crate) fn files_with(directory: &Path, bytes: &[u8]) -> Vec<String> {
    let present = |result: io::Result<Vec<u8>>, path: &Path| match result {
        Ok(content) => Some(content),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => panic!("{}: {error}", path.display()),
    };
    let disk = fs::metadata(directory).unwrap().dev();
    let (mut found, mut directories) = (Vec::new(), vec![directory.to_owned()]);
    while let Some(directory) = directories.pop() {
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => panic!("{}: {error}", directory.display()),
        };
        for path in entries.map(|entry| entry.unwrap().path()) {
            let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
            if metadata.dev() != disk {
                continue;
            }
            if metadata.is_dir() {
                directories.push(path);
            } else if metadata.is_file()
                && present(fs::read(&path), &path)
                    .is_some_and(|content| content.windows(bytes.len()).any(|part| part == bytes))
            {
                found.push(path.display().to_string());
            }
        }
    }
    found
}

/// Verifies D10.
#[tokio::test]
async fn secret_is_on_no_disk() {
    const SECRETS: [&str; 2] = ["an-utterly-private-word", "an-utterly-private-name"];
    const PART: &str = "utterly-private";
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("hushed")
        .in_cell()
        .volume("key", Source::Secret(Source::files(&[("key", SECRETS[0])])))
        .volume("token", Source::Projected(Source::files(&[("token", SECRETS[0])])))
        .container(Container::script("main", WAIT).mount("key", "/key").mount("token", "/token"));
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").id.clone();
    assert_eq!(
        run_script(&mut kubelet, &main, "cat /key/key /token/token").await,
        SECRETS[0].repeat(2)
    );

    // The search includes the node's files but not its mounts: the kubelet's own secrets are in
    // memory, and no other file has them. The search finds a file that a container writes to the
    // cell's disk.
    let planted = "echo -n planted-; echo word";
    run_script(&mut kubelet, &main, &format!("{{ {planted}; }} > /written; sync")).await;
    assert!(
        !files_with(node.directory(), b"planted-word").is_empty(),
        "control: the search covers the cell's files"
    );
    let is_nowhere = |kiyot: &Kiyot<'_>| {
        let on_disk = files_with(node.directory(), PART.as_bytes());
        assert_eq!(on_disk, Vec::<String>::new(), "the secret is on a disk");
        assert!(!kiyot.log().contains(PART));
    };
    is_nowhere(&kiyot);
    // Secrets in an update or after a restart of the daemon do not leak either.
    kubelet.update_volume(&spec, "key", &Source::files(&[("key", SECRETS[1])]));
    wait_for_output(&mut kubelet, &main, "cat /key/key", SECRETS[1]).await;
    is_nowhere(&kiyot);
    kiyot.kill9();
    kubelet.update_volume(&spec, "token", &Source::files(&[("token", SECRETS[1])]));
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    wait_for_output(&mut kubelet, &main, "cat /token/token", SECRETS[1]).await;
    is_nowhere(&kiyot);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    is_nowhere(&kiyot);
}

/// Verifies D11.
#[tokio::test]
async fn volume_unmounted_on_the_node_stays_in_the_cell() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("unmounted")
        .in_cell()
        .volume("key", Source::Secret(Source::files(&[("key", "hush")])))
        .volume("settings", Source::ConfigMap(Source::files(&[("colour", "blue")])))
        .container(
            Container::script("main", WAIT).mount("key", "/key").mount("settings", "/settings"),
        );
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").id.clone();
    let key = kubelet.pod_directory(&spec.uid).join("volumes/kubernetes.io~secret/key");
    rustix::mount::unmount(&key, rustix::mount::UnmountFlags::DETACH).unwrap();
    assert_eq!(fs::read_dir(&key).unwrap().count(), 0, "the volume is empty on the node");
    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    for colour in ["red", "green"] {
        // An update compares all volumes of the pod.
        kubelet.update_volume(&spec, "settings", &Source::files(&[("colour", colour)]));
        wait_for_output(&mut kubelet, &main, "cat /settings/colour", colour).await;
    }
    assert_eq!(run_script(&mut kubelet, &main, "cat /key/key").await, "hush");
    // After its restart, the kubelet writes the volume again.
    rustix::mount::mount("tmpfs", &key, "tmpfs", rustix::mount::MountFlags::empty(), None).unwrap();
    kubelet.update_volume(&spec, "key", &Source::files(&[("key", "changed")]));
    kubelet.update_volume(&spec, "settings", &Source::files(&[("colour", "black")]));
    wait_for_output(&mut kubelet, &main, "cat /key/key", "changed").await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D12.
#[tokio::test]
async fn update_arrives_after_the_agent_was_killed() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("agentless")
        .in_cell()
        .volume("token", Source::Projected(Source::files(&[("token", "one")])))
        .container(Container::script("main", WAIT).mount("token", "/token"));
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").id.clone();
    let cell = kiyot.cells().remove(0);
    for token in ["two", "three"] {
        let agents = crate::cell::failures::faults::processes(&["kiyot-cell agent", &cell]);
        crate::cell::failures::faults::kill9(&agents);
        kubelet.update_volume(&spec, "token", &Source::files(&[("token", token)]));
        wait_for_output(&mut kubelet, &main, "cat /token/token", token).await;
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D13.
#[tokio::test]
async fn host_path_is_copied_read_only_by_policy() {
    let node = Node::start().await;
    let mut options = options();
    options.sections = "[backends.milpa.policy]\nhost_path = \"copy-read-only\"\n".to_owned();
    let kiyot = Kiyot::start(&node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    let directory = node.directory().join("of-the-node");
    fs::create_dir_all(directory.join("sub")).unwrap();
    fs::write(directory.join("sub/file"), "from the node").unwrap();
    fs::write(node.directory().join("outside"), "private").unwrap();
    std::os::unix::fs::symlink("../outside", directory.join("out")).unwrap();
    let mut main = Container::script("main", WAIT);
    main.mounts.push(("host".to_owned(), "/host".to_owned(), true));
    let spec = Pod::new("copied")
        .in_cell()
        .volume("host", Source::HostPath(directory.clone()))
        .container(main);
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").id.clone();
    assert_eq!(run_script(&mut kubelet, &main, "cat /host/sub/file").await, "from the node");
    let output = run_script(&mut kubelet, &main, "cat /host/out").await;
    assert!(!output.contains("private"), "the link does not leave the copy: {output}");
    let output = run_script(&mut kubelet, &main, "echo x > /host/x").await;
    assert!(output.contains("Read-only file system"), "{output}");
    fs::write(directory.join("sub/file"), "later").unwrap();
    assert_eq!(
        run_script(&mut kubelet, &main, "cat /host/sub/file").await,
        "from the node",
        "the copy is unchanged"
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;

    let spec = Pod::new("writer")
        .in_cell()
        .volume("host", Source::HostPath(directory))
        .container(Container::script("main", WAIT).mount("host", "/host"));
    let refused = kubelet.run_pod(&spec).await.unwrap_err();
    assert!(
        refused.message().contains("/host") && refused.message().contains("copy-read-only"),
        "{refused:?}"
    );
}

/// Verifies D14.
#[tokio::test]
async fn exit_without_a_termination_message_leaves_the_reason_in_the_log() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let ending = Ending::new();
    let script = format!("seq 1 500; echo the reason >&2; {}; exit 9", ending.script());
    let running = kubelet.run_pod(&crate::cell::pod("wordless", &script)).await.unwrap();
    let main = running.container("main");
    wait_for_cell_log(&kiyot, main, "500").await;
    wait_for_cell_log(&kiyot, main, "the reason").await;
    ending.release().await;
    assert_eq!(kubelet.exited(&main.id).await.exit_code, 9);
    // FallbackToLogsOnError: if the termination message is empty, the kubelet takes the end of the
    // log.
    assert_eq!(fs::read_to_string(&main.termination).unwrap(), "");
    let lines = kubelet.log_lines(main);
    assert_eq!(lines.len(), 501);
    assert!(lines.iter().any(|line| line.text == "the reason"));
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D19.
#[tokio::test]
async fn owners_and_modes_are_the_nodes_also_after_an_update() {
    const GROUP: u32 = 2000;
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("grouped")
        .in_cell()
        .volume("token", Source::Projected(Source::files(&[("token", "one")])))
        .volume("settings", Source::ConfigMap(Source::files(&[("sub/colour", "blue")])))
        .volume("scratch", Source::EmptyDir { memory: false });
    let config = kubelet.prepare(&spec);
    let volumes = kubelet.pod_directory(&spec.uid).join("volumes");
    // The kubelet makes these changes for fsGroup (pkg/volume/volume_linux.go) and for the user of
    // a token. It makes them before it renames ..data, which does not matter here because no
    // container runs yet.
    let grouped = |directory: &Path| {
        let directory = directory.display().to_string();
        kiyot_testkit::output("chown", &["-R", &format!("0:{GROUP}"), &directory]).unwrap();
        let chmod = format!(
            "find {directory} -type d -exec chmod 2775 {{}} +; \
             find {directory} -type f -exec chmod 0440 {{}} +"
        );
        kiyot_testkit::output("sh", &["-c", &chmod]).unwrap();
    };
    let of = |plugin: &str, name: &str| volumes.join(format!("kubernetes.io~{plugin}")).join(name);
    for (plugin, name) in
        [("projected", "token"), ("configmap", "settings"), ("empty-dir", "scratch")]
    {
        grouped(&of(plugin, name));
    }
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(&spec, config, sandbox);
    let main = Container::script("main", WAIT)
        .mount("token", "/token")
        .mount("settings", "/settings")
        .mount("scratch", "/scratch");
    let change = |config: &mut cri::ContainerConfig| {
        let context = config.linux.get_or_insert_default().security_context.get_or_insert_default();
        context.run_as_user = Some(cri::Int64Value { value: 1000 });
        context.run_as_group = Some(cri::Int64Value { value: 1000 });
        context.supplemental_groups = vec![GROUP.into()];
    };
    let made = kubelet.create_container_with(&running, &main, 0, change).await.unwrap();
    kubelet.start_container(&made.id).await.unwrap();
    let main = made.id.clone();
    running.containers.insert("main".to_owned(), made);
    assert_eq!(
        run_script(
            &mut kubelet,
            &main,
            "cd /; stat -L -c '%a %u %g' token token/token settings/sub settings/sub/colour scratch"
        )
        .await,
        "2775 0 2000\n440 0 2000\n2775 0 2000\n440 0 2000\n2775 0 2000\n"
    );
    assert_eq!(
        run_script(
            &mut kubelet,
            &main,
            "cat /token/token /settings/sub/colour; echo x > /scratch/x; stat -c '%u %g' /scratch/x"
        )
        .await,
        "oneblue1000 2000\n"
    );
    // A renewed token has its group too, when the kubelet has set it.
    kubelet.update_volume(&spec, "token", &Source::files(&[("token", "two")]));
    grouped(&of("projected", "token"));
    kubelet.update_volume(&spec, "settings", &Source::files(&[("sub/colour", "red")]));
    wait_for_output(
        &mut kubelet,
        &main,
        "stat -L -c '%a %g' /token/token; cat /token/token",
        "440 2000\ntwo",
    )
    .await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
