//! Names in Kubernetes: DNS labels, extended resources, uids.

/// Longest label, in bytes.
pub const MAX_LABEL_BYTES: usize = 63;
/// Namespace of objects that do not name a namespace.
pub const DEFAULT_NAMESPACE: &str = "default";

/// Extended resource: a pod for a cell requests one unit of it.
pub const CELL: &str = "pod.elotl.co/cell";
/// Extended resource that stands for the CPU request of a pod in a cell, in whole CPUs.
pub const EXTENDED_CPU: &str = "pod.elotl.co/cpu";
/// Extended resource that stands for the memory request of a pod in a cell, in bytes.
pub const EXTENDED_MEMORY: &str = "pod.elotl.co/memory";
/// Extended resource that stands for the request of ephemeral storage of a pod in a cell, in bytes.
pub const EXTENDED_STORAGE: &str = "pod.elotl.co/ephemeral-storage";

/// Returns whether amounts of a resource are bytes: of memory or ephemeral storage.
pub fn is_bytes(name: &str) -> bool {
    ["memory", "ephemeral-storage", EXTENDED_MEMORY, EXTENDED_STORAGE].contains(&name)
}

/// Returns whether a text is a label: 1 to 63 of a-z, 0-9 and -, not - at either end.
pub fn is_label(text: &str) -> bool {
    (1..=MAX_LABEL_BYTES).contains(&text.len())
        && has_label_letters(text)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Returns whether a text has only characters of labels.
pub fn has_label_letters(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}

/// Returns whether an extended resource is GPUs or parts of them, such as `nvidia.com/mig-1g.5gb`.
pub fn is_gpu(name: &str) -> bool {
    name.contains("gpu") || name.starts_with("nvidia.com/")
}

/// Returns a uid in the API server's form (RFC 9562).
pub fn uid(bytes: &[u8; 16]) -> String {
    let text = hex::encode(bytes);
    let groups = [&text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..]];
    groups.join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_has_allowed_characters_length_and_ends() {
        let longest = "a".repeat(63);
        for label in ["a", "0", "a-b", "a--b", &longest] {
            assert!(is_label(label), "{label}");
        }
        for other in ["", "-", "-a", "a-", "A", "a.b", "a_b", "\u{e4}", &format!("{longest}a")] {
            assert!(!is_label(other), "{other}");
        }
    }

    #[test]
    fn amounts_of_memory_and_storage_are_bytes() {
        for name in ["memory", "ephemeral-storage", EXTENDED_MEMORY, EXTENDED_STORAGE] {
            assert!(is_bytes(name), "{name}");
        }
        for name in ["cpu", "pods", EXTENDED_CPU, CELL, "nvidia.com/gpu"] {
            assert!(!is_bytes(name), "{name}");
        }
    }

    #[test]
    fn gpu_resource_is_recognized_by_its_name() {
        for name in ["nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.5gb"] {
            assert!(is_gpu(name), "{name}");
        }
        assert!(!is_gpu("example.com/fpga"));
    }

    #[test]
    fn uid_has_five_groups() {
        assert_eq!(uid(b"0123456789abcdef"), "30313233-3435-3637-3839-616263646566");
    }
}
