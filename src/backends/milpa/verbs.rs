//! What the kubelet sees: the CRI calls of pods in cells.
