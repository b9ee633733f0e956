//! Registry configuration as content, for cells that don't see the node's files: directories of
//! `HOST/hosts.toml` with the certificates that they name.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
};

use kiyot_link::bind_limits::{MAX_REGISTRY_DIRS, MAX_REGISTRY_FILES};
use kiyot_linux::tree::beneath;
use toml_edit::{DocumentMut, Item, TableLike, Value};

use super::directory::entries;

/// Most bytes of all files.
const MAX_BYTES: usize = 4 << 20;
/// File with the endpoints of a host.
const HOSTS_FILE: &str = "hosts.toml";

/// Files of a registry configuration.
#[derive(Default, PartialEq, Eq)]
pub(super) struct Bundle {
    /// Contents by path: number of the directory, host, file. Keys are secret.
    pub(super) files: BTreeMap<PathBuf, Vec<u8>>,
    /// Problems, each as a sentence, without secrets.
    pub(super) problems: BTreeSet<String>,
}

impl Bundle {
    /// Reads a `config_path`: directories, separated by colons.
    pub(super) fn read(
        config_path: &Path,
        read: &dyn Fn(&Path) -> io::Result<Vec<u8>>,
    ) -> io::Result<Self> {
        let mut bundle = Self::default();
        let roots: Vec<PathBuf> = std::env::split_paths(config_path).collect();
        if roots.len() > MAX_REGISTRY_DIRS {
            let count = roots.len();
            bundle.problems.insert(format!(
                "registry configuration has {count} directories; allowed: at most \
                 {MAX_REGISTRY_DIRS}"
            ));
        }
        for (number, root) in roots.iter().enumerate().take(MAX_REGISTRY_DIRS) {
            for host in entries(root)?.into_iter().filter(|host| host.is_dir()) {
                let Some(name) = host.file_name() else { continue };
                let of_host = beneath(Path::new(&number.to_string()), name)?;
                bundle.add_host(&host, &of_host, read)?;
            }
        }
        Ok(bundle)
    }

    fn add_host(
        &mut self,
        host: &Path,
        of_host: &Path,
        read: &dyn Fn(&Path) -> io::Result<Vec<u8>>,
    ) -> io::Result<()> {
        for path in entries(host)?.into_iter().filter(|path| path.is_file()) {
            let Some(name) = path.file_name() else { continue };
            match read(&path) {
                Ok(content) if name == HOSTS_FILE => {
                    let text = String::from_utf8_lossy(&content).into_owned();
                    let (text, named) = self.with_own_files(&path, &text, read);
                    for (name, content) in named {
                        self.add(beneath(of_host, name)?, content);
                    }
                    self.add(beneath(of_host, name)?, text.into_bytes());
                }
                Ok(content) => self.add(beneath(of_host, name)?, content),
                Err(error) => {
                    self.problems.insert(format!("{} can't be read: {error}", path.display()));
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, path: PathBuf, content: Vec<u8>) {
        let bytes: usize = self.files.values().map(Vec::len).sum();
        if self.files.len() >= MAX_REGISTRY_FILES || bytes + content.len() > MAX_BYTES {
            self.problems.insert(format!(
                "registry configuration has more than {MAX_REGISTRY_FILES} files or {MAX_BYTES} \
                 bytes; the rest is left out"
            ));
        } else {
            self.files.insert(path, content);
        }
    }

    /// Converts a hosts.toml that names files anywhere on the node. Returns a hosts.toml that names
    /// files beside it, and these files. Unreadable files and invalid text stay unchanged.
    fn with_own_files(
        &mut self,
        path: &Path,
        text: &str,
        read: &dyn Fn(&Path) -> io::Result<Vec<u8>>,
    ) -> (String, Vec<(String, Vec<u8>)>) {
        let Ok(mut document) = text.parse::<DocumentMut>() else {
            // Without the parser's message, because it quotes the text.
            self.problems.insert(format!("{} is not valid TOML", path.display()));
            return (text.to_owned(), Vec::new());
        };
        let mut named = Vec::new();
        let mut replace = |file: &mut Value| {
            let Some(original) = file.as_str().map(PathBuf::from) else { return };
            if original.components().count() == 1 && beneath(path, &original).is_ok() {
                return;
            }
            let original = path.parent().unwrap_or(path).join(original);
            match read(&original) {
                Ok(content) => {
                    let name = format!("node-{}.pem", named.len());
                    *file = Value::from(name.as_str());
                    named.push((name, content));
                }
                Err(error) => {
                    self.problems.insert(format!("{} can't be read: {error}", original.display()));
                }
            }
        };
        each_file(document.as_table_mut(), &mut replace);
        if let Some(hosts) = document.get_mut("host").and_then(Item::as_table_like_mut) {
            for (_, host) in hosts.iter_mut() {
                if let Some(host) = host.as_table_like_mut() {
                    each_file(host, &mut replace);
                }
            }
        }
        (document.to_string(), named)
    }
}

/// Calls a function for each file that a table of a hosts.toml names: `ca` (a path or several) and
/// `client` (a path, several, or pairs of certificate and key).
fn each_file(table: &mut dyn TableLike, of_file: &mut dyn FnMut(&mut Value)) {
    for key in ["ca", "client"] {
        if let Some(value) = table.get_mut(key).and_then(Item::as_value_mut) {
            each_string(value, of_file);
        }
    }
}

fn each_string(value: &mut Value, of_string: &mut dyn FnMut(&mut Value)) {
    if let Value::Array(values) = value {
        values.iter_mut().for_each(|value| each_string(value, of_string));
    } else {
        of_string(value);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn bundle(path: &Path) -> Bundle {
        Bundle::read(path, &|path| fs::read(path)).unwrap()
    }

    /// Verifies V6.
    #[test]
    fn hosts_keep_their_order_and_get_files_beside_them() {
        let dir = tempfile::tempdir().unwrap();
        let host = dir.path().join("certs.d/quay.example");
        fs::create_dir_all(&host).unwrap();
        let elsewhere = dir.path().join("key.pem");
        fs::write(&elsewhere, "key").unwrap();
        fs::write(host.join("beside.pem"), "beside").unwrap();
        let text = format!(
            "server = \"https://quay.example\"\nca = \"beside.pem\"\n\n\
             [host.\"https://z.example\"]\nclient = [[\"beside.pem\", \"{0}\"]]\n\n\
             [host.\"https://a.example\"]\nca = [\"{0}\", \"/no/such.pem\"]\n",
            elsewhere.display()
        );
        fs::write(host.join(HOSTS_FILE), &text).unwrap();
        let bundle = bundle(&dir.path().join("certs.d"));
        let paths: Vec<_> = bundle.files.keys().map(|path| path.to_str().unwrap()).collect();
        assert_eq!(
            paths,
            ["beside.pem", "hosts.toml", "node-0.pem", "node-1.pem"]
                .map(|name| format!("0/quay.example/{name}"))
        );
        let made = &bundle.files[Path::new("0/quay.example/hosts.toml")];
        let expected = text.replacen(elsewhere.to_str().unwrap(), "node-0.pem", 1).replacen(
            elsewhere.to_str().unwrap(),
            "node-1.pem",
            1,
        );
        assert_eq!(String::from_utf8_lossy(made), expected);
        assert_eq!(bundle.problems.len(), 1);
        assert!(bundle.problems.iter().all(|problem| problem.starts_with("/no/such.pem can't")));
    }

    #[test]
    fn configuration_is_bounded_and_may_be_absent() {
        let dir = tempfile::tempdir().unwrap();
        assert!(bundle(&dir.path().join("absent")).files.is_empty());
        let host = dir.path().join("quay.example");
        fs::create_dir(&host).unwrap();
        fs::write(host.join("a.pem"), vec![0; MAX_BYTES]).unwrap();
        fs::write(host.join("b.pem"), "more").unwrap();
        let large = bundle(dir.path());
        assert_eq!((large.files.len(), large.problems.len()), (1, 1));
        let many = std::env::join_paths(vec![dir.path(); MAX_REGISTRY_DIRS + 1]).unwrap();
        assert_eq!(bundle(Path::new(&many)).problems.len(), 2);
    }

    #[test]
    fn invalid_toml_is_kept_and_not_quoted() {
        let dir = tempfile::tempdir().unwrap();
        let host = dir.path().join("quay.example");
        fs::create_dir(&host).unwrap();
        fs::write(host.join(HOSTS_FILE), "sesame = = sesame").unwrap();
        let bundle = bundle(dir.path());
        assert_eq!(bundle.files.len(), 1);
        assert!(bundle.problems.iter().all(|problem| !problem.contains("sesame")));
        assert_eq!(bundle.problems.len(), 1);
    }
}
