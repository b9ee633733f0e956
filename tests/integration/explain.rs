//! `kiyot explain -f`, called as by an operator.

use std::{
    fs,
    io::Write as _,
    path::Path,
    process::{Command, Output, Stdio},
};

/// Runs `kiyot explain` with files and a standard input.
fn explain(files: &[&Path], stdin: &str) -> Output {
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/opt-in.toml");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kiyot"));
    command.args(["explain", "--config", config]);
    for file in files {
        command.arg("-f").arg(file);
    }
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().unwrap();
    // The write fails if the program does not read its standard input.
    let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
    child.wait_with_output().unwrap()
}

fn yaml(name: &str) -> String {
    let spec = "spec:\n  containers: [{name: c, image: busybox}]\n";
    format!("apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\n{spec}")
}

fn json(name: &str) -> String {
    format!(
        r#"{{"apiVersion": "v1", "kind": "Pod", "metadata": {{"name": "{name}"}},
            "spec": {{"containers": [{{"name": "c", "image": "busybox"}}]}}}}"#
    )
}

/// Verifies M8.
#[test]
fn explain_takes_the_files_that_kubectl_takes() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    };
    let documents = write("documents", &format!("---\n{}---\n{}", yaml("yaml-1"), yaml("yaml-2")));
    let in_a_row = write("json", &format!("{}\n{}", json("json-1"), json("json-2")));
    let service = r#"{"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "s", "namespace": "shop"}}"#;
    let list = |kind: &str, items: [&str; 2]| {
        format!(r#"{{"apiVersion": "v1", "kind": "{kind}", "items": [{}]}}"#, items.join(","))
    };
    let mixed = write("mixed", &list("List", [service, &json("of-mixed")]));
    let typed = write("typed", &list("PodList", [&json("of-typed-1"), &json("of-typed-2")]));
    let directory = write("all/a.yaml", &yaml("in-yaml")).parent().unwrap().to_owned();
    write("all/b.yml", &yaml("in-yml"));
    write("all/c.json", &json("in-json"));
    write("all/d.txt", &yaml("in-txt"));
    write("all/below/e.yaml", &yaml("below"));

    let files = [&*documents, &in_a_row, &mixed, &typed, Path::new("-"), &directory];
    let output = explain(&files, &yaml("of-stdin"));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let pods: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("Pod default/")).collect();
    assert_eq!(
        pods,
        [
            "yaml-1",
            "yaml-2",
            "json-1",
            "json-2",
            "of-mixed",
            "of-typed-1",
            "of-typed-2",
            "of-stdin",
            "in-yaml",
            "in-yml",
            "in-json",
        ]
    );
    assert!(text.contains("note: Service shop/s skipped: it has no pod"), "{text}");
}

/// Verifies M8.
#[test]
fn explain_refuses_files_above_its_limits() {
    const MORE_FILES: usize = 1_001;
    const MORE_BYTES: usize = (4 << 20) + 1;
    const MORE_DOCUMENTS: usize = 10_001;
    let dir = tempfile::tempdir().unwrap();
    for number in 0..MORE_FILES {
        fs::write(dir.path().join(format!("{number}.yaml")), yaml("p")).unwrap();
    }
    let bytes = yaml("p") + &"#".repeat(MORE_BYTES);
    let documents = vec![yaml("p"); MORE_DOCUMENTS].join("---\n");
    for (file, stdin) in [(dir.path(), ""), (Path::new("-"), &*bytes), (Path::new("-"), &documents)]
    {
        let output = explain(&[file], stdin);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{error}");
        assert!(error.contains("; allowed: "), "{error}");
        assert!(output.stdout.is_empty());
    }
}
