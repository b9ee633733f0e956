//! The netns provider: cells that are sets of namespaces on this node.
//!
//! An instance is a process `kiyot-cell launch` with the processes in its namespaces: see the
//! crate's root.

use std::{path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use kiyot_config::MilpaBackend;
use kiyot_engine::{
    placement::Catalogue,
    provider::{
        Attached, Attachment, Capabilities, Instance, InstanceId, LaunchSpec, Provider,
        ProviderError, THIS_NODE, Terminations,
    },
};
use kiyot_link::bootstrap::CellFile;

use crate::{
    Instances, Launch, PauseImage, RegistryConfig, cgroup, inotify_limit, offering, slice,
};

/// The only instance type: this node.
const INSTANCE_TYPE: &str = "netns";
/// The launcher of cells.
const LAUNCHER: &str = "launch";

/// The capabilities of netns cells. They share the node's kernel, devices and users: a pod with
/// power over these has power over the node and over its agent. The node's answers about them are
/// certain at once.
pub const CAPABILITIES: Capabilities = Capabilities {
    provider: "netns",
    own_kernel: false,
    own_users: false,
    own_devices: false,
    remote: false,
    sees_node_files: true,
    separate_link: false,
    can_be_paused: true,
    pods_control_agent: true,
    ends_with_node: true,
    ends_confirmed_within: Duration::from_secs(10),
    not_found_believed_after: Duration::ZERO,
    listing_period: Duration::from_secs(2),
    has_tags: false,
    parameters_without_effect_on_boots: &[],
};

/// Warns if a limit of the node is too low for `max_cells` cells.
pub fn check_limits(max_cells: usize) {
    inotify_limit::check(max_cells);
}

/// The provider of cells that are namespaces of this node.
#[derive(Debug)]
pub struct Netns {
    instances: Instances,
    settings: Settings,
    registries: Arc<dyn RegistryConfig>,
}

/// The node's configuration for cells.
#[derive(Debug, Clone)]
struct Settings {
    max_cells: usize,
    containerd: PathBuf,
    runc: PathBuf,
    pause_image: Arc<PauseImage>,
    restrict_oom_score_adj: bool,
}

impl Netns {
    /// Returns the configured provider. Has no side effects.
    pub fn new(
        config: &MilpaBackend,
        registries: Arc<dyn RegistryConfig>,
        pause_image: Arc<PauseImage>,
    ) -> Self {
        let netns = &config.netns;
        Self {
            instances: Instances::new(
                config,
                &netns.network,
                netns.cell_binary.as_deref(),
                INSTANCE_TYPE,
            ),
            settings: Settings {
                max_cells: config.max_cells,
                containerd: netns.containerd.clone(),
                runc: netns.runc.clone(),
                pause_image,
                restrict_oom_score_adj: netns.restrict_oom_score_adj,
            },
            registries,
        }
    }

    /// Returns the boot file of a cell.
    async fn cell_file(&self, spec: &LaunchSpec) -> CellFile {
        let Settings { containerd, runc, pause_image, restrict_oom_score_adj, .. } =
            self.settings.clone();
        // Awaited first: the node's runtime may name the pause image in the same response.
        let registry_config_dir = self.registries.config_path().await;
        CellFile {
            bootstrap: spec.bootstrap.clone(),
            containerd,
            runc,
            pause_image: pause_image.current(),
            registry_config_dir,
            restrict_oom_score_adj,
            cri: self.registries.cri_settings().await,
            machine: None,
        }
    }
}

#[async_trait]
impl Provider for Netns {
    fn capabilities(&self) -> Capabilities {
        CAPABILITIES
    }

    fn place(&self) -> Option<String> {
        Some(THIS_NODE.to_owned())
    }

    async fn catalogue(&self) -> Result<Catalogue, ProviderError> {
        Ok(Catalogue::any_size(offering(INSTANCE_TYPE)))
    }

    async fn launch(&self, spec: &LaunchSpec, token: &str) -> Result<Instance, ProviderError> {
        let draft = match self.instances.begin(spec, token).await? {
            Launch::Running(instance) => return Ok(instance),
            Launch::New(draft) => draft,
        };
        let home = draft.home();
        self.cell_file(spec).await.write(&home.cell_file()).map_err(|error| {
            ProviderError::transient(format!("make the instance of {}", home.cell()), error)
        })?;
        self.instances.start(draft, LAUNCHER, INSTANCE_TYPE, None).await
    }

    async fn attach(
        &self,
        instance: &InstanceId,
        to: &Attachment,
    ) -> Result<Attached, ProviderError> {
        let (alone, addresses) = self.instances.attach(instance, to).await?;
        let hierarchies = cgroup::hierarchies()
            .map_err(|error| ProviderError::transient("read the cgroup hierarchies", error))?;
        slice::keep_controllers(alone.home(), &hierarchies, &to.cgroup_parent).await?;
        Ok(Attached::already_made(addresses))
    }

    async fn detach(&self, _instance: &InstanceId) -> Result<(), ProviderError> {
        // The engine awaits the termination, which releases everything.
        Ok(())
    }

    async fn list_owned(&self) -> Result<Vec<Instance>, ProviderError> {
        self.instances.list().await
    }

    async fn describe(&self, id: &InstanceId) -> Result<Instance, ProviderError> {
        self.instances.describe(id)
    }

    async fn terminate(&self, instances: &[InstanceId]) -> Terminations {
        self.instances.terminate(instances).await
    }

    async fn console(&self, instance: &InstanceId) -> Result<String, ProviderError> {
        self.instances.console(instance)
    }

    async fn check(&self) -> Result<(), ProviderError> {
        check_limits(self.settings.max_cells);
        self.instances.check(&[&self.settings.containerd, &self.settings.runc])
    }
}
