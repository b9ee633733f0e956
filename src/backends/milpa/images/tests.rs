//! Images between a played node and a played cell.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Mutex,
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{
    StreamExt as _,
    stream::{self, BoxStream},
};
use kiyot_proto::cell::{
    BlobPart, KnownManifest, KnownManifests, PullNews, PulledManifest, PutImageRequest,
    WatchPullsRequest,
};
use ring::digest::{SHA256, digest};
use tokio::sync::mpsc;

use super::{manifest::Descriptor, *};

const NAME: &str = "registry.example/app:v1";
const PAUSE: &str = "registry.example/pause:1";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

fn sha256(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(digest(&SHA256, bytes)))
}

/// The node: names, and blobs.
#[derive(Debug, Default)]
struct Store {
    names: BTreeMap<String, (String, String, u64)>,
    blobs: BTreeMap<String, Bytes>,
    held: usize,
}

#[derive(Debug, Default, Clone)]
struct PlayedNode(Arc<Mutex<Store>>);

impl PlayedNode {
    fn blob(&self, bytes: impl Into<Bytes>) -> (String, u64) {
        let bytes = bytes.into();
        let digest = sha256(&bytes);
        let size = bytes.len() as u64;
        self.0.lock().unwrap().blobs.insert(digest.clone(), bytes);
        (digest, size)
    }

    /// An image of two layers, one of several parts, behind an index. Its id.
    fn image(&self, name: &str) -> String {
        self.image_and_manifest(name).0
    }

    fn image_and_manifest(&self, name: &str) -> (String, PulledManifest) {
        let entry = |(digest, size): (String, u64)| format!(r#""digest":"{digest}","size":{size}"#);
        let config = self.blob(format!(r#"{{"architecture":"any","name":"{name}"}}"#));
        let layers = [self.blob(vec![7; (5 << 20) + 1]), self.blob("small")]
            .map(|layer| format!("{{{}}}", entry(layer)))
            .join(",");
        let id = config.0.clone();
        let manifest = format!(
            r#"{{"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{{{}}},"layers":[{layers}]}}"#,
            entry(config)
        );
        let told = PulledManifest {
            digest: sha256(manifest.as_bytes()),
            content: manifest.clone().into(),
        };
        let manifest = entry(self.blob(manifest));
        let platform =
            format!(r#""platform":{{"os":"linux","architecture":"{}"}}"#, manifest::architecture());
        let (digest, size) = self
            .blob(format!(r#"{{"mediaType":"{INDEX}","manifests":[{{{manifest},{platform}}}]}}"#));
        let mut store = self.0.lock().unwrap();
        for name in [name, &id] {
            store.names.insert(name.to_owned(), (INDEX.to_owned(), digest.clone(), size));
        }
        (id, told)
    }
}

#[async_trait]
impl Node for PlayedNode {
    async fn status(
        &self,
        request: cri::ImageStatusRequest,
    ) -> Result<cri::ImageStatusResponse, Status> {
        let name = request.image.unwrap().image;
        let store = self.0.lock().unwrap();
        let found = store.names.get(&normalized(&name)).map(|(_, digest, _)| digest.clone());
        let image = found.map(|digest| {
            let same = store
                .names
                .iter()
                .filter(|(_, (_, other, _))| *other == digest)
                .map(|(name, _)| name.clone());
            let (ids, tags) = same.partition::<Vec<_>, _>(|name| is_id(name));
            cri::Image { id: ids[0].clone(), repo_tags: tags, ..cri::Image::default() }
        });
        Ok(cri::ImageStatusResponse { image, ..Default::default() })
    }

    async fn target(&self, name: &str) -> Result<Option<Descriptor>, Status> {
        Ok(self
            .0
            .lock()
            .unwrap()
            .names
            .get(name)
            .map(|(media_type, digest, size)| Descriptor::new(media_type, digest, *size)))
    }

    async fn has(&self, digest: &str) -> Result<bool, Status> {
        Ok(self.0.lock().unwrap().blobs.contains_key(digest))
    }

    async fn read(
        &self,
        blob: &Descriptor,
    ) -> Result<BoxStream<'static, Result<Bytes, Status>>, Status> {
        let bytes = self
            .0
            .lock()
            .unwrap()
            .blobs
            .get(&blob.digest)
            .cloned()
            .ok_or_else(|| Status::not_found("no such blob"))?;
        let parts: Vec<_> =
            bytes.chunks(3 << 20).map(|part| Ok(Bytes::copy_from_slice(part))).collect();
        Ok(stream::iter(parts).boxed())
    }

    async fn hold(&self, _: &str) -> Result<String, Status> {
        self.0.lock().unwrap().held += 1;
        Ok("lease".into())
    }

    async fn release(&self, _: &str) {
        self.0.lock().unwrap().held -= 1;
    }
}

/// A cell: blobs, names, and what its registry has.
#[derive(Debug, Default)]
struct PlayedCell {
    blobs: Mutex<HashMap<String, Vec<u8>>>,
    images: Mutex<HashMap<String, String>>,
    named: Mutex<Vec<PutImageRequest>>,
    registry: Mutex<HashMap<String, String>>,
    pulls: Mutex<Vec<cri::PullImageRequest>>,
    puts: Mutex<usize>,
    /// What is said of its pulls, and the pause before each; then nothing more.
    news: Mutex<Vec<(Duration, PullNews)>>,
    /// The same of the watch after the next.
    again: Mutex<Vec<(Duration, PullNews)>>,
    /// The next watch fails when it has told all.
    breaks: Mutex<bool>,
    /// Which pulls were watched, and how often none more may be.
    watched: Mutex<Vec<WatchPullsRequest>>,
    busy: Mutex<usize>,
    /// The next pull does not end.
    stuck: Mutex<bool>,
    refuses: bool,
    greedy: bool,
}

#[async_trait]
impl Receiver for PlayedCell {
    async fn status(
        &self,
        request: cri::ImageStatusRequest,
        _: Option<Duration>,
    ) -> Result<cri::ImageStatusResponse, Status> {
        let image =
            self.images.lock().unwrap().get(&normalized(&request.image.unwrap().image)).cloned();
        let image = image.map(|id| cri::Image { id, size: 5, ..cri::Image::default() });
        Ok(cri::ImageStatusResponse { image, ..Default::default() })
    }

    async fn pull(&self, request: cri::PullImageRequest, _: Duration) -> Result<String, Status> {
        let name = normalized(&request.image.as_ref().unwrap().image);
        self.pulls.lock().unwrap().push(request);
        let is_stuck = std::mem::take(&mut *self.stuck.lock().unwrap());
        if is_stuck {
            return std::future::pending().await;
        }
        let id = self
            .registry
            .lock()
            .unwrap()
            .get(&name)
            .cloned()
            .ok_or_else(|| Status::unknown("RegistryUnavailable: no such thing"))?;
        let mut images = self.images.lock().unwrap();
        images.insert(name, id.clone());
        images.insert(id.clone(), id.clone());
        Ok(id)
    }

    async fn watch_pulls(
        &self,
        request: WatchPullsRequest,
    ) -> Result<BoxStream<'static, Result<PullNews, Status>>, Status> {
        self.watched.lock().unwrap().push(request);
        let left = self.busy.lock().unwrap().checked_sub(1);
        if let Some(less) = left {
            *self.busy.lock().unwrap() = less;
            return Err(Status::resource_exhausted("too many watchers of pulls at a time"));
        }
        let again = std::mem::take(&mut *self.again.lock().unwrap());
        let news = std::mem::replace(&mut *self.news.lock().unwrap(), again);
        if news.is_empty() {
            return Err(Status::unimplemented("an agent of before"));
        }
        let told = stream::iter(news).then(|(pause, news)| async move {
            tokio::time::sleep(pause).await;
            Ok(news)
        });
        let breaks = std::mem::take(&mut *self.breaks.lock().unwrap());
        let failure =
            stream::iter(breaks.then(|| Err(Status::deadline_exceeded("containerd is busy"))));
        Ok(told.chain(failure).chain(stream::pending()).boxed())
    }

    async fn missing(&self, mut digests: Vec<String>) -> Result<Vec<String>, Status> {
        let blobs = self.blobs.lock().unwrap();
        digests.retain(|digest| !blobs.contains_key(digest));
        if self.greedy {
            digests.push(sha256(b"another image's"));
        }
        Ok(digests)
    }

    async fn put_blob(&self, mut parts: mpsc::Receiver<BlobPart>) -> Result<(), Status> {
        *self.puts.lock().unwrap() += 1;
        let first = parts.recv().await.unwrap();
        if self.refuses {
            return Err(Status::resource_exhausted("the disk is full"));
        }
        let mut bytes = Vec::new();
        while let Some(part) = parts.recv().await {
            assert!(part.content.len() <= 1 << 20);
            bytes.extend_from_slice(&part.content);
        }
        if sha256(&bytes) != first.digest || bytes.len() as u64 != first.size {
            return Err(Status::data_loss("other bytes"));
        }
        self.blobs.lock().unwrap().insert(first.digest, bytes);
        Ok(())
    }

    async fn put_image(&self, request: PutImageRequest) -> Result<(), Status> {
        assert!(self.blobs.lock().unwrap().contains_key(&request.target_digest));
        let mut images = self.images.lock().unwrap();
        for name in request.names.iter().chain([&request.image_id]) {
            images.insert(name.clone(), request.image_id.clone());
        }
        self.named.lock().unwrap().push(request);
        Ok(())
    }
}

struct Scene {
    node: PlayedNode,
    images: Images,
    id: CellId,
    cell: PlayedCell,
}

impl Scene {
    fn new() -> Self {
        let node = PlayedNode::default();
        let images = Images::of(Box::new(node.clone()), PAUSE.into(), Duration::from_secs(120));
        Self { node, images, id: CellId::mint().unwrap(), cell: PlayedCell::default() }
    }

    async fn ensure(&self, image: &str, reference: &str) -> Result<String, Status> {
        let spec = cri::ImageSpec {
            image: image.into(),
            user_specified_image: reference.into(),
            ..Default::default()
        };
        self.images.ensure_in(&self.id, &self.cell, &spec, "uid-1").await
    }

    async fn pull(&self, reference: &str, auth: Option<cri::AuthConfig>) -> Result<String, Status> {
        let metadata = Some(cri::PodSandboxMetadata { uid: "uid-1".into(), ..Default::default() });
        let request = cri::PullImageRequest {
            image: Some(cri::ImageSpec { image: reference.into(), ..Default::default() }),
            auth,
            sandbox_config: Some(cri::PodSandboxConfig { metadata, ..Default::default() }),
        };
        Ok(self.images.pull_in(&self.id, &self.cell, request).await?.image_ref)
    }

    async fn status(&self, reference: &str) -> Option<String> {
        self.images
            .status_in(&self.id, &self.cell, question(reference, false), None)
            .await
            .unwrap()
            .image
            .map(|image| image.id)
    }

    /// What is reported while the cell has its pod.
    fn reported(&self, reference: &str) -> Option<cri::Image> {
        self.images.reported(reference, |cell| *cell == self.id)
    }

    fn in_registry(&self, name: &str, id: &str) {
        self.cell.registry.lock().unwrap().insert(name.into(), id.into());
    }
}

fn auth() -> Option<cri::AuthConfig> {
    Some(cri::AuthConfig {
        username: "user".into(),
        password: "secret".into(),
        ..Default::default()
    })
}

#[tokio::test]
async fn what_the_node_has_is_copied_and_nothing_is_pulled() {
    let scene = Scene::new();
    let id = scene.node.image(NAME);
    assert_eq!(scene.status(NAME).await.as_ref(), Some(&id), "the node can give it");
    assert_eq!(scene.ensure(&id, "registry.example/app:v1").await.unwrap(), id);
    let named = scene.cell.named.lock().unwrap()[0].clone();
    assert_eq!((named.names, &named.image_id), (vec![id.clone(), NAME.to_owned()], &id));
    assert_eq!(named.target_media_type, "application/vnd.oci.image.manifest.v1+json");
    assert_eq!(named.labels["io.cri-containerd.image"], "managed");
    // Two layers, configuration and manifest; the index stays where it is.
    assert_eq!(scene.cell.blobs.lock().unwrap().len(), 4);
    assert!(scene.cell.pulls.lock().unwrap().is_empty());
    assert_eq!(scene.reported(NAME).unwrap().id, id);
    assert_eq!(scene.node.0.lock().unwrap().held, 0);
    // It is there now.
    assert_eq!(scene.ensure(NAME, "").await.unwrap(), id);
    assert_eq!(*scene.cell.puts.lock().unwrap(), 4);
}

#[tokio::test]
async fn blobs_that_the_cell_has_are_not_sent() {
    let scene = Scene::new();
    let id = scene.node.image(NAME);
    scene.cell.blobs.lock().unwrap().insert(sha256(b"small"), b"small".to_vec());
    scene.ensure(&id, NAME).await.unwrap();
    assert_eq!(*scene.cell.puts.lock().unwrap(), 3);
}

#[tokio::test]
async fn a_cell_gets_only_what_it_is_to_have() {
    let mut scene = Scene::new();
    scene.node.blob("another image's");
    scene.cell.greedy = true;
    let id = scene.node.image(NAME);
    scene.ensure(&id, NAME).await.unwrap();
    assert!(!scene.cell.blobs.lock().unwrap().contains_key(&sha256(b"another image's")));
}

#[tokio::test]
async fn an_image_is_copied_once() {
    let scene = Scene::new();
    let id = scene.node.image(NAME);
    let (one, other) = tokio::join!(scene.ensure(&id, NAME), scene.ensure(&id, NAME));
    assert_eq!((one.unwrap(), other.unwrap()), (id.clone(), id));
    assert_eq!(scene.cell.named.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn dropped_layers_are_pulled_with_what_came_for_the_pod() {
    let scene = Scene::new();
    let id = scene.node.image(NAME);
    scene.node.0.lock().unwrap().blobs.remove(&sha256(b"small"));
    assert_eq!(scene.status(NAME).await, None, "the node can't give it");
    // The credentials come with a pull that fails.
    let failed = scene.pull(NAME, auth()).await.unwrap_err();
    assert_eq!(
        (failed.code(), failed.message()),
        (Code::Unknown, "RegistryUnavailable: no such thing")
    );
    scene.in_registry(NAME, &id);
    assert_eq!(scene.ensure(&id, NAME).await.unwrap(), id);
    let last = scene.cell.pulls.lock().unwrap().last().unwrap().clone();
    assert_eq!((last.auth, last.sandbox_config), (auth(), None));
    assert!(!format!("{:?}", scene.images).contains("secret"));
}

#[tokio::test]
async fn credentials_are_forgotten_with_their_pod() {
    let scene = Scene::new();
    let _ = scene.pull(NAME, auth()).await;
    scene.images.forget_pod("uid-1");
    let _ = scene.ensure(NAME, "").await;
    assert_eq!(scene.cell.pulls.lock().unwrap().last().unwrap().auth, None);
}

/// Verifies I6.
#[tokio::test]
async fn what_a_cell_reported_is_forgotten_with_it() {
    let (scene, other) = (Scene::new(), CellId::mint().unwrap());
    let id = sha256(b"an image");
    scene.in_registry(NAME, &id);
    scene.pull(NAME, None).await.unwrap();
    scene.images.forget_cell(&other);
    assert_eq!(scene.reported(NAME).unwrap().id, id);
    assert_eq!(scene.reported(&id).unwrap().id, id);
    scene.images.forget_cell(&scene.id);
    assert_eq!(scene.reported(NAME), None);
    assert_eq!(scene.reported(&id), None);
}

/// Verifies I6.
#[tokio::test]
async fn what_a_cell_without_a_pod_has_is_not_reported() {
    let scene = Scene::new();
    scene.in_registry(NAME, &sha256(b"an image"));
    scene.pull(NAME, None).await.unwrap();
    assert!(scene.images.reported(NAME, |_| true).is_some());
    assert_eq!(scene.images.reported(NAME, |_| false), None);
}

/// Verifies I6.
#[tokio::test]
async fn the_pause_image_is_not_the_pods_unless_a_container_has_it_too() {
    let scene = Scene::new();
    let copied = scene.node.image(PAUSE);
    // Copied, and then found.
    for _ in 0..2 {
        scene.images.ensure_pause_in(&scene.id, &scene.cell).await.unwrap();
        assert_eq!([PAUSE, &copied].map(|reference| scene.reported(reference)), [None, None]);
    }
    assert_eq!(scene.ensure(&copied, PAUSE).await.unwrap(), copied);
    for reference in [PAUSE, &copied] {
        assert_eq!(scene.reported(reference).unwrap().id, copied);
    }
    // Pulled.
    let (scene, pulled) = (Scene::new(), sha256(b"pulled"));
    scene.in_registry(PAUSE, &pulled);
    scene.images.ensure_pause_in(&scene.id, &scene.cell).await.unwrap();
    assert_eq!([PAUSE, &pulled].map(|reference| scene.reported(reference)), [None, None]);
    assert_eq!(scene.ensure(PAUSE, "").await.unwrap(), pulled);
    assert_eq!(scene.reported(PAUSE).unwrap().id, pulled);
}

#[tokio::test]
async fn a_reference_that_moved_is_an_error() {
    let scene = Scene::new();
    let (wanted, other) = (sha256(b"wanted"), sha256(b"other"));
    scene.in_registry(NAME, &other);
    assert_eq!(scene.ensure(&wanted, NAME).await.unwrap_err().code(), Code::FailedPrecondition);
    assert_eq!(scene.ensure(&wanted, "").await.unwrap_err().code(), Code::NotFound);
}

/// Verifies D6.
#[tokio::test]
async fn a_pull_asks_the_registry_by_digest_too() {
    let scene = Scene::new();
    let id = scene.node.image(NAME);
    let other = sha256(b"newer");
    scene.in_registry(NAME, &other);
    assert_eq!(scene.pull(NAME, None).await.unwrap(), other, "the node's may be old");
    let pinned = format!("registry.example/app@{}", sha256(b"an index"));
    {
        let mut store = scene.node.0.lock().unwrap();
        let target = store.names[NAME].clone();
        store.names.insert(pinned.clone(), target);
    }
    // Another pod's image, which the registry gives to that pod only.
    let refused = scene.pull(&pinned, None).await.unwrap_err();
    assert_eq!(refused.message(), "RegistryUnavailable: no such thing");
    assert!(scene.cell.named.lock().unwrap().is_empty(), "nothing was copied");
    scene.in_registry(&pinned, &id);
    assert_eq!(scene.pull(&pinned, auth()).await.unwrap(), id);
    assert_eq!(scene.cell.pulls.lock().unwrap().len(), 3);
    assert_eq!(scene.reported(&pinned).unwrap().id, id);
}

#[tokio::test]
async fn what_the_cell_refuses_is_said_in_its_words() {
    let mut scene = Scene::new();
    scene.cell.refuses = true;
    let id = scene.node.image(NAME);
    let refused = scene.ensure(&id, NAME).await.unwrap_err();
    assert_eq!((refused.code(), refused.message()), (Code::ResourceExhausted, "the disk is full"));
    assert_eq!(scene.node.0.lock().unwrap().held, 0);
}

#[tokio::test]
async fn damaged_json_is_not_believed() {
    let scene = Scene::new();
    let id = scene.node.image(NAME);
    for bytes in scene
        .node
        .0
        .lock()
        .unwrap()
        .blobs
        .values_mut()
        .filter(|bytes| bytes.starts_with(b"{\"mediaType\""))
    {
        *bytes = [bytes.as_ref(), b" "].concat().into();
    }
    scene.in_registry(NAME, &id);
    assert_eq!(scene.ensure(&id, NAME).await.unwrap(), id);
    assert_eq!(*scene.cell.puts.lock().unwrap(), 0);
    assert_eq!(scene.cell.pulls.lock().unwrap().len(), 1);
}

fn news(moves: u64, fetching: bool, manifest: Option<PulledManifest>) -> PullNews {
    PullNews { moves, fetching, manifest, known: None }
}

/// A scene whose registry has an image, and whose node has its layers under another name. Its
/// manifest has come, and the pull of its layers never ends.
fn pulling() -> (Scene, String, PulledManifest) {
    let scene = Scene::new();
    let (id, manifest) = scene.node.image_and_manifest("registry.example/other:1");
    scene.in_registry(NAME, &id);
    *scene.cell.news.lock().unwrap() = vec![
        (Duration::ZERO, news(0, false, None)),
        (Duration::ZERO, news(1, true, Some(manifest.clone()))),
    ];
    *scene.cell.stuck.lock().unwrap() = true;
    (scene, id, manifest)
}

/// Verifies I9.
#[tokio::test]
async fn layers_of_a_pull_come_from_the_node_once_the_registry_has_given_the_manifest() {
    let (scene, id, manifest) = pulling();
    assert_eq!(scene.pull(NAME, auth()).await.unwrap(), id);
    let pulls = scene.cell.pulls.lock().unwrap().clone();
    assert_eq!((pulls.len(), &pulls[0].auth), (2, &pulls[1].auth));
    let blobs = scene.cell.blobs.lock().unwrap();
    assert_eq!(blobs.len(), 2, "layers only");
    assert!(!blobs.contains_key(&id) && !blobs.contains_key(&manifest.digest));
    assert_eq!(scene.node.0.lock().unwrap().held, 0);
}

/// Verifies I13.
#[tokio::test(start_paused = true)]
async fn a_pull_waits_to_be_watched_and_is_watched_by_its_whole_name() {
    let (scene, id, _) = pulling();
    *scene.cell.busy.lock().unwrap() = 3;
    assert_eq!(scene.pull(NAME, None).await.unwrap(), id);
    // Three times in vain, and then for each of the two pulls: it was interrupted once.
    let watched = WatchPullsRequest { image: NAME.to_owned(), known: None };
    assert_eq!(*scene.cell.watched.lock().unwrap(), vec![watched; 5]);
    assert_eq!(scene.cell.blobs.lock().unwrap().len(), 2);
}

/// Verifies L8.
#[tokio::test(start_paused = true)]
async fn a_cell_that_tells_of_ever_more_manifests_is_not_listened_to() {
    let (scene, _, manifest) = pulling();
    let other = |n: u32| {
        let json = format!(r#"{{"mediaType":"x","config":{{}},"layers":[],"n":{n}}}"#);
        PulledManifest { digest: sha256(json.as_bytes()), content: json.into() }
    };
    let told = (0..100)
        .map(other)
        .chain([manifest])
        .map(|manifest| (Duration::ZERO, news(1, true, Some(manifest))))
        .collect();
    *scene.cell.news.lock().unwrap() = told;
    // The last one would interrupt it.
    assert_eq!(scene.pull(NAME, None).await.unwrap_err().code(), Code::DeadlineExceeded);
    assert_eq!((scene.cell.pulls.lock().unwrap().len(), *scene.cell.puts.lock().unwrap()), (1, 0));
}

/// Verifies I13.
#[tokio::test]
async fn a_manifest_of_another_pull_interrupts_too_and_each_does_so_once() {
    let scene = Scene::new();
    let (id, mine) = scene.node.image_and_manifest(NAME);
    let (_, other) = scene.node.image_and_manifest("registry.example/app:v2");
    scene.in_registry(NAME, &id);
    let told = |manifest: &PulledManifest| (Duration::ZERO, news(1, true, Some(manifest.clone())));
    // The same layers under two manifests: the first brings them, and the second is no reason any
    // more.
    *scene.cell.news.lock().unwrap() = vec![told(&other)];
    *scene.cell.again.lock().unwrap() = vec![told(&other), told(&mine)];
    *scene.cell.stuck.lock().unwrap() = true;
    assert_eq!(scene.pull(NAME, None).await.unwrap(), id);
    assert_eq!(scene.cell.pulls.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn layers_that_the_node_lacks_are_no_reason_to_interrupt_a_pull() {
    for drop_all in [true, false] {
        let (scene, id, _) = pulling();
        *scene.cell.stuck.lock().unwrap() = false;
        scene.node.0.lock().unwrap().blobs.retain(|_, bytes| !drop_all && bytes.len() < 1 << 20);
        assert_eq!(scene.pull(NAME, None).await.unwrap(), id);
        assert_eq!(
            (scene.cell.pulls.lock().unwrap().len(), *scene.cell.puts.lock().unwrap()),
            (1, 0)
        );
    }
}

/// Verifies I9.
#[tokio::test(start_paused = true)]
async fn a_manifest_that_is_another_one_is_not_believed() {
    let (scene, _, mut manifest) = pulling();
    manifest.content = [&manifest.content[..], b" "].concat().into();
    scene.cell.news.lock().unwrap()[1].1.manifest = Some(manifest);
    assert_eq!(scene.pull(NAME, None).await.unwrap_err().code(), Code::DeadlineExceeded);
    assert!(scene.cell.blobs.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_layer_that_can_not_be_sent_is_pulled() {
    let (mut scene, id, _) = pulling();
    scene.cell.refuses = true;
    assert_eq!(scene.pull(NAME, None).await.unwrap(), id);
}

/// Verifies I10.
#[tokio::test(start_paused = true)]
async fn a_pull_ends_when_nothing_has_come_for_too_long() {
    let step =
        |seconds, moves, fetching| (Duration::from_secs(seconds), news(moves, fetching, None));
    // Of 120 s: never anything; something, and then no more; an agent that can't say.
    for (said, seconds) in [
        (vec![step(0, 0, false)], 120),
        (vec![step(0, 0, false), step(100, 1, true), step(100, 2, true), step(50, 2, true)], 320),
        (vec![], 120),
    ] {
        let scene = Scene::new();
        *scene.cell.news.lock().unwrap() = said;
        *scene.cell.stuck.lock().unwrap() = true;
        let begun = tokio::time::Instant::now();
        let status = scene.pull(NAME, None).await.unwrap_err();
        assert_eq!((status.code(), begun.elapsed().as_secs()), (Code::DeadlineExceeded, seconds));
        assert!(status.message().contains(NAME) && status.message().contains("120 s"), "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_fails_is_begun_again() {
    let step = |seconds, moves| (Duration::from_secs(seconds), news(moves, true, None));
    let scene = Scene::new();
    *scene.cell.news.lock().unwrap() = vec![step(0, 0), step(100, 1)];
    *scene.cell.breaks.lock().unwrap() = true;
    *scene.cell.again.lock().unwrap() = vec![step(0, 0), step(100, 1), step(100, 2)];
    *scene.cell.stuck.lock().unwrap() = true;
    let begun = tokio::time::Instant::now();
    assert_eq!(scene.pull(NAME, None).await.unwrap_err().code(), Code::DeadlineExceeded);
    assert_eq!(begun.elapsed().as_secs(), 420, "120 s after the last news of the second watch");
}

/// Verifies I13.
#[tokio::test(start_paused = true)]
async fn a_watch_that_is_begun_again_knows_what_the_first_one_knew() {
    let (scene, id, manifest) = pulling();
    let known = |byte| {
        let digest = sha256(&[byte]);
        Some(KnownManifests {
            manifests: vec![KnownManifest {
                digest,
                changed_seconds: 7,
                changed_nanos: i32::from(byte),
            }],
        })
    };
    let told = |byte, manifest| {
        (Duration::ZERO, PullNews { known: known(byte), ..news(0, false, manifest) })
    };
    // The manifest comes while nobody watches. The second watch knows it already, and tells it as
    // it is told what the first one knew.
    *scene.cell.news.lock().unwrap() = vec![told(1, None)];
    *scene.cell.breaks.lock().unwrap() = true;
    *scene.cell.again.lock().unwrap() = vec![told(2, Some(manifest))];
    assert_eq!(scene.pull(NAME, None).await.unwrap(), id);
    let watched: Vec<_> =
        scene.cell.watched.lock().unwrap().iter().map(|request| request.known.clone()).collect();
    assert_eq!(watched, [None, known(1), None], "and the pull that begins again is another one");
    assert_eq!(scene.cell.blobs.lock().unwrap().len(), 2);
}

/// Verifies I10.
#[tokio::test(start_paused = true)]
async fn unpacking_takes_as_long_as_it_takes() {
    let scene = Scene::new();
    let fetched = vec![
        (Duration::ZERO, news(0, false, None)),
        (Duration::from_secs(1), news(5, true, None)),
        (Duration::from_secs(1), news(6, false, None)),
    ];
    let unpacked = std::iter::repeat_n((Duration::from_secs(4), news(6, false, None)), 3000);
    *scene.cell.news.lock().unwrap() = fetched.into_iter().chain(unpacked).collect();
    *scene.cell.stuck.lock().unwrap() = true;
    let pull = scene.pull(NAME, None);
    assert!(tokio::time::timeout(Duration::from_secs(10_000), pull).await.is_err(), "it goes on");
}

/// Verifies I10.
#[tokio::test(start_paused = true)]
async fn a_pull_of_which_the_cell_says_no_more_ends() {
    let scene = Scene::new();
    // Unpacking, for all that is known.
    *scene.cell.news.lock().unwrap() = vec![
        (Duration::ZERO, news(0, false, None)),
        (Duration::from_secs(1), news(6, false, None)),
    ];
    *scene.cell.stuck.lock().unwrap() = true;
    let begun = tokio::time::Instant::now();
    let ended = tokio::time::timeout(Duration::from_secs(10_000), scene.pull(NAME, None)).await;
    assert_eq!(ended.expect("it ends").unwrap_err().code(), Code::DeadlineExceeded);
    assert!((121..=122).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
}
