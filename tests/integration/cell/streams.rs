//! Exec, attach and port-forward of pods in cells, as WebSocket clients speak them.
