//! What tests and benches share: a private containerd, a CRI client that calls as a kubelet does, images made on the spot.
