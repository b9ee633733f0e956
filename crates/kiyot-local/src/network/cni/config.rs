//! Reads the node's CNI configuration.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};

use crate::network::cni::{CniError, Network, plugin_type};

/// The supported versions of the CNI specification.
const VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

impl Network {
    /// Reads the network that containerd would use, from the first file by name of `*.conf`,
    /// `*.conflist` and `*.json` in a directory. Returns `None` without such a file.
    pub(crate) fn load(dir: &Path, bin_dirs: &[PathBuf]) -> Result<Option<Self>, CniError> {
        let entries = match fs::read_dir(dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(CniError::File(dir.to_owned(), error)),
        };
        let mut files = Vec::new();
        for entry in entries {
            let path = entry.map_err(|error| CniError::File(dir.to_owned(), error))?.path();
            if path.extension().is_some_and(|extension| {
                extension == "conf" || extension == "conflist" || extension == "json"
            }) && path.is_file()
            {
                files.push(path);
            }
        }
        files.sort();
        for path in files {
            let content = fs::read(&path).map_err(|error| CniError::File(path.clone(), error))?;
            if let Some(network) = Self::parse(&path, &content, bin_dirs)? {
                return Ok(Some(network));
            }
        }
        Ok(None)
    }

    /// Parses a list of plugins, or the configuration of a single plugin. Returns `None` for a list
    /// without plugins.
    pub(super) fn parse(
        path: &Path,
        content: &[u8],
        bin_dirs: &[PathBuf],
    ) -> Result<Option<Self>, CniError> {
        let bad = |what: &str| CniError::Config { path: path.to_owned(), what: what.to_owned() };
        let value: Value = serde_json::from_slice(content)
            .map_err(|source| CniError::Json { path: path.to_owned(), source })?;
        let Value::Object(mut whole) = value else { return Err(bad("is not an object")) };
        let name = text(&whole, "name")
            .filter(|name| !name.is_empty())
            .ok_or_else(|| bad("has no \"name\""))?;
        let version = text(&whole, "cniVersion").unwrap_or_else(|| "0.2.0".to_owned());
        if !VERSIONS.contains(&version.as_str()) {
            return Err(bad(&format!(
                "\"cniVersion\" is {version:?}; allowed is one of {VERSIONS:?}"
            )));
        }
        let plugins = if path.extension().is_some_and(|extension| extension == "conflist") {
            let Some(Value::Array(plugins)) = whole.remove("plugins") else {
                return Err(bad("has no list \"plugins\""));
            };
            let objects = plugins
                .into_iter()
                .map(|plugin| if let Value::Object(plugin) = plugin { Some(plugin) } else { None });
            objects
                .collect::<Option<Vec<_>>>()
                .ok_or_else(|| bad("has a plugin that is not an object"))?
        } else {
            vec![whole]
        };
        if plugins.iter().any(|plugin| plugin_type(plugin).is_empty()) {
            return Err(bad("has a plugin without \"type\""));
        }
        Ok((!plugins.is_empty()).then(|| Self {
            name,
            version,
            plugins,
            bin_dirs: bin_dirs.to_vec(),
            result: None,
        }))
    }
}

fn text(object: &Map<String, Value>, key: &str) -> Option<String> {
    object.get(key).and_then(Value::as_str).map(ToOwned::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(files: &[(&str, &str)]) -> Result<Option<Network>, CniError> {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            fs::write(dir.path().join(name), content).unwrap();
        }
        Network::load(dir.path(), &["/opt/cni/bin".into()])
    }

    const LIST: &str = r#"{"cniVersion":"1.0.0","name":"list","plugins":[{"type":"bridge","ipam":{"type":"host-local"}},{"type":"portmap"}]}"#;
    const SINGLE: &str = r#"{"cniVersion":"0.3.1","name":"single","type":"ptp"}"#;

    #[test]
    fn first_file_by_name_is_used() {
        let network = written(&[
            ("20-a.conf", SINGLE),
            ("10-b.conflist", LIST),
            ("05.txt", "not a configuration"),
        ])
        .unwrap()
        .unwrap();
        assert_eq!(network.name, "list");
        assert_eq!(
            network.plugins.iter().map(plugin_type).collect::<Vec<_>>(),
            ["bridge", "portmap"]
        );
        let network = written(&[("10-a.json", SINGLE), ("20-b.conflist", LIST)]).unwrap().unwrap();
        assert_eq!(
            (network.name.as_str(), network.version.as_str(), network.plugins.len()),
            ("single", "0.3.1", 1)
        );
    }

    #[test]
    fn directory_without_configuration_has_no_network() {
        assert_eq!(written(&[]).unwrap(), None);
        assert_eq!(
            written(&[("1.conflist", r#"{"cniVersion":"1.0.0","name":"empty","plugins":[]}"#)])
                .unwrap(),
            None
        );
        assert_eq!(Network::load(Path::new("/no/such/dir"), &[]).unwrap(), None);
    }

    #[test]
    fn error_names_the_bad_file() {
        for (content, why) in [
            ("{", "not JSON"),
            ("[]", "is not an object"),
            (r#"{"cniVersion":"1.0.0","plugins":[]}"#, "no \"name\""),
            (r#"{"cniVersion":"0.1.0","name":"n","plugins":[]}"#, "0.1.0"),
            (r#"{"name":"n","plugins":[]}"#, "0.2.0"),
            (r#"{"cniVersion":"1.0.0","name":"n"}"#, "plugins"),
            (r#"{"cniVersion":"1.0.0","name":"n","plugins":[{}]}"#, "type"),
            (r#"{"cniVersion":"1.0.0","name":"n","plugins":[1]}"#, "object"),
        ] {
            let error = written(&[("10-bad.conflist", content), ("20-good.conflist", LIST)])
                .unwrap_err()
                .to_string();
            assert!(error.contains("10-bad.conflist") && error.contains(why), "{content}: {error}");
        }
    }

    #[test]
    fn plugin_type_with_a_path_is_refused() {
        let network =
            written(&[("1.conf", r#"{"cniVersion":"1.0.0","name":"n","type":"../../bin/sh"}"#)])
                .unwrap()
                .unwrap();
        assert!(network.check().is_err());
    }
}
