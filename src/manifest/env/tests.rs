use super::super::tests::problems;
use crate::manifest::{Node, Pod, parse};

const OBJECTS: &str = "\
---
apiVersion: v1
kind: ConfigMap
metadata: {name: words}
data: {WORD: plain, MONEY: \"$(WORD) $$\", lower.key: x}
binaryData: {BYTES: /w==}
---
apiVersion: v1
kind: Secret
metadata: {name: keys}
stringData: {TOKEN: hunter2}
";

/// Returns a manifest with a pod whose container has fields, and with both objects.
fn manifest(fields: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: p\n  labels: {{app: web}}\n  \
         annotations: {{note: hi}}\nspec:\n  containers:\n  - name: c\n    image: i\n    \
         command: [echo, \"$(A)\"]\n    {fields}\n{OBJECTS}"
    )
}

/// Returns the variables of the request, and its command.
fn variables(fields: &str) -> (Vec<(String, String)>, Vec<String>) {
    let pods = parse("m.yaml", &manifest(fields)).unwrap().pods;
    let pod: &Pod = &pods[0];
    let node = Node::default();
    let sandbox = pod.sandbox_config(&node, 0);
    let config = pod.container_config(&pod.containers[0], &node, &sandbox, "i", 0);
    let text = |env: kiyot_proto::cri::KeyValue| {
        (env.key, String::from_utf8_lossy(env.value.as_ref()).into_owned())
    };
    (config.envs.into_iter().map(text).collect(), config.command)
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// Verifies M10.
#[test]
fn variable_from_a_source_has_its_value_unexpanded() {
    let (found, command) = variables(
        "env:\n    - {name: WORD, value: other}\n    \
         - {name: A, valueFrom: {configMapKeyRef: {name: words, key: MONEY}}}\n    \
         - {name: B, value: \"<$(A)>\"}\n    \
         - {name: T, valueFrom: {secretKeyRef: {name: keys, key: TOKEN}}}\n    \
         - {name: NAME, valueFrom: {fieldRef: {apiVersion: v1, fieldPath: metadata.name}}}\n    \
         - {name: L, valueFrom: {fieldRef: {fieldPath: \"metadata.labels['app']\"}}}\n    \
         - {name: O, valueFrom: {fieldRef: {fieldPath: \"metadata.annotations['note']\"}}}\n    \
         - {name: E, valueFrom: {fieldRef: {fieldPath: \"metadata.labels['absent']\"}}}",
    );
    let expected = [
        ("WORD", "other"),
        ("A", "$(WORD) $$"),
        ("B", "<$(WORD) $$>"),
        ("T", "hunter2"),
        ("NAME", "p"),
        ("L", "web"),
        ("O", "hi"),
        ("E", ""),
    ];
    assert_eq!(found, pairs(&expected));
    assert_eq!(command, ["echo", "$(WORD) $$"]);
}

/// Verifies M10.
#[test]
fn variable_of_env_wins_over_one_of_env_from() {
    let (found, _) = variables(
        "envFrom: [{prefix: S_, secretRef: {name: keys}}]\n    \
         env: [{name: S_TOKEN, value: own}, {name: A, value: \"1\"}, {name: A, value: $(A)2}]",
    );
    assert_eq!(found, pairs(&[("S_TOKEN", "own"), ("A", "12")]));
}

/// Verifies M10.
#[test]
fn absent_optional_source_gives_no_variable() {
    let (found, _) = variables(
        "envFrom: [{configMapRef: {name: absent, optional: true}}]\n    env:\n    \
         - {name: A, valueFrom: {configMapKeyRef: {name: absent, key: k, optional: true}}}\n    \
         - {name: B, valueFrom: {secretKeyRef: {name: keys, key: absent, optional: true}}}",
    );
    assert_eq!(found, []);
}

/// Verifies M10.
#[test]
fn source_that_gives_no_value_is_a_problem() {
    let env = "document 1.spec.containers[0].env[0].valueFrom";
    for (source, expected) in [
        (
            "{configMapKeyRef: {name: absent, key: k}}",
            ".configMapKeyRef.name = absent: is invalid; allowed: the name of a ConfigMap in this \
             file, in namespace default",
        ),
        (
            "{secretKeyRef: {name: keys, key: absent}}",
            ".secretKeyRef.key = absent: is invalid; allowed: a key of Secret keys",
        ),
        (
            "{configMapKeyRef: {name: words, key: BYTES}}",
            ".configMapKeyRef.key = BYTES: can't be a variable; allowed: a key with a value in \
             UTF-8",
        ),
        (
            "{fieldRef: {fieldPath: status.podIP}}",
            ".fieldRef.fieldPath = \"status.podIP\": is invalid; allowed: metadata.name, \
             metadata.namespace, metadata.uid, metadata.labels['KEY'], \
             metadata.annotations['KEY']",
        ),
        (
            "{resourceFieldRef: {resource: limits.cpu}}",
            ".resourceFieldRef: is not supported to run a pod from a manifest; allowed: absent",
        ),
    ] {
        let found = problems(&manifest(&format!("env: [{{name: A, valueFrom: {source}}}]")));
        assert_eq!(found, [format!("{env}{expected}")]);
    }
    let found = problems(&manifest("envFrom: [{configMapRef: {name: words}}]"));
    assert_eq!(
        found,
        ["ConfigMap words.BYTES: can't be a variable; allowed: a key of printable ASCII without \
          \"=\", and a value in UTF-8"]
    );
}

/// Verifies M11.
#[test]
fn variables_that_double_at_each_step_are_refused_for_their_size() {
    use crate::manifest::{File, Purpose, parse_files};
    let doubling = |steps: usize| {
        let first = format!("    - {{name: A0, value: {}}}\n", "x".repeat(1024));
        let step = |step: usize| {
            let before = step - 1;
            format!("    - {{name: A{step}, value: $(A{before})$(A{before})}}\n")
        };
        manifest(&format!("env:\n{first}{}", (1..=steps).map(step).collect::<String>()))
    };
    let parsed = |text: String, purpose| {
        parse_files(&[File { name: "m.yaml".to_owned(), text }], purpose)
            .map_err(|problems| problems.to_string())
    };
    for purpose in [Purpose::Run, Purpose::Explain] {
        assert!(parsed(doubling(8), purpose).is_ok(), "{purpose:?}");
        // 35 steps are 64 TiB, and 80 more than a number of bytes.
        for (steps, bytes) in [(10, "2096"), (35, "70368744176"), (80, "18446744073709551615")] {
            let refused = parsed(doubling(steps), purpose).unwrap_err();
            for part in ["containers = c", bytes, "allowed: 1048576"] {
                assert!(refused.contains(part), "{purpose:?}: {part} is not in {refused}");
            }
        }
    }
    // A command refers to them too, and the uid may become longer.
    let args = format!("args: [{}]", vec!["\"$(L)\""; 9000].join(", "));
    let label = |by: &str| {
        format!("env: [{{name: L, valueFrom: {{fieldRef: {{fieldPath: {by}}}}}}}]\n    {args}")
    };
    assert!(parsed(manifest(&label("metadata.name")), Purpose::Run).is_ok());
    let uids = args.replace("$(L)", &"$(L)".repeat(4));
    let uid = manifest(&label("metadata.uid").replace(&args, &uids));
    let uid = uid.replace("  name: p\n", "  name: p\n  uid: u\n");
    assert!(parsed(uid, Purpose::Run).unwrap_err().contains("allowed: 1048576"));
}
