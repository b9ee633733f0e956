//! Subpaths of volumes in cells, bound by the kubelet.

use std::{fs, path::Path};

use kiyot_testkit::{
    Container, Kiyot, Kubelet, LIMIT, Node, Pod, RunningPod, Source, cri, wait_until,
};

use crate::cell::{WAIT, options, remove_and_assert_clean};

/// Binds a subpath of a volume as the kubelet does (pkg/volume/util/subpath). Returns the mount
/// that the kubelet sends.
fn bind_subpath(pod: &Path, source: &Path, at: &str, container_path: &str) -> cri::Mount {
    let target = pod.join("volume-subpaths").join(at);
    fs::create_dir_all(target.parent().unwrap()).unwrap();
    if source.is_dir() {
        fs::create_dir(&target).unwrap();
    } else {
        fs::write(&target, "").unwrap();
    }
    rustix::mount::mount_bind(source.canonicalize().unwrap(), &target).unwrap();
    let host_path = target.display().to_string();
    cri::Mount { container_path: container_path.to_owned(), host_path, ..Default::default() }
}

fn unbind(mounts: &[cri::Mount]) {
    for mount in mounts {
        let _ =
            rustix::mount::unmount(mount.host_path.as_str(), rustix::mount::UnmountFlags::DETACH);
    }
}

async fn run_sandbox(kubelet: &mut Kubelet, spec: &Pod) -> RunningPod {
    let config = kubelet.prepare(spec);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    kubelet.running(spec, config, sandbox)
}

async fn start_container(
    kubelet: &mut Kubelet,
    running: &mut RunningPod,
    container: &Container,
) -> String {
    let made = kubelet.create_container(running, container, 0).await.unwrap();
    kubelet.start_container(&made.id).await.unwrap();
    let id = made.id.clone();
    running.containers.insert(container.name.clone(), made);
    id
}

async fn script_stdout(kubelet: &mut Kubelet, container: &str, script: &str) -> String {
    kubelet.exec_sync(container, &["sh", "-c", script]).await.unwrap().stdout
}

/// Verifies D8.
#[tokio::test]
async fn subpath_of_a_config_map_or_secret_is_constant() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("frozen")
        .in_cell()
        .volume(
            "settings",
            Source::ConfigMap(Source::files(&[("colour", "blue"), ("sub/deep", "deep")])),
        )
        .volume("key", Source::Secret(Source::files(&[("key", "hush")])));
    let mut running = run_sandbox(&mut kubelet, &spec).await;
    let pod = kubelet.pod_directory(&spec.uid);
    let settings = pod.join("volumes/kubernetes.io~configmap/settings");
    let mounts = vec![
        bind_subpath(&pod, &settings.join("colour"), "settings/main/0", "/etc/colour"),
        bind_subpath(&pod, &settings.join("sub"), "settings/main/1", "/etc/sub"),
        bind_subpath(
            &pod,
            &pod.join("volumes/kubernetes.io~secret/key/key"),
            "key/main/2",
            "/etc/key",
        ),
    ];
    let mut main = Container::script("main", WAIT).mount("settings", "/settings");
    main.more_mounts.clone_from(&mounts);
    let id = start_container(&mut kubelet, &mut running, &main).await;
    assert_eq!(
        script_stdout(&mut kubelet, &id, "cat /etc/colour /etc/sub/deep /etc/key").await,
        "bluedeephush"
    );
    assert_eq!(
        script_stdout(&mut kubelet, &id, "grep -c '/etc/key tmpfs ' /proc/mounts").await,
        "1\n",
        "a subpath of a secret is in memory"
    );
    kubelet.update_volume(
        &spec,
        "settings",
        &Source::files(&[("colour", "red"), ("sub/deep", "deeper")]),
    );
    wait_until("the whole volume is updated", LIMIT, async || {
        (script_stdout(&mut kubelet, &id, "cat /settings/colour").await == "red").then_some(())
    })
    .await;
    assert_eq!(script_stdout(&mut kubelet, &id, "cat /etc/colour /etc/sub/deep").await, "bluedeep");
    unbind(&mounts);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D8.
#[tokio::test]
async fn subpath_of_an_empty_dir_is_live_and_shared() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("parts")
        .in_cell()
        .volume("scratch", Source::EmptyDir { memory: false })
        .volume("fast", Source::EmptyDir { memory: true });
    let mut running = run_sandbox(&mut kubelet, &spec).await;
    // Files of an init container are in the cell, but not on the node.
    let first = Container::script(
        "init",
        "echo made > /scratch/config; mkdir /scratch/data; \
        echo one > /scratch/data/one; echo f > /fast/file",
    )
    .mount("scratch", "/scratch")
    .mount("fast", "/fast");
    let init = start_container(&mut kubelet, &mut running, &first).await;
    assert_eq!(kubelet.exited(&init).await.exit_code, 0);

    // The kubelet creates directories for these paths, because they are absent on the node.
    let pod = kubelet.pod_directory(&spec.uid);
    let (scratch, fast) = (
        pod.join("volumes/kubernetes.io~empty-dir/scratch"),
        pod.join("volumes/kubernetes.io~empty-dir/fast"),
    );
    for placeholder in
        [scratch.join("config"), scratch.join("data"), scratch.join("new/er"), fast.join("file")]
    {
        fs::create_dir_all(placeholder).unwrap();
    }
    let mut mounts = vec![
        bind_subpath(&pod, &scratch.join("config"), "scratch/one/0", "/etc/config"),
        bind_subpath(&pod, &scratch.join("data"), "scratch/one/1", "/data"),
        bind_subpath(&pod, &scratch.join("new/er"), "scratch/one/2", "/new"),
        bind_subpath(&pod, &fast.join("file"), "fast/one/3", "/etc/file"),
    ];
    let mut one = Container::script("one", WAIT);
    one.more_mounts.clone_from(&mounts);
    let one = start_container(&mut kubelet, &mut running, &one).await;
    let mut other = Container::script("other", WAIT).mount("scratch", "/scratch");
    other.more_mounts.push(bind_subpath(&pod, &scratch.join("data"), "scratch/other/1", "/data"));
    mounts.extend(other.more_mounts.clone());
    let other = start_container(&mut kubelet, &mut running, &other).await;

    assert_eq!(
        script_stdout(&mut kubelet, &one, "cat /etc/config /data/one /etc/file; ls /new").await,
        "made\none\nf\n"
    );
    script_stdout(&mut kubelet, &one, "echo two > /data/two; echo three > /new/three").await;
    assert_eq!(
        script_stdout(
            &mut kubelet,
            &other,
            "cat /data/two /scratch/data/two /scratch/new/er/three"
        )
        .await,
        "two\ntwo\nthree\n"
    );
    script_stdout(&mut kubelet, &other, "echo changed > /scratch/config").await;
    assert_eq!(script_stdout(&mut kubelet, &one, "cat /etc/config").await, "changed\n");
    unbind(&mounts);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
