//! Pulls of cells that take layers from the node.

use super::*;

fn report(moves: u64, fetching: bool, manifest: Option<PulledManifest>) -> PullNews {
    PullNews { moves, fetching, manifest, known: None }
}

/// Returns a scene with an image in the registry, and on the node under another tag of its
/// repository. The cell reports the manifest, and its pull of the layers never ends.
fn pulling() -> (Scene, String, PulledManifest) {
    let scene = Scene::new();
    let (id, manifest) = scene.node.image_and_manifest("registry.example/app:other");
    scene.in_registry(NAME, &id);
    *scene.cell.reports.lock().unwrap() = vec![
        (Duration::ZERO, report(0, false, None)),
        (Duration::ZERO, report(1, true, Some(manifest.clone()))),
    ];
    *scene.cell.pull_hangs.lock().unwrap() = true;
    (scene, id, manifest)
}

/// Verifies I9.
#[tokio::test]
async fn layers_of_an_image_of_the_repository_come_from_the_node() {
    let (scene, id, manifest) = pulling();
    assert_eq!(scene.pull(NAME, auth()).await.unwrap(), id);
    let pulls = scene.cell.pulls.lock().unwrap().clone();
    assert_eq!((pulls.len(), &pulls[0].auth), (2, &pulls[1].auth));
    let blobs = scene.cell.blobs.lock().unwrap();
    assert_eq!(blobs.len(), 2, "layers only");
    assert!(!blobs.contains_key(&id) && !blobs.contains_key(&manifest.digest));
    assert_eq!(scene.node.0.lock().unwrap().held, 0);
}

/// Verifies I22.
#[tokio::test]
async fn cell_that_pulls_first_copies_images_absent_from_the_registry() {
    let mut scene = Scene::new();
    scene.images.source = ImageSource::Registry;
    let id = scene.node.image(NAME);
    assert_eq!(scene.status(NAME).await.as_ref(), Some(&id), "the node can supply the image");
    scene.in_registry(NAME, &id);
    assert_eq!(scene.ensure(&id, NAME).await.unwrap(), id);
    assert_eq!((*scene.cell.puts.lock().unwrap(), scene.cell.pulls.lock().unwrap().len()), (0, 1));

    // By this name, the registry has another image, or no image.
    for in_registry in [true, false] {
        scene.cell = FakeCell::default();
        if in_registry {
            scene.in_registry(NAME, &sha256(b"a later image"));
        }
        assert_eq!(scene.ensure(&id, NAME).await.unwrap(), id);
        assert!(*scene.cell.puts.lock().unwrap() > 0, "the node has sent the image");
    }
    let absent = sha256(b"absent");
    let failure = scene.ensure(&absent, "absent:1").await.unwrap_err();
    assert!(failure.to_string().contains("RegistryUnavailable"), "{failure}");

    // The pause image comes from the node.
    let pause = scene.node.image(PAUSE);
    scene.cell = FakeCell::default();
    scene.in_registry(PAUSE, &pause);
    scene.images.ensure_pause_in(&scene.id, &scene.cell).await.unwrap();
    assert_eq!(scene.cell.pulls.lock().unwrap().len(), 0);
}

/// Verifies I22.
#[tokio::test(start_paused = true)]
async fn pull_of_a_cell_that_pulls_first_is_not_interrupted_for_layers_of_the_node() {
    let (mut scene, id, _) = pulling();
    scene.images.source = ImageSource::Registry;
    *scene.cell.pull_hangs.lock().unwrap() = false;
    assert_eq!(scene.pull(NAME, auth()).await.unwrap(), id);
    assert_eq!((*scene.cell.puts.lock().unwrap(), scene.cell.pulls.lock().unwrap().len()), (0, 1));
}

/// Verifies I13.
#[tokio::test(start_paused = true)]
async fn pull_waits_for_its_watch_by_full_name() {
    let (scene, id, _) = pulling();
    *scene.cell.busy.lock().unwrap() = 3;
    assert_eq!(scene.pull(NAME, None).await.unwrap(), id);
    // Three refused watches, and a watch for each of two pulls, because the first was interrupted.
    let watched = WatchPullsRequest { image: NAME.to_owned(), known: None };
    assert_eq!(*scene.cell.watched.lock().unwrap(), vec![watched; 5]);
    assert_eq!(scene.cell.blobs.lock().unwrap().len(), 2);
}

/// Verifies L8.
#[tokio::test(start_paused = true)]
async fn endless_manifests_of_a_cell_cost_the_node_one_listing() {
    let (scene, id, manifest) = pulling();
    let other = |n: u32| PulledManifest { digest: sha256(&n.to_be_bytes()) };
    let reported = (0..100)
        .map(other)
        .chain([manifest])
        .map(|manifest| (Duration::ZERO, report(1, true, Some(manifest))))
        .collect();
    *scene.cell.reports.lock().unwrap() = reported;
    assert_eq!(scene.pull(NAME, None).await.unwrap(), id);
    assert_eq!((scene.cell.pulls.lock().unwrap().len(), *scene.cell.puts.lock().unwrap()), (2, 2));
    let content = scene.node.0.lock().unwrap();
    assert_eq!((content.lists, content.reads.len()), (1, 4), "index and manifest, and two layers");
}

/// Verifies I13.
#[tokio::test]
async fn manifest_of_another_pull_interrupts_once() {
    let scene = Scene::new();
    let (id, mine) = scene.node.image_and_manifest(NAME);
    let (_, other) = scene.node.image_and_manifest("registry.example/app:v2");
    scene.in_registry(NAME, &id);
    let reported =
        |manifest: &PulledManifest| (Duration::ZERO, report(1, true, Some(manifest.clone())));
    // The same layers under two manifests: the first manifest brings them, so the second has no
    // effect.
    *scene.cell.reports.lock().unwrap() = vec![reported(&other)];
    *scene.cell.next_reports.lock().unwrap() = vec![reported(&other), reported(&mine)];
    *scene.cell.pull_hangs.lock().unwrap() = true;
    assert_eq!(scene.pull(NAME, None).await.unwrap(), id);
    assert_eq!(scene.cell.pulls.lock().unwrap().len(), 2);
}

/// Verifies I9.
#[tokio::test(start_paused = true)]
async fn manifest_without_an_image_of_the_repository_gets_no_layer() {
    let others = ["registry.example/private:1", "registry.example/app-private:1"];
    let private = |scene: &Scene, name: &str| scene.node.image_and_manifest(name).1;
    // Made by the cell, with a layer of another image whose digest it knows.
    let forged = |scene: &Scene| {
        let layer = sha256(&vec![7; (5 << 20) + 1]);
        let json = format!(
            r#"{{"mediaType":"application/vnd.oci.image.manifest.v1+json",
            "config":{{"digest":"{0}","size":5}},"layers":[{{"digest":"{0}","size":5242881}}]}}"#,
            layer
        );
        // As if the node had the manifest in its store.
        scene.node.blob(json.clone());
        PulledManifest { digest: sha256(json.as_bytes()) }
    };
    for manifest in [
        &forged as &dyn Fn(&Scene) -> PulledManifest,
        &|scene| private(scene, others[0]),
        &|scene| private(scene, others[1]),
    ] {
        let scene = Scene::new();
        scene.node.image(NAME);
        for other in others {
            scene.node.image(other);
        }
        let manifest = manifest(&scene);
        *scene.cell.reports.lock().unwrap() =
            vec![(Duration::ZERO, report(1, true, Some(manifest)))];
        *scene.cell.pull_hangs.lock().unwrap() = true;
        let failure = scene.pull(NAME, None).await.unwrap_err();
        assert_eq!(failure.code(), Code::DeadlineExceeded, "the pull was not interrupted");
        assert!(scene.cell.blobs.lock().unwrap().is_empty());
    }
}

#[tokio::test]
async fn layers_absent_on_the_node_do_not_interrupt_a_pull() {
    for drop_all in [true, false] {
        let (scene, id, _) = pulling();
        *scene.cell.pull_hangs.lock().unwrap() = false;
        scene.node.0.lock().unwrap().blobs.retain(|_, bytes| !drop_all && bytes.len() < 1 << 20);
        assert_eq!(scene.pull(NAME, None).await.unwrap(), id);
        assert_eq!(
            (scene.cell.pulls.lock().unwrap().len(), *scene.cell.puts.lock().unwrap()),
            (1, 0)
        );
    }
}

#[tokio::test]
async fn unsendable_layer_is_pulled() {
    let (mut scene, id, _) = pulling();
    scene.cell.refuses = true;
    assert_eq!(scene.pull(NAME, None).await.unwrap(), id);
}

/// Verifies I10.
#[tokio::test(start_paused = true)]
async fn stalled_pull_ends_at_the_progress_timeout() {
    let step =
        |seconds, moves, fetching| (Duration::from_secs(seconds), report(moves, fetching, None));
    // With a limit of 120 s: no progress; progress that ends; an agent without watches.
    for (said, seconds) in [
        (vec![step(0, 0, false)], 120),
        (vec![step(0, 0, false), step(100, 1, true), step(100, 2, true), step(50, 2, true)], 320),
        (vec![], 120),
    ] {
        let scene = Scene::new();
        *scene.cell.reports.lock().unwrap() = said;
        *scene.cell.pull_hangs.lock().unwrap() = true;
        let begun = tokio::time::Instant::now();
        let failure = scene.pull(NAME, None).await.unwrap_err();
        assert_eq!((failure.code(), begun.elapsed().as_secs()), (Code::DeadlineExceeded, seconds));
        assert!(
            failure.message().contains(NAME) && failure.message().contains("120 s"),
            "{failure}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn failed_watch_is_restarted() {
    let step = |seconds, moves| (Duration::from_secs(seconds), report(moves, true, None));
    let scene = Scene::new();
    *scene.cell.reports.lock().unwrap() = vec![step(0, 0), step(100, 1)];
    *scene.cell.watch_fails.lock().unwrap() = true;
    *scene.cell.next_reports.lock().unwrap() = vec![step(0, 0), step(100, 1), step(100, 2)];
    *scene.cell.pull_hangs.lock().unwrap() = true;
    let begun = tokio::time::Instant::now();
    assert_eq!(scene.pull(NAME, None).await.unwrap_err().code(), Code::DeadlineExceeded);
    assert_eq!(begun.elapsed().as_secs(), 420, "120 s after the last report of the second watch");
}

/// Verifies I13.
#[tokio::test(start_paused = true)]
async fn restarted_watch_keeps_the_known_manifests() {
    let (scene, id, manifest) = pulling();
    let known = |byte| {
        let digest = sha256(&[byte]);
        Some(KnownManifests {
            manifests: vec![KnownManifest {
                digest,
                changed_seconds: 7,
                changed_nanos: i32::from(byte),
            }],
        })
    };
    let reported = |byte, manifest| {
        (Duration::ZERO, PullNews { known: known(byte), ..report(0, false, manifest) })
    };
    // The manifest appears between two watches. The second watch knows it, but reports it, because
    // the first did not know it.
    *scene.cell.reports.lock().unwrap() = vec![reported(1, None)];
    *scene.cell.watch_fails.lock().unwrap() = true;
    *scene.cell.next_reports.lock().unwrap() = vec![reported(2, Some(manifest))];
    assert_eq!(scene.pull(NAME, None).await.unwrap(), id);
    let watched: Vec<_> =
        scene.cell.watched.lock().unwrap().iter().map(|request| request.known.clone()).collect();
    assert_eq!(watched, [None, known(1), None], "the restarted pull has a new watch");
    assert_eq!(scene.cell.blobs.lock().unwrap().len(), 2);
}

/// Verifies I10.
#[tokio::test(start_paused = true)]
async fn unpacking_is_not_limited() {
    let scene = Scene::new();
    let fetched = vec![
        (Duration::ZERO, report(0, false, None)),
        (Duration::from_secs(1), report(5, true, None)),
        (Duration::from_secs(1), report(6, false, None)),
    ];
    let unpacked = std::iter::repeat_n((Duration::from_secs(4), report(6, false, None)), 3000);
    *scene.cell.reports.lock().unwrap() = fetched.into_iter().chain(unpacked).collect();
    *scene.cell.pull_hangs.lock().unwrap() = true;
    let pull = scene.pull(NAME, None);
    assert!(tokio::time::timeout(Duration::from_secs(10_000), pull).await.is_err(), "it continues");
}

/// Verifies I10.
#[tokio::test(start_paused = true)]
async fn pull_without_reports_ends() {
    let scene = Scene::new();
    // The last report says that the pull unpacks.
    *scene.cell.reports.lock().unwrap() = vec![
        (Duration::ZERO, report(0, false, None)),
        (Duration::from_secs(1), report(6, false, None)),
    ];
    *scene.cell.pull_hangs.lock().unwrap() = true;
    let begun = tokio::time::Instant::now();
    let ended = tokio::time::timeout(Duration::from_secs(10_000), scene.pull(NAME, None)).await;
    assert_eq!(ended.expect("it ends").unwrap_err().code(), Code::DeadlineExceeded);
    assert!((121..=122).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
}
