//! Scripts, and the image of cells that `make cell-image` builds.

use std::{
    fs::{self, File},
    io,
    path::Path,
    process::Command,
};

use ring::digest::{SHA256, digest};
use serde_json::Value;

use crate::tree;

/// Directory of the image of `make cell-image`.
const CELL_IMAGE: &str = "target/cell-image";
/// Lock that a build of the image holds.
const CELL_IMAGE_LOCK: &str = "target/cell-image-cache/lock";

/// Runs a checker of shell scripts. Returns its complaints, and `None` if it is not installed.
fn complaints(checker: &mut Command) -> Option<String> {
    match checker.output() {
        Ok(output) if output.status.success() => Some(String::new()),
        Ok(output) => Some(String::from_utf8([output.stdout, output.stderr].concat()).unwrap()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => panic!("{checker:?}: {error}"),
    }
}

/// Returns how the files of an image differ from its `image.json`.
fn differences(image: &Path) -> Vec<String> {
    let description = fs::read(image.join("image.json")).unwrap();
    let description: Value = serde_json::from_slice(&description).unwrap();
    let mut found = Vec::new();
    for (name, expected) in description["files"].as_object().unwrap() {
        let content = fs::read(image.join(name)).unwrap_or_default();
        if expected["size"] != content.len() {
            found.push(format!("{name}: {} bytes, expected {}", content.len(), expected["size"]));
        }
        let hash = hex::encode(digest(&SHA256, &content));
        if expected["sha256"] != hash.as_str() {
            found.push(format!("{name}: SHA-256 {hash}, expected {}", expected["sha256"]));
        }
    }
    found
}

#[test]
fn scripts_are_posix_shell() {
    for script in tree::files("scripts", "") {
        let path = tree::root().join(&script);
        if fs::read(&path).unwrap().starts_with(b"#!/bin/sh\n") {
            let found = complaints(Command::new("sh").arg("-n").arg(&path));
            assert_eq!(found.as_deref(), Some(""), "{}", script.display());
        }
    }
}

#[test]
fn cell_image_script_has_no_complaint_of_shellcheck() {
    let script = tree::root().join("scripts/cell-image");
    let found = complaints(Command::new("shellcheck").arg(script)).unwrap_or_default();
    assert_eq!(found, "");
}

#[test]
fn cell_image_matches_its_description() {
    // A build in progress replaces the files one by one.
    let Ok(lock) = File::open(tree::root().join(CELL_IMAGE_LOCK)) else { return };
    lock.lock_shared().unwrap();
    let image = tree::root().join(CELL_IMAGE);
    if image.join("image.json").exists() {
        assert_eq!(differences(&image), Vec::<String>::new());
    }
}

#[test]
fn changed_file_of_an_image_differs_from_its_description() {
    let image = tempfile::tempdir().unwrap();
    let hash = hex::encode(digest(&SHA256, b"kernel"));
    let description = serde_json::json!({"files": {"kernel": {"sha256": hash, "size": 6}}});
    fs::write(image.path().join("image.json"), description.to_string()).unwrap();
    fs::write(image.path().join("kernel"), "kernel").unwrap();
    assert_eq!(differences(image.path()), Vec::<String>::new());
    fs::write(image.path().join("kernel"), "kernal").unwrap();
    assert_eq!(differences(image.path()).len(), 1);
}
