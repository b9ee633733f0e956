//! How cells reach registries: as the node does, if nothing else is configured.
//!
//! Where its own file is, containerd does not say; what is in it about registries, CRI's `Status`
//! does (containerd 1.x; not from 2.0 on).

use std::{
    collections::BTreeSet,
    fmt, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use kiyot_proto::cri::{self, StatusRequest, runtime_service_client::RuntimeServiceClient};
use tokio::{sync, time::Instant};
use tonic::Status;

use self::{configured::Configured, hosts::Plan};
use super::node::{Containerd, NodeImages};
use crate::backends::milpa::providers::RegistryConfig;

mod configured;
mod directory;
mod hosts;

/// How long to wait before a node's containerd that did not answer at the start is asked again.
const AGAIN: Duration = Duration::from_secs(5);
/// How long the node's containerd has to say what it has: the launch of a cell waits for it.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long what it has said is taken for true: its configuration changes when it is started anew,
/// and nobody tells.
const FRESH: Duration = Duration::from_secs(30);
/// The longest list of hosts that is shown.
const HOSTS: usize = 8;
/// The longest certificate or key, in bytes.
const MAX_CERTIFICATES: u64 = 1 << 20;
/// The name of the directory of files made from the old form, beneath the daemon's own.
const DIRECTORY: &str = "registries";
/// What containerd 2 says of itself where the old form is still written, without saying what it is.
const DEPRECATED: &str = "io.containerd.deprecation/cri-registry-mirrors";

/// What opens registries to every pod of the node. Never logged, never kept on disk.
#[derive(Default)]
pub struct NodeCredentials(Mutex<Configured>);

impl NodeCredentials {
    /// For an image, by its whole name; `None` if there is nothing, or nothing that may leave the
    /// node.
    pub(super) fn of(&self, image: &str) -> Option<cri::AuthConfig> {
        let configured = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        configured.auth(&hosts::with_auth(&configured, image.split_once('/')?.0)?)
    }
}

impl fmt::Debug for NodeCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeCredentials").finish_non_exhaustive()
    }
}

/// Asks the node's containerd, and gives cells what it has.
#[derive(Debug)]
pub struct Registries {
    node: Containerd,
    /// `registry_config_dir`: then nothing else is taken.
    configured: Option<PathBuf>,
    /// Where files are made.
    directory: PathBuf,
    credentials: Arc<NodeCredentials>,
    known: sync::Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    asked: Option<Instant>,
    has_answered: bool,
    config_path: Option<PathBuf>,
    /// What was said in the log.
    said: BTreeSet<String>,
}

impl Registries {
    /// `configured`: the operator's own directory. `state_dir`: where a directory may be made.
    pub fn new(node: NodeImages, configured: Option<PathBuf>, state_dir: &Path) -> Arc<Self> {
        Arc::new(Self {
            node: Containerd::new(node),
            configured,
            directory: state_dir.join(DIRECTORY),
            credentials: Arc::default(),
            known: sync::Mutex::default(),
        })
    }

    /// What opens registries to every pod of the node, as far as it is known.
    pub fn credentials(&self) -> Arc<NodeCredentials> {
        Arc::clone(&self.credentials)
    }

    /// Asks the node's containerd until it has answered.
    pub async fn learn(&self) {
        loop {
            {
                let mut known = self.known.lock().await;
                self.ask(&mut known).await;
                if known.has_answered {
                    return;
                }
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    async fn ask(&self, known: &mut Known) {
        let answer = tokio::time::timeout(PATIENCE, status(&self.node)).await;
        known.asked = Some(Instant::now());
        let said = match answer
            .unwrap_or_else(|_| Err(Status::deadline_exceeded("it does not answer")))
        {
            Ok((json, deprecated)) => {
                known.has_answered = true;
                let (config_path, said) = self.taken(&json, deprecated).await;
                known.config_path = config_path;
                said
            }
            Err(status) => {
                tracing::debug!(
                    status = status.message(),
                    "The node's containerd does not say which mirrors it has"
                );
                let unknown = !known.has_answered && self.configured.is_none();
                unknown
                    .then(|| "The node's containerd does not say which mirrors it has: cells that are made meanwhile pull without them.".to_owned())
                    .into_iter()
                    .collect()
            }
        };
        for said in said {
            if known.said.insert(said.clone()) {
                tracing::warn!("{said}");
            }
        }
    }

    /// What cells are given, and what is to be said of it.
    async fn taken(&self, json: &str, deprecated: bool) -> (Option<PathBuf>, Vec<String>) {
        let configured = match Configured::parse(json) {
            Ok(configured) => configured,
            Err((line, column)) => {
                let said = format!(
                    "The configuration that the node's containerd tells can't be read (line {line}, column {column}): cells pull without its mirrors."
                );
                return (self.configured.clone(), vec![said]);
            }
        };
        let mut said = Vec::new();
        if configured.is_none() && deprecated && self.configured.is_none() {
            said.push(
                "The node's containerd has registry.mirrors and, as of 2.0, does not tell them: cells pull past them. Write them as HOST/hosts.toml in a directory, and set config_path of \
                 the node's containerd and registry_config_dir to it."
                    .to_owned(),
            );
        }
        let configured = configured.unwrap_or_default();
        *self.credentials.0.lock().unwrap_or_else(PoisonError::into_inner) = configured.clone();
        if let headers @ [_, ..] = configured.headers().as_slice() {
            said.push(format!(
                "Cells do not send registry.headers of the node's containerd: {}.",
                shown(headers)
            ));
        }
        if let Some(own) = &self.configured {
            if configured.is_old() {
                said.push(format!(
                    "registry_config_dir is set, so that cells do not read registry.mirrors and registry.configs of the node's containerd, which has {}: without it they do.",
                    shown(&configured.hosts())
                ));
            }
            return (Some(own.clone()), said);
        }
        if !configured.config_path.is_empty() {
            return (Some(configured.config_path.into()), said);
        }
        let directory = self.directory.clone();
        let made = tokio::task::spawn_blocking(move || {
            let Plan { files, problems } =
                if configured.is_old() { hosts::plan(&configured, &read) } else { Plan::default() };
            directory::make(&directory, &files).map(|()| (!files.is_empty(), problems))
        });
        match made.await.map_err(io::Error::other).and_then(|made| made) {
            Ok((is_any, problems)) => {
                said.extend(
                    problems.into_iter().map(|problem| format!("Cells pull without what they can't use of the node's containerd: {problem}.")),
                );
                (is_any.then(|| self.directory.clone()), said)
            }
            Err(error) => {
                said.push(format!(
                    "Cells pull without the mirrors of the node's containerd: {} can't be written: {error}.",
                    self.directory.display()
                ));
                (None, said)
            }
        }
    }
}

#[async_trait]
impl RegistryConfig for Registries {
    async fn config_path(&self) -> Option<PathBuf> {
        let mut known = self.known.lock().await;
        if known.asked.is_none_or(|asked| asked.elapsed() > FRESH) {
            self.ask(&mut known).await;
        }
        if known.has_answered { known.config_path.clone() } else { self.configured.clone() }
    }
}

fn shown(words: &[&str]) -> String {
    words.iter().take(HOSTS).copied().collect::<Vec<_>>().join(", ")
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let found = std::fs::metadata(path)?;
    if !found.is_file() || found.len() > MAX_CERTIFICATES {
        return Err(io::Error::other(format!(
            "it is no file, or has more than {MAX_CERTIFICATES} bytes"
        )));
    }
    std::fs::read(path)
}

/// The configuration as JSON, empty if there is none in the answer; and whether containerd calls
/// its old form deprecated.
async fn status(containerd: &Containerd) -> Result<(String, bool), Status> {
    let request = containerd.request(StatusRequest { verbose: true }, Some(super::node::ASK))?;
    let mut answer =
        RuntimeServiceClient::new(containerd.channel().await?).status(request).await?.into_inner();
    let deprecated = answer
        .status
        .unwrap_or_default()
        .conditions
        .iter()
        .any(|condition| condition.message.contains(DEPRECATED));
    Ok((answer.info.remove("config").unwrap_or_else(|| "{}".to_owned()), deprecated))
}

#[cfg(test)]
mod tests;
