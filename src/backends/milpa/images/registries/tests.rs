use super::*;

const OLD: &str = r#"{"registry": {"configPath": "", "mirrors": {"docker.io": {"endpoint": ["https://user:sesame@m.example"]}},
    "configs": {"m.example": {"auth": {"username": "violet", "password": "sesame"}, "tls": null}}, "headers": {"X-Team": ["sesame"]}}}"#;
const NEW: &str =
    r#"{"registry": {"configPath": "/etc/containerd/certs.d", "mirrors": null}, "other": 1}"#;

fn registries(state: &Path, configured: Option<&str>) -> Arc<Registries> {
    let node =
        NodeImages { socket: "/nowhere/containerd.sock".into(), namespace: "k8s.io".to_owned() };
    Registries::new(node, configured.map(PathBuf::from), state, PauseImage::new(None))
}

#[tokio::test]
async fn registry_configuration_of_the_node_reaches_cells() {
    let state = tempfile::tempdir().unwrap();
    let registries = registries(state.path(), None);
    let (given, warnings) = registries.apply(OLD, false).await;
    assert_eq!(given, Some(state.path().join("registries")));
    let made =
        std::fs::read_to_string(state.path().join("registries/docker.io/hosts.toml")).unwrap();
    assert!(made.contains("[host.\"https://m.example/v2\"]") && !made.contains("sesame"), "{made}");
    assert!(
        matches!(
            warnings.as_slice(),
            [headers] if headers.contains("registry.headers") && headers.contains("X-Team")
        ),
        "{warnings:?}"
    );
    assert_eq!(
        registries.credentials().of("docker.io/library/busybox:latest").unwrap().password,
        "sesame"
    );
    assert_eq!(registries.credentials().of("quay.example/app:1"), None);
    assert!(!format!("{warnings:?} {registries:?}").contains("sesame"), "{registries:?}");
    // The configuration changes.
    assert_eq!(
        registries.apply(NEW, false).await,
        (Some("/etc/containerd/certs.d".into()), vec![])
    );
    assert_eq!(registries.credentials().of("docker.io/library/busybox:latest"), None);
    assert_eq!(registries.apply("{}", false).await, (None, vec![]));
    assert!(!state.path().join("registries/docker.io").exists());
}

/// Verifies I17.
#[tokio::test]
async fn directory_of_the_operator_replaces_the_nodes_configuration() {
    let state = tempfile::tempdir().unwrap();
    let own = registries(state.path(), Some("/etc/certs"));
    let (given, warnings) = own.apply(OLD, false).await;
    assert_eq!(given, Some("/etc/certs".into()));
    assert!(
        warnings.iter().any(|warning| ["registry_config_dir", "registry.mirrors", "docker.io"]
            .iter()
            .all(|word| warning.contains(word))),
        "{warnings:?}"
    );
    assert!(!state.path().join("registries").exists());
    for json in [NEW, "{}"] {
        assert_eq!(own.apply(json, true).await, (Some("/etc/certs".into()), vec![]), "{json}");
    }
    assert_eq!(
        own.config_path().await,
        Some("/etc/certs".into()),
        "the node's containerd is absent"
    );
}

/// Verifies I16.
#[tokio::test]
async fn undisclosed_mirrors_are_logged() {
    let state = tempfile::tempdir().unwrap();
    let registries = registries(state.path(), None);
    let (given, warnings) = registries.apply("{}", true).await;
    assert!(
        given.is_none()
            && warnings[0].contains("registry.mirrors")
            && warnings[0].contains("registry_config_dir"),
        "{warnings:?}"
    );
    let (given, warnings) = registries.apply(r#"{"registry": {"mirrors": "sesame"}}"#, false).await;
    assert!(
        given.is_none() && warnings[0].contains("line 1") && !warnings[0].contains("sesame"),
        "{warnings:?}"
    );
    assert_eq!(registries.config_path().await, None);
    let warnings = registries.known().warnings.clone();
    assert!(warnings.iter().any(|warning| warning.contains("containerd unknown")), "{warnings:?}");
}

/// Verifies U27.
#[tokio::test(start_paused = true)]
async fn hung_containerd_delays_no_cell_once_its_settings_are_known() {
    let state = tempfile::tempdir().unwrap();
    let socket = state.path().join("containerd.sock");
    // Connections succeed, but nothing answers.
    let _hung = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let node = NodeImages { socket, namespace: "k8s.io".to_owned() };
    let registries = Registries::new(node, None, state.path(), PauseImage::new(None));
    let begun = tokio::time::Instant::now();
    assert_eq!(registries.settings().await, NodeSettings::default());
    assert_eq!(begun.elapsed(), CONTAINERD_TIMEOUT, "the first response is awaited");
    let (unusual, _) = NodeSettings::parse(r#"{"enableUnprivilegedPorts": false}"#).unwrap();
    {
        let mut known = registries.known();
        (known.has_answered, known.settings) = (true, unusual.clone());
    }
    tokio::time::advance(2 * CONFIG_MAX_AGE).await;
    let following = Arc::clone(&registries);
    let following = tokio::spawn(async move { following.follow().await });
    tokio::task::yield_now().await;
    let begun = tokio::time::Instant::now();
    assert_eq!(registries.settings().await, unusual);
    assert!(registries.files().await.is_empty());
    assert_eq!(begun.elapsed(), Duration::ZERO);
    following.abort();
}

/// Verifies U27.
#[tokio::test]
async fn unreadable_settings_of_the_node_are_named() {
    let json = "{\n\"maxContainerLogSize\": \"many\"}";
    let warning = settings(json).await.unwrap_err();
    let expected = "settings of the node's containerd invalid at line 2, column 29: cells keep the \
                    last known settings";
    assert_eq!(warning, expected);
    assert!(settings("no JSON").await.is_err());
}
