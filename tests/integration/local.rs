//! Pods that stay on the node, through the daemon.
