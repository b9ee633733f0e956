//! Registry configuration of the node's containerd, from CRI's `Status`. Pure.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use kiyot_proto::cri;
use serde::{Deserialize, de::IgnoredAny};

/// Registry part of containerd's configuration (containerd 1.x, pkg/cri/config: `Registry`).
/// Contains secrets.
#[derive(Default, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Configured {
    /// Directories of `HOST/hosts.toml` files, separated by colons. If set, `mirrors` and `tls` are
    /// ignored.
    pub(super) config_path: String,
    mirrors: Option<BTreeMap<String, Mirror>>,
    configs: Option<BTreeMap<String, Host>>,
    headers: Option<BTreeMap<String, IgnoredHeader>>,
}

#[derive(Default, Clone, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Mirror {
    endpoint: Option<Vec<String>>,
}

#[derive(Default, Clone, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Host {
    auth: Option<Auth>,
    tls: Option<Tls>,
}

/// Value of a header, dropped because it may be secret.
#[derive(Clone, PartialEq, Eq)]
struct IgnoredHeader;

impl<'de> Deserialize<'de> for IgnoredHeader {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}

#[derive(Default, Clone, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Auth {
    username: String,
    password: String,
    auth: String,
    identitytoken: String,
}

#[derive(Debug, Default, Clone, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Tls {
    /// Disables the verification.
    pub(super) insecure_skip_verify: bool,
    /// Authorities besides the system's; may be empty.
    #[serde(rename = "caFile")]
    pub(super) ca_file: PathBuf,
    /// Client certificate; may be empty.
    #[serde(rename = "certFile")]
    pub(super) cert_file: PathBuf,
    /// Key of the client certificate.
    #[serde(rename = "keyFile")]
    pub(super) key_file: PathBuf,
}

impl fmt::Debug for Configured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Configured").field("config_path", &self.config_path).finish_non_exhaustive()
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Whole {
    registry: Option<Configured>,
}

impl Configured {
    /// Parses the JSON of the node's configuration; `None` without a registry part, such as from
    /// containerd 2.
    ///
    /// # Errors
    /// Line and column of invalid content, without the content.
    pub(super) fn parse(json: &str) -> Result<Option<Self>, (usize, usize)> {
        serde_json::from_str::<Whole>(json)
            .map(|whole| whole.registry)
            .map_err(|error| (error.line(), error.column()))
    }

    /// Returns whether mirrors or TLS settings of hosts are in the old form, without files.
    pub(super) fn has_old_form(&self) -> bool {
        self.config_path.is_empty() && !self.hosts().is_empty()
    }

    /// Returns the hosts with settings in the old form; `*` means all other hosts.
    pub(super) fn hosts(&self) -> Vec<&str> {
        let with_tls = self
            .configs
            .iter()
            .flatten()
            .filter(|(_, host)| host.tls.is_some())
            .map(|(name, _)| name);
        let mut hosts: Vec<&str> = self
            .mirrors
            .iter()
            .flatten()
            .map(|(name, _)| name)
            .chain(with_tls)
            .map(String::as_str)
            .collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    /// Returns the endpoints of a host's mirrors in order: the host's own, or else those of `*`
    /// (containerd, registryEndpoints).
    pub(super) fn endpoints(&self, host: &str) -> &[String] {
        let mirror = self
            .mirrors
            .as_ref()
            .and_then(|mirrors| mirrors.get(host).or_else(|| mirrors.get("*")));
        mirror.and_then(|mirror| mirror.endpoint.as_deref()).unwrap_or_default()
    }

    /// Returns the TLS configuration of a host.
    pub(super) fn tls(&self, host: &str) -> Option<&Tls> {
        self.configs.as_ref()?.get(host)?.tls.as_ref()
    }

    /// Returns the credentials of exactly this host.
    pub(super) fn auth(&self, host: &str) -> Option<cri::AuthConfig> {
        let Auth { username, password, auth, identitytoken } =
            self.configs.as_ref()?.get(host)?.auth.clone()?;
        // Any scheme will do: containerd compares only the host (ParseAuth).
        let server_address = format!("https://{host}");
        Some(cri::AuthConfig {
            username,
            password,
            auth,
            identity_token: identitytoken,
            server_address,
            registry_token: String::new(),
        })
    }

    /// Returns the names of the headers sent to all registries.
    pub(super) fn headers(&self) -> Vec<&str> {
        self.headers.iter().flatten().map(|(name, _)| name.as_str()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_is_parsed_and_debug_hides_secrets() {
        let json = r#"{"registry": {"configPath": "", "mirrors": {"docker.io": {"endpoint": ["https://one.example", "two.example"]}, "bare.example": {"endpoint": null},
            "*": {"endpoint": ["http://all.example"]}}, "configs": {"one.example": {"auth": {"username": "violet", "password": "sesame", "auth": "", "identitytoken": ""},
            "tls": null}, "two.example": {"auth": null, "tls": {"insecure_skip_verify": true, "caFile": "/etc/ca.pem", "certFile": "", "keyFile": ""}}},
            "auths": null, "headers": {"X-Team": ["sesame"]}}, "other": 1}"#;
        let configured = Configured::parse(json).unwrap().unwrap();
        assert!(configured.has_old_form());
        assert_eq!(configured.hosts(), ["*", "bare.example", "docker.io", "two.example"]);
        assert_eq!(configured.endpoints("docker.io"), ["https://one.example", "two.example"]);
        assert_eq!(configured.endpoints("quay.example"), ["http://all.example"]);
        assert!(configured.endpoints("bare.example").is_empty());
        assert_eq!(configured.tls("two.example").unwrap().ca_file, PathBuf::from("/etc/ca.pem"));
        let auth = configured.auth("one.example").unwrap();
        assert_eq!(
            (&*auth.username, &*auth.password, &*auth.server_address),
            ("violet", "sesame", "https://one.example")
        );
        assert_eq!((configured.auth("two.example"), configured.headers()), (None, vec!["X-Team"]));
        assert!(!format!("{configured:?}").contains("sesame"));
        // A configuration with only secrets needs no files, and a config_path takes precedence.
        for same in [
            r#"{"registry": {"configs": {"a": {"auth": {"username": "u"}}}}}"#,
            r#"{"registry": {"configPath": "/certs", "mirrors": {"a": {}}}}"#,
        ] {
            assert!(!Configured::parse(same).unwrap().unwrap().has_old_form(), "{same}");
        }
        assert_eq!(Configured::parse("{}"), Ok(None));
        assert!(matches!(Configured::parse(r#"{"registry": 7}"#), Err((1, _))));
    }
}
