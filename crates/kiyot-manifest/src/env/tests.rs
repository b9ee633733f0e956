use crate::{File, Node, parse_files};

/// Returns a manifest with a pod whose container has fields.
fn manifest(fields: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec:\n  containers:\n  - name: c\n    \
         image: i\n    command: [echo, \"$(A)\"]\n    {fields}\n"
    )
}

fn parsed(text: String) -> Result<crate::Manifest, String> {
    parse_files(&[File { name: "m.yaml".to_owned(), text }])
        .map_err(|problems| problems.to_string())
}

/// Verifies M1, M9.
#[test]
fn later_variable_wins_and_variable_with_a_source_is_omitted() {
    let manifest = parsed(manifest(
        "envFrom: [{prefix: S_, secretRef: {name: keys}}]\n    env:\n    \
         - {name: T, valueFrom: {secretKeyRef: {name: keys, key: TOKEN}}}\n    \
         - {name: A, value: \"1\"}\n    - {name: A, value: $(A)2}",
    ));
    let pod = &manifest.unwrap().pods[0];
    let sandbox = pod.sandbox_config(&Node::default(), 0);
    let config = pod.container_config(&pod.containers[0], &Node::default(), &sandbox, "i", 0);
    let found: Vec<_> = config.envs.iter().map(|env| (&*env.key, env.value.as_ref())).collect();
    assert_eq!(found, [("A", "12".as_bytes())]);
    assert_eq!(config.command, ["echo", "12"]);
}

/// Verifies M11.
#[test]
fn variables_that_double_at_each_step_are_refused_for_their_size() {
    let doubling = |steps: usize| {
        let first = format!("    - {{name: A0, value: {}}}\n", "x".repeat(1024));
        let step = |step: usize| {
            let before = step - 1;
            format!("    - {{name: A{step}, value: $(A{before})$(A{before})}}\n")
        };
        manifest(&format!("env:\n{first}{}", (1..=steps).map(step).collect::<String>()))
    };
    assert!(parsed(doubling(8)).is_ok());
    // 35 steps make 64 TiB; 80 steps exceed the range of a number.
    for (steps, bytes) in [(10, "2096"), (35, "70368744176"), (80, "18446744073709551615")] {
        let refused = parsed(doubling(steps)).unwrap_err();
        for part in ["containers = c", bytes, "allowed: 1048576"] {
            assert!(refused.contains(part), "{part} is not in {refused}");
        }
    }
    // Commands refer to variables too.
    let args = |times: usize| {
        let args = vec![format!("\"{}\"", "$(L)".repeat(times)); 1000].join(", ");
        manifest(&format!("env: [{{name: L, value: {}}}]\n    args: [{args}]", "x".repeat(36)))
    };
    assert!(parsed(args(27)).is_ok());
    assert!(parsed(args(36)).unwrap_err().contains("allowed: 1048576"));
}
