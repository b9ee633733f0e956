//! Images of pods in cells: copied from the node's containerd, or pulled in the cell.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kiyot_proto::cri;
use tonic::{Code, Status};

pub(super) use self::reference::normalized;
use self::{
    copy::CopyError,
    memory::{Recent, Turns},
    node::{Containerd, Node},
    receiver::{CellReceiver, Receiver},
    reference::is_id,
    reports::Reports,
};
pub use self::{
    node::NodeImages,
    registries::{NodeCredentials, Registries},
};
use super::{cells::Cell, id::CellId};

mod copy;
mod manifest;
mod memory;
mod node;
mod pull;
mod receiver;
mod reference;
mod registries;
mod reports;
#[cfg(test)]
mod tests;

/// Credentials that are remembered; each may be a few KiB.
const MAX_CREDENTIALS: usize = 1_024;

/// Names that an image gets in a cell.
const MAX_NAMES: usize = 64;

/// Images of pods in cells.
#[derive(Debug)]
pub struct Images {
    node: Box<dyn Node>,
    pause_image: String,
    progress_timeout: Duration,
    /// Reports of cells, each kept as long as its cell lives.
    reported: Reports,
    /// By the pod's uid and the reference. Never logged, never kept on disk.
    credentials: Recent<(String, String), cri::AuthConfig>,
    of_node: Arc<NodeCredentials>,
    turns: Turns<(CellId, String)>,
}

impl Images {
    /// `pause_image`: the name that the cells' containerd is configured with. `progress_timeout`:
    /// how long a blob on its way to a cell, or a pull in a cell, may stand still. `of_node`: what
    /// opens images for which no credentials came.
    pub fn new(
        node: NodeImages,
        pause_image: impl Into<String>,
        progress_timeout: Duration,
        of_node: Arc<NodeCredentials>,
    ) -> Arc<Self> {
        Arc::new(Self {
            of_node,
            ..Self::of(Box::new(Containerd::new(node)), pause_image.into(), progress_timeout)
        })
    }

    fn of(node: Box<dyn Node>, pause_image: String, progress_timeout: Duration) -> Self {
        Self {
            node,
            pause_image,
            progress_timeout,
            reported: Reports::default(),
            credentials: Recent::new(MAX_CREDENTIALS),
            of_node: Arc::default(),
            turns: Turns::default(),
        }
    }

    /// `PullImage` for a pod in this cell. A pull's failure is the pull's own words.
    ///
    /// The kubelet asks for it only if the registry must be asked, so the cell pulls. Also by
    /// digest, and although the node may have the image: whether this pod may have it is the
    /// registry's to say, by the credentials that came for it. The kubelet sets no deadline:
    /// `progress_timeout` ends it.
    pub async fn pull(
        &self,
        cell: &Cell,
        request: cri::PullImageRequest,
    ) -> Result<cri::PullImageResponse, Status> {
        Box::pin(self.pull_in(&cell.id, &CellReceiver(cell.link.clone()), request)).await
    }

    async fn pull_in(
        &self,
        cell: &CellId,
        receiver: &dyn Receiver,
        request: cri::PullImageRequest,
    ) -> Result<cri::PullImageResponse, Status> {
        let reference = request.image.map(|image| image.image).unwrap_or_default();
        let uid = request
            .sandbox_config
            .and_then(|sandbox| sandbox.metadata)
            .map(|metadata| metadata.uid)
            .unwrap_or_default();
        if reference.is_empty() {
            return Err(Status::invalid_argument("PullImage without an image"));
        }
        if let Some(auth) = &request.auth {
            self.credentials.put((uid, normalized(&reference)), auth.clone());
        }
        let _turn = self.turns.take((cell.clone(), normalized(&reference))).await;
        let image_ref = self.pulled(cell, receiver, &reference, request.auth).await?;
        // Known to getImageUser, which names no pod.
        if let Some(image) = in_cell(receiver, &image_ref).await? {
            self.reported.put(cell, &reference, &image);
        }
        Ok(cri::PullImageResponse { image_ref })
    }

    /// `ImageStatus` for a pod in this cell: in the cell, else on the node (which can give it).
    pub async fn status(
        &self,
        cell: &Cell,
        request: cri::ImageStatusRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::ImageStatusResponse, Status> {
        Box::pin(self.status_in(&cell.id, &CellReceiver(cell.link.clone()), request, deadline))
            .await
    }

    async fn status_in(
        &self,
        cell: &CellId,
        receiver: &dyn Receiver,
        request: cri::ImageStatusRequest,
        deadline: Option<Instant>,
    ) -> Result<cri::ImageStatusResponse, Status> {
        let reference = request.image.map(|image| image.image).unwrap_or_default();
        let asked = question(&reference, request.verbose);
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let in_cell = receiver.status(asked.clone(), left).await;
        if let Ok(found) = &in_cell
            && let Some(image) = &found.image
        {
            self.reported.put(cell, &reference, image);
            return in_cell;
        }
        let on_node = self.node.status(asked).await?;
        match &on_node.image {
            Some(image) if self.can_give(&image.id).await? => Ok(on_node),
            // That the cell can't be asked is no reason to pull.
            _ => in_cell,
        }
    }

    /// Returns what cells reported for a reference, for an `ImageStatus` that names no pod; `None`
    /// if nothing, or if they differ in the image's user. Only of cells that have a pod, as
    /// `has_pod` says.
    pub fn reported(
        &self,
        reference: &str,
        has_pod: impl Fn(&CellId) -> bool,
    ) -> Option<cri::Image> {
        self.reported.get(reference, has_pod)
    }

    /// Sees to it that an image is in a cell: it is, or is copied from the node, or is pulled with
    /// the credentials that came for this pod. Returns the id by which the cell's containerd knows
    /// it.
    ///
    /// A pull's failure is the pull's own words; NOT_FOUND if there is no reference to pull by,
    /// FAILED_PRECONDITION if the reference means another image by now.
    pub async fn ensure(
        &self,
        cell: &Cell,
        image: &cri::ImageSpec,
        sandbox: &cri::PodSandboxConfig,
    ) -> Result<String, Status> {
        let uid = sandbox.metadata.as_ref().map_or("", |metadata| &metadata.uid);
        Box::pin(self.ensure_in(&cell.id, &CellReceiver(cell.link.clone()), image, uid)).await
    }

    async fn ensure_in(
        &self,
        cell: &CellId,
        receiver: &dyn Receiver,
        image: &cri::ImageSpec,
        uid: &str,
    ) -> Result<String, Status> {
        let (id, found) = self.present_in(cell, receiver, image, uid).await?;
        if let Some(found) = &found {
            self.reported.put(cell, &image.image, found);
            self.reported.put(cell, &image.user_specified_image, found);
        }
        Ok(id)
    }

    /// Sees to it that the pause image is in a cell, under the name that the cell's containerd is
    /// configured with. It is the cell's own, and no image of the pod's: it is not reported, unless
    /// a container of the pod has the same one.
    pub async fn ensure_pause(&self, cell: &Cell) -> Result<(), Status> {
        Box::pin(self.ensure_pause_in(&cell.id, &CellReceiver(cell.link.clone()))).await
    }

    async fn ensure_pause_in(&self, cell: &CellId, receiver: &dyn Receiver) -> Result<(), Status> {
        let image = cri::ImageSpec { image: self.pause_image.clone(), ..cri::ImageSpec::default() };
        self.present_in(cell, receiver, &image, "").await.map(drop)
    }

    /// Has an image in a cell as [`Self::ensure`] does. Returns its id, and what the cell says of
    /// it.
    async fn present_in(
        &self,
        cell: &CellId,
        receiver: &dyn Receiver,
        image: &cri::ImageSpec,
        uid: &str,
    ) -> Result<(String, Option<cri::Image>), Status> {
        let wanted = &image.image;
        if let Some(found) = in_cell(receiver, wanted).await? {
            return Ok((found.id.clone(), Some(found)));
        }
        let _turn = self.turns.take((cell.clone(), normalized(wanted))).await;
        // Whoever had the turn before may have brought it.
        if let Some(found) = in_cell(receiver, wanted).await? {
            return Ok((found.id.clone(), Some(found)));
        }
        if let Some(copied) = self.copied(cell, receiver, wanted).await? {
            return Ok((copied.id.clone(), Some(copied)));
        }
        let reference = if is_id(wanted) { &image.user_specified_image } else { wanted };
        if reference.is_empty() || is_id(reference) {
            return Err(Status::not_found(format!(
                "image {wanted} is neither in cell {cell} nor whole on the node, and no reference is known by which it could be pulled"
            )));
        }
        let auth = self.credentials.get(&(uid.to_owned(), normalized(reference)));
        let id = self.pulled(cell, receiver, reference, auth).await?;
        if is_id(wanted) && id != *wanted {
            return Err(Status::failed_precondition(format!(
                "image {wanted} is not in cell {cell}, and its reference {reference} means {id} by now"
            )));
        }
        let found = in_cell(receiver, &id).await?;
        Ok((id, found))
    }

    /// Forgets the credentials that came for a pod.
    pub fn forget_pod(&self, pod_uid: &str) {
        self.credentials.forget(|(uid, _)| uid == pod_uid);
    }

    /// Forgets what a cell reported that is gone: its images are gone with it.
    pub fn forget_cell(&self, cell: &CellId) {
        self.reported.forget(cell);
    }

    /// Copies an image from the node; `None` if it isn't there, or not whole, or the node can't be
    /// asked.
    async fn copied(
        &self,
        cell: &CellId,
        receiver: &dyn Receiver,
        wanted: &str,
    ) -> Result<Option<cri::Image>, Status> {
        match self.copy(receiver, wanted).await {
            Ok(None) => Ok(None),
            Ok(Some(id)) => {
                tracing::info!(%cell, image = wanted, id, "Copied an image from the node to a cell.");
                let found = in_cell(receiver, &id).await?;
                found.map(Some).ok_or_else(|| {
                    Status::internal(format!(
                        "cell {cell} has taken image {wanted} and does not know it"
                    ))
                })
            }
            Err(CopyError::Cell(status)) => Err(status),
            Err(error) => {
                tracing::info!(%cell, image = wanted, error = &error as &dyn std::error::Error, "an image is not copied from the node; the cell pulls it");
                Ok(None)
            }
        }
    }

    async fn copy(
        &self,
        receiver: &dyn Receiver,
        wanted: &str,
    ) -> Result<Option<String>, CopyError> {
        let node = &*self.node;
        let Some(manifest) = copy::resolve(node, &normalized(wanted)).await? else {
            return Ok(None);
        };
        let id = manifest.config.digest.clone();
        if is_id(wanted) && id != wanted {
            return Ok(None);
        }
        let known = node.status(question(&id, false)).await.map_err(CopyError::Node)?.image;
        let tags = known
            .into_iter()
            .flat_map(|image| image.repo_tags.into_iter().chain(image.repo_digests));
        // CRI gives each image that it manages its id for a name, and asks containerd for an image
        // volume by it.
        let mut names = vec![id.clone()];
        for name in Some(normalized(wanted))
            .into_iter()
            .filter(|name| !is_id(name))
            .chain(tags)
            .take(MAX_NAMES - 1)
        {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        copy::copy(node, receiver, &manifest, names, self.progress_timeout).await?;
        Ok(Some(id))
    }

    /// Pulls in the cell, and returns the image's id.
    async fn pulled(
        &self,
        cell: &CellId,
        receiver: &dyn Receiver,
        reference: &str,
        auth: Option<cri::AuthConfig>,
    ) -> Result<String, Status> {
        let image = cri::ImageSpec { image: reference.to_owned(), ..cri::ImageSpec::default() };
        // As the node's containerd does: what is configured is for whom nothing came.
        let auth = auth.or_else(|| self.of_node.of(&normalized(reference)));
        let request = cri::PullImageRequest { image: Some(image), auth, sandbox_config: None };
        let pulled = pull::pull(&*self.node, receiver, &request, self.progress_timeout).await?;
        if let (layers @ 1.., bytes) = pulled.from_node {
            tracing::info!(%cell, image = reference, layers, bytes, "Took layers of a pull from the node: so many bytes were not asked of the registry.");
        }
        Ok(pulled.id)
    }

    /// Whether the node has all of an image, so that a cell can get it.
    async fn can_give(&self, id: &str) -> Result<bool, Status> {
        match copy::resolve(&*self.node, id).await {
            Ok(Some(manifest)) => copy::is_whole(&*self.node, &manifest).await,
            Ok(None) => Ok(false),
            Err(CopyError::Node(status)) if status.code() != Code::NotFound => Err(status),
            Err(error) => {
                tracing::debug!(image = id, %error, "the node can't give an image");
                Ok(false)
            }
        }
    }
}

/// What the cell has under a name.
async fn in_cell(receiver: &dyn Receiver, name: &str) -> Result<Option<cri::Image>, Status> {
    Ok(receiver.status(question(name, false), None).await?.image)
}

fn question(reference: &str, verbose: bool) -> cri::ImageStatusRequest {
    cri::ImageStatusRequest {
        image: Some(cri::ImageSpec { image: reference.to_owned(), ..cri::ImageSpec::default() }),
        verbose,
    }
}
