//! Registry configuration of cells: the node's, unless `registry_config_dir` replaces it.
//!
//! The path of containerd's own configuration file is unknown, but CRI's `Status` has the part
//! about registries (containerd 1.x; absent since 2.0).

use std::{
    collections::BTreeSet,
    fmt, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use kiyot_link::cri_settings::CriSettings;
use kiyot_local::{PauseImage, RegistryConfig};
use kiyot_proto::{
    cell::RegistryFile,
    cri::{
        self, ListImagesRequest, StatusRequest, image_service_client::ImageServiceClient,
        runtime_service_client::RuntimeServiceClient,
    },
};
use tokio::sync;

use self::{bundle::Bundle, configured::Configured, hosts::Plan};
use super::node::{Containerd, MAX_MESSAGE_BYTES, NodeImages, RESPONSE_TIMEOUT};
use crate::backends::milpa::failure::{Code, Failure};

pub use self::cri_plugin::NodeSettings;

mod bundle;
mod configured;
mod cri_plugin;
mod directory;
mod hosts;

/// Delay before the node's containerd is asked again if it has not responded yet.
const RETRY_DELAY: Duration = Duration::from_secs(5);
/// Deadline for the node's containerd, because the launch of the first cells waits for it.
const CONTAINERD_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay before the node's containerd is asked again: its configuration changes at its restart,
/// without notice.
const CONFIG_MAX_AGE: Duration = Duration::from_secs(30);
/// Most hosts in a log message.
const MAX_SHOWN_HOSTS: usize = 8;
/// Most bytes of a certificate or key file.
const MAX_CERTIFICATE_BYTES: u64 = 1 << 20;
/// Directory of the generated hosts.toml files, in the daemon's state directory.
const GENERATED_DIRECTORY: &str = "registries";
/// Deprecation in the status of containerd 2 for mirrors in the old form, whose content it doesn't
/// disclose.
const DEPRECATED_MIRRORS: &str = "io.containerd.deprecation/cri-registry-mirrors";

/// Registry credentials that every pod of the node may use. Never logged, never on disk.
#[derive(Default)]
pub struct NodeCredentials(Mutex<Configured>);

impl NodeCredentials {
    /// Returns the credentials for an image by its full name; `None` without credentials that may
    /// leave the node.
    pub(super) fn of(&self, image: &str) -> Option<cri::AuthConfig> {
        let configured = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        configured.auth(&hosts::host_with_auth(&configured, image.split_once('/')?.0)?)
    }
}

impl fmt::Debug for NodeCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeCredentials").finish_non_exhaustive()
    }
}

/// Registry configuration of the node's containerd, and the resulting directory for cells.
#[derive(Debug)]
pub struct Registries {
    node: Containerd,
    /// `registry_config_dir`, which replaces the node's configuration.
    configured: Option<PathBuf>,
    /// Directory of generated files.
    directory: PathBuf,
    state_dir: PathBuf,
    credentials: Arc<NodeCredentials>,
    pause_image: Arc<PauseImage>,
    known: Mutex<KnownConfig>,
    /// Held while the node's containerd is asked, which may hang.
    asking: sync::Mutex<()>,
    /// The files, until the node's containerd is asked again.
    files: sync::Mutex<Option<Files>>,
}

#[derive(Debug, Default)]
struct KnownConfig {
    was_asked: bool,
    has_answered: bool,
    config_path: Option<PathBuf>,
    settings: NodeSettings,
    /// Warnings already logged.
    warnings: BTreeSet<String>,
}

/// Configuration of the node's containerd, as far as it discloses it.
struct Disclosed {
    /// The configuration of the CRI plugin; `{}` if absent.
    json: String,
    /// True if containerd reports mirrors in the deprecated form.
    deprecated: bool,
    /// The image of sandbox containers.
    pause_image: Option<String>,
}

/// Files of a registry configuration. `Debug` omits them, because some are keys.
#[derive(Clone)]
struct Files(Vec<RegistryFile>);

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Files").field(&self.0.len()).finish()
    }
}

impl KnownConfig {
    /// Logs a warning once.
    fn warn(&mut self, warning: String) {
        if self.warnings.insert(warning.clone()) {
            tracing::warn!("{warning}");
        }
    }
}

impl Registries {
    /// Creates a configuration that is not known yet. `configured` is the operator's directory,
    /// `state_dir` the daemon's. `pause_image` is set from the node's configuration.
    pub fn new(
        node: NodeImages,
        configured: Option<PathBuf>,
        state_dir: &Path,
        pause_image: Arc<PauseImage>,
    ) -> Arc<Self> {
        Arc::new(Self {
            node: Containerd::new(node),
            configured,
            directory: state_dir.join(GENERATED_DIRECTORY),
            state_dir: state_dir.to_owned(),
            credentials: Arc::default(),
            pause_image,
            known: Mutex::default(),
            asking: sync::Mutex::default(),
            files: sync::Mutex::default(),
        })
    }

    /// Returns the credentials that every pod of the node may use, as far as they are known.
    pub fn credentials(&self) -> Arc<NodeCredentials> {
        Arc::clone(&self.credentials)
    }

    pub(super) fn pause_image(&self) -> Arc<PauseImage> {
        Arc::clone(&self.pause_image)
    }

    /// Asks the node's containerd periodically, so that no launch waits for its response.
    pub async fn follow(&self) {
        loop {
            {
                let _asking = self.asking.lock().await;
                self.refresh().await;
            }
            let delay = if self.known().has_answered { CONFIG_MAX_AGE } else { RETRY_DELAY };
            tokio::time::sleep(delay).await;
        }
    }

    /// Waits until the node's containerd was asked once. The wait is bounded.
    async fn asked(&self) {
        if self.known().was_asked {
            return;
        }
        let _asking = self.asking.lock().await;
        if !self.known().was_asked {
            self.refresh().await;
        }
    }

    fn known(&self) -> MutexGuard<'_, KnownConfig> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn refresh(&self) {
        let answer = tokio::time::timeout(CONTAINERD_TIMEOUT, self.disclosed()).await;
        let answer = answer
            .unwrap_or_else(|_| Err(Failure::node(Code::DeadlineExceeded, "no response in time")));
        match answer {
            Ok(Disclosed { json, deprecated, pause_image }) => {
                if pause_image.is_some_and(|image| self.pause_image.learn(image)) {
                    self.keep_pause_image().await;
                }
                let (config_path, warnings) = self.apply(&json, deprecated).await;
                let settings = settings(&json).await;
                let mut known = self.known();
                known.config_path = config_path;
                known.has_answered = true;
                warnings.into_iter().for_each(|warning| known.warn(warning));
                match settings {
                    Ok((settings, warning)) => {
                        known.settings = settings;
                        warning.into_iter().for_each(|warning| known.warn(warning));
                    }
                    Err(warning) => known.warn(warning),
                }
            }
            Err(failure) => {
                tracing::debug!(
                    error = %failure,
                    "mirrors of the node's containerd unknown"
                );
                let mut known = self.known();
                if !known.has_answered && self.configured.is_none() {
                    known.warn(
                        "mirrors of the node's containerd unknown: new cells pull without them"
                            .to_owned(),
                    );
                }
            }
        }
        self.known().was_asked = true;
        *self.files.lock().await = None;
    }

    async fn keep_pause_image(&self) {
        let (pause_image, state_dir) = (Arc::clone(&self.pause_image), self.state_dir.clone());
        let kept = tokio::task::spawn_blocking(move || pause_image.keep(&state_dir)).await;
        if let Err(error) = kept.map_err(io::Error::other).flatten() {
            tracing::warn!(%error, "pause image of the node's runtime not kept for a restart");
        }
    }

    async fn disclosed(&self) -> Result<Disclosed, Failure> {
        let channel = self.node.channel().await?;
        let request = self.node.request(StatusRequest { verbose: true }, Some(RESPONSE_TIMEOUT))?;
        let mut answer = RuntimeServiceClient::new(channel.clone())
            .status(request)
            .await
            .map_err(Failure::of_node)?
            .into_inner();
        let deprecated = answer
            .status
            .unwrap_or_default()
            .conditions
            .iter()
            .any(|condition| condition.message.contains(DEPRECATED_MIRRORS));
        let json = answer.info.remove("config").unwrap_or_else(|| "{}".to_owned());
        let mut pause_image = cri_plugin::sandbox_image(&json);
        if pause_image.is_none() && !self.pause_image.is_configured() {
            let request =
                self.node.request(ListImagesRequest::default(), Some(RESPONSE_TIMEOUT))?;
            let mut images =
                ImageServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
            let listed = images.list_images(request).await.map_err(Failure::of_node)?;
            pause_image = cri_plugin::pinned_pause(&listed.into_inner().images);
        }
        Ok(Disclosed { json, deprecated, pause_image })
    }

    /// Returns the directory for cells, and warnings.
    async fn apply(&self, json: &str, deprecated: bool) -> (Option<PathBuf>, Vec<String>) {
        let configured = match Configured::parse(json) {
            Ok(configured) => configured,
            Err((line, column)) => {
                let warning = format!(
                    "configuration of the node's containerd invalid at line {line}, column \
                     {column}: cells pull without its mirrors"
                );
                return (self.configured.clone(), vec![warning]);
            }
        };
        let mut warnings = Vec::new();
        if configured.is_none() && deprecated && self.configured.is_none() {
            warnings.push(
                "registry.mirrors of the node's containerd undisclosed since 2.0: cells pull \
                 without them; write them as HOST/hosts.toml in a directory, and set config_path \
                 of the node's containerd and registry_config_dir to it"
                    .to_owned(),
            );
        }
        let configured = configured.unwrap_or_default();
        *self.credentials.0.lock().unwrap_or_else(PoisonError::into_inner) = configured.clone();
        if let headers @ [_, ..] = configured.headers().as_slice() {
            warnings.push(format!(
                "registry.headers of the node's containerd not used by cells: {}",
                shown(headers)
            ));
        }
        if let Some(own) = &self.configured {
            if configured.has_old_form() {
                warnings.push(format!(
                    "registry.mirrors and registry.configs of the node's containerd not used by \
                     cells, because registry_config_dir is set: {}",
                    shown(&configured.hosts())
                ));
            }
            return (Some(own.clone()), warnings);
        }
        if !configured.config_path.is_empty() {
            return (Some(configured.config_path.into()), warnings);
        }
        let directory = self.directory.clone();
        let made = tokio::task::spawn_blocking(move || {
            let Plan { files, problems } = if configured.has_old_form() {
                hosts::plan(&configured, &read)
            } else {
                Plan::default()
            };
            directory::make(&directory, &files).map(|()| (!files.is_empty(), problems))
        });
        match made.await.map_err(io::Error::other).and_then(|made| made) {
            Ok((is_any, problems)) => {
                warnings.extend(problems.into_iter().map(|problem| {
                    format!(
                        "registry setting of the node's containerd not used by cells: \
                             {problem}"
                    )
                }));
                (is_any.then(|| self.directory.clone()), warnings)
            }
            Err(error) => {
                warnings.push(format!(
                    "mirrors of the node's containerd not used by cells: {} can't be written: \
                     {error}",
                    self.directory.display()
                ));
                (None, warnings)
            }
        }
    }
}

#[async_trait]
impl RegistryConfig for Registries {
    async fn config_path(&self) -> Option<PathBuf> {
        self.asked().await;
        let known = self.known();
        if known.has_answered { known.config_path.clone() } else { self.configured.clone() }
    }

    async fn cri_settings(&self) -> CriSettings {
        self.settings().await.cri
    }
}

impl Registries {
    /// Returns the last known settings of the node for pods in cells.
    pub async fn settings(&self) -> NodeSettings {
        self.asked().await;
        self.known().settings.clone()
    }

    /// Returns the files of the configuration, for cells that don't see the node's files. Logs each
    /// problem once.
    pub async fn files(&self) -> Vec<RegistryFile> {
        let Some(config_path) = self.config_path().await else { return Vec::new() };
        let mut kept = self.files.lock().await;
        if let Some(Files(files)) = &*kept {
            return files.clone();
        }
        let reading = tokio::task::spawn_blocking(move || Bundle::read(&config_path, &read));
        let bundle =
            reading.await.map_err(io::Error::other).flatten().unwrap_or_else(|error| Bundle {
                problems: [format!("registry configuration can't be read: {error}")].into(),
                ..Bundle::default()
            });
        for problem in bundle.problems {
            if self.known().warnings.insert(problem.clone()) {
                tracing::warn!(problem, "registry configuration of cells incomplete");
            }
        }
        let file = |(path, content): (PathBuf, Vec<u8>)| RegistryFile {
            path: path.to_string_lossy().into_owned(),
            content: content.into(),
        };
        let files: Vec<_> = bundle.files.into_iter().map(file).collect();
        *kept = Some(Files(files.clone()));
        files
    }
}

fn shown(words: &[&str]) -> String {
    words.iter().take(MAX_SHOWN_HOSTS).copied().collect::<Vec<_>>().join(", ")
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let found = std::fs::metadata(path)?;
    if !found.is_file() || found.len() > MAX_CERTIFICATE_BYTES {
        return Err(io::Error::other(format!(
            "not a file, or larger than {MAX_CERTIFICATE_BYTES} bytes"
        )));
    }
    std::fs::read(path)
}

/// Returns the settings in a configuration, with the limits of its base spec, and a warning if the
/// limits are unusable. An unreadable configuration is an error with its warning.
async fn settings(json: &str) -> Result<(NodeSettings, Option<String>), String> {
    let (mut settings, path) = NodeSettings::parse(json).map_err(|(line, column)| {
        format!(
            "settings of the node's containerd invalid at line {line}, column {column}: cells \
             keep the last known settings"
        )
    })?;
    let Some(path) = path else { return Ok((settings, None)) };
    let file = path.clone();
    let reading = tokio::task::spawn_blocking(move || read(&file)).await;
    let spec = reading.map_err(io::Error::other).flatten().map_err(|error| error.to_string());
    let warning = spec.and_then(|spec| settings.set_rlimits(&spec)).err().map(|error| {
        format!(
            "limits of the base_runtime_spec {} of the node's containerd not used by cells: \
             {error}",
            path.display()
        )
    });
    Ok((settings, warning))
}

#[cfg(test)]
mod tests;
