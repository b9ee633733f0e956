//! Volumes of pods in cells.

use kiyot_testkit::{Container, Kiyot, LIMIT, Node, Pod, Source, wait_until};

use crate::cell::{
    WAIT, failures::faults, options, remove_and_assert_clean, run_script, wait_for_output,
};

/// Verifies D2.
#[tokio::test]
async fn files_of_the_kubelet_have_their_modes_in_the_cell() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("files")
        .in_cell()
        .volume(
            "settings",
            Source::ConfigMap(Source::files(&[("colour", "blue"), ("shape", "round")])),
        )
        .volume("key", Source::Secret(Source::files(&[("key", "hush")])))
        .volume("token", Source::Projected(Source::files(&[("token", "t0ken")])))
        .volume("about", Source::DownwardApi(Source::files(&[("name", "files")])))
        .volume("scratch", Source::EmptyDir { memory: false })
        .volume("fast", Source::EmptyDir { memory: true })
        .container(
            Container::script(
                "writer",
                &format!("echo shared > /scratch/file; echo quick > /fast/file; {WAIT}"),
            )
            .mount("settings", "/settings")
            .mount("key", "/key")
            .mount("token", "/token")
            .mount("about", "/about")
            .mount("scratch", "/scratch")
            .mount("fast", "/fast"),
        )
        .container(
            Container::script(
                "reader",
                "until cat /scratch/file /fast/file; do sleep 0.1; done; sleep 1000",
            )
            .mount("scratch", "/scratch")
            .mount("fast", "/fast"),
        );
    let running = kubelet.run_pod(&spec).await.unwrap();
    let writer = running.container("writer").id.clone();
    let read = kubelet
        .exec_sync(
            &writer,
            &["sh", "-c", "cat /settings/colour /settings/shape /key/key /token/token /about/name"],
        )
        .await
        .unwrap();
    assert_eq!(read.stdout, "blueroundhusht0kenfiles");
    let modes = kubelet
        .exec_sync(
            &writer,
            &["sh", "-c", "stat -c %a $(readlink -f /settings/colour); readlink /settings/colour"],
        )
        .await
        .unwrap();
    assert_eq!(modes.stdout, "644\n..data/colour\n");
    let memory = kubelet
        .exec_sync(&writer, &["sh", "-c", "grep -cE ' (/key|/token|/fast) tmpfs ' /proc/mounts"])
        .await
        .unwrap();
    assert_eq!(memory.stdout, "3\n", "secrets, tokens and memory volumes are in memory only");
    let hosts = kubelet.exec_sync(&writer, &["cat", "/etc/hosts"]).await.unwrap();
    assert!(hosts.stdout.contains("Kubernetes-managed"), "{}", hosts.stdout);
    kubelet.logged(running.container("reader"), "shared").await;
    kubelet.logged(running.container("reader"), "quick").await;
    let on_node =
        kubelet.pod_directory(&spec.uid).join("volumes/kubernetes.io~empty-dir/scratch/file");
    assert!(!on_node.exists(), "an emptyDir exists only in the cell");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D3.
#[tokio::test]
async fn volume_update_on_the_node_shows_in_the_cell() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("kept")
        .in_cell()
        .volume("settings", Source::ConfigMap(Source::files(&[("colour", "blue"), ("old", "1")])))
        .volume("token", Source::Projected(Source::files(&[("token", "one")])))
        .container(
            Container::script("main", WAIT).mount("settings", "/settings").mount("token", "/token"),
        );
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").id.clone();
    kubelet.update_volume(&spec, "settings", &Source::files(&[("colour", "red"), ("new", "2")]));
    wait_for_output(&mut kubelet, &main, "cd /settings; cat colour new; ls", "red2colour\nnew\n")
        .await;

    kiyot.kill9();
    kubelet.update_volume(&spec, "token", &Source::files(&[("token", "two")]));
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    wait_for_output(&mut kubelet, &main, "cat /token/token", "two").await;
    kubelet.update_volume(&spec, "token", &Source::files(&[("token", "three")]));
    wait_for_output(&mut kubelet, &main, "cat /token/token", "three").await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D39.
#[tokio::test]
async fn empty_dir_lives_as_long_as_its_cell() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let container =
        Container::script("main", WAIT).mount("scratch", "/scratch").mount("fast", "/fast");
    let spec = Pod::new("scratching")
        .in_cell()
        .volume("scratch", Source::EmptyDir { memory: false })
        .volume("fast", Source::EmptyDir { memory: true })
        .container(container.clone());
    let mut first = kubelet.run_pod(&spec).await.unwrap();
    let mut main = first.container("main").id.clone();
    run_script(
        &mut kubelet,
        &main,
        "echo kept > /scratch/file; echo kept > /fast/file; chmod 640 /scratch/file",
    )
    .await;
    // The volumes are mounted for each attempt, also after a restart of the agent and of the
    // daemon.
    for attempt in 1..=3 {
        kubelet.stop_container(&main, 1).await.unwrap();
        match attempt {
            2 => faults::kill9(&faults::processes(&["kiyot-cell agent", &kiyot.cells()[0]])),
            3 => {
                kiyot.kill9();
                kiyot.start_again().await;
                kubelet = kiyot.kubelet().await;
            }
            _ => {}
        }
        let made = wait_until("the next attempt is created", LIMIT, async || {
            kubelet.create_container(&first, &container, attempt).await.ok()
        })
        .await;
        kubelet.start_container(&made.id).await.unwrap();
        main.clone_from(&made.id);
        first.containers.insert(format!("main-{attempt}"), made);
        assert_eq!(
            run_script(
                &mut kubelet,
                &main,
                "cat /scratch/file /fast/file; stat -c %a /scratch/file"
            )
            .await,
            "kept\nkept\n640\n",
            "attempt {attempt}"
        );
    }
    // A new sandbox of the same pod gets another cell with empty volumes. On a node, the volumes
    // would keep their files.
    kubelet.stop_pod(&first).await.unwrap();
    let mut config = first.config.clone();
    config.metadata.as_mut().unwrap().attempt = 1;
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut second = kubelet.running(&spec, config, sandbox);
    let made = kubelet.create_container(&second, &container, 4).await.unwrap();
    kubelet.start_container(&made.id).await.unwrap();
    assert_eq!(
        run_script(&mut kubelet, &made.id, "ls -A /scratch /fast").await,
        "/fast:\n\n/scratch:\n"
    );
    second.containers.insert("main".to_owned(), made);
    let old = kiyot_testkit::cri::RemovePodSandboxRequest { pod_sandbox_id: first.sandbox };
    kubelet.runtime.remove_pod_sandbox(old).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &second).await;
}
