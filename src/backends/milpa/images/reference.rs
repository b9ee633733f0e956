//! References of images in containerd's notation. Pure.

use ring::digest::{SHA256, digest};

/// Registry of references without a registry.
const DEFAULT_REGISTRY: &str = "docker.io";

/// Returns whether a text is the id of an image: the digest of its configuration.
pub(super) fn is_id(text: &str) -> bool {
    is_digest(text)
}

/// Returns whether a text is a digest that can be checked here.
pub(super) fn is_digest(text: &str) -> bool {
    text.strip_prefix("sha256:").is_some_and(|hex| {
        hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    })
}

/// Returns the digest of a content, in the form of images.
pub(super) fn digest_of(content: &[u8]) -> String {
    format!("sha256:{}", hex::encode(digest(&SHA256, content)))
}

/// Returns containerd's name for a reference: with its registry, and with either a tag or a digest.
/// Returns an id unchanged.
pub(crate) fn normalized(reference: &str) -> String {
    if is_id(reference) {
        return reference.to_owned();
    }
    let (repository, tag, digest) = parts(reference);
    let (domain, path) = match repository.split_once('/') {
        Some((domain, path)) if domain == "localhost" || domain.contains(['.', ':']) => {
            (domain, path)
        }
        _ => (DEFAULT_REGISTRY, repository),
    };
    let domain = if domain == "index.docker.io" { DEFAULT_REGISTRY } else { domain };
    let library = if domain == DEFAULT_REGISTRY && !path.contains('/') { "library/" } else { "" };
    match (digest, tag) {
        (Some(digest), _) => format!("{domain}/{library}{path}@{digest}"),
        (None, tag) => format!("{domain}/{library}{path}:{}", tag.unwrap_or("latest")),
    }
}

/// Returns the repository of a name, including registry and port.
pub(super) fn repository(name: &str) -> &str {
    parts(name).0
}

/// Splits a reference into repository, tag and digest.
fn parts(reference: &str) -> (&str, Option<&str>, Option<&str>) {
    let (named, digest) = match reference.rsplit_once('@') {
        Some((named, digest)) => (named, Some(digest)),
        None => (reference, None),
    };
    // A colon after the last slash begins a tag, an earlier colon a port.
    match named.rsplit_once(':').filter(|(_, tag)| !tag.contains('/')) {
        Some((repository, tag)) => (repository, Some(tag), digest),
        None => (named, None, digest),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn references_are_normalized_like_containerd() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        for (reference, name) in [
            ("busybox", "docker.io/library/busybox:latest"),
            ("busybox:1.36", "docker.io/library/busybox:1.36"),
            ("user/app", "docker.io/user/app:latest"),
            ("index.docker.io/busybox", "docker.io/library/busybox:latest"),
            ("registry.example:5000/app", "registry.example:5000/app:latest"),
            ("registry.example:5000/a/b:v1", "registry.example:5000/a/b:v1"),
            ("localhost/app:v1", "localhost/app:v1"),
            (&format!("quay.example/app:v1@{digest}"), &format!("quay.example/app@{digest}")),
            (&digest, &digest),
        ] {
            assert_eq!(normalized(reference), name);
            assert_eq!(normalized(name), name, "it stays");
        }
    }

    #[test]
    fn repository_keeps_registry_and_port() {
        for (name, expected) in [
            ("registry.example:5000/a/b:v1", "registry.example:5000/a/b"),
            ("docker.io/library/busybox:latest", "docker.io/library/busybox"),
            ("quay.example/app@sha256:00", "quay.example/app"),
        ] {
            assert_eq!(repository(name), expected);
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_does_not_panic(text in ".{0,60}") {
            let _ = normalized(&text);
        }
    }
}
