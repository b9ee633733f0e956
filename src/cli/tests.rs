use super::*;

fn execute_line(line: &[&str]) -> Result<String, Failure> {
    execute(Arguments::try_parse_from(line).unwrap().command)
}

fn file(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name).display().to_string()
}

#[test]
fn a_good_configuration_is_told_in_short() {
    let text = execute_line(&["kiyot", "check-config", "--config", &file("examples/opt-out.toml")]).unwrap();
    for line in [
        "is fine.",
        "backend containerd: the container runtime at /run/containerd/containerd.sock, answers for the node",
        "rule daemonsets-stay: to containerd",
        "other pods: to milpa",
    ] {
        assert!(text.contains(line), "{text}");
    }
}

#[test]
fn a_bad_configuration_is_a_usage_error() {
    let Err(Failure::Usage(text)) = execute_line(&["kiyot", "check-config", "--config", "/nonexistent/kiyot.toml"]) else { panic!() };
    assert!(text.contains("/nonexistent/kiyot.toml: the file: can't be read"), "{text}");
    assert_eq!(run(["kiyot", "serve", "--config", "/nonexistent/kiyot.toml"].map(Into::into)), ExitCode::from(EXIT_USAGE));
}

#[test]
fn exit_codes() {
    for (line, code) in [
        (&["kiyot", "version"][..], ExitCode::SUCCESS),
        (&["kiyot", "--help"], ExitCode::SUCCESS),
        (&["kiyot", "--version"], ExitCode::SUCCESS),
        (&["kiyot"], ExitCode::from(EXIT_USAGE)),
        (&["kiyot", "dance"], ExitCode::from(EXIT_USAGE)),
        (&["kiyot", "serve", "--log-format", "xml"], ExitCode::from(EXIT_USAGE)),
        (&["kiyot", "explain"], ExitCode::from(EXIT_USAGE)),
    ] {
        assert_eq!(run(line.iter().map(Into::into)), code, "{line:?}");
    }
}

#[test]
fn errors_are_told_with_their_causes() {
    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] io::Error);
    assert_eq!(chain(&Outer(io::Error::other("inner"))), "outer: inner");
}
