//! Whether cells pull through the same mirrors as the node.
//!
//! Where its own file is, containerd does not say; what is in it, CRI's `Status` does (containerd 1.x; of later ones only what their CRI runtime reads).

use std::{collections::BTreeMap, path::Path, time::Duration};

use kiyot_proto::cri::{StatusRequest, runtime_service_client::RuntimeServiceClient};
use serde::{Deserialize, de::IgnoredAny};
use tonic::Status;

use super::node::{Containerd, NodeImages};

/// How long to wait before a node's containerd that did not answer is asked again.
const AGAIN: Duration = Duration::from_secs(5);
/// The longest list of hosts that is shown.
const HOSTS: usize = 8;

/// What is looked at of the node's configuration. Whatever else is in it, such as passwords, is passed over.
#[derive(Debug, Default, Deserialize)]
struct Configuration {
    #[serde(default)]
    registry: Registry,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Registry {
    config_path: String,
    mirrors: Option<BTreeMap<String, IgnoredAny>>,
    configs: Option<BTreeMap<String, IgnoredAny>>,
}

/// Asks the node's containerd until it has answered, and says in the log what its pulls have and those of cells have not.
pub async fn compare(node: NodeImages, registry_config_dir: Option<&Path>) {
    let containerd = Containerd::new(node);
    let configuration = loop {
        match ask(&containerd).await {
            Ok(configuration) => break configuration,
            Err(status) => tracing::debug!(status = status.message(), "The node's containerd does not say yet which mirrors it has"),
        }
        tokio::time::sleep(AGAIN).await;
    };
    for missing in missing(&configuration.unwrap_or_default(), registry_config_dir) {
        tracing::warn!("{missing}");
    }
}

/// The configuration as JSON; `None` if there is none in the answer.
async fn ask(containerd: &Containerd) -> Result<Option<String>, Status> {
    let request = containerd.request(StatusRequest { verbose: true }, Some(super::node::ASK))?;
    let mut info = RuntimeServiceClient::new(containerd.channel().await?).status(request).await?.into_inner().info;
    Ok(info.remove("config"))
}

/// What the node has and cells have not, each as a sentence for the operator. Pure.
fn missing(json: &str, registry_config_dir: Option<&Path>) -> Vec<String> {
    let Registry { config_path, mirrors, configs } = serde_json::from_str::<Configuration>(json).unwrap_or_default().registry;
    let mut missing = Vec::new();
    for (key, found) in [("mirrors", mirrors), ("configs", configs)] {
        let hosts: Vec<_> = found.into_iter().flatten().map(|(host, _)| host).take(HOSTS).collect();
        if !hosts.is_empty() {
            missing.push(format!(
                "Cells do not read registry.{key} of the node's containerd, which has {}: write it as HOST/hosts.toml in a directory, and set config_path of the node's \
                 containerd and registry_config_dir to it.",
                hosts.join(", ")
            ));
        }
    }
    if !config_path.is_empty() && registry_config_dir.is_none() {
        missing.push(format!(
            "The node pulls through the mirrors in {config_path:?} (config_path), and cells do not: set registry_config_dir to it if they are to."
        ));
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cells_have_not_is_named_and_no_secret_is() {
        let old = r#"{"registry": {"configPath": "", "mirrors": {"docker.io": {"endpoint": ["https://user:sesame@mirror.example"]}},
            "configs": {"mirror.example": {"auth": {"username": "violet", "password": "sesame"}, "tls": null}}, "auths": null}}"#;
        let said = missing(old, None);
        assert!(
            matches!(said.as_slice(), [one, other] if one.contains("registry.mirrors") && one.contains("docker.io")
            && other.contains("registry.configs") && other.contains("mirror.example")),
            "{said:?}"
        );
        assert!(!said.concat().contains("sesame"), "{said:?}");
        let new = r#"{"registry": {"configPath": "/etc/containerd/certs.d", "mirrors": null}, "other": 1}"#;
        assert!(missing(new, None).concat().contains("\"/etc/containerd/certs.d\""));
        for same in [missing(new, Some(Path::new("/etc/certs"))), missing("", None), missing("{}", None), missing("not JSON", None)] {
            assert_eq!(same, Vec::<String>::new());
        }
    }
}
