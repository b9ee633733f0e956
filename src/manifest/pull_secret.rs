//! Credentials of registries, in the Secrets that a pod's `imagePullSecrets` names, and the images
//! that they are for (pkg/credentialprovider of the kubelet).

use std::{collections::BTreeMap, fmt};

use base64::{Engine, prelude::BASE64_STANDARD};
use serde::Deserialize;

use super::{Content, Purpose, env::Origins, metadata::dns_name, sources::absent_object};
use crate::{
    glob,
    problems::{Field, Problem},
};

/// The key of a Secret of the type `kubernetes.io/dockerconfigjson`.
const CONFIG_KEY: &str = ".dockerconfigjson";
/// The key of one of the type `kubernetes.io/dockercfg`: its value is the inner part of the other.
const OLD_CONFIG_KEY: &str = ".dockercfg";
/// The registry of images without one, and the name that credentials have for it.
const DEFAULT_REGISTRY: &str = "docker.io";
const DEFAULT_KEY: &str = "index.docker.io";

/// Credentials of a pod's images.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PullSecrets {
    logins: Vec<(Place, Login)>,
    /// The names of the Secrets, in the order of the manifest.
    names: Vec<String>,
}

/// The name and password of a user of a registry.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// The user's name.
    pub user: String,
    /// The password.
    pub password: String,
}

/// Hides both: some registries have the token as the name.
impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").finish_non_exhaustive()
    }
}

/// The images that credentials are for: those of a host, in which `*` matches a part, whose path
/// begins like this.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    host: String,
    path: String,
}

/// The file of credentials of `docker login`.
#[derive(Deserialize)]
struct DockerConfig {
    #[serde(default)]
    auths: BTreeMap<String, Auth>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Auth {
    username: String,
    password: String,
    /// Both of these in base64, which counts before them.
    auth: String,
}

impl PullSecrets {
    /// Reads `imagePullSecrets`. Explaining pulls no image.
    pub(super) fn read(field: Field<'_>, origins: Origins<'_>) -> Self {
        if origins.purpose == Purpose::Explain {
            return Self::default();
        }
        let (mut logins, mut names) = (Vec::new(), Vec::new());
        for (name, of_secret) in field.items().into_iter().filter_map(|it| read_item(it, origins)) {
            names.push(name);
            logins.extend(of_secret);
        }
        // The most specific first, as the kubelet has it.
        logins.sort_by(|(one, _), (other, _)| other.cmp(one));
        Self { logins, names }
    }

    /// Returns the names of the Secrets.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the credentials for an image, in the order in which they are tried.
    pub fn logins(&self, image: &str) -> Vec<&Login> {
        let (host, path) = match image.split_once('/') {
            Some((host, path)) if host == "localhost" || host.contains(['.', ':']) => {
                (host, path.to_owned())
            }
            Some(_) => (DEFAULT_REGISTRY, image.to_owned()),
            None => (DEFAULT_REGISTRY, format!("library/{image}")),
        };
        let of = |is_such: &dyn Fn(&Place) -> bool| -> Vec<&Login> {
            self.logins.iter().filter(|(place, _)| is_such(place)).map(|(_, login)| login).collect()
        };
        let named = of(&|place| place.has(host, &path));
        if !named.is_empty() || ![DEFAULT_REGISTRY, DEFAULT_KEY].contains(&host) {
            return named;
        }
        of(&|place| place.host == DEFAULT_KEY && place.path.is_empty())
    }
}

impl Place {
    /// Reads a key of the credentials: a URL, or one without its scheme.
    fn parse(key: &str) -> Self {
        let key =
            key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
        let (host, path) = key.split_once('/').unwrap_or((key, ""));
        let path = path.strip_prefix("v1/").or_else(|| path.strip_prefix("v2/")).unwrap_or(path);
        Self { host: host.to_owned(), path: path.to_owned() }
    }

    fn has(&self, host: &str, path: &str) -> bool {
        let (own_name, own_port) = self.host.split_once(':').unwrap_or((&self.host, ""));
        let (name, port) = host.split_once(':').unwrap_or((host, ""));
        let (own_parts, parts) = (own_name.split('.'), name.split('.'));
        own_port == port
            && own_parts.clone().count() == parts.clone().count()
            && own_parts.zip(parts).all(|(own, part)| glob::matches(own, part))
            && path.starts_with(&self.path)
    }
}

/// Reads the Secret that an item names. Returns its name and credentials.
fn read_item(item: Field<'_>, origins: Origins<'_>) -> Option<(String, Vec<(Place, Login)>)> {
    let mut table = item.table()?;
    let at = table.path_of("name");
    let name = table.need("name", "the name of a Secret in this file").and_then(dns_name);
    let report = table.report();
    table.finish();
    let name = name?;
    let Some(keys) = origins.sources.keys("Secret", origins.namespace, &name) else {
        report.add(absent_object(at, "Secret", origins.namespace, name));
        return None;
    };
    let Some(logins) = logins_of(keys) else {
        // Without the error of the parser, which may quote the secret.
        let rule = "has no credentials; allowed: a Secret whose key .dockerconfigjson has the JSON \
                    of docker login, in which each registry has auth, or username and password";
        report.add(Problem::with_value(at, name, rule));
        return None;
    };
    Some((name, logins))
}

/// Returns the credentials of a Secret; `None` if it has none, or has broken ones.
fn logins_of(keys: &BTreeMap<String, Content>) -> Option<Vec<(Place, Login)>> {
    let auths: BTreeMap<String, Auth> = match (keys.get(CONFIG_KEY), keys.get(OLD_CONFIG_KEY)) {
        (Some(Content(config)), _) => serde_json::from_slice::<DockerConfig>(config).ok()?.auths,
        (None, old) => serde_json::from_slice(&old?.0).ok()?,
    };
    auths.into_iter().map(|(key, auth)| Some((Place::parse(&key), auth.login()?))).collect()
}

impl Auth {
    fn login(self) -> Option<Login> {
        if self.auth.is_empty() {
            return Some(Login { user: self.username, password: self.password });
        }
        let both = String::from_utf8(BASE64_STANDARD.decode(self.auth.trim()).ok()?).ok()?;
        let (user, password) = both.split_once(':')?;
        Some(Login { user: user.to_owned(), password: password.trim_end_matches('\0').to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets(keys: &[&str]) -> PullSecrets {
        let login = |key: &&str| {
            let login = Login { user: (*key).to_owned(), password: "hush".to_owned() };
            (Place::parse(key), login)
        };
        let mut all: Vec<_> = keys.iter().map(login).collect();
        all.sort_by(|(one, _), (other, _)| other.cmp(one));
        PullSecrets { logins: all, names: Vec::new() }
    }

    /// Returns the names and passwords of a Secret's key.
    fn read(key: &str, json: &str) -> Option<Vec<(String, String)>> {
        let keys = [(key.to_owned(), Content(json.as_bytes().to_vec()))].into();
        let logins = logins_of(&keys)?.into_iter();
        Some(logins.map(|(_, login)| (login.user, login.password)).collect())
    }

    #[test]
    fn secrets_of_both_types_are_read() {
        let violet = Some(vec![("violet".to_owned(), "a:b".to_owned())]);
        let auth = r#"{"r.example": {"auth": "dmlvbGV0OmE6Yg==", "username": "other"}}"#;
        assert_eq!(read(CONFIG_KEY, &format!(r#"{{"auths": {auth}}}"#)), violet);
        assert_eq!(read(OLD_CONFIG_KEY, auth), violet);
        let plain = r#"{"r.example": {"username": "violet", "password": "a:b", "email": "x"}}"#;
        assert_eq!(read(OLD_CONFIG_KEY, plain), violet);
        assert_eq!(read(CONFIG_KEY, r#"{"credHelpers": {}}"#), Some(Vec::new()));
        for broken in
            ["", "[1]", r#"{"r": 1}"#, r#"{"r": {"auth": "!"}}"#, r#"{"r": {"auth": "YQ=="}}"#]
        {
            assert_eq!(read(OLD_CONFIG_KEY, broken), None, "{broken}");
        }
        assert_eq!(read("token", auth), None);
    }

    #[test]
    fn credentials_are_those_of_the_registry_and_path_the_most_specific_first() {
        let all = secrets(&[
            "registry.example",
            "https://registry.example/team",
            "registry.example:5000",
            "*.cloud.example",
            "https://index.docker.io/v1/",
        ]);
        for (image, expected) in [
            ("registry.example/app:1", vec!["registry.example"]),
            (
                "registry.example/team/app",
                vec!["https://registry.example/team", "registry.example"],
            ),
            ("registry.example:5000/app", vec!["registry.example:5000"]),
            ("registry.example:5001/app", vec![]),
            ("one.cloud.example/app@sha256:00", vec!["*.cloud.example"]),
            ("cloud.example/app", vec![]),
            ("two.one.cloud.example/app", vec![]),
            ("busybox", vec!["https://index.docker.io/v1/"]),
            ("team/app:2", vec!["https://index.docker.io/v1/"]),
            ("docker.io/team/app:2", vec!["https://index.docker.io/v1/"]),
            ("localhost/app", vec![]),
        ] {
            let found: Vec<_> = all.logins(image).iter().map(|login| login.user.as_str()).collect();
            assert_eq!(found, expected, "{image}");
        }
        let of_the_hub = secrets(&["docker.io/library", "index.docker.io"]);
        assert_eq!(of_the_hub.logins("busybox")[0].user, "docker.io/library");
        assert!(!format!("{of_the_hub:?}").contains("hush"));
    }
}
