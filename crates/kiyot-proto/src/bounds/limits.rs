//! The limits of all messages, in bytes.

/// The longest message on the control connection. The longest kind is a snapshot, with some 500
/// bytes per container: room for 2,000 containers.
pub(super) const MAX_CONTROL_FRAME_BYTES: usize = 1 << 20;
/// The longest response of a cell. A part of a manifest or listing has up to 4 MiB.
pub(super) const MAX_RESPONSE_BYTES: usize = (4 << 20) + (64 << 10);
/// The longest response to `ExecSync`: the limit of a kubelet.
pub(super) const MAX_EXEC_RESPONSE_BYTES: usize = 16 << 20;

/// The longest `HelloReply`.
const MAX_HELLO_BYTES: usize = 16 << 10;
/// The longest `WatchEnd`: a gRPC status with its message.
const MAX_STATUS_BYTES: usize = 16 << 10;
/// The longest `LogGrown`: a path and a number.
const MAX_LOG_EVENT_BYTES: usize = 8 << 10;
/// The longest CRI status of a container or sandbox. Kubernetes allows 256 KiB of annotations.
const MAX_POD_STATUS_BYTES: usize = 512 << 10;

/// The memory of a decoded control message. 256 containers with statistics and 50 metrics each need
/// 6 MiB as this module counts.
const MAX_CONTROL_MEMORY_BYTES: usize = 8 << 20;
/// The memory of a decoded response. A string is counted with a quarter more than its length.
const MAX_RESPONSE_MEMORY_BYTES: usize = 8 << 20;
/// The memory of a decoded response to `ExecSync`.
const MAX_EXEC_MEMORY_BYTES: usize = 24 << 20;
/// The memory of a decoded list. Agents decode lists of their containerd, and tests decode lists of
/// whole nodes; the daemon requests only lists of containers from a cell.
const MAX_LIST_MEMORY_BYTES: usize = 48 << 20;
/// The memory of a decoded request. Agents trust the daemon's requests.
const MAX_REQUEST_MEMORY_BYTES: usize = 48 << 20;

/// Returns the most bytes of an encoded message, and the most bytes of memory of the decoded
/// message.
pub(super) const fn for_message(name: &str) -> (usize, usize) {
    let name = name.as_bytes();
    let encoded =
        if equals(name, b"kiyot.cell.v1.FromCell") || equals(name, b"kiyot.cell.v1.ToCell") {
            MAX_CONTROL_FRAME_BYTES
        } else if equals(name, b"kiyot.cell.v1.HelloReply") {
            MAX_HELLO_BYTES
        } else if equals(name, b"kiyot.cell.v1.WatchEnd") {
            MAX_STATUS_BYTES
        } else if equals(name, b"kiyot.cell.v1.LogGrown") {
            MAX_LOG_EVENT_BYTES
        } else if equals(name, b"runtime.v1.ContainerStatus")
            || equals(name, b"runtime.v1.PodSandboxStatus")
        {
            MAX_POD_STATUS_BYTES
        } else {
            MAX_EXEC_RESPONSE_BYTES
        };
    let decoded = if equals(name, b"kiyot.cell.v1.FromCell") {
        MAX_CONTROL_MEMORY_BYTES
    } else if equals(name, b"runtime.v1.ExecSyncResponse") {
        MAX_EXEC_MEMORY_BYTES
    } else if starts_with(name, b"runtime.v1.List") || starts_with(name, b"runtime.v1.Stream") {
        MAX_LIST_MEMORY_BYTES
    } else if ends_with(name, b"Request") && !equals(name, b"kiyot.cell.v1.EnrolRequest") {
        MAX_REQUEST_MEMORY_BYTES
    } else {
        MAX_RESPONSE_MEMORY_BYTES
    };
    (encoded, decoded)
}

const fn equals(text: &[u8], other: &[u8]) -> bool {
    text.len() == other.len() && starts_with(text, other)
}

const fn starts_with(text: &[u8], prefix: &[u8]) -> bool {
    text.len() >= prefix.len() && contains_at(text, 0, prefix)
}

const fn ends_with(text: &[u8], suffix: &[u8]) -> bool {
    text.len() >= suffix.len() && contains_at(text, text.len() - suffix.len(), suffix)
}

const fn contains_at(text: &[u8], offset: usize, part: &[u8]) -> bool {
    let mut index = 0;
    while index < part.len() {
        if text[offset + index] != part[index] {
            return false;
        }
        index += 1;
    }
    true
}
