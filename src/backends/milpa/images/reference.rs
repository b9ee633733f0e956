//! Names of images, as containerd's CRI writes them. Pure.

/// Where images are from that name no registry.
const DEFAULT_DOMAIN: &str = "docker.io";

/// Whether this is an image's id: the digest of its configuration.
pub(super) fn is_id(text: &str) -> bool {
    is_digest(text)
}

/// Whether this is a digest whose content can be checked here.
pub(super) fn is_digest(text: &str) -> bool {
    text.strip_prefix("sha256:").is_some_and(|hex| {
        hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    })
}

/// The name under which containerd keeps what a reference means: with its registry, and with a tag
/// or a digest, not both. An id stays as it is.
pub(crate) fn normalized(reference: &str) -> String {
    if is_id(reference) {
        return reference.to_owned();
    }
    let (named, digest) = match reference.rsplit_once('@') {
        Some((named, digest)) => (named, Some(digest)),
        None => (reference, None),
    };
    // A colon behind the last slash begins a tag; one before it, a port.
    let (repository, tag) = match named.rsplit_once(':').filter(|(_, tag)| !tag.contains('/')) {
        Some((repository, tag)) => (repository, Some(tag)),
        None => (named, None),
    };
    let (domain, path) = match repository.split_once('/') {
        Some((domain, path)) if domain == "localhost" || domain.contains(['.', ':']) => {
            (domain, path)
        }
        _ => (DEFAULT_DOMAIN, repository),
    };
    let domain = if domain == "index.docker.io" { DEFAULT_DOMAIN } else { domain };
    let library = if domain == DEFAULT_DOMAIN && !path.contains('/') { "library/" } else { "" };
    match (digest, tag) {
        (Some(digest), _) => format!("{domain}/{library}{path}@{digest}"),
        (None, tag) => format!("{domain}/{library}{path}:{}", tag.unwrap_or("latest")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn references_are_written_as_containerd_does() {
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

    proptest! {
        #[test]
        fn any_text_is_taken(text in ".{0,60}") {
            let _ = normalized(&text);
        }
    }
}
