//! Busybox image, split into blobs as the daemon pushes them.

use kiyot_proto::cell::{BlobPart, PutImageRequest};
use ring::digest::{SHA256, digest};
use serde_json::json;

pub(crate) const PAUSE: &str = "kiyot.test/pause:1";
pub(crate) const BUSYBOX: &str = "kiyot.test/busybox:1";
/// Size of a part in bytes, small enough that a blob has several parts.
const PART: usize = 256 * 1024;
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

pub(crate) struct Image {
    layer: Vec<u8>,
    config: Vec<u8>,
    manifest: Vec<u8>,
}

fn sha256(blob: &[u8]) -> String {
    let hex: String =
        digest(&SHA256, blob).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

pub(crate) fn busybox() -> Image {
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    for dir in ["bin/", "dev/", "proc/", "sys/", "v/"] {
        header.set_entry_type(tar::EntryType::Directory);
        header.set_mode(0o755);
        header.set_size(0);
        tar.append_data(&mut header, dir, &[][..]).unwrap();
    }
    let program = std::fs::read("/bin/busybox").unwrap();
    header.set_entry_type(tar::EntryType::Regular);
    header.set_size(program.len() as u64);
    tar.append_data(&mut header, "bin/busybox", &program[..]).unwrap();
    header.set_entry_type(tar::EntryType::Symlink);
    header.set_size(0);
    for applet in ["sh", "sleep", "cat"] {
        tar.append_link(&mut header, format!("bin/{applet}"), "busybox").unwrap();
    }
    let layer = tar.into_inner().unwrap();
    let architecture = if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" };
    let config = json!({
        "architecture": architecture, "os": "linux",
        "config": { "Entrypoint": ["/bin/busybox", "sleep", "2147483647"], "Env": ["PATH=/bin"] },
        "rootfs": { "type": "layers", "diff_ids": [sha256(&layer)] },
    })
    .to_string()
    .into_bytes();
    let descriptor = |media_type: &str, blob: &[u8]| {
        let (digest, size) = (sha256(blob), blob.len());
        json!({ "mediaType": media_type, "digest": digest, "size": size })
    };
    let manifest = json!({
        "schemaVersion": 2, "mediaType": MANIFEST,
        "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
        "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer)],
    })
    .to_string()
    .into_bytes();
    Image { layer, config, manifest }
}

/// Returns a blob that doesn't match its digest.
pub(crate) fn corrupt() -> Vec<BlobPart> {
    vec![BlobPart {
        digest: sha256(b"expected"),
        size: 5,
        content: "other".into(),
        ..Default::default()
    }]
}

impl Image {
    pub(crate) fn id(&self) -> String {
        sha256(&self.config)
    }

    /// Returns the digest of the layer's tar, which is not compressed.
    pub(crate) fn layer_id(&self) -> String {
        sha256(&self.layer)
    }

    pub(crate) fn digests(&self) -> Vec<String> {
        [&self.layer, &self.config, &self.manifest].map(|blob| sha256(blob)).to_vec()
    }

    /// Returns the blobs in parts. The manifest has the labels that keep its references from
    /// garbage collection.
    pub(crate) fn parts(&self) -> Vec<Vec<BlobPart>> {
        let references = [
            ("containerd.io/gc.ref.content.config", &self.config),
            ("containerd.io/gc.ref.content.l.0", &self.layer),
        ];
        let labels = |blob: &Vec<u8>| {
            let manifest = blob == &self.manifest;
            references
                .iter()
                .filter(|_| manifest)
                .map(|(label, blob)| ((*label).to_owned(), sha256(blob)))
                .collect()
        };
        let split = |blob: &Vec<u8>| {
            let mut parts: Vec<_> = blob
                .chunks(PART)
                .map(|part| BlobPart { content: part.to_vec().into(), ..Default::default() })
                .collect();
            parts[0].digest = sha256(blob);
            parts[0].size = blob.len() as u64;
            parts[0].labels = labels(blob);
            parts
        };
        [&self.layer, &self.config, &self.manifest].map(split).to_vec()
    }

    pub(crate) fn request(&self, names: &[&str]) -> PutImageRequest {
        PutImageRequest {
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            target_digest: sha256(&self.manifest),
            target_media_type: MANIFEST.into(),
            target_size: self.manifest.len() as u64,
            image_id: self.id(),
            labels: std::collections::HashMap::new(),
            snapshot: String::new(),
        }
    }
}
