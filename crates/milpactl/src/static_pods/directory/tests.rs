use std::{
    fs,
    os::unix::fs::{MetadataExt, symlink},
};

use super::*;

fn pods(names: &[&str]) -> Vec<StaticPod> {
    let pod = |name: &&str| StaticPod {
        name: PodName::new(None, name).unwrap(),
        file: "pods.yaml".to_owned(),
        json: format!("\"{name}\""),
    };
    names.iter().map(pod).collect()
}

fn opened(dir: &Path) -> StaticPodDirectory {
    StaticPodDirectory::open(Some(dir.to_owned())).unwrap()
}

/// Returns the names in a directory, sorted.
fn files(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Verifies O50, O52.
#[test]
fn files_of_pods_are_written_all_or_none_and_removed_by_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let directory = opened(dir.path());
    directory.put(&pods(&["web", "cart"])).unwrap();
    let both = ["kiyot-default_cart.json", "kiyot-default_web.json"];
    assert_eq!(files(dir.path()), both);
    let web = dir.path().join(both[1]);
    assert_eq!(fs::read_to_string(&web).unwrap(), "\"web\"");
    assert_eq!(fs::metadata(&web).unwrap().mode() & 0o777, 0o600);

    // The second pod exists: the file of the first pod is removed.
    let refused = directory.put(&pods(&["new", "web"])).unwrap_err().text();
    assert!(refused.starts_with("pod default/web exists: "), "{refused}");
    assert_eq!(files(dir.path()), both);

    directory.remove(&PodName::new(None, "web").unwrap()).unwrap();
    assert_eq!(files(dir.path()), both[..1]);
    let refused = directory.remove(&PodName::new(None, "web").unwrap()).unwrap_err();
    assert_eq!(refused.exit_code(), 66);
    let refused = refused.text();
    assert!(refused.contains("no static pod default/web"), "{refused}");
    assert!(refused.contains("there: default/cart;"), "{refused}");
}

/// Verifies O52.
#[test]
fn link_in_the_place_of_a_file_is_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("target");
    fs::write(&target, "kept").unwrap();
    let link = dir.path().join("kiyot-default_web.json");
    symlink(&target, &link).unwrap();
    let directory = opened(dir.path());
    assert!(directory.put(&pods(&["web"])).unwrap_err().text().contains("exists"));
    directory.remove(&PodName::new(None, "web").unwrap()).unwrap();
    assert_eq!(files(dir.path()), ["target"]);
    assert_eq!(fs::read_to_string(&target).unwrap(), "kept");
}

/// Verifies O52.
#[test]
fn directory_defaults_to_the_kubelets_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.yaml");
    let refused = |text: Option<&str>| {
        if let Some(text) = text {
            fs::write(&config, text).unwrap();
        }
        let refused = configured(&config).unwrap_err().text();
        let allowed = "; allowed: staticPodPath in the kubelet's configuration, or \
                       --static-pod-path DIRECTORY";
        assert!(refused.starts_with(config.to_str().unwrap()), "{refused}");
        assert!(refused.ends_with(allowed), "{refused}");
        refused
    };
    refused(None);
    for text in ["kind: KubeletConfiguration\n", "staticPodPath: \"\"\n", "staticPodPath: [1]\n"] {
        assert!(refused(Some(text)).contains(": has no staticPodPath;"), "{text}");
    }
    assert!(refused(Some("staticPodPath: [")).contains(": is not YAML"));
    assert!(refused(Some(&"#".repeat(1024 * 1024 + 1))).contains("more than 1048576 bytes"));
    for (text, expected) in [
        ("staticPodPath: /etc/pods\n", Path::new("/etc/pods").to_owned()),
        ("{\"staticPodPath\": \"pods\"}", dir.path().join("pods")),
    ] {
        fs::write(&config, text).unwrap();
        assert_eq!(configured(&config).unwrap(), expected);
    }
    let error = StaticPodDirectory::open(Some(config.clone())).unwrap_err().text();
    assert!(error.starts_with(config.to_str().unwrap()), "{error}");
    assert!(error.contains("Not a directory"), "{error}");
}
