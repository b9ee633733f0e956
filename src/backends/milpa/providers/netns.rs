//! Cells that are sets of namespaces on this node.
