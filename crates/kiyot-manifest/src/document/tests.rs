use kiyot_values::problems::Problems;
use proptest::prelude::*;

use crate::{
    File, Manifest, Node,
    files::{MAX_DOCUMENTS, MAX_FILE_BYTES},
    parse_files,
};

const SAMPLES: [&str; 7] = [
    include_str!("../samples/cronjob.yaml"),
    include_str!("../samples/daemonset.yaml"),
    include_str!("../samples/deployment.yaml"),
    include_str!("../samples/every-field.yaml"),
    include_str!("../samples/gpu-job.yaml"),
    include_str!("../samples/list.json"),
    include_str!("../samples/statefulset.yaml"),
];

fn explained(texts: &[&str]) -> Result<Manifest, Problems> {
    let file = |(index, text): (usize, &&str)| File {
        name: format!("{index}.yaml"),
        text: (*text).to_owned(),
    };
    let files: Vec<File> = texts.iter().enumerate().map(file).collect();
    parse_files(&files)
}

fn problems(texts: &[&str]) -> String {
    explained(texts).unwrap_err().to_string()
}

fn names(manifest: &Manifest) -> Vec<&str> {
    manifest.pods.iter().map(|pod| pod.metadata.name.as_str()).collect()
}

fn skipped_texts(manifest: &Manifest) -> Vec<String> {
    manifest.skipped.iter().map(ToString::to_string).collect()
}

fn pod(name: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}}}, spec: {{containers: [{{name: c, \
         image: i}}]}}}}"
    )
}

/// Verifies M6.
#[test]
fn kinds_without_pods_are_skipped_by_name() {
    let manifest = explained(&[SAMPLES[5]]).unwrap();
    assert_eq!(names(&manifest), ["debug-<generated>", "old-<generated>"]);
    assert_eq!(
        skipped_texts(&manifest),
        [
            "Namespace shop skipped: it has no pod",
            "ConfigMap shop/m skipped: it has no pod",
            "Certificate shop/web skipped: its kind is no workload of Kubernetes",
        ]
    );
    // A kind of another group may have any name and any fields.
    let own = "apiVersion: example.org/v1\nkind: Deployment\nspec: [1]\n";
    let manifest = explained(&[&format!("{own}---\n{}", pod("p"))]).unwrap();
    assert_eq!(
        skipped_texts(&manifest),
        ["Deployment skipped: its kind is no workload of Kubernetes"]
    );
}

/// Verifies M6.
#[test]
fn manifest_without_pods_is_refused() {
    let service = "apiVersion: v1\nkind: Service\nmetadata: {name: s}\n";
    assert_eq!(problems(&[service]), "0.yaml: the text: has no Pod; allowed: one or more");
    assert_eq!(problems(&[service, ""]), "2 files: the text: has no Pod; allowed: one or more");
    assert_eq!(
        problems(&["metadata: {name: s}"]),
        "0.yaml: document 1.kind: is missing; allowed: a kind such as Pod, \
         Deployment or List"
    );
    assert_eq!(
        problems(&["kind: Service"]),
        "0.yaml: document 1.apiVersion: is missing; allowed: a version"
    );
}

/// Verifies M8.
#[test]
fn items_of_a_typed_list_have_its_kind() {
    let item = "metadata: {name: p}, spec: {containers: [{name: c, image: i}]}";
    let list = format!(
        "{{apiVersion: v1, kind: PodList, metadata: {{resourceVersion: \"1\"}}, items: \
         [{{{item}}}, {}]}}",
        pod("q")
    );
    assert_eq!(names(&explained(&[&list]).unwrap()), ["p", "q"]);
    let template = format!("{{metadata: {{name: d}}, spec: {{template: {{{item}}}}}}}");
    let list = format!("{{apiVersion: apps/v1, kind: DeploymentList, items: [{template}]}}");
    assert_eq!(names(&explained(&[&list]).unwrap()), ["d-<generated>"]);
    let list = format!("{{apiVersion: v1, kind: List, items: [{{{item}}}]}}");
    assert!(problems(&[&list]).contains("document 1.items[0].kind: is missing"));
    let nested = "{apiVersion: v1, kind: List, items: [{apiVersion: v1, kind: List, items: []}]}";
    assert_eq!(
        problems(&[nested]),
        "0.yaml: document 1.items[0].kind = \"List\": is invalid; allowed: any kind but a list"
    );
}

/// Verifies M8.
#[test]
fn json_documents_may_follow_each_other() {
    let json = |name: &str| {
        format!(
            "{{\n\t\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"metadata\": {{\"name\": \
             \"{name}\"}},\n\t\"spec\": {{\"containers\": [{{\"name\": \"c\", \"image\": \
             \"i\"}}]}}\n}}\n"
        )
    };
    let two = format!("\u{feff}{}{}", json("p"), json("q"));
    assert_eq!(names(&explained(&[&two]).unwrap()), ["p", "q"]);
    // YAML may begin with a brace too.
    assert_eq!(names(&explained(&[&pod("p")]).unwrap()), ["p"]);
    assert!(problems(&["{\"kind\": "]).contains("document 1: is not YAML"));
}

/// Verifies M6.
#[test]
fn config_map_and_secret_are_skipped_and_their_keys_are_not_read() {
    let mounting = pod("p").replace(
        "containers",
        "volumes: [{name: v, configMap: {name: m, items: [{key: absent, path: a}]}}], containers",
    );
    let map = "{apiVersion: v1, kind: ConfigMap, metadata: {name: m}, data: {a/../../../x: b}}";
    let manifest = explained(&[&mounting, map]).unwrap();
    assert_eq!(skipped_texts(&manifest), ["ConfigMap m skipped: it has no pod"]);
}

/// Verifies M8.
#[test]
fn problems_of_several_files_name_their_file() {
    let large = format!("{}# {}", pod("p"), "x".repeat(MAX_FILE_BYTES));
    let text = problems(&[&large, "a: ["]);
    assert!(
        text.contains("0.yaml: the text: has ") && text.contains("1.yaml: document 1: is not YAML")
    );
}

/// Verifies M8.
#[test]
fn documents_above_the_limit_are_reported_once() {
    let many = |count: usize| {
        let items = vec!["{apiVersion: v1, kind: Event}"; count - 1].join(", ");
        format!("{{apiVersion: v1, kind: List, items: [{}, {items}]}}", pod("p"))
    };
    // The list itself is a document too.
    let fitting = many(MAX_DOCUMENTS - 1);
    assert_eq!(explained(&[&fitting]).unwrap().skipped.len(), MAX_DOCUMENTS - 2);
    assert_eq!(
        problems(&[&many(MAX_DOCUMENTS)]),
        "0.yaml: document 1.items[9999]: is one document too many; allowed: 10000"
    );
    assert_eq!(
        problems(&[&many(MAX_DOCUMENTS + 9)]),
        "0.yaml: document 1.items: has 10009 items; allowed: 10000"
    );
    assert_eq!(
        problems(&[&fitting, "{\"kind\": \"Event\", \"apiVersion\": \"v1\"}"]),
        "2 files: 1.yaml: document 1: is one document too many; allowed: 10000"
    );
}

/// Verifies M9.
#[test]
fn every_field_of_kubernetes_is_accepted_to_explain() {
    let text = SAMPLES[3];
    let pod = explained(&[text]).unwrap().pods.remove(0);
    assert_eq!(pod.resources().cpu_limit, Some(2000));
    assert_eq!(pod.claims, ["gpu"]);
    let sandbox = pod.sandbox_config(&Node::default(), 0);
    let config = pod.container_config(&pod.containers[0], &Node::default(), &sandbox, "i", 0);
    assert_eq!(config.devices[0].container_path, "/dev/x");
    assert!(config.mounts[0].recursive_read_only);
    let with_image = text.replace("{name: csi, mountPath", "{name: image, mountPath");
    let pod = explained(&[&with_image]).unwrap().pods.remove(0);
    let mounts =
        pod.container_config(&pod.containers[0], &Node::default(), &sandbox, "i", 0).mounts;
    let image = mounts[1].image.as_ref().map(|image| image.image.as_str());
    assert_eq!((image, mounts[1].readonly), (Some("a"), true));
    // A variable with a source has no value before the container is created.
    assert_eq!(config.envs.len(), 1);
    assert!(pod.notes.is_empty(), "{:?}", pod.notes);
    let spelt_wrong = text.replace("hostAliases", "hostAlias").replace("csi, csi:", "csi, cis:");
    let notes = explained(&[&spelt_wrong]).unwrap().pods.remove(0).notes;
    assert_eq!(notes.len(), 2, "{notes:?}");
    for (note, part) in notes.iter().zip(["spec.hostAlias: is not a field", ".cis: is not a field"])
    {
        assert!(note.contains(part), "{note}");
    }
}

proptest! {
    #[test]
    fn explained_text_is_a_manifest_or_a_problem(text in "\\PC{0,200}") {
        if let Err(problems) = explained(&[&text]) {
            prop_assert!(!problems.list.is_empty());
        }
    }

    #[test]
    fn sample_with_a_changed_line_does_not_panic(
        sample in 0..SAMPLES.len(),
        line in 0_usize..120,
        with in "( {0,8}[a-zA-Z]{1,12}: ?([0-9]{1,20}|true|\\[\\]|\\{\\}|~|\"x\"|\\.\\.)?|---|)",
    ) {
        let replaced = |(index, text)| if index == line { with.as_str() } else { text };
        let lines: Vec<&str> = SAMPLES[sample].lines().enumerate().map(replaced).collect();
        let text = lines.join("\n");
        if let Ok(manifest) = explained(&[&text]) {
            for pod in &manifest.pods {
                let sandbox = pod.sandbox_config(&Node::default(), 0);
                for container in pod.all_containers() {
                    pod.container_config(container, &Node::default(), &sandbox, "i", 0);
                }
            }
        }
    }
}
