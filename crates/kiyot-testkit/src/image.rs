//! Container images built from Debian's busybox-static, without a registry.

use std::{fs, io::Write, path::Path};

use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use tar::{Builder, EntryType, Header};

use crate::command;

/// The default image of pods.
pub const BUSYBOX_IMAGE: &str = "kiyot.test/busybox:1";

/// The pause image of every node.
pub const PAUSE_IMAGE: &str = "kiyot.test/pause:1";

/// The program of each image.
const BUSYBOX: &str = "/bin/busybox";

/// The media type of an image's manifest.
pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// The media type of an uncompressed layer.
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// Blobs of an image.
pub(crate) struct Blobs {
    /// Uncompressed tars.
    pub(crate) layers: Vec<Vec<u8>>,
    /// Image configuration, JSON.
    pub(crate) config: Vec<u8>,
    /// Image manifest, JSON.
    pub(crate) manifest: Vec<u8>,
}

/// Description of an image. Each image has busybox, a hard link to it for each applet, /etc/passwd,
/// /etc/group and /tmp.
#[derive(Debug, Clone, Default)]
pub struct ImageSpec {
    /// Additional files: path from the root, mode, contents.
    pub files: Vec<(String, u32, Vec<u8>)>,
    /// Files of a second layer, so that other images share the first layer. Without files the image
    /// has no second layer.
    pub upper: Vec<(String, u32, Vec<u8>)>,
    /// The image's `Entrypoint`.
    pub entrypoint: Vec<String>,
    /// The image's `Cmd`.
    pub cmd: Vec<String>,
    /// `user[:group]`; empty: root.
    pub user: String,
    /// Environment, `NAME=value`.
    pub env: Vec<String>,
    /// Working directory; empty: `/`.
    pub working_dir: String,
    /// Stop signal; empty: TERM.
    pub stop_signal: String,
}

impl ImageSpec {
    /// Describes an image that runs a shell script.
    pub fn script(text: &str) -> Self {
        Self { cmd: vec!["sh".to_owned(), "-c".to_owned(), text.to_owned()], ..Self::default() }
    }

    /// Describes the pause image: it sleeps until it is killed.
    pub fn pause() -> Self {
        Self {
            entrypoint: ["/bin/busybox", "sleep", "2147483647"].map(str::to_owned).to_vec(),
            ..Self::default()
        }
    }

    /// Builds the blobs. They are the same in each build.
    pub(crate) fn blobs(&self) -> std::io::Result<Blobs> {
        let mut layers = vec![self.layer()?];
        if !self.upper.is_empty() {
            let mut tar = Builder::new(Vec::new());
            for (path, mode, contents) in &self.upper {
                file(&mut tar, path.trim_start_matches('/'), *mode, contents)?;
            }
            layers.push(tar.into_inner()?);
        }
        let env = [vec!["PATH=/bin".to_owned()], self.env.clone()].concat();
        let diff_ids: Vec<_> = layers.iter().map(|layer| sha256(layer)).collect();
        let config = json!({
            "architecture": architecture(), "os": "linux",
            "config": {
                "Entrypoint": self.entrypoint, "Cmd": self.cmd, "User": self.user,
                "WorkingDir": self.working_dir, "Env": env, "StopSignal": self.stop_signal,
            },
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
        });
        let config = config.to_string().into_bytes();
        let descriptors: Vec<_> = layers.iter().map(|layer| descriptor(LAYER, layer)).collect();
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": descriptors,
        });
        Ok(Blobs { layers, config, manifest: manifest.to_string().into_bytes() })
    }

    /// Writes the image as an OCI archive for `ctr images import`, with its full name.
    pub fn write(&self, name: &str, archive: &Path) -> std::io::Result<()> {
        let Blobs { layers, config, manifest } = self.blobs()?;
        let mut entry = descriptor(MANIFEST, &manifest);
        entry["annotations"] = json!({ "io.containerd.image.name": name });
        entry["platform"] = json!({ "architecture": architecture(), "os": "linux" });
        let index = json!({ "schemaVersion": 2, "manifests": [entry] }).to_string().into_bytes();

        let mut tar = Builder::new(fs::File::create(archive)?);
        file(&mut tar, "oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        file(&mut tar, "index.json", 0o644, &index)?;
        for blob in layers.iter().chain([&config, &manifest]) {
            file(&mut tar, &format!("blobs/{}", sha256(blob).replace(':', "/")), 0o644, blob)?;
        }
        tar.finish()
    }

    fn layer(&self) -> std::io::Result<Vec<u8>> {
        let mut tar = Builder::new(Vec::new());
        for (directory, mode) in [
            ("bin", 0o755),
            ("dev", 0o755),
            ("etc", 0o755),
            ("proc", 0o755),
            ("root", 0o700),
            ("sys", 0o755),
            ("tmp", 0o1777),
            ("var", 0o755),
        ] {
            let mut header = header(EntryType::Directory, mode, 0);
            tar.append_data(&mut header, format!("{directory}/"), &[][..])?;
        }
        file(&mut tar, "bin/busybox", 0o755, &fs::read(BUSYBOX)?)?;
        // Hard links, as in busybox's own image: inodes would cost more than the rest of the
        // import.
        for applet in
            command::run(BUSYBOX, &["--list"]).lines().filter(|applet| *applet != "busybox")
        {
            tar.append_link(
                &mut header(EntryType::Link, 0o755, 0),
                format!("bin/{applet}"),
                "bin/busybox",
            )?;
        }
        file(
            &mut tar,
            "etc/passwd",
            0o644,
            b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
        )?;
        file(&mut tar, "etc/group", 0o644, b"root:x:0:\nnogroup:x:65534:\n")?;
        for (path, mode, contents) in &self.files {
            file(&mut tar, path.trim_start_matches('/'), *mode, contents)?;
        }
        tar.into_inner()
    }
}

fn file<W: Write>(
    tar: &mut Builder<W>,
    path: &str,
    mode: u32,
    contents: &[u8],
) -> std::io::Result<()> {
    tar.append_data(&mut header(EntryType::Regular, mode, contents.len() as u64), path, contents)
}

/// Returns a tar header with a fixed time and owner, so that digests are reproducible.
fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(1_700_000_000);
    header.set_uid(0);
    header.set_gid(0);
    header
}

fn descriptor(media_type: &str, blob: &[u8]) -> Value {
    json!({ "mediaType": media_type, "digest": sha256(blob), "size": blob.len() })
}

pub(crate) fn sha256(blob: &[u8]) -> String {
    let hex: String =
        digest(&SHA256, blob).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// Returns the OCI name of this machine's architecture.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
