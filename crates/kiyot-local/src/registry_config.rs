//! The configuration of the node's runtime.

use std::{fmt, path::PathBuf};

use async_trait::async_trait;
use kiyot_link::cri_settings::CriSettings;

/// The parts of the configuration of the node's runtime that new cells copy.
#[async_trait]
pub trait RegistryConfig: fmt::Debug + Send + Sync {
    /// Returns the directory of `HOST/hosts.toml` files for a new cell, or several directories
    /// separated by colons (containerd's `config_path`). `None` stands for containerd's defaults.
    async fn config_path(&self) -> Option<PathBuf>;
    /// Returns the settings of the node's CRI plugin for a new cell.
    async fn cri_settings(&self) -> CriSettings {
        CriSettings::default()
    }
}

/// A constant `config_path`.
#[async_trait]
impl RegistryConfig for Option<PathBuf> {
    async fn config_path(&self) -> Option<PathBuf> {
        self.clone()
    }
}
