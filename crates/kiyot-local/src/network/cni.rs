//! Runs the plugins of the node's CNI configuration, as specified by CNI 0.3.0 to 1.1.0.

use std::{ffi::OsString, net::IpAddr, path::PathBuf, time::Duration};

use kiyot_engine::provider::{ErrorClass, HostPort, ProviderError};
use kiyot_linux::tree::beneath;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{
    command::{self, CommandError},
    instance::Home,
    network::{DEVICE, ports, rules::RuleError},
};

mod chains;
mod config;
#[cfg(debug_assertions)]
#[path = "../../../../fuzz/inside/instances.rs"]
pub mod fuzzing;
mod result;

/// The capability of plugins that map host ports.
const PORT_MAPPINGS: &str = "portMappings";
/// Bounds the attempts of a DEL.
const DEL_ATTEMPTS: u32 = 3;
/// The pause before another DEL.
const DEL_PAUSE: Duration = Duration::from_millis(500);

/// An error of a CNI network.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CniError {
    #[error("{0}")]
    File(PathBuf, #[source] std::io::Error),
    #[error("{path} is not JSON")]
    Json {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("{path}: {what}")]
    Config { path: PathBuf, what: String },
    #[error("no CNI plugin {plugin:?} in {dirs:?}")]
    NoPlugin { plugin: String, dirs: Vec<PathBuf> },
    #[error("CNI plugin {plugin}")]
    Run {
        plugin: String,
        #[source]
        source: CommandError,
    },
    #[error("CNI plugin {plugin} refused {command}: {said}")]
    Refused { plugin: String, command: &'static str, said: String },
    #[error("the result of CNI plugin {plugin}: {what}")]
    Result { plugin: String, what: String },
    #[error("remove the masquerading of CNI network {network:?}")]
    Masquerading {
        network: String,
        #[source]
        source: RuleError,
    },
}

/// A pod in the form of CNI arguments.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pod<'a> {
    pub(super) name: &'a str,
    pub(super) namespace: &'a str,
    pub(super) uid: &'a str,
    pub(super) sandbox: &'a str,
    pub(super) ports: &'a [HostPort],
}

/// A network by its configuration, with the result for a cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Network {
    name: String,
    version: String,
    plugins: Vec<Map<String, Value>>,
    bin_dirs: Vec<PathBuf>,
    /// The result of the last plugin.
    result: Option<Value>,
}

impl Network {
    /// Checks whether all plugins exist. The error names the missing plugin.
    pub(super) fn check(&self) -> Result<(), ProviderError> {
        for plugin in &self.plugins {
            self.program(plugin_type(plugin)).map_err(|error| {
                ProviderError::new(
                    ErrorClass::Invalid,
                    format!("use the CNI network {:?}", self.name),
                    error,
                )
            })?;
        }
        Ok(())
    }

    /// Returns whether a plugin maps host ports.
    pub(super) fn maps_ports(&self) -> bool {
        self.plugins.iter().any(can_map_ports)
    }

    /// Returns the subnets of the pod's link, once the pod is attached.
    pub(super) fn subnets(&self) -> Vec<String> {
        self.result.as_ref().map(result::subnets).unwrap_or_default()
    }

    /// Runs ADD of all plugins for a cell and returns the pod's addresses.
    pub(super) async fn add(
        &mut self,
        home: &Home,
        pod: &Pod<'_>,
    ) -> Result<Vec<IpAddr>, CniError> {
        let mut previous = None;
        for plugin in &self.plugins {
            let name = plugin_type(plugin);
            let output = self.run(plugin, "ADD", home, pod, previous.as_ref()).await?;
            let result = serde_json::from_slice(&output).map_err(|error| CniError::Result {
                plugin: name.to_owned(),
                what: error.to_string(),
            })?;
            previous = Some(result);
        }
        let last = self.plugins.last().map(plugin_type).unwrap_or_default();
        let broken = |what| CniError::Result { plugin: last.to_owned(), what };
        let result = previous.ok_or_else(|| broken("it is absent".to_owned()))?;
        let addresses = result::addresses(&result, DEVICE).map_err(broken)?;
        self.result = Some(result);
        Ok(addresses)
    }

    /// Runs DEL of all plugins for a cell, the last plugin first. Makes at most [`DEL_ATTEMPTS`]
    /// attempts.
    pub(super) async fn del(&self, home: &Home, pod: &Pod<'_>) -> Result<(), CniError> {
        for attempt in 1.. {
            match self.del_once(home, pod).await {
                Err(error) if attempt < DEL_ATTEMPTS => {
                    tracing::warn!(
                        cell = home.cell(),
                        error = &error as &dyn std::error::Error,
                        "CNI DEL failed, will be retried"
                    );
                    tokio::time::sleep(DEL_PAUSE).await;
                }
                outcome => return outcome,
            }
        }
        Ok(())
    }

    async fn del_once(&self, home: &Home, pod: &Pod<'_>) -> Result<(), CniError> {
        // Plugins get the result of the ADD since version 0.4.0.
        let previous = self.result.as_ref().filter(|_| !self.version.starts_with("0.3."));
        let mut outcome = Ok(());
        for plugin in self.plugins.iter().rev() {
            if let Err(error) = self.run(plugin, "DEL", home, pod, previous).await {
                outcome = Err(error);
            }
        }
        outcome?;
        let addresses = self
            .result
            .as_ref()
            .and_then(|result| result::addresses(result, DEVICE).ok())
            .unwrap_or_default();
        chains::remove(&self.name, pod.sandbox, &addresses, home.dir())
            .await
            .map_err(|source| CniError::Masquerading { network: self.name.clone(), source })
    }

    async fn run(
        &self,
        plugin: &Map<String, Value>,
        command: &'static str,
        home: &Home,
        pod: &Pod<'_>,
        previous: Option<&Value>,
    ) -> Result<Vec<u8>, CniError> {
        let name = plugin_type(plugin);
        let program = self.program(name)?;
        let mut input = plugin.clone();
        input.insert("cniVersion".to_owned(), self.version.as_str().into());
        input.insert("name".to_owned(), self.name.as_str().into());
        if !pod.ports.is_empty() && can_map_ports(plugin) {
            let mut runtime = Map::new();
            runtime.insert(PORT_MAPPINGS.to_owned(), ports::mappings(pod.ports));
            input.insert("runtimeConfig".to_owned(), runtime.into());
        }
        if let Some(previous) = previous {
            input.insert("prevResult".to_owned(), previous.clone());
        }
        // Has containerd's form. A pod's name, namespace and uid have no ";" or "=".
        let arguments = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};\
             K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID={}",
            pod.namespace, pod.name, pod.sandbox, pod.uid
        );
        let netns = home.netns_path();
        // After a reboot the namespace does not exist.
        let netns =
            if command == "DEL" && !netns.exists() { OsString::new() } else { netns.into() };
        let path = std::env::join_paths(&self.bin_dirs).unwrap_or_default();
        let variables: [(&str, &std::ffi::OsStr); 6] = [
            ("CNI_COMMAND", command.as_ref()),
            ("CNI_CONTAINERID", pod.sandbox.as_ref()),
            ("CNI_NETNS", &netns),
            ("CNI_IFNAME", DEVICE.as_ref()),
            ("CNI_ARGS", arguments.as_ref()),
            ("CNI_PATH", &path),
        ];
        let ended = command::run(
            &program,
            &[],
            Some(home.dir()),
            &variables,
            Value::Object(input).to_string().as_bytes(),
        )
        .await
        .map_err(|source| CniError::Run { plugin: name.to_owned(), source })?;
        if ended.status.success() {
            return Ok(ended.stdout);
        }
        let said = result::refusal(&ended.stdout)
            .unwrap_or_else(|| format!("{}: {}", ended.status, ended.stderr));
        Err(CniError::Refused { plugin: name.to_owned(), command, said })
    }

    fn program(&self, plugin: &str) -> Result<PathBuf, CniError> {
        // A plugin's type must be a file name, not a path.
        let candidates = self.bin_dirs.iter().filter_map(|dir| beneath(dir, plugin).ok());
        let found = candidates.filter(|_| !plugin.contains('/')).find(|path| path.is_file());
        found.ok_or_else(|| CniError::NoPlugin {
            plugin: plugin.to_owned(),
            dirs: self.bin_dirs.clone(),
        })
    }
}

fn can_map_ports(plugin: &Map<String, Value>) -> bool {
    plugin
        .get("capabilities")
        .and_then(|capabilities| capabilities.get(PORT_MAPPINGS))
        .and_then(Value::as_bool)
        .unwrap_or_default()
}

fn plugin_type(plugin: &Map<String, Value>) -> &str {
    plugin.get("type").and_then(Value::as_str).unwrap_or_default()
}
