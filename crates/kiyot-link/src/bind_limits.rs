//! Limits of Bind: the daemon's requests keep them, and the agent checks them.

/// The most routes of a pod. Nodes with overlay networks have one per node of the cluster.
pub const MAX_ROUTES: usize = 256;
/// The most addresses, neighbours, name servers or search domains of a pod.
pub const MAX_ENTRIES: usize = 64;
/// The most directories of a registry configuration (containerd's `registry.config_path`).
pub const MAX_REGISTRY_DIRS: usize = 4;
/// Proxy variables for image pulls. The upper-case names take precedence, as in Go's net/http.
pub const PROXY_VARIABLES: [&str; 6] =
    ["HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"];
/// The most bytes of a proxy variable's value.
pub const MAX_PROXY_BYTES: usize = 4096;

/// Returns whether a value is valid for a proxy variable: one line of bounded length. The value may
/// contain a password, so messages must not quote it.
pub fn is_proxy_value(value: &str) -> bool {
    value.len() <= MAX_PROXY_BYTES && !value.contains(char::is_control)
}

/// The most files of a registry configuration.
pub const MAX_REGISTRY_FILES: usize = 512;
