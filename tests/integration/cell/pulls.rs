//! Pulls of one cell at once, what the node says of its images beside them, and what nobody writes down of them.

use std::{
    fs,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use kiyot_testkit::{
    Access, Container, Kiyot, Kubelet, LIMIT, Node, Pace, Pod, Registry, Source,
    cri::{self, ImageFsInfoRequest},
    wait_until,
};

use super::{
    WAIT, ends_without_a_trace, options,
    registries::{auth, heavy, impatient, is_written, sandbox, saying, says, with_mirrors},
};

#[tokio::test]
async fn a_pull_that_stands_still_ends_though_another_one_goes_on() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let (stuck, _) = registry.image("stuck:1", &heavy(8 << 20));
    let (slow, _) = registry.image("slow:1", &heavy(32 << 20));
    let kiyot = Kiyot::start(&node, impatient(&node, 8)).await;
    let mut kubelet = kiyot.kubelet().await;
    let pod = sandbox(&mut kubelet, "patient").await;
    registry.pace(&registry.parts(&stuck).pop().unwrap().0, Pace::Stalls(4 << 20));
    // MiB by MiB for half a minute.
    registry.pace(&registry.parts(&slow).pop().unwrap().0, Pace::Trickles(1 << 20, Duration::from_secs(1)));
    let (mut one, mut other) = (kubelet.clone(), kubelet.clone());
    let stalled = tokio::select! {
        stalled = one.pull(&pod.spec, &pod.config, &stuck, None) => stalled.unwrap_err(),
        ended = other.pull(&pod.spec, &pod.config, &slow, None) => panic!("the one that goes on ended first: {ended:?}"),
    };
    assert_eq!(stalled.code(), tonic::Code::DeadlineExceeded);
    assert!(stalled.message().contains("stuck:1") && stalled.message().contains("nothing of it has come for 8 s"), "{stalled:?}");
    ends_without_a_trace(&mut kubelet, &kiyot, &pod).await;
}

/// What the node says of its images' file systems, in a measurement that began after now.
async fn measured(kubelet: &mut Kubelet, direct: &mut Kubelet) -> cri::ImageFsInfoResponse {
    let now = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap();
    wait_until("containerd has measured its images anew, and kiyot says what it says", LIMIT, async || {
        let of = async |kubelet: &mut Kubelet| kubelet.image.image_fs_info(ImageFsInfoRequest::default()).await.unwrap().into_inner();
        let (own, through) = (of(direct).await, of(kubelet).await);
        let is_new = !own.image_filesystems.is_empty() && own.image_filesystems.iter().all(|system| system.timestamp > now);
        (is_new && own == through).then_some(own)
    })
    .await
}

#[tokio::test]
async fn the_file_systems_of_images_are_the_nodes_alone() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let (name, _) = registry.image("app:1", &heavy(24 << 20));
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let (mut kubelet, mut direct) = (kiyot.kubelet().await, node.kubelet(&node.socket()).await.unwrap());
    let before = measured(&mut kubelet, &mut direct).await;
    let mut pod = sandbox(&mut kubelet, "heavy").await;
    says(&mut kubelet, &mut pod, "main", &name, "heavy").await;
    let mut after = measured(&mut kubelet, &mut direct).await;
    for (after, before) in after.image_filesystems.iter_mut().zip(&before.image_filesystems) {
        after.timestamp = before.timestamp;
    }
    assert_eq!(after, before, "24 MiB in a cell are none of the node's");
    ends_without_a_trace(&mut kubelet, &kiyot, &pod).await;
}

#[tokio::test]
async fn no_secret_is_in_a_log_of_the_daemon_or_of_a_containerd() {
    const SECRETS: [&str; 4] = ["sesame", "a-secret-of-a-volume", "a-secret-of-a-variable", "a-secret-that-is-told"];
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Basic("violet".to_owned(), SECRETS[0].to_owned()));
    let (name, _) = registry.image("violet/app:1", &saying("opened"));
    let mut options = with_mirrors(&node);
    options.log = "trace".to_owned();
    let kiyot = Kiyot::start(&node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    let secret = Source::Secret(Source::files(&[("key", SECRETS[1])]));
    let main = Container::script("main", WAIT).mount("key", "/key").env("PASSWORD", SECRETS[2]);
    let mut pod = kubelet.run_pod(&Pod::new("hushed").in_cell().volume("key", secret).container(main)).await.unwrap();
    let (id, spec, config) = (pod.container("main").id.clone(), pod.spec.clone(), pod.config.clone());
    let said = kubelet.exec_sync(&id, &["sh", "-c", "cat /key/key; echo $PASSWORD"]).await.unwrap().stdout;
    assert_eq!(said, format!("{}{}\n", SECRETS[1], SECRETS[2]));
    kubelet.update_volume(&spec, "key", &Source::files(&[("key", SECRETS[3])]));
    wait_until("the new secret is in the cell", LIMIT, async || {
        (kubelet.exec_sync(&id, &["cat", "/key/key"]).await.ok()?.stdout == SECRETS[3]).then_some(())
    })
    .await;
    // What fails is told at length.
    for failing in [None, Some(auth("violet", SECRETS[0]))] {
        let is_allowed = failing.is_some();
        assert_eq!(kubelet.pull(&spec, &config, &name, failing).await.is_ok(), is_allowed);
    }
    let mut broken = Container::script("broken", "").env("PASSWORD", SECRETS[2]).mount("key", "/key");
    broken.command = vec!["/no/such/program".to_owned()];
    let created = kubelet.create_container(&pod, &broken, 0).await.unwrap();
    kubelet.start_container(&created.id).await.unwrap_err();
    pod.containers.insert("broken".to_owned(), created);
    assert_eq!(is_written(&node, &kiyot, &SECRETS), Vec::<String>::new());
    ends_without_a_trace(&mut kubelet, &kiyot, &pod).await;
    assert!(!kiyot.log().contains(SECRETS[2]));
}

#[tokio::test]
async fn mirrors_that_only_the_nodes_own_file_has_are_named_in_the_log() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let warned = async |kiyot: &Kiyot<'_>, words: &[&str]| {
        wait_until(format!("the log has a warning with {words:?}"), LIMIT, async || {
            kiyot.log().lines().any(|line| line.contains("WARN") && words.iter().all(|word| line.contains(word))).then_some(())
        })
        .await;
    };
    let directory = node.registries().display().to_string();
    warned(&kiyot, &["cells do not", "registry_config_dir", &directory]).await;
    drop(kiyot);
    let file = node.directory().join("containerd.toml");
    let text = fs::read_to_string(&file).unwrap();
    let old = text.replace(
        &format!("[plugins.\"io.containerd.grpc.v1.cri\".registry]\nconfig_path = \"{directory}\"\n"),
        "[plugins.\"io.containerd.grpc.v1.cri\".registry.mirrors.\"old.example\"]\nendpoint = [\"https://violet:sesame@mirror.example\"]\n\
         [plugins.\"io.containerd.grpc.v1.cri\".registry.configs.\"mirror.example\".auth]\nusername = \"violet\"\npassword = \"sesame\"\n",
    );
    assert_ne!(old, text);
    fs::write(&file, old).unwrap();
    node.restart_containerd().await;
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    warned(&kiyot, &["registry.mirrors", "old.example", "hosts.toml"]).await;
    warned(&kiyot, &["registry.configs", "mirror.example"]).await;
    assert!(!kiyot.log().contains("sesame"));
}
