use kiyot_engine::request::Architecture;

use super::*;

fn execute_line(line: &[&str]) -> Result<String, UsageError> {
    execute(Arguments::try_parse_from(line).unwrap().command, None).map(|output| output.text)
}

fn file(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name).display().to_string()
}

#[test]
fn valid_configuration_is_summarised() {
    let text = execute_line(&["kiyot", "check-config", "--config", &file("examples/opt-out.toml")])
        .unwrap();
    for line in [
        "is valid",
        "backend containerd: the container runtime at /run/containerd/containerd.sock, answers \
         for the node",
        "rule daemonsets-stay: to containerd",
        "other pods: to milpa",
    ] {
        assert!(text.contains(line), "{text}");
    }
}

/// Verifies V43.
#[test]
fn live_check_of_another_provider_checks_only_the_kubelet() {
    let path = file("examples/opt-out.toml");
    let line = ["kiyot", "check-config", "--live", "--config", &path];
    let output = execute(Arguments::try_parse_from(line).unwrap().command, None).unwrap();
    // A kubelet may run on the machine of the test.
    assert!(output.text.contains("\nkubelet"), "{}", output.text);
    assert!(!output.text.contains("check-config --live:"), "{}", output.text);
}

/// Verifies V43.
#[cfg(not(feature = "ec2"))]
#[test]
fn build_without_the_configured_provider_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kiyot.toml");
    let text = format!(
        "[server]\nlisten = \"{dir}/kiyot.sock\"\n[backends.containerd]\ntype = \"cri\"\n\
         [backends.milpa]\ntype = \"milpa\"\nprovider = \"ec2\"\ncluster = \"test\"\n\
         state_dir = \"{dir}/state\"\n[backends.milpa.gateway]\nlisten = \"127.0.0.1:7700\"\n\
         [backends.milpa.ec2]\nregion = \"us-east-1\"\nsubnets = [\"subnet-1\"]\n\
         security_groups = [\"sg-1\"]\nimage = {{ id = \"ami-1\" }}\n",
        dir = dir.path().display()
    );
    std::fs::write(&path, &text).unwrap();
    let reason = "this program was built without \"ec2\" (cargo build --features ec2)";
    let path = path.display().to_string();
    for (line, code) in [
        (vec!["kiyot", "check-config", "--config", &path], ExitCode::SUCCESS),
        (vec!["kiyot", "check-config", "--live", "--config", &path], ExitCode::FAILURE),
    ] {
        let output = execute(Arguments::try_parse_from(line).unwrap().command, None).unwrap();
        assert!(output.text.contains(reason), "{}", output.text);
        assert_eq!(output.code, code, "{}", output.text);
    }
    let config = config::parse("kiyot.toml", &text, []).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let started = runtime.block_on(app::App::start(&config, false, Default::default(), None));
    let error = started.err().unwrap().to_string();
    assert_eq!(error, format!("the provider of backend milpa: {reason}"));
}

#[test]
fn version_names_the_commit_of_the_build() {
    let package = env!("CARGO_PKG_VERSION");
    for (commit, shown) in [(Some("0123456789ab-dirty"), "0123456789ab-dirty"), (None, "unknown")] {
        let output = execute(Command::Version, commit).unwrap();
        assert_eq!(output.text, format!("kiyot {package}, commit {shown}, CRI v1\n"));
    }
}

/// Verifies C5.
#[test]
fn invalid_configuration_is_a_usage_error() {
    let Err(UsageError(text)) =
        execute_line(&["kiyot", "check-config", "--config", "/nonexistent/kiyot.toml"])
    else {
        panic!()
    };
    assert!(text.contains("/nonexistent/kiyot.toml: the file: can't be read"), "{text}");
    assert_eq!(
        run(["kiyot", "serve", "--config", "/nonexistent/kiyot.toml"].map(Into::into), None),
        ExitCode::from(EXIT_USAGE)
    );
}

#[test]
fn all_problems_of_a_configuration_are_reported_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kiyot.toml");
    std::fs::write(
        &path,
        format!(
            "{OPT_IN}[server]\nlisten = \"x\"\n[backends.milpa.policy]\n\
        host_pid = \"yes\"\nhost_namespaces = \"refuse\"\n"
        ),
    )
    .unwrap();
    let Err(UsageError(text)) =
        execute_line(&["kiyot", "check-config", "--config", &path.display().to_string()])
    else {
        panic!()
    };
    for problem in [
        "server.listen = \"x\": is invalid; allowed: the absolute path",
        "backends.milpa.policy.host_pid = \"yes\": is invalid; allowed: \"refuse\", \
         \"keep-local\", \"cell\"",
        "backends.milpa.policy.host_namespaces: is an unknown key",
    ] {
        assert!(text.contains(problem), "{problem} is not in {text}");
    }
}

fn explained(config: &str, manifest: &str) -> (String, bool) {
    let config = config::parse("config", config, []).unwrap();
    let file = manifest::File { name: "manifest".into(), text: manifest.into() };
    let manifest = manifest::parse_files(&[file]).unwrap_or_else(|problems| panic!("{problems}"));
    let output = Output::from(explain::explain(&config, &manifest, Prices::BuiltIn));
    (output.text, output.code == ExitCode::SUCCESS)
}

fn pod(annotations: &str, spec: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: p, annotations: {{{annotations}}}}}\n\
         spec:\n  containers: [{{name: c, image: i}}]\n{spec}"
    )
}

const OPT_IN: &str = include_str!("../../examples/opt-in.toml");
const OPT_OUT: &str = include_str!("../../examples/opt-out.toml");
const IN_A_CELL: &str = "kubernetes.io/target-runtime: kiyot";

/// Verifies C7.
#[test]
fn examples_are_explained() {
    for (name, parts) in [
        (
            "examples/pod-in-a-cell.yaml",
            &[
                "Pod default/pod-in-a-cell\n  goes to milpa: its annotation \
                 kubernetes.io/target-runtime names it",
                "launch type Spot",
                "type that matches c5*",
                "20 GiB",
            ][..],
        ),
        (
            "examples/pod-on-the-node.yaml",
            &["Pod default/pod-on-the-node\n  goes to containerd: no rule matches; this is \
                 routing.default\n"],
        ),
    ] {
        let text = execute_line(&[
            "kiyot",
            "explain",
            "--config",
            &file("examples/opt-in.toml"),
            "-f",
            &file(name),
        ])
        .unwrap();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}

/// Verifies A37.
#[test]
fn providers_of_a_rule_are_shown_and_honoured() {
    let text = "[backends.containerd]\ntype = \"cri\"\n[backends.milpa]\ntype = \"milpa\"\n\
                providers = [\"netns\", \"ec2\"]\ncluster = \"test\"\n\
                [backends.milpa.gateway]\nlisten = \"10.0.0.5:7700\"\n\
                [backends.milpa.ec2]\nregion = \"us-east-1\"\nsubnets = [\"subnet-1\"]\n\
                security_groups = [\"sg-1\"]\nimage = { id = \"ami-1\" }\n\
                [[routing.rule]]\nname = \"batch\"\nnamespace = [\"*\"]\nbackend = \"milpa\"\n\
                providers = [\"ec2\"]\n";
    let config = config::parse("config", text, []).unwrap();
    let summary = summary::of(Path::new("config"), &config);
    assert!(summary.contains("rule batch: to milpa, in cells of ec2\n"), "{summary}");
    let (explanation, fine) = explained(text, &pod("", ""));
    assert!(fine, "{explanation}");
    for line in [
        "goes to milpa: rule batch matches first, with providers \"ec2\"",
        "with netns: refused: the routing rule \"batch\" allows \"ec2\"",
        "ranking of all providers: t3a.micro (On-Demand)",
    ] {
        assert!(explanation.contains(line), "{explanation}");
    }
    let (explanation, fine) = explained(text, &pod("pod.elotl.co/provider: netns", ""));
    let both = "\n  refused: pod.elotl.co/provider asks for \"netns\", and the routing rule \
                \"batch\" allows \"ec2\"";
    assert!(!fine && explanation.contains(both), "{explanation}");
    // The annotation that sends a pod to cells wins over all rules.
    let own = "kubernetes.io/target-runtime: kiyot, pod.elotl.co/provider: netns";
    let (explanation, fine) = explained(text, &pod(own, ""));
    assert!(fine && explanation.contains("ranking of all providers: netns"), "{explanation}");
}

/// Verifies C7.
#[test]
fn every_reason_is_explained() {
    for (config, manifest, why) in [
        (
            OPT_IN,
            pod("", "  runtimeClassName: kiyot"),
            "goes to milpa: it declares the runtime handler kiyot",
        ),
        (OPT_OUT, pod("", ""), "goes to milpa: no rule matches"),
        (
            OPT_OUT,
            pod("kubernetes.io/target-runtime: containerd", ""),
            "goes to containerd: rule on-request matches first",
        ),
        (
            OPT_OUT,
            pod("kubernetes.io/config.source: file", ""),
            "goes to containerd: rule static-pods-stay matches first",
        ),
        (
            OPT_OUT,
            pod("", "").replace(
                "{name: p,",
                "{name: p, labels: {controller-revision-hash: a, pod-template-generation: \"1\"},",
            ),
            "goes to containerd: rule daemonsets-stay matches first",
        ),
        (
            OPT_OUT,
            pod("", "  hostNetwork: true"),
            "goes to containerd instead of milpa: it asks for the node's network (hostNetwork), \
             and policy.host_network is \"keep-local\"",
        ),
    ] {
        let (text, fine) = explained(config, &manifest);
        assert!(fine && text.contains(why), "{text}");
    }
}

/// Verifies C7.
#[test]
fn refusals_are_explained() {
    let path = "  volumes: [{name: v, hostPath: {path: /srv/data}}]\n";
    let mounting = |spec: &str| {
        pod(IN_A_CELL, spec)
            .replace("image: i", "image: i, volumeMounts: [{name: v, mountPath: /v}]")
    };
    for (manifest, why) in [
        (
            pod("kubernetes.io/target-runtime: other", ""),
            "refused: annotation kubernetes.io/target-runtime has the value \"other\"; allowed is \
             \"kiyot\"",
        ),
        (
            pod(
                &format!(
                    "{IN_A_CELL}, pod.elotl.co/launch-type: cheap, pod.elotl.co/volume-size: big"
                ),
                "",
            ),
            "refused: pod.elotl.co/launch-type = \"cheap\": is invalid; allowed:",
        ),
        (
            pod(IN_A_CELL, "  hostPID: true"),
            "refused: pod default/p asks for the node's processes (hostPID)",
        ),
        (
            pod(IN_A_CELL, "").replace("image: i", "image: i, securityContext: {privileged: true}"),
            "refused: container \"c\" asks for all privileges",
        ),
        (
            mounting(path),
            "refused: container \"c\" mounts /srv/data of the node, and policy.host_path is \
             \"refuse\"",
        ),
    ] {
        let (text, fine) = explained(OPT_IN, &manifest);
        assert!(!fine && text.contains(why), "{text}");
    }
    let copying = format!("{OPT_IN}[backends.milpa.policy]\nhost_path = \"copy-read-only\"\n");
    let (text, fine) = explained(&copying, &mounting(path));
    assert!(
        !fine
            && text.contains(
                "mounts /srv/data of the node writable, and policy.host_path \
        allows read-only copies"
            ),
        "{text}"
    );
    let (text, fine) = explained(
        &copying,
        &mounting(path).replace("mountPath: /v", "mountPath: /v, readOnly: true"),
    );
    assert!(fine && text.contains("note: container \"c\" gets a copy of /srv/data"), "{text}");
}

/// Verifies R9.
#[test]
fn kernel_access_of_a_container_is_explained() {
    let adding = |more: &str| {
        let security = "image: i, securityContext: {capabilities: {add: [SYS_ADMIN]}}";
        pod(IN_A_CELL, more).replace("image: i", security)
    };
    let refused = "refused: container \"c\" asks for the capability SYS_ADMIN, which reaches the \
                   node's kernel (policy.privileged is \"refuse\")";
    let (text, fine) = explained(OPT_IN, &adding(""));
    assert!(!fine && text.contains(refused), "{text}");
    let unmasked =
        pod(IN_A_CELL, "").replace("image: i", "image: i, securityContext: {procMount: Unmasked}");
    let (text, fine) = explained(OPT_IN, &unmasked);
    assert!(!fine && text.contains("an unmasked /proc (procMount: Unmasked)"), "{text}");

    let allowing = format!("{OPT_IN}[backends.milpa.policy]\nprivileged = \"allow\"\n");
    let (text, fine) = explained(&allowing, &adding(""));
    let given = "note: it has a container with the capability SYS_ADMIN, and policy.privileged is \
                 \"allow\"";
    assert!(fine && text.contains(given), "{text}");

    let keeping = format!("{OPT_IN}[backends.milpa.policy]\nprivileged = \"keep-local\"\n");
    let moved = "goes to containerd instead of milpa: it has a container with the capability \
                 SYS_ADMIN, which reaches the node's kernel, and policy.privileged is \
                 \"keep-local\"";
    for more in ["", "  initContainers: [{name: once, image: j}]"] {
        let (text, fine) = explained(&keeping, &adding(more));
        assert!(fine && text.contains(moved) && text.contains("first sandbox"), "{text}");
    }
    // A refused sandbox has no containers.
    let (text, fine) = explained(&keeping, &adding("  hostPID: true"));
    assert!(!fine && text.contains("goes to milpa") && text.contains("hostPID"), "{text}");
    let beside_one_that_runs =
        adding("  initContainers: [{name: beside, image: j, restartPolicy: Always}]");
    let (text, fine) = explained(&keeping, &beside_one_that_runs);
    assert!(
        !fine && text.contains("moves a pod to the node only while no container of it runs"),
        "{text}"
    );
}

/// Verifies R2.
#[test]
fn granted_host_access_is_explained() {
    let giving = format!(
        "{OPT_IN}[backends.milpa.policy]\nhost_network = \"cell\"\nhost_pid = \"cell\"\n\
         host_users = \"cell\"\nprivileged = \"cell\"\n"
    );
    let (text, fine) = explained(&giving, &pod(IN_A_CELL, "  hostNetwork: true\n  hostPID: true"));
    assert!(
        fine && text.contains(
            "note: it asks for the node's network (hostNetwork), and gets the network of its cell"
        ),
        "{text}"
    );
    assert!(
        text.contains(
            "note: it asks for the node's processes (hostPID), and gets the processes of its cell"
        ),
        "{text}"
    );
    let (text, fine) = explained(
        &giving,
        &pod(IN_A_CELL, "").replace("image: i", "image: i, securityContext: {privileged: true}"),
    );
    assert!(
        !fine
            && text.contains(
                "refused: pod default/p asks for all privileges \
                                (securityContext.privileged); policy.privileged is \"cell\", but"
            ),
        "{text}"
    );
    let allowing = giving.replace("privileged = \"cell\"", "privileged = \"allow\"");
    let (text, fine) = explained(
        &allowing,
        &pod(IN_A_CELL, "").replace("image: i", "image: i, securityContext: {privileged: true}"),
    );
    assert!(fine && text.contains("it is root on the node"), "{text}");
}

/// Verifies R2.
#[test]
fn policy_that_cells_can_not_keep_is_noted() {
    let config = config::parse(
        "config",
        &format!("{OPT_IN}[backends.milpa.policy]\nprivileged = \"cell\"\nhost_pid = \"cell\"\n"),
        [],
    )
    .unwrap();
    let text = summary::of(Path::new("config"), &config);
    let note = "note: backend milpa: policy.privileged is \"cell\", but cells of the provider \
                \"netns\" share the node's kernel";
    assert!(text.contains(note) && !text.contains("host_pid"), "{text}");
    assert!(
        !summary::of(Path::new("config"), &config::parse("config", OPT_IN, []).unwrap())
            .contains("note:")
    );
}

/// Verifies C7.
#[test]
fn annotations_that_choose_an_instance_are_explained() {
    let wishes = "pod.elotl.co/launch-type: spot-preferred, pod.elotl.co/cpu: \"1.5\", \
                  pod.elotl.co/memory: 4G, pod.elotl.co/gpu: 0 t4, \
                  pod.elotl.co/architecture: x86_64, pod.elotl.co/max-price: \"0.5\", \
                  pod.elotl.co/sustained-cpu: \"true\"";
    let (text, fine) = explained(OPT_IN, &pod(&format!("{IN_A_CELL}, {wishes}"), ""));
    let explanation = "its cell: launch type Spot-Preferred; at least 1500 milli-CPUs; at least \
                       3815 MiB of memory; no GPU; architecture amd64; at most $0.5000 an \
                       hour; all vCPUs of burstable types\n";
    assert!(fine && text.contains(explanation), "{text}");
}

/// Verifies A6.
#[test]
fn misspelt_and_idle_annotations_are_noted() {
    let (text, fine) =
        explained(OPT_IN, &pod(&format!("{IN_A_CELL}, pod.elotl.co/lunch-type: Spot"), ""));
    let refused =
        "refused: pod.elotl.co/lunch-type: is unknown; did you mean pod.elotl.co/launch-type?";
    assert!(!fine && text.contains(refused) && !text.contains("unknown annotation"), "{text}");
    let (text, fine) = explained(OPT_IN, &pod(&format!("{IN_A_CELL}, pod.elotl.co/zone: a"), ""));
    assert!(fine && text.contains("note: unknown annotation pod.elotl.co/zone"), "{text}");
    let (text, _) = explained(OPT_IN, &pod("pod.elotl.co/launch-type: Spot", ""));
    assert!(text.contains("note: its annotations for cells have no effect on the node"), "{text}");
}

/// Verifies C7.
#[test]
fn catalogue_of_the_command_line_prices_pods_and_its_broken_rows_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let manifest = path("pod.yaml", &pod(&format!("{IN_A_CELL}, pod.elotl.co/cpu: \"1\""), ""));
    let architecture = match Architecture::of_node() {
        Architecture::Amd64 => "x86_64",
        Architecture::Arm64 => "arm64",
    };
    let file_of = |rows: &str| {
        let text = "instance_type,vcpus,memory_mib,architectures,on_demand_usd_per_hour\n";
        path("types.csv", &(text.to_owned() + &rows.replace("ARCHITECTURE", architecture)))
    };
    let config = file("examples/opt-in.toml");
    let explained = |catalogue: &str| {
        let line = ["kiyot", "explain", "--config", &config, "--catalogue", catalogue, "-f"];
        execute_line(&[&line[..], &[&manifest]].concat())
    };
    let good = "own.large,4,16384,ARCHITECTURE,0.5\n";
    let catalogue = file_of(&format!("own.tiny,two,4096,ARCHITECTURE,0.1\n{good}"));
    let text = explained(&catalogue).unwrap();
    let instance = "its instance: own.large (On-Demand) at $0.5000 an hour\n";
    assert!(text.contains(instance), "{text}");
    let note = format!("note: {catalogue}: line 2: vcpus");
    assert!(text.contains(&note) && text.ends_with(", row skipped\n"), "{text}");
    assert_eq!(text.matches("row skipped").count(), 1, "{text}");
    let text = explained(&file_of(good)).unwrap();
    assert!(text.contains(instance) && !text.contains("row skipped"), "{text}");
    // The built-in catalogue needs no file and serves any provider.
    let text = explained("ec2-us-east-1").unwrap();
    assert!(text.contains("its instance: ") && !text.contains("own.large"), "{text}");
    let Err(UsageError(text)) = explained("/nonexistent.csv") else { panic!() };
    assert!(text.starts_with("/nonexistent.csv: can't be read"), "{text}");
}

/// Verifies C5.
#[test]
fn exit_code_separates_usage_errors() {
    for (line, code) in [
        (&["kiyot", "version"][..], ExitCode::SUCCESS),
        (&["kiyot", "--help"], ExitCode::SUCCESS),
        (&["kiyot", "--version"], ExitCode::SUCCESS),
        (&["kiyot"], ExitCode::from(EXIT_USAGE)),
        (&["kiyot", "dance"], ExitCode::from(EXIT_USAGE)),
        (&["kiyot", "serve", "--log-format", "xml"], ExitCode::from(EXIT_USAGE)),
        (&["kiyot", "explain"], ExitCode::from(EXIT_USAGE)),
    ] {
        assert_eq!(run(line.iter().map(Into::into), None), code, "{line:?}");
    }
}

fn simulated(arguments: &[&str]) -> Result<String, UsageError> {
    execute_line(&[&["kiyot", "simulate"], arguments].concat())
}

#[test]
fn two_configurations_of_a_trace_are_shown_side_by_side() {
    let (cold, warm) = (file("examples/opt-in.toml"), file("examples/warm-pool.toml"));
    let trace = file("examples/bursty-day.csv");
    let arguments = ["--config", &cold, "--config", &warm, "--trace", &trace];
    let text = simulated(&arguments).unwrap();
    let row = |label: &str| -> Vec<&str> {
        let line = text.lines().find(|line| line.starts_with(label));
        line.unwrap_or_else(|| panic!("{label}: {text}"))[label.len()..]
            .split_whitespace()
            .collect()
    };
    assert_eq!(row("pods "), ["240", "240"]);
    assert_eq!(row("started  "), ["240", "240"]);
    let warm_starts = row("started in a warm cell");
    assert_eq!(warm_starts[..3], ["0", "(0", "%)"]);
    assert!(warm_starts[3].parse::<u32>().unwrap() > 100, "{text}");
    let seconds = row("start p50");
    let median = |at: usize| seconds[at].parse::<f64>().unwrap();
    assert!(median(0) > 20.0 && median(2) < 5.0, "{text}");
    for part in ["cost without a pod", "cost of batch", "cost of web", "8.2 h\n"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    assert_eq!(text, simulated(&arguments).unwrap(), "the same seed has the same result");
}

/// File names set the width of their column, and the names in the document are relative to the
/// package, where tests run.
#[test]
fn document_has_the_simulation_of_the_bursty_day() {
    const DOCUMENT: &str = include_str!("../../docs/milpactl.md");
    let command = "$ kiyot simulate --config examples/opt-in.toml --config \
                   examples/warm-pool.toml --trace examples/bursty-day.csv\n";
    let (_, shown) = DOCUMENT.split_once(command).unwrap();
    let (shown, _) = shown.split_once("```").unwrap();
    let (cold, warm) = ("examples/opt-in.toml", "examples/warm-pool.toml");
    let trace = "examples/bursty-day.csv";
    let text = simulated(&["--config", cold, "--config", warm, "--trace", trace]).unwrap();
    let (table, _charts) = text.split_once("\n\n").unwrap();
    assert_eq!(shown.trim_end(), table, "docs/milpactl.md lacks\n{table}");
}

#[test]
fn document_has_the_simulation_of_an_overflow() {
    let line = "kiyot simulate --node-cpus 8 --node-gib 16 --trace examples/bursty-day.csv \
                --config examples/on-node.toml --config examples/overflow.toml --config \
                examples/on-ec2.toml";
    let text = execute_line(&line.split(' ').collect::<Vec<_>>()).unwrap();
    let (table, _charts) = text.split_once("\n\n").unwrap();
    let document = std::fs::read_to_string("examples/README.md").unwrap().replace(" \\\n    ", " ");
    assert!(
        document.contains(&format!("$ {line}\n{table}\n")),
        "examples/README.md lacks\n{table}"
    );
}

#[test]
fn unusable_trace_is_a_usage_error() {
    let config = file("examples/opt-in.toml");
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let good = path("good.csv", "arrival_s,duration_s,cpu\n0,1,1\n");
    let huge = path("huge.csv", "arrival_s,duration_s,cpu\n0,1,5000\n");
    let bad = path("bad.csv", "arrival_s,duration_s,cpu\nsoon,1,1\n");
    let local = path("local.toml", "[backends.containerd]\ntype = \"cri\"\n");
    for (arguments, reason) in [
        (["--config", &config, "--trace", "/nonexistent.csv"], "/nonexistent.csv: can't be read"),
        (
            ["--config", &config, "--trace", &bad],
            "bad.csv: line 2: arrival_s \"soon\" is not a time",
        ),
        (["--config", &local, "--trace", &good], "local.toml: has no backend with type"),
        (["--config", "/nonexistent.toml", "--trace", &good], "/nonexistent.toml"),
    ] {
        let Err(UsageError(text)) = simulated(&arguments) else { panic!("{arguments:?}") };
        assert!(text.contains(reason), "{text}");
    }
    let too_many = ["--config", &config].repeat(4);
    let too_many = [&too_many[..], &["--trace", &good]].concat();
    let Err(UsageError(text)) = simulated(&too_many) else { panic!() };
    assert!(text.contains("--config is given 4 times"), "{text}");
    let text = simulated(&["--config", &config, "--trace", &huge]).unwrap();
    assert!(text.contains("1 pod is left out, the first because"), "{text}");
    // Longer than the launch timeout.
    let slow = ["--boot-seconds", "600", "--config", &config, "--trace", &good];
    let text = simulated(&slow).unwrap();
    assert!(text.contains("1 pod never started, the last error was: cell"), "{text}");
    for line in [
        ["kiyot", "simulate", "--trace", "pods.csv"],
        ["kiyot", "simulate", "--config", "kiyot.toml"],
        ["kiyot", "simulate", "--boot-seconds", "20"],
        ["kiyot", "simulate", "--pods", "0"],
        ["kiyot", "simulate", "--node-cpus", "8"],
    ] {
        assert!(Arguments::try_parse_from(line).is_err(), "{line:?}");
    }
}

/// Verifies C7.
#[test]
fn volume_limit_without_effect_in_a_cell_is_a_note() {
    let volumes = "  volumes: [{name: d, emptyDir: {sizeLimit: 1Gi}}, {name: m, emptyDir: \
                   {medium: Memory, sizeLimit: 1Gi}}, {name: free, emptyDir: {}}]\n";
    let (text, fine) = explained(OPT_IN, &pod(IN_A_CELL, volumes));
    assert!(fine && text.contains("note: volume \"d\": sizeLimit has no effect"), "{text}");
    assert_eq!(text.matches("sizeLimit").count(), 1, "{text}");
    let (text, _) = explained(OPT_IN, &pod("a: b", volumes));
    assert!(!text.contains("sizeLimit"), "{text}");
}

/// Verifies C7.
#[test]
fn forbidden_cloud_route_is_explained_as_refused() {
    let config = format!(
        "{OPT_IN}[backends.milpa.gateway]\nlisten = \"10.0.0.5:7700\"\n[backends.milpa.ec2]\n\
         region = \"us-east-1\"\nsubnets = [\"subnet-1\"]\nsecurity_groups = [\"sg-1\"]\n\
         image = {{ id = \"ami-1\" }}\ncloud_routes = [\"10.8.0.0/16\"]\n"
    );
    let config = config.replace(
        "type = \"milpa\"",
        "type = \"milpa\"\nprovider = \"ec2\"\ncluster = \"production\"",
    );
    let routed =
        |network: &str| pod(&format!("{IN_A_CELL}, pod.elotl.co/cloud-route: {network}"), "");
    let (text, fine) = explained(&config, &routed("10.8.1.0/24"));
    assert!(fine && text.contains("routes for 10.8.1.0/24"), "{text}");
    let (text, fine) = explained(&config, &routed("10.9.0.0/16"));
    let why = "refused: pod.elotl.co/cloud-route = 10.9.0.0/16: is not allowed";
    assert!(!fine && text.contains(why), "{text}");
}
