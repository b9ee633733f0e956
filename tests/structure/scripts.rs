//! Scripts, and the image of cells that `make cell-image` builds.

use std::{
    collections::BTreeSet,
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

/// Returns what a program prints, without the end of the line.
fn printed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
}

#[test]
fn commit_of_a_checkout_is_marked_if_a_file_differs() {
    let directory = tempfile::tempdir().unwrap();
    let git = |line: &str| {
        let mut git = Command::new("git");
        let named = ["-c", "user.name=test", "-c", "user.email=test@localhost"];
        git.current_dir(&directory).env_remove("GIT_DIR").args(named).args(line.split(' '));
        printed(&mut git)
    };
    // Copies the script into the repository's root, or into a directory as of a source archive.
    let place = |place: &str| {
        let scripts = directory.path().join(place).join("scripts");
        fs::create_dir_all(&scripts).unwrap();
        let script = scripts.join("git-commit");
        fs::copy(tree::root().join("scripts/git-commit"), &script).unwrap();
        move || printed(Command::new(&script).env_remove("GIT_DIR"))
    };
    let (of_root, of_archive) = (place("."), place("archive"));
    assert_eq!((of_root(), of_archive()), Default::default(), "without a repository");
    git("init --quiet");
    git("add .");
    git("commit --quiet --message first");
    git("tag v1");
    let commit = git("rev-parse --short=12 HEAD");
    assert_eq!((of_root(), of_archive()), (commit.clone(), String::new()));
    fs::write(directory.path().join("new"), "").unwrap();
    git("add new");
    assert_eq!(of_root(), format!("{commit}-dirty"));
}

#[test]
fn makefile_gives_the_commit_to_the_build() {
    let make = |commit: Option<&str>| {
        let mut make = Command::new("make");
        make.args(["--silent", "--no-print-directory", "--eval"]);
        make.args(["print:;@echo \"$$KIYOT_GIT_COMMIT\"", "print"]).current_dir(tree::root());
        make.env_remove("MAKEFLAGS").env_remove("MAKELEVEL").env_remove("KIYOT_GIT_COMMIT");
        make.envs(commit.map(|commit| ("KIYOT_GIT_COMMIT", commit)));
        printed(&mut make)
    };
    let script = tree::root().join("scripts/git-commit");
    assert_eq!(make(None), printed(&mut Command::new(script)));
    assert_eq!(make(Some("given")), "given");
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

/// Returns the listed files that an image's root must not have: shells, login programs and setuid
/// programs.
fn unwanted(listing: &str) -> Vec<&str> {
    const SHELLS_AND_LOGINS: [&str; 10] =
        ["sh", "bash", "dash", "busybox", "sshd", "login", "agetty", "getty", "su", "shadow"];
    let is_unwanted = |line: &&str| {
        let mut fields = line.split_whitespace();
        let mode = fields.next().unwrap_or_default();
        // A link has its target last.
        let path = fields.find(|field| field.starts_with("squashfs-root")).unwrap_or_default();
        let name = path.rsplit('/').next().unwrap_or_default();
        let is_program = !mode.starts_with('d') && (mode.contains('x') || name == "shadow");
        let is_of_owner = mode.starts_with('-') && mode.contains(['s', 'S']);
        is_of_owner || is_program && SHELLS_AND_LOGINS.contains(&name)
    };
    listing.lines().filter(is_unwanted).collect()
}

#[test]
fn cell_image_has_no_shell_and_no_login() {
    let Ok(lock) = File::open(tree::root().join(CELL_IMAGE_LOCK)) else { return };
    lock.lock_shared().unwrap();
    let root = tree::root().join(CELL_IMAGE).join("root.squashfs");
    if !root.exists() {
        return;
    }
    let listing = Command::new("unsquashfs").arg("-lls").arg(root).output().unwrap();
    let listing = String::from_utf8(listing.stdout).unwrap();
    assert!(listing.contains("squashfs-root/usr/bin/containerd\n"), "{listing}");
    assert_eq!(unwanted(&listing), Vec::<&str>::new());
}

#[test]
fn shells_and_setuid_programs_are_unwanted() {
    let listing = "\
lrwxrwxrwx root/root     4 2026-11-16 10:17 squashfs-root/usr/bin/sh -> dash
-rwxr-xr-x root/root  1000 2026-11-16 10:17 squashfs-root/usr/bin/mount
-rwsr-xr-x root/root  1000 2026-11-16 10:17 squashfs-root/usr/bin/umount
-rwxr-sr-x root/mail  1000 2026-11-16 10:17 squashfs-root/usr/bin/write
drwxrwsr-x root/staff 1000 2026-11-16 10:17 squashfs-root/usr/local
-rw-r----- root/root   100 2026-11-16 10:17 squashfs-root/etc/shadow";
    let found = unwanted(listing).len();
    assert_eq!(found, 4, "{:?}", unwanted(listing));
}

#[test]
fn cell_image_is_small_and_lists_its_parts() {
    const MAX_BYTES: u64 = 90 << 20;
    let Ok(lock) = File::open(tree::root().join(CELL_IMAGE_LOCK)) else { return };
    lock.lock_shared().unwrap();
    let image = tree::root().join(CELL_IMAGE);
    let Ok(description) = fs::read(image.join("image.json")) else { return };
    let description: Value = serde_json::from_slice(&description).unwrap();
    let files = description["files"].as_object().unwrap();
    let size: u64 = files.values().map(|file| file["size"].as_u64().unwrap()).sum();
    assert!(size < MAX_BYTES, "{size} bytes, allowed: {MAX_BYTES}");

    let parts = fs::read(image.join("sbom.spdx.json")).unwrap();
    let parts: Value = serde_json::from_slice(&parts).unwrap();
    assert!(parts["spdxVersion"].as_str().unwrap().starts_with("SPDX-2."), "{parts}");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut ids = BTreeSet::from(["SPDXRef-DOCUMENT".to_owned()]);
    let mut names = BTreeSet::new();
    for package in parts["packages"].as_array().unwrap() {
        assert_ne!(text(&package["versionInfo"]), "", "{package}");
        assert!(ids.insert(text(&package["SPDXID"])), "repeated SPDXID: {package}");
        names.insert(text(&package["name"]));
        // Debian packages and the agent have a checksum; crates are found by name and version.
        let id = text(&package["SPDXID"]);
        if id.starts_with("SPDXRef-deb-") || id == "SPDXRef-agent" {
            assert_eq!(text(&package["checksums"][0]["algorithm"]), "SHA256", "{package}");
            assert_eq!(text(&package["checksums"][0]["checksumValue"]).len(), 64, "{package}");
        }
    }
    for name in ["kiyot-cell", "containerd", "runc", "kmod", "tokio"] {
        assert!(names.contains(name), "{name} is not listed");
    }
    for relationship in parts["relationships"].as_array().unwrap() {
        for end in ["spdxElementId", "relatedSpdxElement"] {
            assert!(ids.contains(&text(&relationship[end])), "{relationship}");
        }
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
