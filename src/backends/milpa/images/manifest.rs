//! Indexes and manifests of images, in the formats of OCI and Docker. Pure.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::reference::is_digest;

/// Most layers of an image; containerd's snapshotters allow fewer.
const MAX_LAYERS: usize = 512;

/// Most bytes of a blob (1 TiB), only to prevent overflows.
const MAX_BLOB_BYTES: u64 = 1 << 40;

/// Error of reading a document of an image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum ManifestError {
    /// The document is not the expected JSON.
    #[error("blob {0} is not the JSON of an image: {1}")]
    Json(String, String),
    /// The document has another type.
    #[error(
        "blob {0} is of type {1:?}; allowed are indexes and manifests of OCI and of Docker \
         (schema 2)"
    )]
    Type(String, String),
    /// The digest can't be checked.
    #[error("{0:?} is not a digest that can be checked; allowed: sha256")]
    Digest(String),
    /// The image exceeds a bound.
    #[error(
        "image has more than {MAX_LAYERS} layers, or a blob of more than {MAX_BLOB_BYTES} bytes"
    )]
    TooMuch,
    /// The index has no image for the cell's machine.
    #[error("index {0} has no image for linux/{1}")]
    Platform(String, &'static str),
    /// The image is for another machine than the cell's.
    #[error("the image with the configuration {0} is not for linux/{1}")]
    Architecture(String, &'static str),
}

/// Reference to a blob of an image.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Descriptor {
    #[serde(default)]
    pub(super) media_type: String,
    pub(super) digest: String,
    /// Length in bytes.
    pub(super) size: u64,
    #[serde(default)]
    platform: Option<Platform>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Platform {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    variant: String,
}

/// Index or manifest, distinguished by its fields.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    #[serde(default)]
    media_type: String,
    #[serde(default)]
    manifests: Vec<Descriptor>,
    #[serde(default)]
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Vec<Descriptor>,
}

/// Parsed document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Parsed {
    /// An index, with its entry for the machine.
    Index(Descriptor),
    Manifest(Manifest),
}

/// Content of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Manifest {
    /// Descriptor of the manifest itself.
    pub(super) target: Descriptor,
    /// Configuration, whose digest is the image's id.
    pub(super) config: Descriptor,
    /// Layers in order.
    pub(super) layers: Vec<Descriptor>,
}

impl Descriptor {
    pub(super) fn new(media_type: &str, digest: &str, size: u64) -> Self {
        Self { media_type: media_type.to_owned(), digest: digest.to_owned(), size, platform: None }
    }
}

impl Manifest {
    /// Returns all blobs without duplicates, each after the blobs that it references.
    pub(super) fn blobs(&self) -> Vec<&Descriptor> {
        let mut blobs: Vec<&Descriptor> = Vec::new();
        for blob in self.layers.iter().chain([&self.config, &self.target]) {
            if !blobs.iter().any(|other| other.digest == blob.digest) {
                blobs.push(blob);
            }
        }
        blobs
    }

    /// Returns the labels of a blob for containerd's garbage collection.
    pub(super) fn labels(&self, digest: &str) -> BTreeMap<String, String> {
        if digest != self.target.digest {
            return BTreeMap::new();
        }
        let layers = self.layers.iter().enumerate().map(|(number, layer)| {
            (format!("containerd.io/gc.ref.content.l.{number}"), layer.digest.clone())
        });
        layers
            .chain([("containerd.io/gc.ref.content.config".to_owned(), self.config.digest.clone())])
            .collect()
    }
}

/// Parses a document. Its bytes must already match its digest.
pub(super) fn parse(
    blob: &Descriptor,
    json: &[u8],
    architecture: &'static str,
) -> Result<Parsed, ManifestError> {
    let document: Document = serde_json::from_slice(json)
        .map_err(|error| ManifestError::Json(blob.digest.clone(), error.to_string()))?;
    let media_type =
        if document.media_type.is_empty() { &blob.media_type } else { &document.media_type };
    match (&**media_type, document.config) {
        (
            "application/vnd.oci.image.index.v1+json"
            | "application/vnd.docker.distribution.manifest.list.v2+json",
            _,
        ) => {
            let found = for_machine(document.manifests, architecture)
                .ok_or_else(|| ManifestError::Platform(blob.digest.clone(), architecture))?;
            checked(found).map(Parsed::Index)
        }
        (
            "application/vnd.oci.image.manifest.v1+json"
            | "application/vnd.docker.distribution.manifest.v2+json",
            Some(config),
        ) => {
            if document.layers.len() > MAX_LAYERS {
                return Err(ManifestError::TooMuch);
            }
            let target = Descriptor::new(media_type, &blob.digest, blob.size);
            let layers = document.layers.into_iter().map(checked).collect::<Result<_, _>>()?;
            Ok(Parsed::Manifest(Manifest {
                target: checked(target)?,
                config: checked(config)?,
                layers,
            }))
        }
        (other, _) => Err(ManifestError::Type(blob.digest.clone(), other.to_owned())),
    }
}

/// Checks by an image's configuration that the image is for an architecture, which a manifest alone
/// does not say. The bytes must already match the digest.
pub(super) fn check_architecture(
    blob: &Descriptor,
    json: &[u8],
    architecture: &'static str,
) -> Result<(), ManifestError> {
    #[derive(Deserialize)]
    struct Config {
        #[serde(default)]
        architecture: String,
    }
    let config: Config = serde_json::from_slice(json)
        .map_err(|error| ManifestError::Json(blob.digest.clone(), error.to_string()))?;
    if config.architecture == architecture {
        Ok(())
    } else {
        Err(ManifestError::Architecture(blob.digest.clone(), architecture))
    }
}

fn checked(descriptor: Descriptor) -> Result<Descriptor, ManifestError> {
    if !is_digest(&descriptor.digest) {
        return Err(ManifestError::Digest(descriptor.digest));
    }
    if descriptor.size > MAX_BLOB_BYTES { Err(ManifestError::TooMuch) } else { Ok(descriptor) }
}

/// Returns the best entry for a machine: the first with the most preferred variant.
fn for_machine(manifests: Vec<Descriptor>, architecture: &str) -> Option<Descriptor> {
    let variants: &[&str] = match architecture {
        "amd64" => &["", "v1"],
        "arm64" => &["v8", ""],
        "arm" => &["v7", "v6", "v5", ""],
        _ => &[""],
    };
    let rank = |descriptor: &Descriptor| match &descriptor.platform {
        Some(platform) if platform.os == "linux" && platform.architecture == architecture => {
            variants.iter().position(|variant| *variant == platform.variant)
        }
        Some(_) => None,
        // An entry without a variant comes last.
        None => Some(variants.len()),
    };
    manifests
        .into_iter()
        .filter_map(|descriptor| Some((rank(&descriptor)?, descriptor)))
        .min_by_key(|(rank, _)| *rank)
        .map(|(_, descriptor)| descriptor)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const INDEX: &str = "application/vnd.oci.image.index.v1+json";
    const MANIFEST_MEDIA_TYPE: &str = "application/vnd.docker.distribution.manifest.v2+json";

    fn digest(byte: u8) -> String {
        format!("sha256:{}", hex::encode([byte; 32]))
    }

    fn entry(byte: u8, platform: &str) -> String {
        format!(
            r#"{{"mediaType":"{MANIFEST_MEDIA_TYPE}","digest":"{}","size":{byte}{platform}}}"#,
            digest(byte)
        )
    }

    fn platform(os: &str, architecture: &str, variant: &str) -> String {
        format!(
            r#","platform":{{"os":"{os}","architecture":"{architecture}","variant":"{variant}"}}"#
        )
    }

    #[test]
    fn index_selects_image_of_this_machine() {
        let entries = [
            entry(1, &platform("linux", "arm64", "")),
            entry(2, &platform("windows", "amd64", "")),
            entry(3, &platform("unknown", "unknown", "")),
            entry(4, &platform("linux", "amd64", "v3")),
            entry(5, &platform("linux", "amd64", "")),
            entry(6, &platform("linux", "arm64", "v8")),
        ];
        let json = format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, entries.join(","));
        let blob = Descriptor::new(INDEX, &digest(9), json.len() as u64);
        for (architecture, expected) in [("amd64", 5), ("arm64", 6)] {
            assert!(
                matches!(
                    parse(&blob, json.as_bytes(), architecture),
                    Ok(Parsed::Index(found)) if found.digest == digest(expected)
                ),
                "{architecture}"
            );
        }
        assert!(matches!(
            parse(&blob, json.as_bytes(), "s390x"),
            Err(ManifestError::Platform(_, "s390x"))
        ));
        let json = format!(r#"{{"manifests":[{}]}}"#, entry(7, ""));
        assert!(matches!(
            parse(&blob, json.as_bytes(), "amd64"),
            Ok(Parsed::Index(found)) if found.digest == digest(7)
        ));
    }

    #[test]
    fn manifest_blobs_are_unique_and_end_with_itself() {
        let json = format!(
            r#"{{"mediaType":"{MANIFEST_MEDIA_TYPE}","config":{},"layers":[{},{},{}]}}"#,
            entry(1, ""),
            entry(2, ""),
            entry(3, ""),
            entry(2, "")
        );
        let Ok(Parsed::Manifest(manifest)) =
            parse(&Descriptor::new("", &digest(9), 5), json.as_bytes(), "amd64")
        else {
            panic!("no manifest")
        };
        assert_eq!(
            manifest.blobs().iter().map(|blob| blob.digest.clone()).collect::<Vec<_>>(),
            [2, 3, 1, 9].map(digest)
        );
        assert_eq!(manifest.target, Descriptor::new(MANIFEST_MEDIA_TYPE, &digest(9), 5));
        let labels = manifest.labels(&digest(9));
        assert_eq!(labels["containerd.io/gc.ref.content.config"], digest(1));
        assert_eq!(labels["containerd.io/gc.ref.content.l.2"], digest(2));
        assert!(manifest.labels(&digest(1)).is_empty());
    }

    #[test]
    fn invalid_image_document_is_refused() {
        let blob = |media_type: &str| Descriptor::new(media_type, &digest(9), 5);
        assert!(matches!(
            parse(&blob(MANIFEST_MEDIA_TYPE), b"{", "amd64"),
            Err(ManifestError::Json(..))
        ));
        assert!(matches!(
            parse(&blob(MANIFEST_MEDIA_TYPE), b"{}", "amd64"),
            Err(ManifestError::Type(..))
        ));
        assert!(matches!(
            parse(&blob("application/vnd.docker.distribution.manifest.v1+json"), b"{}", "amd64"),
            Err(ManifestError::Type(..))
        ));
        let bad = r#"{"config":{"digest":"sha512:00","size":1}}"#;
        assert!(matches!(
            parse(&blob(MANIFEST_MEDIA_TYPE), bad.as_bytes(), "amd64"),
            Err(ManifestError::Digest(_))
        ));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(json in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&Descriptor::new(MANIFEST_MEDIA_TYPE, &digest(0), 0), &json, "amd64");
        }
    }
}
