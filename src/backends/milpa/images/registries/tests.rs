use super::*;

const OLD: &str = r#"{"registry": {"configPath": "", "mirrors": {"docker.io": {"endpoint": ["https://user:sesame@m.example"]}},
    "configs": {"m.example": {"auth": {"username": "violet", "password": "sesame"}, "tls": null}}, "headers": {"X-Team": ["sesame"]}}}"#;
const NEW: &str =
    r#"{"registry": {"configPath": "/etc/containerd/certs.d", "mirrors": null}, "other": 1}"#;

fn registries(state: &Path, configured: Option<&str>) -> Arc<Registries> {
    let node =
        NodeImages { socket: "/nowhere/containerd.sock".into(), namespace: "k8s.io".to_owned() };
    Registries::new(node, configured.map(PathBuf::from), state)
}

#[tokio::test]
async fn cells_are_given_what_the_node_has() {
    let state = tempfile::tempdir().unwrap();
    let registries = registries(state.path(), None);
    let (given, said) = registries.taken(OLD, false).await;
    assert_eq!(given, Some(state.path().join("registries")));
    let made =
        std::fs::read_to_string(state.path().join("registries/docker.io/hosts.toml")).unwrap();
    assert!(made.contains("[host.\"https://m.example/v2\"]") && !made.contains("sesame"), "{made}");
    assert!(
        matches!(said.as_slice(), [headers] if headers.contains("registry.headers") && headers.contains("X-Team")),
        "{said:?}"
    );
    assert_eq!(
        registries.credentials().of("docker.io/library/busybox:latest").unwrap().password,
        "sesame"
    );
    assert_eq!(registries.credentials().of("quay.example/app:1"), None);
    assert!(!format!("{said:?} {registries:?}").contains("sesame"), "{registries:?}");
    // It is configured anew.
    assert_eq!(
        registries.taken(NEW, false).await,
        (Some("/etc/containerd/certs.d".into()), vec![])
    );
    assert_eq!(registries.credentials().of("docker.io/library/busybox:latest"), None);
    assert_eq!(registries.taken("{}", false).await, (None, vec![]));
    assert!(!state.path().join("registries/docker.io").exists());
}

/// Verifies I17.
#[tokio::test]
async fn what_is_configured_for_cells_is_all_they_are_given_and_the_rest_is_named() {
    let state = tempfile::tempdir().unwrap();
    let own = registries(state.path(), Some("/etc/certs"));
    let (given, said) = own.taken(OLD, false).await;
    assert_eq!(given, Some("/etc/certs".into()));
    assert!(
        said.iter().any(|said| ["registry_config_dir", "registry.mirrors", "docker.io"]
            .iter()
            .all(|word| said.contains(word))),
        "{said:?}"
    );
    assert!(!state.path().join("registries").exists());
    for json in [NEW, "{}"] {
        assert_eq!(own.taken(json, true).await, (Some("/etc/certs".into()), vec![]), "{json}");
    }
    assert_eq!(
        own.config_path().await,
        Some("/etc/certs".into()),
        "the node's containerd is not there"
    );
}

/// Verifies I16.
#[tokio::test]
async fn what_the_node_does_not_tell_is_said() {
    let state = tempfile::tempdir().unwrap();
    let registries = registries(state.path(), None);
    let (given, said) = registries.taken("{}", true).await;
    assert!(
        given.is_none()
            && said[0].contains("registry.mirrors")
            && said[0].contains("registry_config_dir"),
        "{said:?}"
    );
    let (given, said) = registries.taken(r#"{"registry": {"mirrors": "sesame"}}"#, false).await;
    assert!(
        given.is_none() && said[0].contains("line 1") && !said[0].contains("sesame"),
        "{said:?}"
    );
    assert_eq!(registries.config_path().await, None);
    let said = registries.known.lock().await.said.clone();
    assert!(said.iter().any(|said| said.contains("does not say which mirrors")), "{said:?}");
}
