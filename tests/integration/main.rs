//! Integration tests against real parts: containerd, runc, CNI plugins, and the daemon itself. They need root and namespaces of their own, which
//! cargo's runner gives them (scripts/runner), and fail without.

mod kit;
mod local;
