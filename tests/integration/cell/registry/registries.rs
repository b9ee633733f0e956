//! Images of pods in cells, pulled from a registry.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    time::{Duration, Instant},
};

use kiyot_testkit::{
    Access, Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Node, Pace, Pod, Registry, RunningPod,
    cri, image::ImageSpec, registry::REFUSAL, wait_until,
};

use crate::cell::{WAIT, options, remove_and_assert_clean};

/// Returns options of a daemon whose cells pull through the node's mirrors. Without the mirrors,
/// the hosts of these images do not exist.
pub(crate) fn with_mirrors(node: &Node) -> KiyotOptions {
    KiyotOptions { milpa: format!("registry_config_dir = {:?}\n", node.registries()), ..options() }
}

/// Returns an image that writes a text and runs until it is stopped. It does not end by itself,
/// because its last output could be lost (`Ending`).
pub(crate) fn image_running(says: &str) -> ImageSpec {
    ImageSpec::script(&format!("trap 'exit 0' TERM; {says}; {WAIT}"))
}

/// Returns an image with its own layer that writes a word.
pub(crate) fn image_with_word(word: &str) -> ImageSpec {
    ImageSpec {
        files: vec![(word.to_owned(), 0o644, word.into())],
        ..image_running(&format!("echo {word}"))
    }
}

/// Runs a sandbox without containers in a cell.
pub(crate) async fn run_sandbox(kubelet: &mut Kubelet, name: &str) -> RunningPod {
    let pod = Pod::new(name).in_cell();
    let config = kubelet.prepare(&pod);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    kubelet.running(&pod, config, sandbox)
}

/// Runs a container with the pull policy IfNotPresent, and stops it when it has written its word.
/// Returns the id of its image.
pub(crate) async fn run_until_word(
    kubelet: &mut Kubelet,
    pod: &mut RunningPod,
    container: &str,
    image: &str,
    word: &str,
) -> String {
    let created =
        kubelet.create_container(pod, &Container::of_image(container, image), 0).await.unwrap();
    kubelet.start_container(&created.id).await.unwrap();
    kubelet.logged(&created, word).await;
    kubelet.stop_container(&created.id, i64::try_from(LIMIT.as_secs()).unwrap()).await.unwrap();
    pod.containers.insert(container.to_owned(), created);
    kubelet.image_status(&pod.spec, image).await.unwrap().unwrap().id
}

/// Returns the requests for blobs.
pub(crate) fn blob_requests(requests: &[String]) -> BTreeSet<String> {
    requests
        .iter()
        .filter_map(|request| request.strip_prefix("GET /v2/")?.rsplit_once("/blobs/"))
        .map(|(_, digest)| digest.to_owned())
        .collect()
}

pub(crate) fn auth(user: &str, password: &str) -> cri::AuthConfig {
    cri::AuthConfig {
        username: user.to_owned(),
        password: password.to_owned(),
        ..Default::default()
    }
}

/// `violet:sesame` as encoded in a Docker configuration.
const ENCODED_CREDENTIALS: &str = "dmlvbGV0OnNlc2FtZQ==";

/// Verifies I1.
#[tokio::test]
async fn every_form_of_credentials_opens_a_private_image() {
    let node = Node::start().await;
    let by_name = Registry::start(&node, Access::Basic("violet".to_owned(), "sesame".to_owned()));
    let access = Access::Token {
        user: "violet".to_owned(),
        password: "sesame".to_owned(),
        identity: "an-identity".to_owned(),
    };
    let by_token = Registry::start(&node, access);
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let encoded = cri::AuthConfig { auth: ENCODED_CREDENTIALS.to_owned(), ..Default::default() };
    let identity =
        cri::AuthConfig { identity_token: "an-identity".to_owned(), ..Default::default() };
    let forms = [
        (&by_name, auth("violet", "sesame")),
        (&by_name, encoded.clone()),
        (&by_token, auth("violet", "sesame")),
        (&by_token, encoded),
        (&by_token, identity),
    ];
    let mut pod = run_sandbox(&mut kubelet, "credentials").await;
    for (number, (registry, auth)) in forms.into_iter().enumerate() {
        let word = format!("opened-{number}");
        let (name, _) = registry.image(&format!("violet/app{number}:1"), &image_with_word(&word));
        let pulled = kubelet.pull(&pod.spec, &pod.config, &name, Some(auth)).await.unwrap();
        assert_eq!(
            run_until_word(&mut kubelet, &mut pod, &format!("main{number}"), &name, &word).await,
            pulled
        );
    }
    let log = kiyot.log();
    assert!(
        !["sesame", ENCODED_CREDENTIALS, "an-identity"].iter().any(|secret| log.contains(secret)),
        "{log}"
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
}

/// Verifies I2.
#[tokio::test]
async fn refused_private_image_quotes_the_registry() {
    let node = Node::start().await;
    let access = Access::Token {
        user: "violet".to_owned(),
        password: "sesame".to_owned(),
        identity: "an-identity".to_owned(),
    };
    let registry = Registry::start(&node, access);
    let (name, _) = registry.image("violet/app:1", &image_with_word("opened"));
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let pod = run_sandbox(&mut kubelet, "stranger").await;
    for auth in [None, Some(auth("violet", "open-up"))] {
        let refused = kubelet.pull(&pod.spec, &pod.config, &name, auth).await.unwrap_err();
        assert!(
            refused.message().contains(REFUSAL) && refused.message().contains(&name),
            "{refused:?}"
        );
        assert!(!refused.message().contains("open-up"), "{refused:?}");
    }
    let refused =
        kubelet.create_container(&pod, &Container::of_image("main", &name), 0).await.unwrap_err();
    assert!(refused.message().contains(REFUSAL), "{refused:?}");
    assert_eq!(kubelet.image_status(&pod.spec, &name).await.unwrap(), None);
    assert!(blob_requests(&registry.asked()).is_empty());
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
}

/// Verifies I3.
#[tokio::test]
async fn image_is_pulled_by_its_digest() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let (_, pinned) = registry.image("app:1", &image_with_word("old"));
    registry.image("app:1", &image_with_word("new"));
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut pod = run_sandbox(&mut kubelet, "pinned").await;
    let id = run_until_word(&mut kubelet, &mut pod, "main", &pinned, "old").await;
    let image = kubelet.image_status(&pod.spec, &pinned).await.unwrap().unwrap();
    assert_eq!((image.id, image.repo_digests), (id, vec![pinned]));
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
}

/// Verifies I4.
#[tokio::test]
async fn pull_policies_work_as_on_the_node() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let (name, _) = registry.image("app:1", &image_with_word("old"));
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut pod = run_sandbox(&mut kubelet, "policies").await;
    // Never: the kubelet reads the status and gives up.
    assert_eq!(kubelet.image_status(&pod.spec, &name).await.unwrap(), None);
    assert_eq!(registry.asked(), Vec::<String>::new());
    // IfNotPresent: the image is absent, and is pulled.
    let old = run_until_word(&mut kubelet, &mut pod, "first", &name, "old").await;
    assert_eq!(blob_requests(&registry.asked()).len(), 2);
    // IfNotPresent and Never: the image is present and runs, whatever the registry has now.
    registry.image("app:1", &image_with_word("new"));
    assert_eq!(run_until_word(&mut kubelet, &mut pod, "second", &name, "old").await, old);
    assert_eq!(kubelet.image_status(&pod.spec, &name).await.unwrap().unwrap().id, old);
    assert_eq!(registry.asked(), Vec::<String>::new());
    // Always: the registry gets a request, and serves the new image.
    let new = kubelet.pull(&pod.spec, &pod.config, &name, None).await.unwrap();
    assert_ne!(new, old);
    assert_eq!(blob_requests(&registry.asked()).len(), 2);
    assert_eq!(run_until_word(&mut kubelet, &mut pod, "third", &name, "new").await, new);
    // Always, with an unchanged tag: no blob is fetched.
    assert_eq!(kubelet.pull(&pod.spec, &pod.config, &name, None).await.unwrap(), new);
    let requests = registry.asked();
    assert!(!requests.is_empty() && blob_requests(&requests).is_empty(), "{requests:?}");
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
}

/// Counts requests by kind: the verb, with manifests or blobs.
fn count_by_kind(requests: &[String]) -> BTreeMap<String, usize> {
    let mut kinds = BTreeMap::new();
    for request in requests {
        let verb = request.split(' ').next().unwrap_or_default();
        let of = ["manifests", "blobs"]
            .into_iter()
            .find(|kind| request.contains(&format!("/{kind}/")))
            .unwrap_or("other");
        *kinds.entry(format!("{verb} {of}")).or_default() += 1;
    }
    kinds
}

/// Verifies I4.
#[tokio::test]
async fn pull_policies_make_as_many_requests_for_a_cell_as_for_the_node() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut asked_for = Vec::new();
    for spec in [Pod::new("local"), Pod::new("cell").in_cell()] {
        let config = kubelet.prepare(&spec);
        let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
        let mut pod = kubelet.running(&spec, config, sandbox);
        // Each pod has its own image, without common layers.
        let word = |age: &str| format!("{age}-{}", spec.name);
        let repository = format!("app-{}:1", spec.name);
        let (name, _) = registry.image(&repository, &image_with_word(&word("old")));
        let mut steps = Vec::new();
        let mut ends = |step: &'static str| steps.push((step, count_by_kind(&registry.asked())));
        assert_eq!(kubelet.image_status(&pod.spec, &name).await.unwrap(), None);
        ends("Never, without the image");
        run_until_word(&mut kubelet, &mut pod, "first", &name, &word("old")).await;
        ends("IfNotPresent, without the image");
        registry.image(&repository, &image_with_word(&word("new")));
        run_until_word(&mut kubelet, &mut pod, "second", &name, &word("old")).await;
        ends("IfNotPresent");
        kubelet.restart();
        run_until_word(&mut kubelet, &mut pod, "third", &name, &word("old")).await;
        ends("IfNotPresent, after a restart of the kubelet");
        assert!(kubelet.image_status(&pod.spec, &name).await.unwrap().is_some());
        ends("Never");
        kubelet.pull(&pod.spec, &pod.config, &name, None).await.unwrap();
        ends("Always, of a tag that has moved");
        kubelet.pull(&pod.spec, &pod.config, &name, None).await.unwrap();
        ends("Always");
        run_until_word(&mut kubelet, &mut pod, "fourth", &name, &word("new")).await;
        ends("a container of the pulled image");
        asked_for.push(steps);
        kubelet.stop_and_remove(&pod).await.unwrap();
    }
    let (node_steps, of_cell) = (&asked_for[0], &asked_for[1]);
    for (step, requests) in node_steps {
        let is_pull = ["without the image", "Always"].iter().any(|word| step.contains(word))
            && !step.starts_with("Never");
        assert_eq!(requests.is_empty(), !is_pull, "{step}: {requests:?}");
    }
    assert_eq!(of_cell, node_steps);
    // The hosts of these images do not exist: all blobs were fetched through the node's mirrors.
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}

/// Verifies I8.
#[tokio::test]
async fn image_pulled_by_the_node_is_pulled_by_no_cell() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let (name, _) = registry.image("app:1", &image_with_word("once"));
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let local = kubelet
        .run_pod(&Pod::new("local").container(Container::of_image("main", &name)))
        .await
        .unwrap();
    assert_eq!(blob_requests(&registry.asked()).len(), 2, "the node pulls the image");
    for cell in ["first", "second"] {
        let mut pod = run_sandbox(&mut kubelet, cell).await;
        run_until_word(&mut kubelet, &mut pod, "main", &name, "once").await;
        assert_eq!(
            registry.asked(),
            Vec::<String>::new(),
            "the {cell} cell copies the image from the node"
        );
        remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
    }
    kubelet.stop_and_remove(&local).await.unwrap();
}

/// Verifies I22.
#[tokio::test]
async fn cells_with_the_registry_as_source_pull_and_get_the_rest_from_the_node() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Basic("violet".into(), "sesame".into()));
    let (name, _) = registry.image("app:1", &image_with_word("once"));
    let with_mirrors = with_mirrors(&node);
    let milpa = format!("{}image_source = \"registry\"\n", with_mirrors.milpa);
    let kiyot = Kiyot::start(&node, KiyotOptions { milpa, ..with_mirrors }).await;
    let mut kubelet = kiyot.kubelet().await;
    let local = Pod::new("local");
    let credentials = auth("violet", "sesame");
    let config = kubelet.prepare(&local);
    kubelet.pull(&local, &config, &name, Some(credentials.clone())).await.unwrap();
    registry.asked();

    let pod = run_sandbox(&mut kubelet, "with-credentials").await;
    kubelet.pull(&pod.spec, &pod.config, &name, Some(credentials)).await.unwrap();
    assert_eq!(blob_requests(&registry.asked()).len(), 2, "the cell pulls the image");
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;

    // The registry refuses the cell. For IfNotPresent the image counts as present.
    let mut pod = run_sandbox(&mut kubelet, "without-credentials").await;
    run_until_word(&mut kubelet, &mut pod, "main", &name, "once").await;
    assert_eq!(blob_requests(&registry.asked()), BTreeSet::new(), "the node sends the image");
    assert!(kiyot.log().contains("image copied from the node"), "{}", kiyot.log());
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
    kubelet.forget(&local);
}

/// Verifies I5.
#[tokio::test]
async fn layers_that_the_node_discarded_are_pulled() {
    let node = Node::start_discarding_layers().await;
    let registry = Registry::start(&node, Access::Basic("violet".to_owned(), "sesame".to_owned()));
    let (name, _) = registry.image("violet/app:1", &image_with_word("whole"));
    let credentials = || Some(auth("violet", "sesame"));
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    // An image that was pulled for a pod on the node does not count for a pod in a cell.
    let local = Pod::new("local");
    let on_node =
        kubelet.pull(&local, &kubelet.prepare(&local), &name, credentials()).await.unwrap();
    let fetched = blob_requests(&registry.asked());
    wait_until("the node has discarded a layer", LIMIT, async || {
        // Removing an image starts containerd's garbage collection.
        node.image("kiyot.test/passing:1", &image_with_word("passing")).await;
        node.ctr(&["images", "remove", "--sync", "kiyot.test/passing:1"]);
        let kept = node.ctr(&["content", "list", "--quiet"]);
        fetched.iter().any(|digest| !kept.contains(digest.as_str())).then_some(())
    })
    .await;

    let mut pod = run_sandbox(&mut kubelet, "whole").await;
    // Never: the kubelet gives up. Other policies pull the image with the pod's credentials.
    assert_eq!(
        kubelet.image_status(&pod.spec, &name).await.unwrap(),
        None,
        "the node lacks the layer"
    );
    assert!(kubelet.pull(&pod.spec, &pod.config, &name, None).await.is_err());
    assert_eq!(kubelet.pull(&pod.spec, &pod.config, &name, credentials()).await.unwrap(), on_node);
    assert_eq!(
        run_until_word(&mut kubelet, &mut pod, "main", &name, "whole").await,
        on_node,
        "the image is the same"
    );
    assert_eq!(blob_requests(&registry.asked()), fetched);
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
    kubelet.forget(&local);
}

/// Verifies I6.
#[tokio::test]
async fn images_of_cells_are_absent_on_the_node() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let (name, _) = registry
        .image("app:1", &ImageSpec { user: "nobody".to_owned(), ..image_with_word("apart") });
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let before = listed_images(&mut kubelet).await;
    let mut pod = run_sandbox(&mut kubelet, "apart").await;
    let id = run_until_word(&mut kubelet, &mut pod, "main", &name, "apart").await;
    // For runAsNonRoot, the kubelet requests the user of the image without naming a pod.
    for reference in [&name, &id] {
        assert_eq!(
            kubelet.image_status_without_pod(reference).await.unwrap().unwrap().username,
            "nobody"
        );
    }
    assert_eq!(listed_images(&mut kubelet).await, before);
    let local = Pod::new("local");
    assert_eq!(
        kubelet.image_status(&local, &name).await.unwrap(),
        None,
        "the image is absent for a pod on the node"
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
    // The images of an ended cell are absent.
    for reference in [&name, &id] {
        assert_eq!(kubelet.image_status_without_pod(reference).await.unwrap(), None);
    }
}

async fn listed_images(kubelet: &mut Kubelet) -> BTreeSet<String> {
    let images = kubelet
        .image
        .list_images(cri::ListImagesRequest::default())
        .await
        .unwrap()
        .into_inner()
        .images;
    images.into_iter().flat_map(|image| image.repo_tags.into_iter().chain([image.id])).collect()
}

/// Pulls an image for a pod on the node. Discards the requests that the registry has recorded.
pub(crate) async fn pull_on_node(kubelet: &mut Kubelet, registry: &Registry, image: &str) -> Pod {
    let local = Pod::new("local");
    kubelet.pull(&local, &kubelet.prepare(&local), image, None).await.unwrap();
    registry.asked();
    local
}

/// Returns an image with two layers of its own. The pause image has neither.
pub(crate) fn image_with_layers(base: &str, word: &str) -> ImageSpec {
    let file = |name: &str| vec![(name.to_owned(), 0o644, name.into())];
    ImageSpec {
        files: file(base),
        upper: file(word),
        ..image_running(&format!("cat /{word}; echo"))
    }
}

/// Verifies I9.
#[tokio::test]
async fn layers_on_the_node_are_not_requested_from_the_registry() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let [of_node, name] =
        ["app:1", "app:2"].map(|tag| registry.image(tag, &image_with_layers("base", "mine")).0);
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let local = pull_on_node(&mut kubelet, &registry, &of_node).await;
    let [config, base, upper] = registry.parts(&name).try_into().unwrap();
    let mut pod = run_sandbox(&mut kubelet, "sharing").await;
    // The registry holds the configuration blob back until the test has seen the base in the cell:
    // the pull requests layers after the configuration.
    registry.pace(&config.0, Pace::Stalls(0));
    let blob =
        base.0.replace("sha256:", "containerd/io.containerd.content.v1.content/blobs/sha256/");
    let in_cell = kiyot.state().join("cells").join(kiyot.cells().remove(0)).join(blob);
    let arrives = async {
        wait_until("the base is in the cell", LIMIT, async || in_cell.exists().then_some(())).await;
        registry.release(&config.0);
    };
    let (pulled, ()) = tokio::join!(kubelet.pull(&pod.spec, &pod.config, &name, None), arrives);
    let pulled = pulled.unwrap();
    assert_eq!(pulled, config.0);
    let requests = blob_requests(&registry.asked());
    assert_eq!(requests, BTreeSet::from([config.0]), "the layers are the node's");
    let log = kiyot.log();
    assert!(
        log.lines().any(|line| line.contains("from the node")
            && line.contains(&name)
            && line.contains(&(base.1 + upper.1).to_string())),
        "{log}"
    );
    assert_eq!(run_until_word(&mut kubelet, &mut pod, "main", &name, "mine").await, pulled);
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
    kubelet.forget(&local);
}

/// Verifies I9.
#[tokio::test]
async fn pod_that_may_not_pull_gets_no_layer_of_the_node() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Basic("violet".to_owned(), "sesame".to_owned()));
    let (name, _) = registry.image("app:1", &image_with_layers("base", "mine"));
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let local = Pod::new("local");
    let login = Some(auth("violet", "sesame"));
    kubelet.pull(&local, &kubelet.prepare(&local), &name, login).await.unwrap();
    let pod = run_sandbox(&mut kubelet, "stranger").await;
    let refused = kubelet.pull(&pod.spec, &pod.config, &name, None).await.unwrap_err();
    assert!(refused.message().contains(&name), "{refused:?}");
    let log = kiyot.log();
    assert!(
        !log.lines().any(|line| line.contains("from the node") && line.contains(&name)),
        "{log}"
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
    kubelet.forget(&local);
}

/// The time without progress after which a pull is cancelled, with
/// [`options_with_progress_timeout`]. It is longer than a busy machine needs for the first byte or
/// for one MiB.
pub(crate) const PROGRESS_TIMEOUT: Duration = Duration::from_secs(15);

/// Returns options of a daemon that cancels a pull without progress for [`PROGRESS_TIMEOUT`].
pub(crate) fn options_with_progress_timeout(node: &Node) -> KiyotOptions {
    let milpa = format!(
        "registry_config_dir = {:?}\nimage_pull_progress_timeout = \"{}s\"\n",
        node.registries(),
        PROGRESS_TIMEOUT.as_secs()
    );
    KiyotOptions { milpa, ..options() }
}

/// Returns an image with one layer of this size. The node does not have the layer.
pub(crate) fn image_of_size(bytes: usize) -> ImageSpec {
    ImageSpec {
        files: vec![("weight".to_owned(), 0o644, vec![b'w'; bytes])],
        ..image_running("echo heavy")
    }
}

/// Verifies I10.
#[tokio::test]
async fn stalled_pull_ends_and_the_next_resumes_it() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let (name, _) = registry.image("app:1", &image_of_size(8 << 20));
    let kiyot = Kiyot::start(&node, options_with_progress_timeout(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut pod = run_sandbox(&mut kubelet, "stalled").await;
    let layer = registry.parts(&name).pop().unwrap().0;
    registry.pace(&layer, Pace::Stalls(4 << 20));
    let stalled = kubelet.pull(&pod.spec, &pod.config, &name, None).await.unwrap_err();
    assert_eq!(stalled.code(), tonic::Code::DeadlineExceeded);
    assert!(
        ["app:1", "no progress for 15 s"].iter().all(|word| stalled.message().contains(word)),
        "{stalled:?}"
    );
    assert!(blob_requests(&registry.asked()).contains(&layer));
    // The kubelet retries.
    registry.release(&layer);
    run_until_word(&mut kubelet, &mut pod, "main", &name, "heavy").await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
}

/// Verifies I10.
#[tokio::test]
async fn slow_pull_with_progress_continues() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let (name, _) = registry.image("app:1", &image_of_size(24 << 20));
    let kiyot = Kiyot::start(&node, options_with_progress_timeout(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut pod = run_sandbox(&mut kubelet, "slow").await;
    // The registry sends two hundred parts, one every 100 ms. The cell's containerd writes one MiB
    // at a time.
    registry.pace(
        &registry.parts(&name).pop().unwrap().0,
        Pace::Trickles(128 << 10, Duration::from_millis(100)),
    );
    let begun = Instant::now();
    run_until_word(&mut kubelet, &mut pod, "main", &name, "heavy").await;
    assert!(begun.elapsed() > PROGRESS_TIMEOUT, "the pull took longer than its progress timeout");
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
}

/// Returns the words that the daemon, the node's containerd or the cells have written.
pub(crate) fn written_words(node: &Node, kiyot: &Kiyot<'_>, words: &[&str]) -> Vec<String> {
    let of_cells = kiyot.cells().into_iter().map(|cell| kiyot.state().join("cells").join(cell));
    let logs =
        of_cells.flat_map(|cell| ["console.log", "containerd.log"].map(|log| cell.join(log)));
    let files: Vec<_> = logs.chain([node.directory().join("containerd.log")]).collect();
    let texts =
        files.iter().map(|file| fs::read_to_string(file).unwrap_or_default()).chain([kiyot.log()]);
    let found: Vec<String> =
        texts.filter(|text| words.iter().any(|word| text.contains(word))).collect();
    assert!(
        !files.is_empty() && files.iter().all(|file| file.exists()),
        "{}",
        node.directory().display()
    );
    found
}

/// Verifies I11.
#[tokio::test]
async fn registry_token_is_ignored_as_on_the_node() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Bearer("an-open-sesame".to_owned()));
    let (name, _) = registry.image("app:1", &image_with_word("opened"));
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let token =
        Some(cri::AuthConfig { registry_token: "an-open-sesame".to_owned(), ..Default::default() });
    let (pod, local) = (run_sandbox(&mut kubelet, "token").await, Pod::new("local"));
    let on_node =
        kubelet.pull(&local, &kubelet.prepare(&local), &name, token.clone()).await.unwrap_err();
    let in_cell = kubelet.pull(&pod.spec, &pod.config, &name, token).await.unwrap_err();
    // containerd 1.6 does not support this form of credentials; a later version may.
    assert_eq!((in_cell.code(), in_cell.message()), (on_node.code(), on_node.message()));
    assert_eq!(written_words(&node, &kiyot, &["an-open-sesame"]), Vec::<String>::new());
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
    kubelet.forget(&local);
}

/// Verifies I11.
#[tokio::test]
async fn private_image_exists_for_its_pod_by_every_pull_policy() {
    let node = Node::start().await;
    let access = Access::Token {
        user: "violet".to_owned(),
        password: "sesame".to_owned(),
        identity: "an-identity".to_owned(),
    };
    let registry = Registry::start(&node, access);
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let forms = [
        auth("violet", "sesame"),
        cri::AuthConfig { auth: ENCODED_CREDENTIALS.to_owned(), ..Default::default() },
        cri::AuthConfig { identity_token: "an-identity".to_owned(), ..Default::default() },
    ];
    let mut pod = run_sandbox(&mut kubelet, "policies").await;
    for (number, form) in forms.into_iter().enumerate() {
        let (name, _) =
            registry.image(&format!("violet/app{number}:1"), &image_with_word("private"));
        // Never: the image is absent.
        assert_eq!(kubelet.image_status(&pod.spec, &name).await.unwrap(), None);
        // IfNotPresent: the image is pulled with the pod's credentials, and is then present without
        // a request. Always: the registry gets another request, but no blob is fetched.
        let pulled = kubelet.pull(&pod.spec, &pod.config, &name, Some(form.clone())).await.unwrap();
        registry.asked();
        assert_eq!(
            run_until_word(&mut kubelet, &mut pod, &format!("present{number}"), &name, "private")
                .await,
            pulled
        );
        assert_eq!(registry.asked(), Vec::<String>::new());
        assert_eq!(kubelet.pull(&pod.spec, &pod.config, &name, Some(form)).await.unwrap(), pulled);
        let requests = registry.asked();
        assert!(!requests.is_empty() && blob_requests(&requests).is_empty(), "{requests:?}");
    }
    assert_eq!(
        written_words(&node, &kiyot, &["sesame", ENCODED_CREDENTIALS, "an-identity"]),
        Vec::<String>::new()
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
}

/// Verifies I12.
#[tokio::test]
async fn image_removed_on_the_node_stays_in_cells() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let (name, _) = registry.image("app:1", &image_with_word("kept"));
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let local = pull_on_node(&mut kubelet, &registry, &name).await;
    let mut pod = run_sandbox(&mut kubelet, "keeping").await;
    run_until_word(&mut kubelet, &mut pod, "first", &name, "kept").await;
    // The kubelet's garbage collection reads these values.
    let used = filesystems(&mut kubelet).await;
    let image = Some(cri::ImageSpec { image: name.clone(), ..Default::default() });
    kubelet.image.remove_image(cri::RemoveImageRequest { image }).await.unwrap();
    assert_eq!(kubelet.image_status(&local, &name).await.unwrap(), None);
    run_until_word(&mut kubelet, &mut pod, "second", &name, "kept").await;
    assert_eq!(registry.asked(), Vec::<String>::new());
    // The usage counts the node's disk, but not the cell's.
    assert_eq!(filesystems(&mut kubelet).await, used);
    assert!(
        used.iter().all(|path| Path::new(path).starts_with(node.directory().join("root"))),
        "{used:?}"
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
    kubelet.forget(&local);
}

/// Returns the image file systems that the kubelet's garbage collection reads.
async fn filesystems(kubelet: &mut Kubelet) -> Vec<String> {
    let info =
        kubelet.image.image_fs_info(cri::ImageFsInfoRequest::default()).await.unwrap().into_inner();
    info.image_filesystems.into_iter().filter_map(|system| Some(system.fs_id?.mountpoint)).collect()
}
