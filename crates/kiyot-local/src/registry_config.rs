//! The configuration of the node's runtime.

use std::{fmt, path::PathBuf};

use async_trait::async_trait;
use kiyot_link::cri_settings::CriSettings;

/// The configuration of the node's runtime, as far as new cells have it.
#[async_trait]
pub trait RegistryConfig: fmt::Debug + Send + Sync {
    /// Returns the directory of `HOST/hosts.toml` files, or several separated by colons
    /// (containerd's `config_path`), for a new cell; `None` for containerd's defaults.
    async fn config_path(&self) -> Option<PathBuf>;
    /// Returns the settings of the node's CRI plugin for a new cell.
    async fn cri_settings(&self) -> CriSettings {
        CriSettings::default()
    }
}

/// A constant registry configuration.
#[async_trait]
impl RegistryConfig for Option<PathBuf> {
    async fn config_path(&self) -> Option<PathBuf> {
        self.clone()
    }
}
