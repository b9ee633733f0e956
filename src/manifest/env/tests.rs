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
