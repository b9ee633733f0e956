use super::*;

fn of(text: &str) -> Result<Vec<StaticPod>, String> {
    let file = ManifestFile { name: "pods.yaml".to_owned(), text: text.to_owned() };
    read(&[file]).map_err(|error| error.text())
}

fn pod(name: &str, spec: &str) -> String {
    format!("{{apiVersion: v1, kind: Pod, metadata: {{name: {name}}}, spec: {{{spec}}}}}\n")
}

/// Verifies O50.
#[test]
fn pods_of_documents_and_lists_get_the_annotation() {
    let list = format!(
        "{{apiVersion: v1, kind: PodList, items: [{{metadata: {{name: cart, namespace: shop, \
         annotations: {{a: b}}}}}}]}}\n---\n---\n{{apiVersion: v1, kind: List, items: [{}]}}",
        pod("own", "")
            .replace("name: own", "name: own, annotations: {kubernetes.io/target-runtime: kiyot}")
    );
    let pods = of(&format!("{}---\n{list}", pod("web", "a: 1"))).unwrap();
    let names: Vec<String> = pods.iter().map(|pod| pod.name.to_string()).collect();
    assert_eq!(names, ["default/web", "shop/cart", "default/own"]);
    for (pod, annotations) in pods.iter().zip([1, 2, 1]) {
        let object: Value = serde_json::from_str(&pod.json).unwrap();
        let all = object["metadata"]["annotations"].as_object().unwrap();
        assert_eq!((&all[TARGET_RUNTIME], all.len()), (&KIYOT.into(), annotations));
        assert_eq!((&object["kind"], &object["apiVersion"]), (&"Pod".into(), &"v1".into()));
    }
    assert!(pods[0].json.contains("\"a\":1"), "{}", pods[0].json);
}

/// Verifies O50, O51.
#[test]
fn document_that_is_no_static_pod_is_refused_by_kind_and_place() {
    let kind = |kind: &str, version: &str| {
        let rest = "metadata: {name: x}, data: {a/../../../../tmp/x: b}";
        format!("{}---\n{{apiVersion: {version}, kind: {kind}, {rest}}}", pod("web", ""))
    };
    let annotated = |value: &str| {
        let text = format!("name: web, annotations: {{kubernetes.io/target-runtime: {value}}}");
        pod("web", "").replace("name: web", &text)
    };
    for (text, expected) in [
        (
            kind("ConfigMap", "v1"),
            "pods.yaml: document 2 is of the kind \"ConfigMap\" of \"v1\"; allowed: Pod",
        ),
        (kind("Secret", "v1"), "\"Secret\""),
        (kind("Service", "v1"), "`kubectl apply -f` creates it through the API server"),
        (kind("Deployment", "apps/v1"), "\"Deployment\" of \"apps/v1\""),
        (kind("Pod", "v2"), "\"Pod\" of \"v2\""),
        ("- 1".to_owned(), "document 1 = [1]: is invalid; allowed: a table"),
        ("a: [".to_owned(), "pods.yaml: document 1: is not YAML"),
        (String::new(), "have no Pod; allowed: one or more"),
        ("{apiVersion: v1, kind: Pod}".to_owned(), "document 1.metadata: name \"\"; allowed"),
        (pod("../x", ""), "document 1.metadata: name \"../x\"; allowed"),
        (
            annotated("containerd"),
            "[\"kubernetes.io/target-runtime\"] = \"containerd\"; allowed: \"kiyot\"",
        ),
        (annotated("[1]"), "= [1]; allowed: \"kiyot\""),
        (format!("{0}---\n{0}", pod("web", "")), "two pods default/web"),
        (
            "{apiVersion: v1, kind: List, items: [{apiVersion: v1, kind: PodList, items: []}]}"
                .to_owned(),
            "document 1.items[0].kind = \"PodList\": is invalid; allowed: any kind but a list",
        ),
        (
            format!("{}---\n{{apiVersion: v1, kind: List}}", pod("web", "")),
            "document 2.items: is missing; allowed: a list of documents",
        ),
    ] {
        let refused = of(&text).unwrap_err();
        assert!(refused.contains(expected), "{expected} is not in {refused}");
    }
}

/// Verifies O51.
#[test]
fn reference_to_an_object_of_the_api_server_is_refused_by_its_path() {
    for (spec, path) in [
        ("serviceAccountName: a", "serviceAccountName"),
        ("serviceAccount: a", "serviceAccount"),
        ("imagePullSecrets: [{name: a}]", "imagePullSecrets"),
        ("resourceClaims: [{name: a}]", "resourceClaims"),
        (
            "volumes: [{name: v, emptyDir: {}}, {name: m, configMap: {name: a}}]",
            "volumes[1].configMap",
        ),
        ("volumes: [{secret: {}}]", "volumes[0].secret"),
        ("volumes: [{persistentVolumeClaim: {}}]", "volumes[0].persistentVolumeClaim"),
        ("volumes: [{rbd: {secretRef: {}}}]", "volumes[0].rbd.secretRef"),
        (
            "volumes: [{projected: {sources: [{serviceAccountToken: {}}]}}]",
            "volumes[0].projected.sources[0].serviceAccountToken",
        ),
        (
            "containers: [{env: [{valueFrom: {secretKeyRef: {}}}]}]",
            "containers[0].env[0].valueFrom.secretKeyRef",
        ),
        (
            "initContainers: [{envFrom: [{configMapRef: {}}]}]",
            "initContainers[0].envFrom[0].configMapRef",
        ),
    ] {
        let refused = of(&pod("web", spec)).unwrap_err();
        let expected = format!("document 1.spec.{path}: a kubelet runs no static pod that refers");
        assert!(refused.contains(&expected), "{expected} is not in {refused}");
    }
    let none = "serviceAccountName: \"\", imagePullSecrets: [], volumes: [{emptyDir: {}}, \
                {hostPath: {path: /x}}, {configMap: ~}, \
                {projected: {sources: [{downwardAPI: {}}]}}], \
                containers: [{env: [{name: secret, value: configMap}, \
                {valueFrom: {fieldRef: {fieldPath: metadata.name}}}]}]";
    assert!(of(&pod("web", none)).is_ok());
}
