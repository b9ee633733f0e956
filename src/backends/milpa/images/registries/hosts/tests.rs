use super::*;

fn configured(registry: &str) -> Configured {
    Configured::parse(&format!(r#"{{"registry": {registry}}}"#)).unwrap().unwrap()
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    if path.starts_with("/certs") {
        Ok(path.display().to_string().into())
    } else {
        Err(io::ErrorKind::NotFound.into())
    }
}

fn planned(registry: &str) -> (BTreeMap<String, String>, Vec<String>) {
    let plan = plan(&configured(registry), &read);
    let files = plan
        .files
        .into_iter()
        .map(|(path, content)| (path.display().to_string(), String::from_utf8(content).unwrap()));
    (files.collect(), plan.problems.into_iter().collect())
}

/// Returns the endpoints of a file in the order of attempts.
fn tried(text: &str) -> Vec<String> {
    let hosts = text.lines().filter_map(|line| line.strip_prefix("[host.\"")?.strip_suffix("\"]"));
    let server =
        text.lines().filter_map(|line| line.strip_prefix("server = \"")?.strip_suffix('"'));
    hosts.chain(server).map(str::to_owned).collect()
}

/// Verifies I17.
#[test]
fn endpoints_follow_the_order_of_containerd() {
    for (registry, file, expected) in [
        // Mirrors in order, then the host itself; path /v2 by default, without user name and
        // password.
        (
            r#"{"mirrors": {"quay.example": {"endpoint": ["https://violet:sesame@b.example", "http://a.example:5000/proxy/v2"]}}}"#,
            "quay.example",
            vec![
                "https://b.example/v2",
                "http://a.example:5000/proxy/v2",
                "https://quay.example/v2",
            ],
        ),
        // Docker's host differs from the host in image names. Duplicates are removed.
        (
            r#"{"mirrors": {"docker.io": {"endpoint": ["m.example", "https://m.example"]}}}"#,
            "docker.io",
            vec!["https://m.example/v2", "https://registry-1.docker.io/v2"],
        ),
        // A host that is its own mirror, and a registry without certificates, occur once.
        (
            r#"{"mirrors": {"own.example:5000": {"endpoint": ["http://own.example:5000"]}}}"#,
            "own.example_5000_",
            vec!["http://own.example:5000/v2"],
        ),
        // The directory for all other hosts has no server, because the requested host is the
        // server.
        (
            r#"{"mirrors": {"*": {"endpoint": ["https://all.example"]}}}"#,
            "_default",
            vec!["https://all.example/v2"],
        ),
        // A host with certificates has the mirrors of all other hosts, and itself.
        (
            r#"{"mirrors": {"*": {"endpoint": ["https://all.example"]}}, "configs": {"tls.example": {"tls": {"insecure_skip_verify": true}}}}"#,
            "tls.example",
            vec!["https://all.example/v2", "https://tls.example/v2"],
        ),
        (
            r#"{"configs": {"registry-1.docker.io": {"tls": {"insecure_skip_verify": true}}}}"#,
            "docker.io",
            vec!["https://registry-1.docker.io/v2"],
        ),
    ] {
        let (files, problems) = planned(registry);
        let text = &files[&format!("{file}/hosts.toml")];
        assert_eq!(
            (tried(text), problems),
            (expected.into_iter().map(str::to_owned).collect(), vec![]),
            "{registry}"
        );
        assert!(!text.contains("sesame"), "{text}");
    }
}

#[test]
fn hosts_file_has_the_form_of_containerd() {
    let (files, _) = planned(
        r#"{"mirrors": {"quay.example": {"endpoint": ["https://m.example/api"]}}, "configs": {"m.example": {"tls":
            {"insecure_skip_verify": true, "caFile": "/certs/ca.crt", "certFile": "/certs/me.crt", "keyFile": "/certs/me.key"}}, "quay.example": {"tls": {"caFile": "/certs/q"}}}}"#,
    );
    let expected = r#"# Generated from registry.mirrors and registry.configs of the node's containerd.
server = "https://quay.example/v2"
capabilities = ["pull", "resolve"]
ca = ["1-ca.pem"]

[host."https://m.example/api"]
capabilities = ["pull", "resolve"]
override_path = true
ca = ["0-ca.pem"]
client = [["0-client.pem", "0-key.pem"]]
skip_verify = true
"#;
    assert_eq!(files["quay.example/hosts.toml"], expected);
    let copied = |name: &str| files[&format!("quay.example/{name}")].as_str();
    assert_eq!(
        ["0-ca.pem", "0-client.pem", "0-key.pem", "1-ca.pem"].map(copied),
        ["/certs/ca.crt", "/certs/me.crt", "/certs/me.key", "/certs/q"]
    );
    // Images of the mirror itself also use its certificates.
    assert!(
        files["m.example/hosts.toml"].ends_with("skip_verify = true\n\n[host]\n"),
        "{}",
        files["m.example/hosts.toml"]
    );
}

/// Verifies I16.
#[test]
fn unusable_settings_are_named() {
    let (files, problems) = planned(
        r#"{"mirrors": {"a.example": {"endpoint": ["http://127.0.0.1:5000", "http://[::1]:5000", "localhost:5000"]}, "../b": {"endpoint": []}, "localhost:5000": {"endpoint": []},
            "c.example": {"endpoint": ["ftp://violet:sesame@x", "https://"]}}, "configs": {"a.example": {"tls": {"caFile": "/none"}}, "d.example": {"tls": {"certFile": "/certs/c"}}}}"#,
    );
    assert_eq!(files.keys().collect::<Vec<_>>(), ["c.example/hosts.toml"]);
    assert_eq!(tried(&files["c.example/hosts.toml"]), ["https://c.example/v2"]);
    for word in [
        "127.0.0.1:5000",
        "[::1]:5000",
        "localhost:5000",
        "../b",
        "c.example",
        "/none can't be read",
        "cert_file and key_file",
    ] {
        assert!(problems.iter().any(|problem| problem.contains(word)), "{word}: {problems:?}");
    }
    assert!(!problems.concat().contains("sesame"), "{problems:?}");
}

#[test]
fn credentials_come_from_the_first_endpoint_with_credentials() {
    let old = configured(
        r#"{"mirrors": {"docker.io": {"endpoint": ["https://open.example", "https://m.example"]}}, "configs": {"m.example": {"auth": {"username": "v"}},
            "registry-1.docker.io": {"auth": {"username": "w"}}, "127.0.0.1:5000": {"auth": {"username": "x"}}}}"#,
    );
    assert_eq!(host_with_auth(&old, "docker.io").as_deref(), Some("m.example"));
    assert_eq!(
        (host_with_auth(&old, "quay.example"), host_with_auth(&old, "127.0.0.1:5000")),
        (None, None),
        "a pod may listen on its own loopback"
    );
    let new = configured(
        r#"{"configPath": "/certs", "configs": {"registry-1.docker.io": {"auth": {"username": "w"}}}}"#,
    );
    assert_eq!(host_with_auth(&new, "docker.io").as_deref(), Some("registry-1.docker.io"));
}
