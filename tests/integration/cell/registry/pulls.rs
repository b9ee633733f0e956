//! Concurrent pulls of a cell, the node's image statistics during pulls, and secrets of pulls.

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use kiyot_proto::admin::UnitState;
use kiyot_testkit::{
    Access, Container, Kiyot, Kubelet, LIMIT, Node, Pace, Pod, Registry, Source,
    cri::{self, ImageFsInfoRequest},
    wait_until,
};

use crate::cell::{
    WAIT,
    operator::admin::{admin, pods},
    registry::registries::{
        auth, blob_requests, image_of_size, image_with_layers, image_with_word,
        options_with_progress_timeout, pull_on_node, run_sandbox, run_until_word, with_mirrors,
        written_words,
    },
    remove_and_assert_clean,
};

/// Verifies I13.
#[tokio::test]
async fn concurrent_pulls_each_take_their_own_layers_from_the_node() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let (mut names, mut bases, mut wanted) = (Vec::new(), Vec::new(), BTreeSet::new());
    for (base, word) in [("granite", "first"), ("marble", "second")] {
        let image = image_with_layers(base, word);
        let (of_node, _) = registry.image(&format!("{word}:0"), &image);
        let local = pull_on_node(&mut kubelet, &registry, &of_node).await;
        kubelet.forget(&local);
        let (name, _) = registry.image(&format!("{word}:1"), &image);
        let [config, layer, upper] = registry.parts(&name).try_into().unwrap();
        // The registry holds the configuration blob back until the test has seen the base in the
        // cell: the pull requests layers after the configuration.
        registry.pace(&config.0, Pace::Stalls(0));
        wanted.insert(config.0.clone());
        names.push((name, config.0));
        bases.push((layer.0, layer.1 + upper.1));
    }
    let mut pod = run_sandbox(&mut kubelet, "hasty").await;
    let cell = kiyot.state().join("cells").join(kiyot.cells().remove(0));
    let in_cell = |digest: &str| {
        cell.join(
            digest.replace("sha256:", "containerd/io.containerd.content.v1.content/blobs/sha256/"),
        )
        .exists()
    };
    let arrive = async {
        wait_until("both bases are in the cell", LIMIT, async || {
            bases.iter().all(|(digest, _)| in_cell(digest)).then_some(())
        })
        .await;
        names.iter().for_each(|(_, config)| registry.release(config));
    };
    let (mut one, mut other) = (kubelet.clone(), kubelet.clone());
    let (first, second, ()) = tokio::join!(
        one.pull(&pod.spec, &pod.config, &names[0].0, None),
        other.pull(&pod.spec, &pod.config, &names[1].0, None),
        arrive
    );
    assert_eq!([first.unwrap(), second.unwrap()], [names[0].1.clone(), names[1].1.clone()]);
    assert_eq!(blob_requests(&registry.asked()), wanted, "the layers are the node's");
    let log = kiyot.log();
    for ((name, _), (_, bytes)) in names.iter().zip(&bases) {
        let copy_logs: Vec<_> = log
            .lines()
            .filter(|line| {
                line.contains("layers of a pull copied from the node")
                    && line.contains(name.as_str())
            })
            .collect();
        assert!(
            matches!(copy_logs.as_slice(), [line] if line.contains(&bytes.to_string())),
            "{name}: {copy_logs:?}"
        );
    }
    for (container, (name, _)) in ["first", "second"].iter().zip(&names) {
        run_until_word(&mut kubelet, &mut pod, container, name, container).await;
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
}

/// Verifies O27.
#[tokio::test]
async fn failed_pull_is_shown_as_a_unit_until_it_succeeds() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Basic("violet".to_owned(), "sesame".to_owned()));
    let (name, _) = registry.image("violet/app:1", &image_with_word("opened"));
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut client = admin(&kiyot).await;
    let pod = run_sandbox(&mut kubelet, "barred").await;
    let refused = kubelet.pull(&pod.spec, &pod.config, &name, None).await.unwrap_err();
    let listed = pods(&mut client).await.remove(0);
    let [unit] = &*listed.units else { panic!("{listed:?}") };
    assert_eq!((&unit.name, &unit.image, unit.start_failure), (&name, &name, true));
    assert_eq!(unit.state(), UnitState::UnitWaiting);
    assert_eq!(unit.message, format!("Error pulling image for unit {name}: {}", refused.message()));
    assert_eq!(listed.message, format!("Error pulling image {name}: {}", refused.message()));
    let login = Some(auth("violet", "sesame"));
    kubelet.pull(&pod.spec, &pod.config, &name, login).await.unwrap();
    let listed = pods(&mut client).await.remove(0);
    assert_eq!((listed.units, listed.message), (Vec::new(), String::new()));
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
}

/// Verifies I13.
#[tokio::test]
async fn stalled_pull_ends_while_another_continues() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let (stuck, _) = registry.image("stuck:1", &image_of_size(8 << 20));
    let (slow, _) = registry.image("slow:1", &image_of_size(32 << 20));
    let kiyot = Kiyot::start(&node, options_with_progress_timeout(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let pod = run_sandbox(&mut kubelet, "patient").await;
    registry.pace(&registry.parts(&stuck).pop().unwrap().0, Pace::Stalls(4 << 20));
    // The registry sends one MiB at a time for half a minute.
    registry.pace(
        &registry.parts(&slow).pop().unwrap().0,
        Pace::Trickles(1 << 20, Duration::from_secs(1)),
    );
    let (mut one, mut other) = (kubelet.clone(), kubelet.clone());
    let stalled = tokio::select! {
        stalled = one.pull(&pod.spec, &pod.config, &stuck, None) => stalled.unwrap_err(),
        ended = other.pull(&pod.spec, &pod.config, &slow, None) => {
            panic!("the pull that makes progress ended first: {ended:?}")
        }
    };
    assert_eq!(stalled.code(), tonic::Code::DeadlineExceeded);
    assert!(
        stalled.message().contains("stuck:1") && stalled.message().contains("no progress for 15 s"),
        "{stalled:?}"
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
}

/// Verifies I18.
#[tokio::test]
async fn pod_ends_although_its_pull_stalls() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let (name, _) = registry.image("stuck:1", &image_of_size(8 << 20));
    // The deadline of the pull is five minutes away, as long as a test may take.
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let pod = run_sandbox(&mut kubelet, "ending").await;
    let layer = registry.parts(&name).pop().unwrap().0;
    registry.pace(&layer, Pace::Stalls(4 << 20));
    let mut other = kubelet.clone();
    let ending = async {
        wait_until("the layer is requested", LIMIT, async || {
            blob_requests(&registry.asked()).contains(&layer).then_some(())
        })
        .await;
        remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
    };
    let (pulled, ()) = tokio::join!(other.pull(&pod.spec, &pod.config, &name, None), ending);
    pulled.unwrap_err();
}

/// Returns the node's image file systems, measured after the call began.
async fn fresh_image_fs_info(
    kubelet: &mut Kubelet,
    direct: &mut Kubelet,
) -> cri::ImageFsInfoResponse {
    let now =
        i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap();
    wait_until("containerd has a new measurement, and kiyot reports the same", LIMIT, async || {
        let of = async |kubelet: &mut Kubelet| {
            kubelet.image.image_fs_info(ImageFsInfoRequest::default()).await.unwrap().into_inner()
        };
        let (direct_info, info) = (of(direct).await, of(kubelet).await);
        let is_new = !direct_info.image_filesystems.is_empty()
            && direct_info.image_filesystems.iter().all(|system| system.timestamp > now);
        (is_new && direct_info == info).then_some(direct_info)
    })
    .await
}

/// Verifies I14.
#[tokio::test]
async fn image_file_systems_equal_the_nodes() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let (name, _) = registry.image("app:1", &image_of_size(24 << 20));
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let (mut kubelet, mut direct) =
        (kiyot.kubelet().await, node.kubelet(&node.socket()).await.unwrap());
    let before = fresh_image_fs_info(&mut kubelet, &mut direct).await;
    let mut pod = run_sandbox(&mut kubelet, "heavy").await;
    run_until_word(&mut kubelet, &mut pod, "main", &name, "heavy").await;
    let mut after = fresh_image_fs_info(&mut kubelet, &mut direct).await;
    for (after, before) in after.image_filesystems.iter_mut().zip(&before.image_filesystems) {
        after.timestamp = before.timestamp;
    }
    assert_eq!(after, before, "the node's usage does not count 24 MiB in a cell");
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
}

/// Verifies I15.
#[tokio::test]
async fn no_secret_is_in_a_log_of_the_daemon_or_of_a_containerd() {
    const SECRETS: [&str; 4] =
        ["sesame", "a-secret-of-a-volume", "a-secret-of-a-variable", "a-secret-that-is-told"];
    let node = Node::start().await;
    let registry =
        Registry::start(&node, Access::Basic("violet".to_owned(), SECRETS[0].to_owned()));
    let (name, _) = registry.image("violet/app:1", &image_with_word("opened"));
    let mut options = with_mirrors(&node);
    options.log = "trace".to_owned();
    let kiyot = Kiyot::start(&node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    let secret = Source::Secret(Source::files(&[("key", SECRETS[1])]));
    let main = Container::script("main", WAIT).mount("key", "/key").env("PASSWORD", SECRETS[2]);
    let mut pod = kubelet
        .run_pod(&Pod::new("hushed").in_cell().volume("key", secret).container(main))
        .await
        .unwrap();
    let (id, spec, config) =
        (pod.container("main").id.clone(), pod.spec.clone(), pod.config.clone());
    let output =
        kubelet.exec_sync(&id, &["sh", "-c", "cat /key/key; echo $PASSWORD"]).await.unwrap().stdout;
    assert_eq!(output, format!("{}{}\n", SECRETS[1], SECRETS[2]));
    kubelet.update_volume(&spec, "key", &Source::files(&[("key", SECRETS[3])]));
    wait_until("the new secret is in the cell", LIMIT, async || {
        (kubelet.exec_sync(&id, &["cat", "/key/key"]).await.ok()?.stdout == SECRETS[3])
            .then_some(())
    })
    .await;
    // Failures are logged in detail.
    for failing in [None, Some(auth("violet", SECRETS[0]))] {
        let is_allowed = failing.is_some();
        assert_eq!(kubelet.pull(&spec, &config, &name, failing).await.is_ok(), is_allowed);
    }
    let mut broken =
        Container::script("broken", "").env("PASSWORD", SECRETS[2]).mount("key", "/key");
    broken.command = vec!["/no/such/program".to_owned()];
    let created = kubelet.create_container(&pod, &broken, 0).await.unwrap();
    kubelet.start_container(&created.id).await.unwrap_err();
    pod.containers.insert("broken".to_owned(), created);
    assert_eq!(written_words(&node, &kiyot, &SECRETS), Vec::<String>::new());
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
    assert!(!kiyot.log().contains(SECRETS[2]));
}
