//! Images between a fake node and a fake cell.

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
    UnpackedLayer, WatchPullsRequest,
};
use ring::digest::{SHA256, digest};
use tokio::sync::mpsc;

use super::{manifest::Descriptor, *};

mod architectures;
mod copies;
mod pulls;

const NAME: &str = "registry.example/app:v1";
const PAUSE: &str = "registry.example/pause:1";
/// Turns of other tasks while the fake cell takes a blob.
const TURNS: usize = 8;
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

fn sha256(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(digest(&SHA256, bytes)))
}

/// Content of the fake node.
#[derive(Debug, Default)]
struct NodeContent {
    names: BTreeMap<String, (String, String, u64)>,
    /// Images that can be pulled, by name.
    registry: BTreeMap<String, (String, String, u64)>,
    blobs: BTreeMap<String, Bytes>,
    held: usize,
    /// Number of listings of images.
    lists: usize,
    /// Number of leases taken, and the blobs read.
    leases: usize,
    reads: Vec<String>,
    /// Failures of the next calls for a target, in reverse order.
    failures: Vec<Failure>,
}

#[derive(Debug, Default, Clone)]
struct FakeNode(Arc<Mutex<NodeContent>>);

impl FakeNode {
    fn blob(&self, bytes: impl Into<Bytes>) -> (String, u64) {
        let bytes = bytes.into();
        let digest = sha256(&bytes);
        let size = bytes.len() as u64;
        self.0.lock().unwrap().blobs.insert(digest.clone(), bytes);
        (digest, size)
    }

    /// Adds an image behind an index, with two layers; one layer has several parts. Returns the
    /// image's id.
    fn image(&self, name: &str) -> String {
        self.image_and_manifest(name).0
    }

    fn image_and_manifest(&self, name: &str) -> (String, PulledManifest) {
        self.image_of_layers(name, vec![7; (5 << 20) + 1])
    }

    fn image_of_layers(&self, name: &str, lower: Vec<u8>) -> (String, PulledManifest) {
        let entry = |(digest, size): (String, u64)| format!(r#""digest":"{digest}","size":{size}"#);
        let config = self.blob(format!(r#"{{"architecture":"any","name":"{name}"}}"#));
        let layers = [self.blob(lower), self.blob("small")]
            .map(|layer| format!("{{{}}}", entry(layer)))
            .join(",");
        let id = config.0.clone();
        let manifest = format!(
            r#"{{"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{{{}}},"layers":[{layers}]}}"#,
            entry(config)
        );
        let reported = PulledManifest { digest: sha256(manifest.as_bytes()) };
        let manifest = entry(self.blob(manifest));
        let platform =
            format!(r#""platform":{{"os":"linux","architecture":"{}"}}"#, of_this_machine());
        let (digest, size) = self
            .blob(format!(r#"{{"mediaType":"{INDEX}","manifests":[{{{manifest},{platform}}}]}}"#));
        let mut store = self.0.lock().unwrap();
        for name in [name, &id] {
            store.names.insert(name.to_owned(), (INDEX.to_owned(), digest.clone(), size));
        }
        (id, reported)
    }
}

#[async_trait]
impl Node for FakeNode {
    async fn status(
        &self,
        request: cri::ImageStatusRequest,
    ) -> Result<cri::ImageStatusResponse, Failure> {
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

    async fn pull(&self, image: &str) -> Result<(), Failure> {
        let mut content = self.0.lock().unwrap();
        let found = content.registry.get(image).cloned();
        let found = found.ok_or_else(|| Failure::node(Code::NotFound, "no such image"))?;
        content.names.insert(image.to_owned(), found);
        Ok(())
    }

    async fn target(&self, name: &str) -> Result<Option<Descriptor>, Failure> {
        let mut content = self.0.lock().unwrap();
        if let Some(failure) = content.failures.pop() {
            return Err(failure);
        }
        Ok(content
            .names
            .get(name)
            .map(|(media_type, digest, size)| Descriptor::new(media_type, digest, *size)))
    }

    async fn targets(&self, of: &str) -> Result<Vec<Descriptor>, Failure> {
        let mut content = self.0.lock().unwrap();
        content.lists += 1;
        let named = content.names.iter().filter(|(name, _)| reference::repository(name) == of);
        let targets =
            named.map(|(_, (media_type, digest, size))| Descriptor::new(media_type, digest, *size));
        Ok(targets.collect())
    }

    async fn has(&self, digest: &str) -> Result<bool, Failure> {
        Ok(self.0.lock().unwrap().blobs.contains_key(digest))
    }

    async fn read(
        &self,
        blob: &Descriptor,
    ) -> Result<BoxStream<'static, Result<Bytes, Failure>>, Failure> {
        let mut content = self.0.lock().unwrap();
        content.reads.push(blob.digest.clone());
        let bytes = content
            .blobs
            .get(&blob.digest)
            .cloned()
            .ok_or_else(|| Failure::node(Code::NotFound, "no such blob"))?;
        let parts: Vec<_> =
            bytes.chunks(3 << 20).map(|part| Ok(Bytes::copy_from_slice(part))).collect();
        Ok(stream::iter(parts).boxed())
    }

    async fn acquire_lease(&self, _: &str) -> Result<String, Failure> {
        let mut content = self.0.lock().unwrap();
        (content.held, content.leases) = (content.held + 1, content.leases + 1);
        Ok("lease".into())
    }

    async fn release_lease(&self, _: &str) {
        self.0.lock().unwrap().held -= 1;
    }
}

/// Fake cell: blobs, names, and the content of its registry.
#[derive(Debug, Default)]
struct FakeCell {
    blobs: Mutex<HashMap<String, Vec<u8>>>,
    images: Mutex<HashMap<String, String>>,
    named: Mutex<Vec<PutImageRequest>>,
    registry: Mutex<HashMap<String, String>>,
    pulls: Mutex<Vec<cri::PullImageRequest>>,
    puts: Mutex<usize>,
    /// Reports on pulls, each after a pause.
    reports: Mutex<Vec<(Duration, PullNews)>>,
    /// Reports of the second watch.
    next_reports: Mutex<Vec<(Duration, PullNews)>>,
    /// Makes the next watch fail after its reports.
    watch_fails: Mutex<bool>,
    /// Watched pulls, and the number of watches to refuse.
    watched: Mutex<Vec<WatchPullsRequest>>,
    busy: Mutex<usize>,
    /// Keeps the next pull from ending.
    pull_hangs: Mutex<bool>,
    /// Number of requested image statuses.
    asked: Mutex<usize>,
    /// Barrier until this many blobs are on their way; then the cell takes them.
    together: Option<tokio::sync::Barrier>,
    /// Blobs on their way: now, and at most.
    in_flight: Mutex<(usize, usize)>,
    /// Cells with blobs on their way: now, and at most; shared by several fake cells.
    copying: Arc<Mutex<(usize, usize)>>,
    /// Keeps the cell from taking blobs.
    put_hangs: bool,
    refuses: bool,
    greedy: bool,
    limits: Option<Arc<CopyLimits>>,
    architecture: Option<&'static str>,
}

#[async_trait]
impl Receiver for FakeCell {
    fn is_remote(&self) -> bool {
        true
    }

    fn sees_node_files(&self) -> bool {
        true
    }

    async fn architecture(&self) -> Result<&'static str, Failure> {
        Ok(self.architecture.unwrap_or_else(of_this_machine))
    }

    async fn pause_image(&self) -> Result<String, Failure> {
        Ok(String::new())
    }

    async fn status(
        &self,
        request: cri::ImageStatusRequest,
        _: Option<Duration>,
    ) -> Result<cri::ImageStatusResponse, Failure> {
        *self.asked.lock().unwrap() += 1;
        let image =
            self.images.lock().unwrap().get(&normalized(&request.image.unwrap().image)).cloned();
        let image = image.map(|id| cri::Image { id, size: 5, ..cri::Image::default() });
        Ok(cri::ImageStatusResponse { image, ..Default::default() })
    }

    async fn pull(&self, request: cri::PullImageRequest, _: Duration) -> Result<String, Failure> {
        let name = normalized(&request.image.as_ref().unwrap().image);
        self.pulls.lock().unwrap().push(request);
        let hangs = std::mem::take(&mut *self.pull_hangs.lock().unwrap());
        if hangs {
            return std::future::pending().await;
        }
        let id =
            self.registry.lock().unwrap().get(&name).cloned().ok_or_else(|| {
                Failure::cell(Code::Unknown, "RegistryUnavailable: no such image")
            })?;
        let mut images = self.images.lock().unwrap();
        images.insert(name, id.clone());
        images.insert(id.clone(), id.clone());
        Ok(id)
    }

    async fn watch_pulls(
        &self,
        request: WatchPullsRequest,
    ) -> Result<BoxStream<'static, Result<PullNews, Failure>>, Failure> {
        self.watched.lock().unwrap().push(request);
        let left = self.busy.lock().unwrap().checked_sub(1);
        if let Some(less) = left {
            *self.busy.lock().unwrap() = less;
            return Err(Failure::cell(
                Code::ResourceExhausted,
                "too many watchers of pulls at a time",
            ));
        }
        let next_reports = std::mem::take(&mut *self.next_reports.lock().unwrap());
        let reports = std::mem::replace(&mut *self.reports.lock().unwrap(), next_reports);
        if reports.is_empty() {
            return Err(Failure::cell(Code::Unimplemented, "an older agent"));
        }
        let reported = stream::iter(reports).then(|(pause, reports)| async move {
            tokio::time::sleep(pause).await;
            Ok(reports)
        });
        let watch_fails = std::mem::take(&mut *self.watch_fails.lock().unwrap());
        let failure = stream::iter(
            watch_fails.then(|| Err(Failure::cell(Code::DeadlineExceeded, "containerd is busy"))),
        );
        Ok(reported.chain(failure).chain(stream::pending()).boxed())
    }

    async fn missing(&self, mut digests: Vec<String>) -> Result<Vec<String>, Failure> {
        let blobs = self.blobs.lock().unwrap();
        digests.retain(|digest| !blobs.contains_key(digest));
        if self.greedy {
            digests.push(sha256(b"another image's"));
        }
        Ok(digests)
    }

    async fn ready(&self, bytes: usize) {
        if let Some(limits) = &self.limits {
            limits.ready(bytes).await;
        }
    }

    async fn put_blob(&self, mut parts: mpsc::Receiver<BlobPart>) -> Result<(), Failure> {
        *self.puts.lock().unwrap() += 1;
        let first = parts.recv().await.unwrap();
        if self.refuses {
            return Err(Failure::cell(Code::ResourceExhausted, "the disk is full"));
        }
        if self.put_hangs {
            return std::future::pending().await;
        }
        if let Some(together) = &self.together {
            together.wait().await;
        }
        self.blob_begins();
        // Concurrent blobs begin now.
        for _ in 0..TURNS {
            tokio::task::yield_now().await;
        }
        let mut bytes = Vec::new();
        while let Some(part) = parts.recv().await {
            assert!(part.content.len() <= 1 << 20);
            bytes.extend_from_slice(&part.content);
        }
        self.blob_ends();
        if sha256(&bytes) != first.digest || bytes.len() as u64 != first.size {
            return Err(Failure::cell(Code::DataLoss, "other bytes"));
        }
        self.blobs.lock().unwrap().insert(first.digest, bytes);
        Ok(())
    }

    async fn mount_layers(&self, layers: Vec<UnpackedLayer>) -> Result<(), Failure> {
        Err(Failure::cell(Code::Internal, format!("{layers:?} are not here")))
    }

    async fn put_image(&self, request: PutImageRequest) -> Result<(), Failure> {
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
    node: FakeNode,
    images: Images,
    id: CellId,
    cell: FakeCell,
}

impl Scene {
    fn new() -> Self {
        let node = FakeNode::default();
        let images = Images::of(
            Box::new(node.clone()),
            PauseImage::new(Some(PAUSE.into())),
            Duration::from_secs(120),
        );
        Self { node, images, id: CellId::mint().unwrap(), cell: FakeCell::default() }
    }

    async fn ensure(&self, image: &str, reference: &str) -> Result<String, Failure> {
        let spec = cri::ImageSpec {
            image: image.into(),
            user_specified_image: reference.into(),
            ..Default::default()
        };
        self.images.ensure_in(&self.id, &self.cell, &spec, "uid-1").await
    }

    async fn pull(
        &self,
        reference: &str,
        auth: Option<cri::AuthConfig>,
    ) -> Result<String, Failure> {
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
            .status_in(&self.id, &self.cell, status_request(reference, false), None)
            .await
            .unwrap()
            .image
            .map(|image| image.id)
    }

    /// Returns the report on a reference while the cell has a pod.
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
async fn image_on_the_node_is_copied_without_a_pull() {
    let scene = Scene::new();
    let id = scene.node.image(NAME);
    assert_eq!(scene.status(NAME).await.as_ref(), Some(&id), "the node can supply the image");
    assert_eq!(scene.ensure(&id, "registry.example/app:v1").await.unwrap(), id);
    let named = scene.cell.named.lock().unwrap()[0].clone();
    assert_eq!((named.names, &named.image_id), (vec![id.clone(), NAME.to_owned()], &id));
    assert_eq!(named.target_media_type, "application/vnd.oci.image.manifest.v1+json");
    assert_eq!(named.labels["io.cri-containerd.image"], "managed");
    // Two layers, configuration and manifest; the index is not copied.
    assert_eq!(scene.cell.blobs.lock().unwrap().len(), 4);
    assert!(scene.cell.pulls.lock().unwrap().is_empty());
    assert_eq!(scene.reported(NAME).unwrap().id, id);
    assert_eq!(scene.node.0.lock().unwrap().held, 0);
    // Present after the first call.
    assert_eq!(scene.ensure(NAME, "").await.unwrap(), id);
    assert_eq!(*scene.cell.puts.lock().unwrap(), 4);
}

#[tokio::test]
async fn deleted_layers_are_pulled_with_the_pods_credentials() {
    let scene = Scene::new();
    let id = scene.node.image(NAME);
    scene.node.0.lock().unwrap().blobs.remove(&sha256(b"small"));
    assert_eq!(scene.status(NAME).await, None, "the node can't supply the image");
    // Credentials of a failed pull are kept.
    let failed = scene.pull(NAME, auth()).await.unwrap_err();
    assert_eq!(
        (failed.code(), failed.message()),
        (Code::Unknown, "RegistryUnavailable: no such image")
    );
    scene.in_registry(NAME, &id);
    assert_eq!(scene.ensure(&id, NAME).await.unwrap(), id);
    let last = scene.cell.pulls.lock().unwrap().last().unwrap().clone();
    assert_eq!((last.auth, last.sandbox_config), (auth(), None));
    assert!(!format!("{:?}", scene.images).contains("secret"));
}

#[tokio::test]
async fn pod_removal_deletes_its_credentials() {
    let scene = Scene::new();
    let _ = scene.pull(NAME, auth()).await;
    scene.images.forget_pod("uid-1");
    let _ = scene.ensure(NAME, "").await;
    assert_eq!(scene.cell.pulls.lock().unwrap().last().unwrap().auth, None);
}

/// Verifies I6.
#[tokio::test]
async fn cell_end_deletes_its_reports() {
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
async fn images_of_cells_without_pods_are_not_reported() {
    let scene = Scene::new();
    scene.in_registry(NAME, &sha256(b"an image"));
    scene.pull(NAME, None).await.unwrap();
    assert!(scene.images.reported(NAME, |_| true).is_some());
    assert_eq!(scene.images.reported(NAME, |_| false), None);
}

/// Verifies I6.
#[tokio::test]
async fn pause_image_is_reported_only_if_a_container_has_it() {
    let scene = Scene::new();
    let copied = scene.node.image(PAUSE);
    // First the pause image is copied, then found.
    for _ in 0..2 {
        scene.images.ensure_pause_in(&scene.id, &scene.cell).await.unwrap();
        assert_eq!([PAUSE, &copied].map(|reference| scene.reported(reference)), [None, None]);
    }
    assert_eq!(scene.ensure(&copied, PAUSE).await.unwrap(), copied);
    for reference in [PAUSE, &copied] {
        assert_eq!(scene.reported(reference).unwrap().id, copied);
    }
    // The pause image is pulled.
    let (scene, pulled) = (Scene::new(), sha256(b"pulled"));
    scene.in_registry(PAUSE, &pulled);
    scene.images.ensure_pause_in(&scene.id, &scene.cell).await.unwrap();
    assert_eq!([PAUSE, &pulled].map(|reference| scene.reported(reference)), [None, None]);
    assert_eq!(scene.ensure(PAUSE, "").await.unwrap(), pulled);
    assert_eq!(scene.reported(PAUSE).unwrap().id, pulled);
}

#[tokio::test]
async fn moved_reference_is_an_error() {
    let scene = Scene::new();
    let (wanted, other) = (sha256(b"wanted"), sha256(b"other"));
    scene.in_registry(NAME, &other);
    assert_eq!(scene.ensure(&wanted, NAME).await.unwrap_err().code(), Code::FailedPrecondition);
    assert_eq!(scene.ensure(&wanted, "").await.unwrap_err().code(), Code::NotFound);
}

/// Verifies D6.
#[tokio::test]
async fn pull_by_digest_asks_the_registry() {
    let scene = Scene::new();
    let id = scene.node.image(NAME);
    let other = sha256(b"newer");
    scene.in_registry(NAME, &other);
    assert_eq!(scene.pull(NAME, None).await.unwrap(), other, "the node's image may be outdated");
    let pinned = format!("registry.example/app@{}", sha256(b"an index"));
    {
        let mut store = scene.node.0.lock().unwrap();
        let target = store.names[NAME].clone();
        store.names.insert(pinned.clone(), target);
    }
    // An image of another pod: the registry gives it only to that pod.
    let refused = scene.pull(&pinned, None).await.unwrap_err();
    assert_eq!(refused.message(), "RegistryUnavailable: no such image");
    assert!(scene.cell.named.lock().unwrap().is_empty(), "nothing was copied");
    scene.in_registry(&pinned, &id);
    assert_eq!(scene.pull(&pinned, auth()).await.unwrap(), id);
    assert_eq!(scene.cell.pulls.lock().unwrap().len(), 3);
    assert_eq!(scene.reported(&pinned).unwrap().id, id);
}

/// Verifies I28, P11.
#[tokio::test]
async fn id_reported_by_a_cell_copies_no_image_of_another_pod() {
    let scene = Scene::new();
    let private = scene.node.image("registry.example/private:1");
    // The kubelet creates the container with the id from ImageStatus or PullImage.
    scene.cell.images.lock().unwrap().insert(NAME.into(), private.clone());
    assert_eq!(scene.status(NAME).await.as_ref(), Some(&private));
    scene.cell.images.lock().unwrap().clear();
    let own = scene.node.image(NAME);
    for in_registry in [false, true] {
        if in_registry {
            scene.in_registry(NAME, &own);
        }
        scene.ensure(&private, NAME).await.unwrap_err();
        scene.ensure(&private, "").await.unwrap_err();
        assert_eq!(*scene.cell.puts.lock().unwrap(), 0, "the node has sent a blob");
    }
    assert_eq!(scene.ensure("registry.example/private:1", NAME).await.unwrap(), own);
}

#[tokio::test]
async fn failed_pull_returns_the_cells_status() {
    let mut scene = Scene::new();
    scene.cell.refuses = true;
    let id = scene.node.image(NAME);
    let refused = scene.ensure(&id, NAME).await.unwrap_err();
    assert_eq!((refused.code(), refused.message()), (Code::ResourceExhausted, "the disk is full"));
    assert_eq!(scene.node.0.lock().unwrap().held, 0);
}

#[tokio::test]
async fn damaged_json_is_pulled_instead() {
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
