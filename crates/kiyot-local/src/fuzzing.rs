//! Fuzz targets of the files that the provider reads: its own and the node's.

use std::{
    ffi::OsStr,
    os::unix::ffi::OsStrExt,
    path::{Component, Path},
};

use kiyot_linux::mountinfo::{self, Mount};
use serde::{Serialize, de::DeserializeOwned};

use crate::{cgroup, instance::Known, network::Plan};

pub use crate::network::cni::fuzzing::cni;

/// Reads an instance's files. What can be read comes back as it was from where it is kept.
///
/// # Panics
/// If not.
pub fn files(bytes: &[u8]) {
    kept::<Known>(bytes);
    kept::<Plan>(bytes);
}

fn kept<T: Serialize + DeserializeOwned>(bytes: &[u8]) {
    let Ok(read) = serde_json::from_slice::<T>(bytes) else { return };
    let written = |value: &T| {
        serde_json::to_vec_pretty(value).unwrap_or_else(|error| panic!("it can't be kept: {error}"))
    };
    let first = written(&read);
    let again = serde_json::from_slice::<T>(&first)
        .unwrap_or_else(|error| panic!("what is kept can't be read: {error}"));
    assert_eq!(String::from_utf8_lossy(&written(&again)), String::from_utf8_lossy(&first));
}

/// Reads lines of `/proc/self/mountinfo` and `/proc/<pid>/cgroup`: any, and those that the kernel
/// would write of mounts whose roots and points are what is between the bytes 0. No process is in a
/// cgroup outside of what is mounted.
///
/// # Panics
/// If a line is read otherwise than it was written, or leads elsewhere.
pub fn mounts(bytes: &[u8]) {
    let hierarchies = cgroup::parse_hierarchies(bytes);
    for dir in cgroup::container_dirs(&hierarchies, bytes) {
        assert!(
            hierarchies.iter().any(|hierarchy| dir.starts_with(&hierarchy.mount)),
            "{}",
            dir.display()
        );
        assert!(dir.components().all(|part| part != Component::ParentDir), "{}", dir.display());
    }
    let mut text = Vec::new();
    let mut expected = Vec::new();
    let mut words = bytes.split(|byte| *byte == 0);
    while let (Some(root), Some(point)) = (words.next(), words.next()) {
        text.extend(b"36 35 98:0 ");
        written(root, &mut text);
        text.push(b' ');
        written(point, &mut text);
        text.extend(b" rw,noatime master:1 - cgroup2 name rw,nsdelegate\n");
        let path = |bytes| Path::new(OsStr::from_bytes(bytes)).to_owned();
        expected.push(Mount {
            device: "98:0".to_owned(),
            root: path(root),
            point: path(point),
            kind: "cgroup2".to_owned(),
            options: "rw,nsdelegate".to_owned(),
        });
    }
    assert_eq!(mountinfo::parse(&text), expected);
}

/// Escapes a path like the kernel (`seq_path`, with blanks, line ends, backslashes and, lately, `#`
/// as three octal digits).
fn written(path: &[u8], text: &mut Vec<u8>) {
    for byte in path {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' | b'#' => text.extend(format!("\\{byte:03o}").bytes()),
            _ => text.push(*byte),
        }
    }
}
