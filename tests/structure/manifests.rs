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

/// The crates of the workspace that a crate may depend on.
const MAY: &[(&str, &[&str])] = &[
    ("kiyot-values", &[]),
    ("kiyot-linux", &[]),
    ("kiyot-http2", &[]),
    ("kiyot-proto", &[]),
    ("kiyot-config", &["kiyot-values"]),
    ("kiyot-manifest", &["kiyot-linux", "kiyot-proto", "kiyot-values"]),
    ("kiyot-link", &[]),
    ("kiyot-kubernetes", &["kiyot-proto", "kiyot-values"]),
    ("kiyot-engine", &["kiyot-config", "kiyot-link", "kiyot-proto", "kiyot-values"]),
    ("kiyot-sim", &["kiyot-config", "kiyot-engine", "kiyot-link", "kiyot-proto", "kiyot-values"]),
    ("kiyot-local", &["kiyot-config", "kiyot-engine", "kiyot-link", "kiyot-linux", "kiyot-values"]),
    (
        "kiyot-ec2",
        &[
            "kiyot-config",
            "kiyot-engine",
            "kiyot-link",
            "kiyot-local",
            "kiyot-proto",
            "kiyot-values",
        ],
    ),
    ("kiyot-cell", &["kiyot-link", "kiyot-linux", "kiyot-proto"]),
    ("milpactl", &["kiyot-manifest", "kiyot-proto"]),
    ("kiyot-testkit", &["kiyot-cell", "kiyot-link", "kiyot-linux", "kiyot-proto", "milpactl"]),
    ("kiyot-testcloud", &["kiyot-testkit"]),
];

/// Crates without tasks and without sockets.
const PURE: &[&str] =
    &["kiyot-config", "kiyot-engine", "kiyot-manifest", "kiyot-sim", "kiyot-values"];

/// Verifies T1.
#[test]
fn crates_depend_downwards_only() {
    for path in tree::files("crates", "Cargo.toml") {
        let path = path.to_str().unwrap();
        let name = path.split('/').nth(1).unwrap();
        let Some((_, may)) = MAY.iter().find(|(known, _)| *known == name) else {
            panic!("{name} is not in tests/structure/manifests.rs")
        };
        let mut all = dependencies(path, "dependencies");
        all.extend(dependencies(path, "build-dependencies"));
        let own = |name: &&String| name.starts_with("kiyot") || *name == "milpactl";
        let own = all.iter().filter(own).filter(|name| !may.contains(&name.as_str()));
        assert_eq!(own.collect::<Vec<_>>(), <[&String; 0]>::default(), "{name}");
        let edges = all.iter().filter(|name| ["hyper", "tokio", "tonic"].contains(&name.as_str()));
        assert!(!PURE.contains(&name) || edges.count() == 0, "{name}: {all:?}");
        assert!(name == "kiyot-cell" || !all.contains(&"redb".to_owned()), "{name}: {all:?}");
    }
    let daemon = dependencies("Cargo.toml", "dependencies");
    for other in ["kiyot-cell", "kiyot-testcloud", "kiyot-testkit"] {
        assert!(!daemon.contains(&other.to_owned()), "the daemon depends on {other}");
    }
    // Agent, link and test kit never depend on the daemon, in their tests either.
    for name in ["kiyot-cell", "kiyot-testkit", "kiyot-link"] {
        let tests = dependencies(&format!("crates/{name}/Cargo.toml"), "dev-dependencies");
        assert!(!tests.contains(&"kiyot".to_owned()), "{name}");
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
