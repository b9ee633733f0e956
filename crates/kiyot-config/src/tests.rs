use std::time::Duration;

use proptest::prelude::*;

use super::*;

const MINIMAL: &str = "[backends.containerd]\ntype = \"cri\"\n";
const WITH_CELLS: &str =
    "[backends.containerd]\ntype = \"cri\"\n[backends.milpa]\ntype = \"milpa\"\n";

fn parsed(text: &str) -> Config {
    parse("test.toml", text, []).unwrap()
}

fn problems(text: &str) -> Vec<String> {
    parse("test.toml", text, []).unwrap_err().list.iter().map(ToString::to_string).collect()
}

fn milpa(config: &Config) -> &MilpaBackend {
    let Some(BackendConfig::Milpa(milpa)) = config.backends.get("milpa") else {
        panic!("no milpa in {config:?}")
    };
    milpa
}

#[test]
fn absent_keys_have_their_defaults() {
    let config = parsed(WITH_CELLS);
    assert_eq!(
        config.server,
        Server { node_backend: Some("containerd".into()), ..Server::default() }
    );
    assert_eq!(config.backends["containerd"], BackendConfig::Cri(CriBackend::default()));
    assert_eq!(milpa(&config), &MilpaBackend::default());
    assert_eq!(config.routing, Routing::default());
}

#[test]
fn file_sets_every_kind_of_value() {
    let text = format!(
        "{WITH_CELLS}max_cells = 3\nlaunch_timeout = \"1m 30s\"\n[backends.milpa.policy]\n\
         host_path = \"copy-read-only\"\n[backends.milpa.netns]\nsubnet = \"10.9.0.0/24\"\n\
         restrict_oom_score_adj = true\ncni_bin_dirs = [\"/a\", \"/b\"]\n[server]\n\
         drain_timeout = \"250ms\"\n[routing]\ndefault = \"milpa\"\n[[routing.rule]]\n\
         name = \"daemons\"\n\
         daemonset = true\nlabel = {{ app = \"x\" }}\nnamespace = [\"kube-*\"]\n\
         backend = \"containerd\"\n"
    );
    let config = parsed(&text);
    assert_eq!(
        (milpa(&config).max_cells, milpa(&config).launch_timeout),
        (3, Duration::from_secs(90))
    );
    assert_eq!(
        milpa(&config).policy,
        Policy { host_path: HostPath::CopyReadOnly, ..Policy::default() }
    );
    assert_eq!(milpa(&config).netns.network.subnet.to_string(), "10.9.0.0/24");
    assert!(milpa(&config).netns.restrict_oom_score_adj);
    assert_eq!(milpa(&config).netns.network.cni_bin_dirs.len(), 2);
    assert_eq!(config.server.drain_timeout, Duration::from_millis(250));
    let rule = &config.routing.rules[0];
    assert_eq!(
        (rule.name.as_str(), rule.daemonset, rule.static_pod, rule.backend.as_str()),
        ("daemons", Some(true), None, "containerd")
    );
    assert_eq!(
        (rule.label["app"].as_str(), rule.namespace.as_slice()),
        ("x", ["kube-*".to_owned()].as_slice())
    );
}

/// Verifies C4.
#[test]
fn environment_overrides_the_file() {
    let environment = [
        ("KIYOT_SERVER__DRAIN_TIMEOUT", "3s"),
        ("KIYOT_BACKENDS__MILPA__NETNS__BRIDGE", "br7"),
        ("KIYOT_LOG", "debug"),
        ("KIYOT_BACKENDS__MILPA__MAX_CELLS", "7"),
    ];
    let config = parse(
        "test.toml",
        &format!("{WITH_CELLS}max_cells = 3\n[server]\ndrain_timeout = \"1s\""),
        environment.map(|(key, value)| (key.into(), value.into())),
    )
    .unwrap();
    assert_eq!(config.server.drain_timeout, Duration::from_secs(3));
    assert_eq!(
        (milpa(&config).netns.network.bridge.as_str(), milpa(&config).max_cells),
        ("br7", 7)
    );
}

/// Verifies C4.
#[test]
fn problem_of_a_variable_names_the_variable() {
    let wrong = [("KIYOT_SERVER__LISTEN".to_owned(), "relative".to_owned())];
    let text = parse("test.toml", MINIMAL, wrong).unwrap_err().to_string();
    assert!(
        text.starts_with(
            "test.toml: server.listen = \"relative\": is invalid; allowed: the absolute path of a \
             unix socket"
        ),
        "{text}"
    );
    assert!(text.ends_with("(set by the environment variable KIYOT_SERVER__LISTEN)"), "{text}");
    // A longer key that begins with the variable's is another key.
    let fine = [("KIYOT_SERVER__LISTEN".to_owned(), "/run/k.sock".to_owned())];
    let text = parse("test.toml", &format!("{MINIMAL}[server]\nlistens = 1\n"), fine)
        .unwrap_err()
        .to_string();
    assert_eq!(text, "test.toml: server.listens: is an unknown key; did you mean: listen");
}

/// Verifies C1.
#[test]
fn all_problems_are_reported_at_once() {
    let text = "surplus = 1\n[server]\nlisten = \"x\"\ndrain_timeot = \"1s\"\n\
                max_concurrent_calls = 0\nclient_timeout = 5\n[backends.containerd]\n\
                type = \"cri\"\nsocket = 7\n\
                [backends.odd]\ntype = \"docker\"\n[routing]\ndefault = \"nowhere\"\n\
                [[routing.rule]]\nbackend = \"containerd\"\n";
    let found = problems(text);
    let expected = [
        "server.listen = \"x\": is invalid; allowed: the absolute path",
        "server.max_concurrent_calls = 0: is invalid; allowed: a whole number from 1 to 1000000",
        "server.client_timeout = 5: is invalid; allowed: a duration such as \"10s\" or \"2m\", \
         from 100ms to 1h",
        "server.drain_timeot: is an unknown key; did you mean: drain_timeout",
        "backends.containerd.socket = 7: is invalid; allowed: the absolute path",
        "backends.odd.type = \"docker\": is invalid; allowed: \"cri\", \"milpa\"",
        "routing.rule[0].name: is missing",
        "surplus: is an unknown key; allowed: server, metrics, admin, kubernetes, backends, \
         routing",
        "routing.default = \"nowhere\": is invalid; allowed: the name of a backend: containerd",
        "routing.rule[0]: has no condition",
    ];
    for start in expected {
        assert!(
            found.iter().any(|problem| problem.starts_with(start)),
            "{start:?} is not among {found:#?}"
        );
    }
    assert_eq!(found.len(), expected.len(), "{found:#?}");
}

/// Verifies C1.
#[test]
fn problems_after_the_hundredth_are_counted() {
    let keys: String = (0..103).map(|key| format!("k{key} = 1\n")).collect();
    let problems = parse("test.toml", &format!("{keys}{MINIMAL}"), []).unwrap_err();
    assert_eq!((problems.list.len(), problems.more), (100, 3));
}

/// Verifies A37, C2.
#[test]
fn contradicting_keys_are_reported() {
    let two = "[backends.a]\ntype = \"cri\"\nsocket = \"/a.sock\"\n[backends.b]\ntype = \"cri\"\n\
               socket = \"/b.sock\"\n[routing]\ndefault = \"a\"\n";
    let rule = "[[routing.rule]]\nname = \"r\"\nstatic = true\nbackend = \"containerd\"\n";
    let to_cells = |providers: &str| {
        format!("{WITH_CELLS}{}providers = {providers}", rule.replace("containerd", "milpa"))
    };
    let long = format!("/{}", "d".repeat(100));
    let cases = [
        (String::new(), "backends: is empty"),
        (
            two.to_owned(),
            "server.node_backend: is missing; with several backends of type \"cri\", allowed: a, b",
        ),
        (
            format!("{two}[server]\nnode_backend = \"c\""),
            "server.node_backend = \"c\": is invalid; allowed: a backend of type \"cri\": a, b",
        ),
        (
            format!("{two}[server]\nnode_backend = \"a\"\nlisten = \"/b.sock\""),
            "server.listen = \"/b.sock\": is the socket of backends.b.socket too",
        ),
        (
            format!("{}[server]\nnode_backend = \"a\"", two.replace("/b.sock", "/a.sock")),
            "backends.b.socket = \"/a.sock\": is the socket of backends.a too",
        ),
        (
            "[backends.m]\ntype = \"milpa\"\n[routing]\ndefault = \"m\"".to_owned(),
            "server.node_backend: is missing; allowed: a backend of type \"cri\"",
        ),
        (
            format!("{WITH_CELLS}[backends.more]\ntype = \"milpa\""),
            "backends: has several of type \"milpa\" (milpa, more)",
        ),
        (
            format!("{MINIMAL}[server]\nnode_backend = \"containerd\"\n{rule}{rule}"),
            "routing.rule[1].name = \"r\": is the name of another rule too",
        ),
        (
            format!("{MINIMAL}{}", rule.replace("containerd", "gone")),
            "routing.rule[0].backend = \"gone\": is invalid; allowed: the name of a backend: \
             containerd",
        ),
        (
            format!("{MINIMAL}{rule}providers = [\"ec2\"]"),
            "routing.rule[0].providers: is for cells, and rule \"r\" leads to backend \
             \"containerd\" on the node",
        ),
        (
            to_cells("[\"ec2\"]"),
            "routing.rule[0].providers = \"ec2\": is not a provider of backend \"milpa\", to which \
             rule \"r\" leads; allowed: \"netns\"",
        ),
        (
            to_cells("[\"azure\"]"),
            "routing.rule[0].providers[0] = \"azure\": is invalid; allowed: \"netns\", \"qemu\"",
        ),
        (
            to_cells("\"netns\""),
            "routing.rule[0].providers = \"netns\": is invalid; allowed: a list",
        ),
        (to_cells("[]"), "routing.rule[0].providers: is empty; allowed: one provider or more"),
        (
            to_cells("[\"netns\", \"netns\"]"),
            "routing.rule[0].providers[1] = \"netns\": is named twice; allowed: once",
        ),
        (format!("{MINIMAL}[server]\nlisten = \"{long}/{long}\""), "server.listen = "),
        (format!("{MINIMAL}[admin]\nlisten = \"{long}\""), "admin.listen = "),
        (
            format!("{MINIMAL}[server]\nlisten = \"/a.d/socket\"\n[admin]\nlisten = \"/a\""),
            "admin.listen = \"/a\" (which leads to \"/a.d/socket\"): is the socket of server",
        ),
        (format!("{WITH_CELLS}state_dir = \"{long}\""), "backends.milpa.state_dir = "),
        (
            format!("{WITH_CELLS}provider = \"sim\""),
            "backends.milpa.provider = \"sim\": is invalid; allowed: \"netns\", \"qemu\"",
        ),
        (
            format!("{WITH_CELLS}node = \"worker 1\""),
            "backends.milpa.node = \"worker 1\": is invalid; allowed: 1 to 253 letters, digits",
        ),
        (
            format!("{WITH_CELLS}cluster = \"{}\"", "c".repeat(254)),
            "backends.milpa.cluster = \"ccc",
        ),
        (
            format!("{WITH_CELLS}state_dir = \"var/lib\""),
            "backends.milpa.state_dir = \"var/lib\": is invalid; allowed: an absolute path",
        ),
        (
            format!("{WITH_CELLS}token_ttl = \"1m\""),
            "backends.milpa.token_ttl = 60s: is invalid; allowed: at least launch_timeout (120s)",
        ),
        (
            format!("{WITH_CELLS}orphan_timeout = \"-5s\""),
            "backends.milpa.orphan_timeout = \"-5s\": is invalid; allowed: a duration",
        ),
        (
            format!("{WITH_CELLS}[backends.milpa.netns]\nsubnet = \"fd00::/64\""),
            "backends.milpa.netns.subnet = \"fd00::/64\": is invalid; allowed: an IPv4 network",
        ),
        (
            format!("{WITH_CELLS}[backends.milpa.netns]\nbridge = \"a-name-too-long-for-linux\""),
            "backends.milpa.netns.bridge = ",
        ),
        (
            format!("{WITH_CELLS}[backends.milpa.netns]\nbridge = \"br+\""),
            "backends.milpa.netns.bridge = \"br+\": is invalid; allowed: the name of a network \
             device",
        ),
        (
            format!(
                "{MINIMAL}[backends.Bad_Name]\ntype = \"cri\"\nsocket = \"/x.sock\"\n[server]\n\
                 node_backend = \"containerd\""
            ),
            "backends.Bad_Name = a table: is not a valid name",
        ),
        (
            format!("{WITH_CELLS}[backends.milpa.placement]\nexclude = [\"\"]"),
            "backends.milpa.placement.exclude[0] = \"\": is invalid; allowed: an instance type",
        ),
        (
            format!("{WITH_CELLS}[backends.milpa.placement]\nzones = [\"a\", \"b c\"]"),
            "backends.milpa.placement.zones[1] = \"b c\": is invalid; allowed: the name of a zone",
        ),
        (
            format!("{WITH_CELLS}[backends.milpa.placement]\nzones = [{}]", "\"a\", ".repeat(33)),
            "backends.milpa.placement.zones[0] = \"a\": is one of 33 zones; allowed: 32",
        ),
        (
            format!("{WITH_CELLS}[backends.milpa.netns]\nreserve_memory = \"1023Ki\""),
            "backends.milpa.netns.reserve_memory = \"1023Ki\": is invalid; allowed: a number",
        ),
        (
            format!("{WITH_CELLS}[backends.milpa.placement]\nspot_deadline = \"11m\""),
            "backends.milpa.placement.spot_deadline = \"11m\": is invalid; allowed: a duration",
        ),
        (
            format!("{WITH_CELLS}[backends.milpa.limits]\nprice_per_hour = \"-1\""),
            "backends.milpa.limits.price_per_hour = \"-1\": is invalid; allowed: dollars",
        ),
        ("not toml".to_owned(), "the text: is not TOML"),
    ];
    for (text, start) in cases {
        let found = problems(&text);
        assert!(
            found.len() == 1 && found[0].starts_with(start),
            "{start:?} is not the only one of {found:#?} of\n{text}"
        );
    }
}

#[test]
fn bounds_of_zones_and_reserved_memory_are_allowed() {
    let config = parsed(&format!(
        "{WITH_CELLS}[backends.milpa.netns]\nreserve_memory = \"1Mi\"\n\
         [backends.milpa.placement]\nzones = [{}]",
        "\"a\", ".repeat(32)
    ));
    let milpa = milpa(&config);
    assert_eq!(milpa.placement.zones.len(), 32);
    assert_eq!(milpa.netns.machine.reserve_memory, Some(1 << 20));
}

#[test]
fn node_containerd_defaults_to_the_node_backend() {
    let text = WITH_CELLS.replacen("\"cri\"\n", "\"cri\"\nsocket = \"/elsewhere.sock\"\n", 1);
    assert_eq!(milpa(&parsed(&text)).node_containerd, Path::new("/elsewhere.sock"));
    assert_eq!(
        milpa(&parsed(&format!("{text}node_containerd = \"/third.sock\""))).node_containerd,
        Path::new("/third.sock")
    );
}

#[test]
fn absent_file_is_a_problem() {
    let text = load(Path::new("/nonexistent/kiyot.toml")).unwrap_err().to_string();
    assert!(text.starts_with("/nonexistent/kiyot.toml: the file: can't be read"), "{text}");
}

/// Verifies C8.
#[test]
fn socket_that_leads_back_to_kiyot_is_refused_for_any_path() {
    let dir = tempfile::tempdir().unwrap();
    let top = std::fs::canonicalize(dir.path()).unwrap();
    std::fs::create_dir(top.join("run")).unwrap();
    std::os::unix::fs::symlink("run", top.join("var-run")).unwrap();
    let problems = |listen: &str, first: &str, second: &str, images: &str| {
        let at = |name: &str| top.join(name).display().to_string();
        let text = format!(
            "[server]\nlisten = {:?}\nnode_backend = \"a\"\n[backends.a]\ntype = \"cri\"\n\
             socket = {:?}\n[backends.b]\ntype = \"cri\"\nsocket = {:?}\n\
             [backends.m]\ntype = \"milpa\"\nnode_containerd = {:?}\n[routing]\ndefault = \"a\"\n",
            at(listen),
            at(first),
            at(second),
            at(images)
        );
        std::fs::write(top.join("kiyot.toml"), text).unwrap();
        load(&top.join("kiyot.toml")).err().map(|problems| {
            problems.list.iter().map(|problem| format!("{} {}", problem.at, problem.rule)).collect()
        })
    };
    assert_eq!(problems("run/k.sock", "run/a.sock", "run/b.sock", "var-run/a.sock"), None);
    let own = |key: &str| {
        Some(vec![format!(
            "server.listen is the socket of backends.{key} too; allowed: a path of its own"
        )])
    };
    assert_eq!(
        problems("run/k.sock", "var-run/k.sock", "run/b.sock", "run/a.sock"),
        own("a.socket")
    );
    assert_eq!(
        problems("var-run/k.sock", "run/a.sock", "run/b.sock", "run/k.sock"),
        own("m.node_containerd")
    );
    for admin in ["var-run/admin.sock", "var-run/admin.sock.d/socket"] {
        let problem = "admin.listen is the socket of backends.b.socket too; allowed: a path of its \
                       own";
        assert_eq!(
            problems("run/k.sock", "run/a.sock", admin, "run/a.sock"),
            Some(vec![problem.to_owned()])
        );
    }
    let twice = vec![
        "backends.b.socket is the socket of backends.a too; allowed: a socket for each backend"
            .to_owned(),
    ];
    assert_eq!(problems("run/k.sock", "var-run/a.sock", "run/a.sock", "run/a.sock"), Some(twice));
}

/// Verifies C8.
#[test]
fn malformed_files_are_problems() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kiyot.toml");
    let reported = |content: &[u8]| {
        std::fs::write(&path, content).unwrap();
        load(&path).unwrap_err().list.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    for (content, expected) in [
        (
            &b""[..],
            "backends: is empty; allowed: one backend or more, such as \
                    [backends.containerd] with type = \"cri\"",
        ),
        (b"[server]\nlisten = \"/\xff\"\n", "the file: is not UTF-8 at byte 21"),
        (b"\0", "the text: is not TOML: "),
        (
            b"[backends.c]\ntype = \"cri\"\ntype = \"cri\"\n",
            "the text: is not TOML: TOML parse \
            error at line 3, column 1",
        ),
        (
            b"[backends.c]\ntype = \"cri\"\n[backends.c]\nsocket = \"/c\"\n",
            "the text: is not TOML: \
            TOML parse error at line 3, column 1",
        ),
        (&[b'#'; 2 << 20], "the file: is too long; allowed: 1048576 bytes"),
        (
            b"server = 1\nbackends = []\nrouting = \"x\"\n",
            "server = 1: is invalid; allowed: a \
            table",
        ),
        (
            b"[backends]\ncontainerd = \"cri\"\n",
            "backends.containerd = \"cri\": is invalid; \
            allowed: a table",
        ),
        (
            b"[backends.c]\ntype = \"cri\"\n[backends.m]\ntype = \"milpa\"\nprovider = \"gce\"\n\
              [routing]\ndefault = \"c\"\n",
            "backends.m.provider = \"gce\": is invalid; allowed: \"netns\", \"qemu\"",
        ),
    ] {
        let reported = reported(content);
        assert!(
            reported.iter().any(|problem| problem.starts_with(expected)),
            "{expected:?} is not in \
            {reported:#?}"
        );
    }
    let directory = load(dir.path()).unwrap_err().to_string();
    assert!(
        directory.ends_with("the file: can't be read: Is a directory (os error 21)"),
        "{directory}"
    );
}

/// Returns config/kiyot.toml as it is, and with all keys in comments (`#key`, without a space)
/// active.
fn shipped() -> (String, String) {
    let text = std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/kiyot.toml"),
    )
    .unwrap();
    let uncommented = text.lines().map(|line| {
        line.strip_prefix('#').filter(|rest| !rest.starts_with([' ', '#'])).unwrap_or(line)
    });
    (text.clone(), uncommented.collect::<Vec<_>>().join("\n"))
}

/// Verifies C4.
#[test]
fn every_key_of_the_shipped_file_has_a_variable() {
    let (_, full) = shipped();
    let (mut section, mut variables) = (None, Vec::new());
    for line in full.lines().filter(|line| !line.starts_with('#')) {
        if line.starts_with("[[") {
            // Variables can't name entries of an array.
            section = None;
        } else if let Some(name) = line.strip_prefix('[') {
            section = name.strip_suffix(']').map(|name| name.replace('.', "__"));
        } else if let (Some(section), Some((key, _))) = (&section, line.split_once(" = ")) {
            variables.push(format!("KIYOT_{section}__{key}").to_uppercase());
        }
    }
    assert!(variables.len() > 35, "{variables:?}");
    for variable in variables {
        // No key accepts this value: the problem shows which key was set.
        let wrong = [(variable.clone(), "[1]".to_owned())];
        let problems = parse("test.toml", &full, wrong).unwrap_err().to_string();
        assert!(problems.contains(&variable), "{variable}: {problems}");
    }
}

/// Verifies C3.
#[test]
fn shipped_file_has_the_defaults() {
    assert_eq!(parse("config/kiyot.toml", &shipped().0, []).unwrap(), parsed(WITH_CELLS));
}

/// Verifies C12.
#[test]
fn providers_are_at_most_one_on_the_node_and_ec2_in_any_order() {
    use ProviderKind::{Ec2, Netns, Qemu};
    let of = |keys: &str| {
        let remote = "[backends.milpa.gateway]\nlisten = \"10.0.0.5:7700\"\n\
                      [backends.milpa.ec2]\nregion = \"us-east-1\"\nsecurity_groups = [\"sg-1\"]\n\
                      image = { id = \"ami-1\" }\n";
        let text = format!("{WITH_CELLS}cluster = \"test\"\n{keys}\n{remote}");
        parse("test", &text, []).map(|config| milpa(&config).providers.clone())
    };
    assert_eq!(of("provider = \"ec2\"").unwrap(), [Ec2]);
    assert_eq!(of("providers = [\"netns\", \"ec2\"]").unwrap(), [Netns, Ec2]);
    assert_eq!(of("providers = [\"ec2\", \"qemu\"]").unwrap(), [Ec2, Qemu]);
    let is_on_the_node = |it| MilpaBackend::default().machine_of(it).is_some();
    assert_eq!([Netns, Qemu, Ec2].map(is_on_the_node), [true, true, false]);
    for (keys, expected) in [
        ("providers = []", "backends.milpa.providers: is empty, "),
        ("providers = [\"netns\", \"qemu\"]", "has several of cells on the node"),
        ("providers = [\"ec2\", \"ec2\"]", "or repeats one; allowed: \"netns\" or \"qemu\""),
        ("providers = [\"gce\"]", "\"gce\": is invalid"),
        ("provider = \"ec2\"\nproviders = [\"netns\"]", "excludes providers; allowed: one"),
        (
            "providers = [\"netns\"]\n[[backends.milpa.warm]]\ncount = 1\nprovider = \"ec2\"",
            "is not configured; allowed: one of providers",
        ),
    ] {
        let Err(problems) = of(keys) else { panic!("{keys} is valid") };
        assert!(problems.to_string().contains(expected), "{keys}: {problems}");
    }
}

/// Verifies C3.
#[test]
fn shipped_file_leaves_the_timeouts_to_the_provider() {
    let ec2 = "provider = \"ec2\"\ncluster = \"test\"";
    let text = shipped().0.replacen("\nprovider = \"netns\"", &format!("\n{ec2}"), 1);
    let keys = "region = \"us-east-1\"\nsecurity_groups = [\"sg-1\"]\nimage = { id = \"ami-1\" }";
    let head = "[backends.milpa.ec2]\n";
    assert!(text.contains(head));
    let text = text.replace(head, &format!("{head}{keys}\n"));
    let text = text.replace(
        "[backends.milpa.gateway]\n",
        "[backends.milpa.gateway]\nlisten = \"10.0.0.5:7700\"\n",
    );
    let config = parse("config/kiyot.toml", &text, []).unwrap();
    let milpa = milpa(&config);
    assert_eq!((milpa.launch_timeout.as_secs(), milpa.token_ttl.as_secs()), (600, 1200));
}

/// Verifies C3.
#[test]
fn shipped_file_has_every_key_with_a_comment() {
    let (text, full) = shipped();
    let config = parse("config/kiyot.toml, uncommented", &full, []).unwrap();
    assert!(
        config.routing.rules.len() >= 2
            && milpa(&config).netns.cell_binary.is_some()
            && milpa(&config).registry_config_dir.is_some()
    );
    let key_of = |line: &str| {
        line.trim_start_matches('#')
            .split_once(" = ")
            .map(|(key, _)| key.to_owned())
            .filter(|key| !key.contains(' '))
    };
    for (number, line) in text.lines().enumerate() {
        assert!(
            key_of(line).is_none() || text.lines().nth(number - 1).unwrap().starts_with("# "),
            "line {}: {line:?} has no comment before it",
            number + 1
        );
    }
    for key in every_key() {
        // The comment on `provider` shows it, because a file can't have both.
        let is_named = key == "providers" && text.contains("providers = [");
        assert!(
            is_named || text.lines().any(|line| key_of(line).as_deref() == Some(key)),
            "{key} is not in config/kiyot.toml"
        );
    }
}

/// Verifies C1.
#[test]
fn healthy_timeout_is_zero_or_in_its_range() {
    let with = |value: &str| {
        let head = "[backends.milpa]\n";
        WITH_CELLS.replace(head, &format!("{head}healthy_timeout = \"{value}\"\n"))
    };
    let limit = |value| milpa(&parsed(&with(value))).healthy_limit();
    assert_eq!((limit("0s"), limit("5s")), (None, Some(Duration::from_secs(5))));
    let problem = problems(&with("4s"));
    assert!(problem[0].contains("\"0s\" (never), or a duration such as"), "{problem:?}");
}

/// Verifies C1.
#[test]
fn warm_pools_are_read_and_checked() {
    let with = |pools: &str| format!("{WITH_CELLS}max_cells = 4\n{pools}");
    let pool = "[[backends.milpa.warm]]\n";
    let config = parsed(&with(&format!(
        "{pool}offering = \"t3.small\"\ncount = 2\nlaunch_type = \"Spot\"\nttl = \"5m\"\n\
         {pool}size = {{ cpu = \"500m\", memory = \"1Gi\" }}\ncount = 1\n{pool}count = 1\n"
    )));
    let expected = [
        WarmPool {
            kind: WarmKind::Offering("t3.small".into()),
            launch_type: WarmLaunchType::Spot,
            provider: None,
            count: 2,
            ttl: Duration::from_secs(300),
        },
        WarmPool {
            kind: WarmKind::Size { milli_cpus: 500, memory: 1 << 30 },
            count: 1,
            ..WarmPool::default()
        },
        WarmPool { count: 1, ..WarmPool::default() },
    ];
    assert_eq!(milpa(&config).warm, expected);
    for (pools, problem) in [
        (format!("{pool}count = 5\n"), "warm[0].count"),
        (format!("{pool}count = 3\n{pool}count = 2\noffering = \"a\"\n"), "warm[1].count"),
        (format!("{pool}count = 1\n{pool}count = 1\n"), "second pool of default size, On-Demand"),
        (format!("{pool}count = -1\n"), "warm[0].count"),
        (pool.to_owned(), "warm[0].count"),
        (format!("{pool}count = 1\noffering = \"t3.*\"\n"), "warm[0].offering"),
        (format!("{pool}count = 1\nttl = \"1s\"\n"), "from 1m to 168h"),
        (
            format!("{pool}count = 1\nsize = {{ cpu = \"0\", memory = \"1Gi\" }}\n"),
            "warm[0].size.cpu",
        ),
        (format!("{pool}count = 1\nsize = {{ cpu = \"1\" }}\n"), "warm[0].size.memory"),
        (
            format!(
                "{pool}count = 1\noffering = \"a\"\nsize = {{ cpu = \"1\", memory = \"1Gi\" }}\n"
            ),
            "excludes offering",
        ),
    ] {
        let problems = problems(&with(&pools));
        assert!(problems.len() == 1 && problems[0].contains(problem), "{pools}: {problems:?}");
    }
}

/// Lists every known key, from the problem of an unknown one.
fn every_key() -> Vec<&'static str> {
    let table = "[WHERE]\n\"\" = 1\n";
    let odd = format!(
        "{}{}{}{}{}{}[backends.c]\ntype = \"cri\"\n\"\" = 1\n\
         [backends.m]\ntype = \"milpa\"\n\"\" = 1\n\
         [[routing.rule]]\n\"\" = 1\n[backends.m.policy]\n\"\" = 1\n\
         [backends.m.placement]\n\"\" = 1\n[backends.m.limits]\n\"\" = 1\n\
         [[backends.m.warm]]\n\"\" = 1\nsize = {{ \"\" = 1 }}\n",
        table.replace("WHERE", "server"),
        table.replace("WHERE", "routing"),
        table.replace("WHERE", "backends.m.netns"),
        table.replace("WHERE", "backends.m.qemu"),
        table.replace("WHERE", "backends.m.gateway"),
        table.replace("WHERE", "backends.m.ec2"),
    );
    let keys = problems(&odd).into_iter().filter_map(|problem| {
        problem.split_once("is an unknown key; allowed: ").map(|(_, keys)| keys.to_owned())
    });
    let all: Vec<String> =
        keys.flat_map(|keys| keys.split(", ").map(str::to_owned).collect::<Vec<_>>()).collect();
    assert!(all.len() > 40, "{all:?}");
    // Tables that are headings in the file, and keys of inline tables.
    let tables = [
        "limits",
        "placement",
        "policy",
        "gateway",
        "netns",
        "qemu",
        "ec2",
        "rule",
        "warm",
        "cpu",
        "memory",
    ];
    all.into_iter().filter(|key| !tables.contains(&key.as_str())).map(|key| &*key.leak()).collect()
}

proptest! {
    #[test]
    fn arbitrary_text_is_a_configuration_or_a_problem(text in "\\PC{0,200}") {
        if let Err(problems) = parse("any", &text, []) {
            prop_assert!(!problems.list.is_empty());
        }
    }

    #[test]
    fn arbitrary_value_of_any_key_is_read_or_reported(
        value in r#"("[a-z0-9./:-]{0,20}"|-?[0-9]{1,19}|true|\["a", 1\]|\{ a = 1 \})"#,
        index in 0_usize..60,
    ) {
        let keys = every_key();
        let key = keys[index % keys.len()];
        for section in [
            "server",
            "routing",
            "backends.containerd",
            "backends.milpa",
            "backends.milpa.netns",
            "backends.milpa.qemu",
            "backends.milpa.policy",
            "backends.milpa.placement",
            "backends.milpa.limits",
        ] {
            let head = format!("[{section}]\n");
            let others = WITH_CELLS.replace(&head, &format!("{head}{key}x = 1\n"));
            let text = format!("{others}{head}{key} = {value}\n");
            if let Err(problems) = parse("any", &text, []) {
                prop_assert!(!problems.list.is_empty() && !problems.to_string().is_empty());
            }
        }
    }
}
