//! Kubernetes Pod YAML as the CRI messages that a kubelet would send. Pure.
