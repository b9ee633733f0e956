//! What a container runtime and a kubelet may send, as any bytes. For kiyot-fuzz alone.

mod kubelet;
mod model;
mod runtime;
mod script;

pub use kubelet::kubelet;
pub use runtime::runtime;
