//! The files of `examples/`.

use std::fs;

use kiyot_config::{self as config, HostAccessPolicy, Privileged};
use kiyot_engine::request::{LaunchType, keys::TARGET_RUNTIME};
use kiyot_manifest as manifest;

use crate::annotations;

/// Returns the files of the folder whose names end like this.
fn files(ending: &str) -> impl Iterator<Item = String> {
    let files = fs::read_dir("examples").unwrap().map(|file| file.unwrap().path());
    let files = files.map(|path| path.into_os_string().into_string().unwrap());
    files.filter(move |name| name.ends_with(ending))
}

fn text(name: &str) -> String {
    fs::read_to_string(name).unwrap()
}

fn config(name: &str) -> config::Config {
    config::parse(name, &text(name), []).unwrap_or_else(|problems| panic!("{problems}"))
}

fn pod(name: &str) -> manifest::Pod {
    let file = manifest::File { name: name.to_owned(), text: text(name) };
    manifest::parse_files(&[file]).unwrap_or_else(|problems| panic!("{problems}")).pods.remove(0)
}

/// Verifies T2.
#[test]
fn examples_are_valid() {
    for file in files(".toml") {
        config(&file);
    }
    for file in files(".yaml") {
        let pod = pod(&file);
        annotations::parse(&pod.metadata.annotations)
            .unwrap_or_else(|problems| panic!("{problems}"));
    }
}

#[test]
fn examples_match_their_names() {
    assert_eq!(config("examples/opt-in.toml").routing.default, "containerd");
    let out = config("examples/opt-out.toml");
    assert_eq!(out.routing.default, "milpa");
    assert!(
        out.routing.rules.iter().any(|rule| rule.daemonset == Some(true))
            && out.routing.rules.iter().any(|rule| rule.static_pod == Some(true))
    );
    let Some(config::BackendConfig::Milpa(milpa)) = out.backends.get("milpa") else { panic!() };
    let policy = milpa.policy;
    assert_eq!(
        [policy.host_network, policy.host_pid, policy.host_ipc, policy.host_users],
        [HostAccessPolicy::KeepLocal; 4]
    );
    assert_eq!(policy.privileged, Privileged::KeepLocal);
    let cell = pod("examples/pod-in-a-cell.yaml");
    assert_eq!(cell.metadata.annotations[TARGET_RUNTIME], "kiyot");
    assert_eq!(
        annotations::parse(&cell.metadata.annotations).unwrap().launch_type,
        LaunchType::Spot
    );
    assert!(
        !pod("examples/pod-on-the-node.yaml").metadata.annotations.contains_key(TARGET_RUNTIME)
    );
}
