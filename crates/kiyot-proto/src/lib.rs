//! The messages and calls of `proto/`, generated at build time, and nothing else.
#![allow(missing_docs, unreachable_pub, missing_debug_implementations, rustdoc::all, clippy::all)]

pub use kiyot::{cell::v1 as cell, store::v1 as store};
pub use runtime::v1 as cri;

pub mod bounds;
pub mod codec;

// The modules follow the packages' names, because the generated code refers to one another by them.

/// CRI.
pub mod runtime {
    /// CRI v1, as of cri-api 0.36.3.
    pub mod v1 {
        tonic::include_proto!("runtime.v1");
    }
}

/// Kiyot's own.
pub mod kiyot {
    /// The agent of a cell.
    pub mod cell {
        /// Version 1.
        pub mod v1 {
            tonic::include_proto!("kiyot.cell.v1");
        }
    }
    /// What the daemon keeps on disk.
    pub mod store {
        /// Version 1.
        pub mod v1 {
            tonic::include_proto!("kiyot.store.v1");
        }
    }
}

/// The descriptors of all of `proto/`, an encoded `google.protobuf.FileDescriptorSet`.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
