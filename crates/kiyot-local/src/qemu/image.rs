//! The image of cells. Its `image.json` lists the hashes of its files, so that an incomplete image,
//! or an image of another architecture, is refused before a machine boots from it.

use std::{
    collections::BTreeMap,
    fs::{self, File, Metadata},
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use kiyot_engine::request::Architecture;
use kiyot_linux::tree::own;
use ring::digest::{Context, SHA256};
use serde::Deserialize;

/// The list of the files with their hashes.
const LIST: &str = "image.json";
/// Bounds the list, in bytes.
const MAX_LIST_BYTES: u64 = 64 * 1024;
/// The files that a machine boots from.
const FILES: [&str; 3] = ["kernel", "initramfs", "root.squashfs"];
/// The architecture of QEMU's board `q35`.
pub(super) const ARCHITECTURE: Architecture = Architecture::Amd64;
/// The size of a read, in bytes.
const READ_BYTES: usize = 1 << 20;

/// An image that can't be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum ImageError {
    #[error("read {0:?}")]
    Io(PathBuf, #[source] io::Error),
    #[error("{0:?} is longer than {MAX_LIST_BYTES} bytes")]
    Long(PathBuf),
    #[error("{0:?} is not a list of an image's files")]
    Invalid(PathBuf, #[source] serde_json::Error),
    #[error("{path:?} has the architecture {found:?}; allowed: \"{ARCHITECTURE}\"")]
    Architecture { path: PathBuf, found: String },
    #[error("{0:?} lists no {1:?}")]
    Unlisted(PathBuf, &'static str),
    #[error("{path:?} has {found} bytes; {LIST} lists {listed}: the image is incomplete")]
    Size { path: PathBuf, found: u64, listed: u64 },
    #[error("{0:?} has another SHA-256 than {LIST} lists: the image is incomplete or was changed")]
    Hash(PathBuf),
}

impl ImageError {
    /// Returns whether a later check may succeed: the file exists, or its existence is unknown.
    pub(super) fn is_transient(&self) -> bool {
        matches!(self, Self::Io(_, error) if error.kind() != io::ErrorKind::NotFound)
    }
}

/// The image of cells in a directory. Clones share the results of comparisons.
#[derive(Debug, Clone)]
pub(super) struct Image {
    dir: PathBuf,
    /// The identities of the files at the last successful comparison.
    compared: Arc<Mutex<Option<Vec<Identity>>>>,
}

/// The identity of a file's content. Any write changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Identity {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// The content of `image.json`. Its other fields are for people.
#[derive(Debug, Deserialize)]
struct List {
    architecture: String,
    files: BTreeMap<String, Listed>,
}

#[derive(Debug, Deserialize)]
struct Listed {
    sha256: String,
    size: u64,
}

impl Image {
    pub(super) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), compared: Arc::default() }
    }

    /// Returns the path of the kernel.
    pub(super) fn kernel(&self) -> PathBuf {
        self.dir.join(FILES[0])
    }

    /// Returns the path of the initramfs.
    pub(super) fn initramfs(&self) -> PathBuf {
        self.dir.join(FILES[1])
    }

    /// Returns the path of the root's file system.
    pub(super) fn root(&self) -> PathBuf {
        self.dir.join(FILES[2])
    }

    /// Compares each file with the list, unless all files are unchanged since the last comparison.
    /// Blocking.
    pub(super) fn check(&self) -> Result<(), ImageError> {
        // Held while files are read, so that concurrent launches read them once.
        let mut compared = self.compared.lock().unwrap_or_else(PoisonError::into_inner);
        let found = self.identities()?;
        if compared.as_ref() == Some(&found) {
            return Ok(());
        }
        let (path, list) = (self.dir.join(LIST), self.list()?);
        if Architecture::named(&list.architecture) != Some(ARCHITECTURE) {
            return Err(ImageError::Architecture { path, found: list.architecture });
        }
        for name in FILES {
            let listed = list.files.get(name);
            self.compare(name, listed.ok_or_else(|| ImageError::Unlisted(path.clone(), name))?)?;
        }
        *compared = Some(found);
        Ok(())
    }

    fn identities(&self) -> Result<Vec<Identity>, ImageError> {
        let identity = |name: &'static str| {
            let path = own(&self.dir, name);
            fs::metadata(&path)
                .map(|metadata| Identity::of(&metadata))
                .map_err(|error| ImageError::Io(path, error))
        };
        FILES.into_iter().chain([LIST]).map(identity).collect()
    }

    fn list(&self) -> Result<List, ImageError> {
        let path = self.dir.join(LIST);
        let mut text = Vec::new();
        File::open(&path)
            .and_then(|file| file.take(MAX_LIST_BYTES + 1).read_to_end(&mut text))
            .map_err(|error| ImageError::Io(path.clone(), error))?;
        if text.len() as u64 > MAX_LIST_BYTES {
            return Err(ImageError::Long(path));
        }
        serde_json::from_slice(&text).map_err(|error| ImageError::Invalid(path, error))
    }

    fn compare(&self, name: &'static str, listed: &Listed) -> Result<(), ImageError> {
        let path = own(&self.dir, name);
        let failed = |error| ImageError::Io(path.clone(), error);
        let mut file = File::open(&path).map_err(failed)?;
        let found = file.metadata().map_err(failed)?.len();
        if found != listed.size {
            return Err(ImageError::Size { path, found, listed: listed.size });
        }
        let (mut context, mut buffer) = (Context::new(&SHA256), vec![0; READ_BYTES]);
        loop {
            match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => context.update(&buffer[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(error)),
            }
        }
        if hex::encode(context.finish()).eq_ignore_ascii_case(&listed.sha256) {
            Ok(())
        } else {
            Err(ImageError::Hash(path))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use ring::digest::digest;

    use super::*;

    /// Makes an image. The content of each file is its name.
    fn make(dir: &Path) -> Image {
        let mut files = serde_json::Map::new();
        for name in FILES {
            fs::write(dir.join(name), name).unwrap();
            let sha256 = hex::encode(digest(&SHA256, name.as_bytes()));
            let listed = serde_json::json!({ "sha256": sha256, "size": name.len() });
            files.insert(name.to_owned(), listed);
        }
        let list = serde_json::json!({ "architecture": "amd64", "files": files });
        fs::write(dir.join(LIST), list.to_string()).unwrap();
        Image::new(dir)
    }

    fn refusal(image: &Image) -> String {
        image.check().unwrap_err().to_string()
    }

    /// Verifies V10.
    #[test]
    fn incomplete_image_is_refused_by_the_name_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let image = make(dir.path());
        image.check().unwrap();
        let root = File::options().write(true).open(image.root()).unwrap();
        root.set_len(4).unwrap();
        assert!(refusal(&image).contains("root.squashfs\" has 4 bytes; image.json lists 13"));
        // Has the right size, but not yet the content.
        root.set_len(13).unwrap();
        assert!(refusal(&image).contains("root.squashfs\" has another SHA-256"));
        root.write_all_at(b"root.squashfs", 0).unwrap();
        image.check().unwrap();
        fs::remove_file(image.kernel()).unwrap();
        let absent = image.check().unwrap_err();
        assert!(absent.to_string().contains("kernel") && !absent.is_transient(), "{absent}");
    }

    /// Verifies V10.
    #[test]
    fn image_of_another_architecture_is_refused_by_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let image = make(dir.path());
        let list = fs::read_to_string(dir.path().join(LIST)).unwrap();
        for (architecture, is_allowed) in [("arm64", false), ("x86_64", true), ("", false)] {
            fs::write(dir.path().join(LIST), list.replace("amd64", architecture)).unwrap();
            if is_allowed {
                image.check().unwrap();
                continue;
            }
            let refused = image.check().unwrap_err();
            let expected =
                format!("image.json\" has the architecture {architecture:?}; allowed: \"amd64\"");
            assert!(refused.to_string().ends_with(&expected), "{refused}");
            assert!(!refused.is_transient());
        }
    }

    #[test]
    fn list_that_is_absent_long_or_lacks_a_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let image = make(dir.path());
        let write = |text: &str| fs::write(dir.path().join(LIST), text).unwrap();
        write(r#"{"architecture":"amd64","files":{"kernel":{"sha256":"00","size":6}}}"#);
        assert!(refusal(&image).contains("kernel\" has another SHA-256"));
        write(r#"{"architecture":"amd64","files":{}}"#);
        assert!(refusal(&image).contains("lists no \"kernel\""));
        write(r#"{"files":{}}"#);
        assert!(refusal(&image).contains("is not a list of an image's files"));
        write(&" ".repeat(1 << 20));
        assert!(refusal(&image).contains("longer than 65536 bytes"));
        write("{}");
        assert!(refusal(&image).contains("is not a list of an image's files"));
        fs::remove_file(dir.path().join(LIST)).unwrap();
        assert!(refusal(&image).contains("image.json"));
    }
}
