//! Dependencies between crates.

use figment::{
    Figment,
    providers::{Format, Toml},
};
use serde_json::Value;

use crate::tree;

fn dependencies(manifest: &str, table: &str) -> Vec<String> {
    let manifest: Value = Figment::from(Toml::string(&tree::text(manifest))).extract().unwrap();
    manifest[table]
        .as_object()
        .map(|dependencies| dependencies.keys().cloned().collect())
        .unwrap_or_default()
}

/// Crates that a crate must not depend on, by its manifest.
const FORBIDDEN: [(&str, &[&str]); 15] = [
    ("Cargo.toml", &["kiyot-cell", "kiyot-testcloud", "kiyot-testkit"]),
    ("crates/kiyot-proto/Cargo.toml", &["kiyot", "kiyot-cell", "kiyot-link", "kiyot-testkit"]),
    ("crates/kiyot-link/Cargo.toml", &["kiyot", "kiyot-cell", "kiyot-testkit", "redb"]),
    ("crates/kiyot-cell/Cargo.toml", &["kiyot", "kiyot-testkit", "redb"]),
    (
        "crates/kiyot-linux/Cargo.toml",
        &[
            "kiyot",
            "kiyot-cell",
            "kiyot-link",
            "kiyot-proto",
            "kiyot-testkit",
            "kiyot-tree",
            "redb",
        ],
    ),
    (
        "crates/kiyot-spdy/Cargo.toml",
        &["kiyot", "kiyot-cell", "kiyot-link", "kiyot-proto", "kiyot-testkit", "redb"],
    ),
    (
        "crates/kiyot-kubernetes/Cargo.toml",
        &["kiyot", "kiyot-cell", "kiyot-link", "kiyot-testkit", "redb"],
    ),
    ("crates/kiyot-testkit/Cargo.toml", &["kiyot", "kiyot-kubernetes", "redb"]),
    ("crates/kiyot-testcloud/Cargo.toml", &["kiyot", "redb"]),
    (
        "crates/kiyot-ec2/Cargo.toml",
        &["kiyot", "kiyot-cell", "kiyot-link", "kiyot-proto", "kiyot-testkit", "redb"],
    ),
    (
        "crates/kiyot-http2/Cargo.toml",
        &["kiyot", "kiyot-cell", "kiyot-link", "kiyot-proto", "kiyot-testkit", "redb", "h2"],
    ),
    (
        "crates/kiyot-manifest-files/Cargo.toml",
        &["kiyot", "kiyot-cell", "kiyot-link", "kiyot-proto", "kiyot-testkit", "redb", "tokio"],
    ),
    ("crates/milpactl/Cargo.toml", &["kiyot", "kiyot-cell", "kiyot-link", "redb"]),
    (
        "crates/kiyot-tree/Cargo.toml",
        &["kiyot", "kiyot-cell", "kiyot-link", "kiyot-proto", "kiyot-testkit", "redb"],
    ),
    (
        "crates/kiyot-values/Cargo.toml",
        &["kiyot", "kiyot-cell", "kiyot-link", "kiyot-proto", "kiyot-testkit", "redb", "tokio"],
    ),
];

/// Verifies T1.
#[test]
fn crates_depend_downwards_only() {
    for (manifest, forbidden) in FORBIDDEN {
        for table in ["dependencies", "build-dependencies"] {
            let found: Vec<_> = dependencies(manifest, table)
                .into_iter()
                .filter(|name| forbidden.contains(&name.as_str()))
                .collect();
            assert!(found.is_empty(), "{manifest}: [{table}] has {found:?}");
        }
    }
    // Agent, link and test kit never depend on the daemon, in their tests either.
    for manifest in [
        "crates/kiyot-cell/Cargo.toml",
        "crates/kiyot-testkit/Cargo.toml",
        "crates/kiyot-link/Cargo.toml",
    ] {
        assert!(
            !dependencies(manifest, "dev-dependencies").contains(&"kiyot".to_owned()),
            "{manifest}"
        );
    }
}

#[test]
fn crates_are_all_checked() {
    for manifest in tree::files("crates", "Cargo.toml") {
        assert!(
            FORBIDDEN.iter().any(|(known, _)| manifest == std::path::Path::new(known)),
            "{} is not in tests/structure/manifests.rs",
            manifest.display()
        );
    }
}

#[test]
fn crates_use_a_single_cryptography_library() {
    for manifest in tree::files(".", "Cargo.toml") {
        for name in dependencies(manifest.to_str().unwrap(), "dependencies") {
            assert!(
                !name.starts_with("aws-lc") && !name.starts_with("openssl") && name != "native-tls",
                "{} depends on {name}",
                manifest.display()
            );
        }
    }
}

#[test]
fn crates_use_the_lints_of_the_workspace() {
    for manifest in tree::files(".", "Cargo.toml") {
        // Generated code has no lints, and fuzz targets have their own.
        if !manifest.starts_with("crates/kiyot-proto") && !manifest.starts_with("fuzz") {
            assert!(
                tree::text(&manifest).contains("[lints]\nworkspace = true"),
                "{} lacks [lints] workspace = true",
                manifest.display()
            );
        }
    }
}
