//! Images of pods in cells: copied from the node's containerd, or pulled in the cell.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use kiyot_config::ImageSource;
use kiyot_engine::id::CellId;
use kiyot_link::architecture::of_this_machine;
use kiyot_local::PauseImage;
use kiyot_proto::{cell::RegistryFile, cri};

use self::{
    copy::CopyError,
    copy_limits::{CopyLimits, Lane},
    document_cache::DocumentCache,
    memory::{BoundedMap, KeyLocks},
    node::{Containerd, Node},
    receiver::{CellReceiver, Receiver},
    reference::is_id,
    reports::Reports,
    shared_layers::SharedLayers,
};
use super::{
    cell_client::CellClient,
    cells::Cell,
    failure::{Code, Failure, Side},
    send_rate::SendRate,
};
use crate::metrics::ByteCounter;

pub(super) use self::reference::normalized;
pub use self::{
    node::NodeImages,
    registries::{NodeCredentials, NodeSettings, Registries},
};

mod copy;
mod copy_limits;
mod document_cache;
mod manifest;
mod memory;
mod node;
mod proxies;
mod pull;
mod receiver;
mod reference;
mod registries;
mod reports;
mod shared_layers;
#[cfg(test)]
mod tests;
mod unpacked;

/// Bounds the credentials in memory; each may take a few KiB.
const MAX_CREDENTIALS: usize = 1_024;

/// Bounds the wait for a restart of the node's containerd; systemd restarts a killed containerd
/// after 5 s.
const NODE_RESTART_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause between the attempts to reach the node's containerd.
const NODE_RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Bounds the names of an image in a cell.
const MAX_NAMES: usize = 64;

/// Images of pods in cells.
#[derive(Debug)]
pub struct Images {
    node: Box<dyn Node>,
    pause_image: Arc<PauseImage>,
    progress_timeout: Duration,
    /// Images reported by cells, until the cell ends.
    reported: Reports,
    /// Credentials by pod UID and reference. Never logged, never on disk.
    credentials: BoundedMap<(String, String), cri::AuthConfig>,
    node_credentials: Arc<NodeCredentials>,
    /// Registry configuration of the node.
    registries: Option<Arc<Registries>>,
    image_locks: KeyLocks<(CellId, String)>,
    /// Copies to a cell run one after the other: they share its link, and its agent bounds the
    /// blobs that it takes at a time.
    copy_locks: KeyLocks<CellId>,
    /// Source from which cells get images.
    source: ImageSource,
    /// Limits of copies to cells on other machines.
    copy_limits: Option<Arc<CopyLimits>>,
    /// Unpacked layers of the node, for cells that see its files.
    shared: Option<SharedLayers>,
    /// Bytes copied to cells.
    bytes: ByteCounter,
    /// Proxy variables of the daemon's environment.
    proxies: HashMap<String, String>,
}

impl Images {
    /// Creates the images of cells. `progress_timeout` bounds the time without progress of a copied
    /// blob and of a pull. `registries` has the credentials for pulls without credentials.
    /// `send_rate` limits copies to cells on other machines; `None` if there are no such cells.
    /// `shared_with` is the daemon's state directory: with it, cells that see the node's files
    /// mount the node's unpacked layers.
    pub fn new(
        node: NodeImages,
        progress_timeout: Duration,
        registries: Arc<Registries>,
        source: ImageSource,
        send_rate: Option<Arc<SendRate>>,
        shared_with: Option<&Path>,
    ) -> Arc<Self> {
        let pause_image = registries.pause_image();
        let owner = shared_with.map(|state_dir| state_dir.display().to_string());
        Arc::new(Self {
            shared: owner.map(|owner| SharedLayers::new(node.clone(), owner)),
            source,
            copy_limits: send_rate.map(|rate| Arc::new(CopyLimits::new(rate))),
            node_credentials: registries.credentials(),
            registries: Some(registries),
            proxies: proxies::of_environment(),
            ..Self::of(Box::new(Containerd::new(node)), pause_image, progress_timeout)
        })
    }

    fn of(node: Box<dyn Node>, pause_image: Arc<PauseImage>, progress_timeout: Duration) -> Self {
        Self {
            node: Box::new(DocumentCache::new(node)),
            pause_image,
            progress_timeout,
            reported: Reports::default(),
            credentials: BoundedMap::new(MAX_CREDENTIALS),
            node_credentials: Arc::default(),
            registries: None,
            image_locks: KeyLocks::default(),
            copy_locks: KeyLocks::default(),
            source: ImageSource::Node,
            copy_limits: None,
            shared: None,
            bytes: ByteCounter::default(),
            proxies: HashMap::new(),
        }
    }

    /// Returns the counter of bytes copied from the node to cells.
    pub fn bytes(&self) -> ByteCounter {
        self.bytes.clone()
    }

    fn receiver(&self, cell: &Cell) -> CellReceiver {
        CellReceiver {
            client: CellClient::new(cell),
            control: cell.link.control.clone(),
            bytes: self.bytes.clone(),
            limits: self.copy_limits.clone().filter(|_| cell.capabilities.remote),
            capabilities: cell.capabilities,
        }
    }

    /// Returns the proxies for pulls of a cell on another machine, by variable.
    pub fn proxies(&self) -> HashMap<String, String> {
        self.proxies.clone()
    }

    /// Returns the node's settings that also hold for pods in cells, as far as they are known.
    pub async fn node_settings(&self) -> NodeSettings {
        match &self.registries {
            Some(registries) => registries.settings().await,
            None => NodeSettings::default(),
        }
    }

    /// Returns the files of the registry configuration, for a cell that doesn't see the node's
    /// files.
    pub async fn registry_files(&self) -> Vec<RegistryFile> {
        match &self.registries {
            Some(registries) => registries.files().await,
            None => Vec::new(),
        }
    }

    /// Serves `PullImage` for a pod in this cell. Fails with the cell's own failure.
    ///
    /// The kubelet calls it only if the registry must be asked. So the cell pulls, also by digest
    /// and for an image on the node: the registry decides by the pod's credentials whether the pod
    /// may have the image. The kubelet sets no deadline; `progress_timeout` ends a stalled pull.
    pub async fn pull(
        &self,
        cell: &Cell,
        request: cri::PullImageRequest,
    ) -> Result<cri::PullImageResponse, Failure> {
        Box::pin(self.pull_in(&cell.id, &self.receiver(cell), request)).await
    }

    async fn pull_in(
        &self,
        cell: &CellId,
        receiver: &dyn Receiver,
        request: cri::PullImageRequest,
    ) -> Result<cri::PullImageResponse, Failure> {
        let reference = request.image.map(|image| image.image).unwrap_or_default();
        let uid = request
            .sandbox_config
            .and_then(|sandbox| sandbox.metadata)
            .map(|metadata| metadata.uid)
            .unwrap_or_default();
        if reference.is_empty() {
            return Err(Failure::request(Code::InvalidArgument, "PullImage without an image"));
        }
        if let Some(auth) = &request.auth {
            self.credentials.put((uid, normalized(&reference)), auth.clone());
        }
        let _lock = self.image_locks.lock((cell.clone(), normalized(&reference))).await;
        let image_ref = self.pull_in_cell(cell, receiver, &reference, request.auth).await?;
        // For the kubelet's `getImageUser`, which does not name the pod.
        if let Some(image) = cell_image(receiver, &image_ref).await? {
            self.reported.put(cell, &reference, &image);
        }
        Ok(cri::PullImageResponse { image_ref })
    }

    /// Serves `ImageStatus` for a pod in this cell: from the cell, or else from the node if the
    /// image can be copied.
    pub async fn status(
        &self,
        cell: &Cell,
        request: cri::ImageStatusRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::ImageStatusResponse, Failure> {
        Box::pin(self.status_in(&cell.id, &self.receiver(cell), request, deadline)).await
    }

    async fn status_in(
        &self,
        cell: &CellId,
        receiver: &dyn Receiver,
        request: cri::ImageStatusRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::ImageStatusResponse, Failure> {
        let reference = request.image.map(|image| image.image).unwrap_or_default();
        let request = status_request(&reference, request.verbose);
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let in_cell = receiver.status(request.clone(), left).await;
        if let Ok(found) = &in_cell
            && let Some(image) = &found.image
        {
            self.reported.put(cell, &reference, image);
            return in_cell;
        }
        let on_node = self.node.status(request).await?;
        let architecture = match &in_cell {
            Ok(_) => receiver.architecture().await?,
            Err(_) => of_this_machine(),
        };
        match &on_node.image {
            Some(image) if self.can_copy(&image.id, architecture).await? => Ok(on_node),
            // An unreachable cell must not cause a pull.
            _ => in_cell,
        }
    }

    /// Returns the image that cells reported for a reference, for an `ImageStatus` without a pod;
    /// `None` if no cell reported it, or if cells differ in the image's user. Considers only cells
    /// with a pod (`has_pod`).
    pub fn reported(
        &self,
        reference: &str,
        has_pod: impl Fn(&CellId) -> bool,
    ) -> Option<cri::Image> {
        self.reported.get(reference, has_pod)
    }

    /// Makes an image present in a cell: an absent image is copied from the node, or pulled with
    /// the pod's credentials. Returns the image's id in the cell's containerd.
    ///
    /// The pod's reference decides which image the node sends and the cell pulls: the id in the
    /// kubelet's request may come from a cell's response.
    ///
    /// Fails with the cell's own failure of a pull; with NOT_FOUND if there is no reference for a
    /// pull; with FAILED_PRECONDITION if the reference now means another image.
    pub async fn ensure(
        &self,
        cell: &Cell,
        image: &cri::ImageSpec,
        sandbox: &cri::PodSandboxConfig,
    ) -> Result<String, Failure> {
        let uid = sandbox.metadata.as_ref().map_or("", |metadata| &metadata.uid);
        Box::pin(self.ensure_in(&cell.id, &self.receiver(cell), image, uid)).await
    }

    async fn ensure_in(
        &self,
        cell: &CellId,
        receiver: &dyn Receiver,
        image: &cri::ImageSpec,
        uid: &str,
    ) -> Result<String, Failure> {
        let (id, found) = self.make_present(cell, receiver, image, uid).await?;
        if let Some(found) = &found {
            self.reported.put(cell, &image.image, found);
            self.reported.put(cell, &image.user_specified_image, found);
        }
        Ok(id)
    }

    /// Makes the pause image present in a cell, under the name in the configuration of the cell's
    /// containerd. Returns its id in the cell. The image belongs to the cell, not to the pod: it is
    /// not reported unless a container of the pod has the same image.
    pub async fn ensure_pause(&self, cell: &Cell) -> Result<String, Failure> {
        Box::pin(self.ensure_pause_in(&cell.id, &self.receiver(cell))).await
    }

    async fn ensure_pause_in(
        &self,
        cell: &CellId,
        receiver: &dyn Receiver,
    ) -> Result<String, Failure> {
        let image = self.pause_image.of_cell(receiver.pause_image().await?);
        let image = cri::ImageSpec { image, ..cri::ImageSpec::default() };
        self.make_present(cell, receiver, &image, "").await.map(|(id, _)| id)
    }

    /// Makes an image present in a cell; see [`Self::ensure`]. Returns the image's id and its
    /// status in the cell.
    async fn make_present(
        &self,
        cell: &CellId,
        receiver: &dyn Receiver,
        image: &cri::ImageSpec,
        uid: &str,
    ) -> Result<(String, Option<cri::Image>), Failure> {
        let wanted = &image.image;
        let key = (cell.clone(), normalized(wanted));
        let _lock = match self.image_locks.try_lock(key.clone()) {
            Some(lock) => lock,
            None => {
                // A present image does not wait for another pull of its reference.
                if let Some(found) = cell_image(receiver, wanted).await? {
                    return Ok((found.id.clone(), Some(found)));
                }
                self.image_locks.lock(key).await
            }
        };
        // The previous holder of the lock may have copied or pulled the image.
        if let Some(found) = cell_image(receiver, wanted).await? {
            return Ok((found.id.clone(), Some(found)));
        }
        let is_pause = self.pause_image.has(wanted);
        if is_pause {
            self.ensure_on_node(wanted).await;
        }
        let is_node_first = !self.pulls_first(receiver) || is_pause;
        if is_node_first && let Some(copied) = self.copy_from_node(cell, receiver, image).await? {
            return Ok((copied.id.clone(), Some(copied)));
        }
        let pulled = self.pull_present(cell, receiver, image, uid).await;
        if is_node_first || pulled.is_ok() {
            return pulled;
        }
        match self.copy_from_node(cell, receiver, image).await? {
            Some(copied) => Ok((copied.id.clone(), Some(copied))),
            None => pulled,
        }
    }

    /// Makes the node's runtime pull a pause image that a prune has deleted, because no pod ran on
    /// the node. After a failure the cell pulls the image.
    async fn ensure_on_node(&self, image: &str) {
        let ensured: Result<(), Failure> = async {
            if self.node.target(&normalized(image)).await?.is_none() {
                self.node.pull(image).await?;
                tracing::info!(image, "pause image was absent on the node, pulled");
            }
            Ok(())
        }
        .await;
        if let Err(failure) = ensured {
            tracing::info!(image, %failure, "pause image not pulled on the node");
        }
    }

    /// Pulls an image in a cell. Returns the image's id and its status in the cell.
    async fn pull_present(
        &self,
        cell: &CellId,
        receiver: &dyn Receiver,
        image: &cri::ImageSpec,
        uid: &str,
    ) -> Result<(String, Option<cri::Image>), Failure> {
        let (wanted, reference) = (&image.image, reference_of(image));
        if reference.is_empty() || is_id(reference) {
            return Err(Failure::request(
                Code::NotFound,
                format!(
                    "image {wanted} is neither in cell {cell} nor whole on the node, and no \
                     reference is known by which it could be pulled"
                ),
            ));
        }
        let auth = self.credentials.get(&(uid.to_owned(), normalized(reference)));
        let id = self.pull_in_cell(cell, receiver, reference, auth).await?;
        if is_id(wanted) && id != *wanted {
            return Err(Failure::request(
                Code::FailedPrecondition,
                format!(
                    "image {wanted} is not in cell {cell}, and its reference {reference} means \
                     {id} now"
                ),
            ));
        }
        let found = cell_image(receiver, &id).await?;
        Ok((id, found))
    }

    /// Deletes the credentials of a pod.
    pub fn forget_pod(&self, pod_uid: &str) {
        self.credentials.forget(|(uid, _)| uid == pod_uid);
    }

    /// Deletes the reports of an ended cell.
    pub fn forget_cell(&self, cell: &CellId) {
        self.reported.forget(cell);
    }

    /// Sets the cells at the start of the daemon: a previous daemon may hold layers for them.
    pub fn begin_with(&self, cells: impl FnOnce() -> HashSet<CellId>) {
        if let Some(shared) = &self.shared {
            shared.begin_with(cells);
        }
    }

    /// Releases the node's layers that are held for an ended cell.
    pub async fn release_layers(&self, cell: &CellId) {
        if let Some(shared) = &self.shared {
            shared.release(cell).await;
        }
    }

    /// Releases the node's layers that are held for unknown cells, which ended while no daemon ran.
    pub async fn release_unknown_layers(&self, known: impl Fn() -> HashSet<CellId>) {
        if let Some(shared) = &self.shared {
            shared.release_unknown(known).await;
        }
    }

    /// Copies an image from the node. Returns `None` if the node lacks a part of it, or fails.
    async fn copy_from_node(
        &self,
        cell: &CellId,
        receiver: &dyn Receiver,
        image: &cri::ImageSpec,
    ) -> Result<Option<cri::Image>, Failure> {
        let wanted = &image.image;
        match self.copy_across_restart(cell, receiver, image).await {
            Ok(None) => Ok(None),
            Ok(Some(id)) => {
                tracing::info!(%cell, image = wanted, id, "image copied from the node");
                let found = cell_image(receiver, &id).await?;
                found.map(Some).ok_or_else(|| {
                    Failure::cell(
                        Code::Internal,
                        format!("cell {cell} accepted image {wanted} but does not list it"),
                    )
                })
            }
            Err(CopyError::Failed(failure)) if failure.side() == Side::Cell => Err(failure),
            Err(error) => {
                tracing::info!(
                    %cell,
                    image = wanted,
                    error = &error as &dyn std::error::Error,
                    "image not copied from the node, pulled in the cell"
                );
                Ok(None)
            }
        }
    }

    /// Copies an image. While the node's containerd may be restarting, repeats the copy for up to
    /// [`NODE_RESTART_TIMEOUT`]: the cell could not pull an image that only the node has.
    async fn copy_across_restart(
        &self,
        cell: &CellId,
        receiver: &dyn Receiver,
        image: &cri::ImageSpec,
    ) -> Result<Option<String>, CopyError> {
        let mut deadline = None;
        loop {
            let result = self.copy(cell, receiver, image).await;
            let now = tokio::time::Instant::now();
            match &result {
                Err(CopyError::Failed(failure))
                    if may_be_restarting(failure)
                        && now < *deadline.get_or_insert(now + NODE_RESTART_TIMEOUT) =>
                {
                    let image = &image.image;
                    tracing::debug!(%cell, image, %failure, "copy of an image repeated");
                    tokio::time::sleep(NODE_RETRY_PAUSE).await;
                }
                _ => return result,
            }
        }
    }

    async fn copy(
        &self,
        cell: &CellId,
        receiver: &dyn Receiver,
        image: &cri::ImageSpec,
    ) -> Result<Option<String>, CopyError> {
        let _lock = self.copy_locks.lock(cell.clone()).await;
        let copy = self.copy_now(cell, receiver, image);
        match self.copy_limits.as_ref().filter(|_| receiver.is_remote()) {
            Some(limits) => limits.in_turn(self.lane(&image.image), copy).await,
            None => copy.await,
        }
    }

    /// Returns whether a cell pulls first, so that the node sends only images that the cell can't
    /// pull.
    fn pulls_first(&self, receiver: &dyn Receiver) -> bool {
        match self.source {
            ImageSource::Auto => receiver.is_remote(),
            ImageSource::Node => false,
            ImageSource::Registry => true,
        }
    }

    fn lane(&self, wanted: &str) -> Lane {
        if self.pause_image.has(wanted) { Lane::Pause } else { Lane::Containers }
    }

    async fn copy_now(
        &self,
        cell: &CellId,
        receiver: &dyn Receiver,
        image: &cri::ImageSpec,
    ) -> Result<Option<String>, CopyError> {
        let node = &*self.node;
        let (wanted, reference) = (&image.image, reference_of(image));
        if reference.is_empty() {
            return Ok(None);
        }
        let architecture = receiver.architecture().await?;
        let Some(manifest) = copy::resolve(node, &normalized(reference), architecture).await?
        else {
            return Ok(None);
        };
        let id = manifest.config.digest.clone();
        if is_id(wanted) && id != *wanted {
            return Ok(None);
        }
        let names = async {
            let known = node.status(status_request(&id, false)).await?.image;
            Ok(names(reference, &id, known))
        };
        let mounted = async {
            // Boxed: futures of calls to containerd are large.
            let shared = self.shared.as_ref().filter(|_| receiver.sees_node_files())?;
            Box::pin(unpacked::mount(node, shared, cell, receiver, &manifest)).await
        };
        copy::copy(node, receiver, &manifest, names, mounted, self.progress_timeout).await?;
        Ok(Some(id))
    }

    /// Pulls an image in the cell and returns its id.
    async fn pull_in_cell(
        &self,
        cell: &CellId,
        receiver: &dyn Receiver,
        reference: &str,
        auth: Option<cri::AuthConfig>,
    ) -> Result<String, Failure> {
        let image = cri::ImageSpec { image: reference.to_owned(), ..cri::ImageSpec::default() };
        // As in the node's containerd, configured credentials are for pulls without credentials.
        let auth = auth.or_else(|| self.node_credentials.of(&normalized(reference)));
        let request = cri::PullImageRequest { image: Some(image), auth, sandbox_config: None };
        let supplier = (!self.pulls_first(receiver)).then_some(&*self.node);
        let pulled = pull::pull(supplier, receiver, &request, self.progress_timeout).await?;
        if let (layers @ 1.., bytes) = pulled.from_node {
            tracing::info!(
                %cell,
                image = reference,
                layers,
                bytes,
                "layers of a pull copied from the node"
            );
        }
        Ok(pulled.id)
    }

    /// Returns whether the node has all of an image, so that a cell can get it.
    async fn can_copy(&self, id: &str, architecture: &'static str) -> Result<bool, Failure> {
        match copy::resolve(&*self.node, id, architecture).await {
            Ok(Some(manifest)) => {
                Ok(manifest.config.digest == id && copy::is_whole(&*self.node, &manifest).await?)
            }
            Ok(None) => Ok(false),
            Err(CopyError::Failed(failure)) if failure.code() != Code::NotFound => Err(failure),
            Err(error) => {
                tracing::debug!(image = id, %error, "image can't be copied from the node");
                Ok(false)
            }
        }
    }
}

/// Returns whether a failure may come from a restarting containerd. Until it is up, it refuses
/// connections, breaks them, or responds before its CRI is initialised; the last two are UNKNOWN.
fn may_be_restarting(failure: &Failure) -> bool {
    failure.side() == Side::Node && matches!(failure.code(), Code::Unavailable | Code::Unknown)
}

/// Returns the names of an image in a cell, by the node's status of the image.
///
/// CRI names each managed image by its id, and uses that name for image volumes in containerd.
fn names(reference: &str, id: &str, known: Option<cri::Image>) -> Vec<String> {
    let tags =
        known.into_iter().flat_map(|image| image.repo_tags.into_iter().chain(image.repo_digests));
    let named = Some(normalized(reference)).into_iter().filter(|name| !is_id(name));
    let mut names = vec![id.to_owned()];
    for name in named.chain(tags).take(MAX_NAMES - 1) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Returns the reference by which the pod names an image; empty for a bare id, which may come from
/// a cell's response.
fn reference_of(image: &cri::ImageSpec) -> &str {
    match (&*image.user_specified_image, &*image.image) {
        ("", id) if is_id(id) => "",
        ("", reference) | (reference, _) => reference,
    }
}

/// Returns the status of an image in the cell.
async fn cell_image(receiver: &dyn Receiver, name: &str) -> Result<Option<cri::Image>, Failure> {
    Ok(receiver.status(status_request(name, false), None).await?.image)
}

fn status_request(reference: &str, verbose: bool) -> cri::ImageStatusRequest {
    cri::ImageStatusRequest {
        image: Some(cri::ImageSpec { image: reference.to_owned(), ..cri::ImageSpec::default() }),
        verbose,
    }
}
