//! Limits of Bind, by which the daemon makes a request and the agent checks it.

/// Most routes of a pod. Nodes with overlay networks have one per node of the cluster.
pub const MAX_ROUTES: usize = 256;
/// Most addresses of a pod, neighbours, name servers, and search domains.
pub const MAX_ENTRIES: usize = 64;
/// Most directories of a registry configuration (containerd's `registry.config_path`).
pub const MAX_REGISTRY_DIRS: usize = 4;
/// Variables of the proxies for pulls. The upper-case names decide, as in Go's net/http.
pub const PROXY_VARIABLES: [&str; 6] =
    ["HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"];
/// Longest value of such a variable, in bytes.
pub const MAX_PROXY_BYTES: usize = 4096;

/// Returns whether a value may be that of a proxy's variable: a line of bounded length. It may have
/// a password, and belongs in no message.
pub fn is_proxy_value(value: &str) -> bool {
    value.len() <= MAX_PROXY_BYTES && !value.contains(char::is_control)
}

/// Most files of a registry configuration.
pub const MAX_REGISTRY_FILES: usize = 512;
