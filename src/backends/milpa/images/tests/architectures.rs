//! Copies to cells with another architecture than the node's.

use super::*;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Returns an architecture other than this machine's.
fn other() -> &'static str {
    if of_this_machine() == "arm64" { "amd64" } else { "arm64" }
}

fn entry((digest, size): &(String, u64)) -> String {
    format!(r#""digest":"{digest}","size":{size}"#)
}

/// Adds the blobs of an image for an architecture. Returns its id and its manifest.
fn manifest_of(node: &FakeNode, of: &str, architecture: &str) -> (String, (String, u64)) {
    let config = node.blob(format!(r#"{{"architecture":"{architecture}","name":"{of}"}}"#));
    let layer = node.blob(format!("layer of {architecture}"));
    let [config_entry, layer_entry] = [&config, &layer].map(entry);
    let manifest = node.blob(format!(
        r#"{{"mediaType":"{MANIFEST}","config":{{{config_entry}}},"layers":[{{{layer_entry}}}]}}"#
    ));
    (config.0, manifest)
}

fn name(node: &FakeNode, name: &str, media_type: &str, (digest, size): (String, u64)) {
    let named = (media_type.to_owned(), digest, size);
    node.0.lock().unwrap().names.insert(name.to_owned(), named);
}

/// Adds an image with manifests for two architectures. Returns their ids, this machine's first.
fn add_index(node: &FakeNode, of: &str) -> [String; 2] {
    let both = [of_this_machine(), other()];
    let made = both.map(|architecture| manifest_of(node, of, architecture));
    let entries = both.iter().zip(&made).map(|(architecture, (_, manifest))| {
        let platform = format!(r#""platform":{{"os":"linux","architecture":"{architecture}"}}"#);
        format!("{{{},{platform}}}", entry(manifest))
    });
    let entries = entries.collect::<Vec<_>>().join(",");
    let index = node.blob(format!(r#"{{"mediaType":"{INDEX}","manifests":[{entries}]}}"#));
    // containerd also has an entry under the id.
    name(node, &made[0].0, INDEX, index.clone());
    name(node, of, INDEX, index);
    made.map(|(id, _)| id)
}

/// Verifies I24.
#[tokio::test]
async fn index_is_copied_for_the_architecture_of_the_cell() {
    for architecture in [None, Some(other())] {
        let mut scene = Scene::new();
        scene.cell.architecture = architecture;
        let ids = add_index(&scene.node, NAME);
        let pause = add_index(&scene.node, PAUSE);
        let wanted = usize::from(architecture.is_some());
        assert_eq!(scene.status(NAME).await.as_ref(), ids.first().filter(|_| wanted == 0));
        assert_eq!(scene.ensure(NAME, NAME).await.unwrap(), ids[wanted]);
        scene.images.ensure_pause_in(&scene.id, &scene.cell).await.unwrap();
        let named = scene.cell.named.lock().unwrap();
        assert_eq!(
            named.iter().map(|image| &image.image_id).collect::<Vec<_>>(),
            [&ids[wanted], &pause[wanted]]
        );
        assert!(scene.cell.pulls.lock().unwrap().is_empty());
    }
}

/// Verifies I24.
#[tokio::test]
async fn image_of_another_architecture_is_pulled_in_the_cell() {
    let mut scene = Scene::new();
    scene.cell.architecture = Some(other());
    let (id, manifest) = manifest_of(&scene.node, NAME, of_this_machine());
    name(&scene.node, NAME, MANIFEST, manifest.clone());
    name(&scene.node, &id, MANIFEST, manifest);
    // For a kubelet the image is absent, so it pulls.
    assert_eq!(scene.status(NAME).await, None);
    let pulled = sha256(b"pulled");
    scene.in_registry(NAME, &pulled);
    assert_eq!(scene.ensure(NAME, NAME).await.unwrap(), pulled);
    assert!(scene.cell.named.lock().unwrap().is_empty());

    scene.cell.architecture = None;
    scene.cell.images.lock().unwrap().clear();
    assert_eq!(scene.status(NAME).await, Some(id.clone()));
    assert_eq!(scene.ensure(NAME, NAME).await.unwrap(), id);
}
