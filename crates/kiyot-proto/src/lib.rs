//! The messages and services of `proto/`, with limits for decoding them.
#![allow(missing_docs, unreachable_pub, missing_debug_implementations, rustdoc::all, clippy::all)]

pub use kiyot::{admin::v1 as admin, cell::v1 as cell, store::v1 as store};
pub use runtime::v1 as cri;

pub mod bounds;
#[cfg(feature = "services")]
pub mod codec;
pub mod kernel_paths;
pub mod text;

// The modules have the packages' names, because generated code refers to other packages by name.

/// Container Runtime Interface.
pub mod runtime {
    /// CRI v1.
    pub mod v1 {
        include!(concat!(env!("OUT_DIR"), "/runtime.v1.rs"));
    }
}

/// Protocols and records of kiyot.
pub mod kiyot {
    /// The protocol between gateway and agent.
    pub mod cell {
        /// Version 1.
        pub mod v1 {
            include!(concat!(env!("OUT_DIR"), "/kiyot.cell.v1.rs"));
        }
    }
    /// The admin API, which milpactl calls.
    pub mod admin {
        /// Version 1.
        pub mod v1 {
            include!(concat!(env!("OUT_DIR"), "/kiyot.admin.v1.rs"));
        }
    }
    /// The daemon's records on disk.
    pub mod store {
        /// Version 1.
        pub mod v1 {
            include!(concat!(env!("OUT_DIR"), "/kiyot.store.v1.rs"));
        }
    }
}

/// The revision of the admin API. Each added method increments it.
pub const ADMIN_REVISION: u32 = 4;

/// The descriptors of all of `proto/`, an encoded `google.protobuf.FileDescriptorSet`.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
