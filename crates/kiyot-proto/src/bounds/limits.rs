//! The limits of each message, in one place. Bytes.

/// The longest message on the control connection. The largest is a snapshot: some 500 bytes for
/// each container that an agent tells of, so 2,000 of them.
pub(super) const MAX_CONTROL_FRAME_BYTES: usize = 1 << 20;
/// The longest answer of a cell to a call. A part of a manifest or of a listing has 4 MiB.
pub(super) const MAX_RESPONSE_BYTES: usize = (4 << 20) + (64 << 10);
/// The longest answer to `ExecSync`: as much as a kubelet takes of a containerd.
pub(super) const MAX_EXEC_RESPONSE_BYTES: usize = 16 << 20;

/// The longest `HelloReply`, in bytes.
const MAX_HELLO_BYTES: usize = 16 << 10;
/// An agent's words about the end of a watch, in all that the status of gRPC may have.
const MAX_STATUS_BYTES: usize = 16 << 10;
/// A path, and a number.
const MAX_LOG_EVENT_BYTES: usize = 8 << 10;
/// All that CRI says of one container or sandbox. Kubernetes allows 256 KiB of annotations.
const MAX_POD_STATUS_BYTES: usize = 512 << 10;

/// The memory of a decoded message of the control connection: 256 containers with statistics and
/// 50 metrics each need 6 MiB by the rule of this module.
const MAX_CONTROL_MEMORY_BYTES: usize = 8 << 20;
/// The memory of a decoded answer. Text needs a quarter more than its length.
const MAX_RESPONSE_MEMORY_BYTES: usize = 8 << 20;
/// The memory of the decoded answer to `ExecSync`.
const MAX_EXEC_MEMORY_BYTES: usize = 24 << 20;
/// The memory of a decoded list. Agents read those of their own containerd, and tests those of
/// whole nodes; of a cell, the daemon asks for containers only.
const MAX_LIST_MEMORY_BYTES: usize = 48 << 20;
/// The memory of a decoded request. The daemon's are trusted by its agents.
const MAX_REQUEST_MEMORY_BYTES: usize = 48 << 20;

/// Returns the encoded bytes that a message may have, and the bytes that it may need when decoded.
pub(super) const fn for_message(name: &str) -> (usize, usize) {
    let name = name.as_bytes();
    let encoded = if equal(name, b"kiyot.cell.v1.FromCell") || equal(name, b"kiyot.cell.v1.ToCell")
    {
        MAX_CONTROL_FRAME_BYTES
    } else if equal(name, b"kiyot.cell.v1.HelloReply") {
        MAX_HELLO_BYTES
    } else if equal(name, b"kiyot.cell.v1.WatchEnd") {
        MAX_STATUS_BYTES
    } else if equal(name, b"kiyot.cell.v1.LogGrown") {
        MAX_LOG_EVENT_BYTES
    } else if equal(name, b"runtime.v1.ContainerStatus")
        || equal(name, b"runtime.v1.PodSandboxStatus")
    {
        MAX_POD_STATUS_BYTES
    } else {
        MAX_EXEC_RESPONSE_BYTES
    };
    let decoded = if equal(name, b"kiyot.cell.v1.FromCell") {
        MAX_CONTROL_MEMORY_BYTES
    } else if equal(name, b"runtime.v1.ExecSyncResponse") {
        MAX_EXEC_MEMORY_BYTES
    } else if begins(name, b"runtime.v1.List") || begins(name, b"runtime.v1.Stream") {
        MAX_LIST_MEMORY_BYTES
    } else if ends(name, b"Request") && !equal(name, b"kiyot.cell.v1.EnrolRequest") {
        MAX_REQUEST_MEMORY_BYTES
    } else {
        MAX_RESPONSE_MEMORY_BYTES
    };
    (encoded, decoded)
}

const fn equal(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && begins(one, other)
}

const fn begins(text: &[u8], with: &[u8]) -> bool {
    text.len() >= with.len() && is_at(text, 0, with)
}

const fn ends(text: &[u8], with: &[u8]) -> bool {
    text.len() >= with.len() && is_at(text, text.len() - with.len(), with)
}

const fn is_at(text: &[u8], from: usize, part: &[u8]) -> bool {
    let mut at = 0;
    while at < part.len() {
        if text[from + at] != part[at] {
            return false;
        }
        at += 1;
    }
    true
}
