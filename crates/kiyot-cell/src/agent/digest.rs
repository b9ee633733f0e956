//! Digests of blobs and layers.

use tonic::Status;

/// Returns whether the text is `sha256:` with 64 lower-case hex digits, or `sha512:` with 128.
fn is_digest(digest: &str) -> bool {
    let of = |name, length| {
        digest.strip_prefix(name).is_some_and(|hex: &str| {
            hex.len() == length
                && hex.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
        })
    };
    of("sha256:", 64) || of("sha512:", 128)
}

pub(super) fn check_digest(digest: &str) -> Result<(), Status> {
    if is_digest(digest) {
        Ok(())
    } else {
        Err(Status::invalid_argument(format!(
            "digest {digest:?}: invalid; allowed: sha256:<64 hex digits> or sha512:<128 hex digits>"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_with_other_form_is_rejected() {
        assert!(is_digest(&format!("sha256:{}", "0a".repeat(32))));
        assert!(is_digest(&format!("sha512:{}", "0a".repeat(64))));
        for wrong in [
            "",
            "sha256:",
            "sha256:00",
            &format!("sha256:{}", "0A".repeat(32)),
            &format!("md5:{}", "0a".repeat(16)),
        ] {
            assert!(!is_digest(wrong), "{wrong}");
        }
    }
}
