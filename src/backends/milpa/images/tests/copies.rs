//! Copies of images from the fake node to the fake cell.

use tokio_util::task::AbortOnDropHandle;

use super::*;

impl FakeCell {
    /// Counts a blob that is on its way.
    pub(super) fn blob_begins(&self) {
        let mut in_flight = self.in_flight.lock().unwrap();
        in_flight.0 += 1;
        in_flight.1 = in_flight.1.max(in_flight.0);
        if in_flight.0 == 1 {
            let mut copying = self.copying.lock().unwrap();
            copying.0 += 1;
            copying.1 = copying.1.max(copying.0);
        }
    }

    /// Counts a blob that has arrived.
    pub(super) fn blob_ends(&self) {
        let mut in_flight = self.in_flight.lock().unwrap();
        in_flight.0 -= 1;
        if in_flight.0 == 0 {
            self.copying.lock().unwrap().0 -= 1;
        }
    }
}

#[tokio::test]
async fn blobs_in_the_cell_are_not_sent_again() {
    let scene = Scene::new();
    let id = scene.node.image(NAME);
    scene.cell.blobs.lock().unwrap().insert(sha256(b"small"), b"small".to_vec());
    scene.ensure(&id, NAME).await.unwrap();
    assert_eq!(*scene.cell.puts.lock().unwrap(), 3);
}

/// Verifies I27.
#[tokio::test]
async fn small_blobs_are_read_from_the_node_once() {
    let scene = Scene::new();
    let (id, _) = scene.node.image_of_layers(NAME, vec![7; 10]);
    let large = scene.node.image(PAUSE);
    for (image, name) in [(&id, NAME), (&large, PAUSE)] {
        scene.ensure(image, name).await.unwrap();
    }
    assert_eq!(scene.node.0.lock().unwrap().leases, 2);
    {
        let mut content = scene.node.0.lock().unwrap();
        content.reads.clear();
        // Blobs in memory hide that the node has deleted its copies.
        content.blobs.retain(|_, bytes| bytes.len() > 1 << 20);
    }
    let (other, uid) = (CellId::mint().unwrap(), "uid-2");
    let cell = FakeCell::default();
    for (image, name) in [(&id, NAME), (&large, PAUSE)] {
        let spec = cri::ImageSpec {
            image: image.clone(),
            user_specified_image: name.to_owned(),
            ..Default::default()
        };
        assert_eq!(scene.images.ensure_in(&other, &cell, &spec, uid).await.unwrap(), *image);
    }
    assert_eq!(cell.blobs.lock().unwrap().len(), 7, "both images have the layer \"small\"");
    let content = scene.node.0.lock().unwrap();
    assert_eq!(content.reads, [sha256(&vec![7; (5 << 20) + 1])], "only the large layer");
    assert_eq!((content.leases, content.held), (3, 0), "a lease for the large layer");
}

/// Verifies I27.
#[tokio::test]
async fn damaged_blob_is_not_kept_in_memory() {
    let scene = Scene::new();
    let id = scene.node.image(NAME);
    let whole = std::mem::take(&mut scene.node.0.lock().unwrap().blobs);
    let damaged = |bytes: &Bytes| [bytes.as_ref(), b" "].concat().into();
    let blobs = whole.iter().map(|(digest, bytes)| (digest.clone(), damaged(bytes)));
    scene.node.0.lock().unwrap().blobs = blobs.collect();
    assert_eq!(scene.status(NAME).await, None);
    scene.node.0.lock().unwrap().blobs = whole;
    assert_eq!(scene.ensure(&id, NAME).await.unwrap(), id);
    assert!(scene.cell.pulls.lock().unwrap().is_empty());
}

#[tokio::test]
async fn greedy_cell_gets_only_blobs_of_its_image() {
    let mut scene = Scene::new();
    scene.node.blob("another image's");
    scene.cell.greedy = true;
    let id = scene.node.image(NAME);
    scene.ensure(&id, NAME).await.unwrap();
    assert!(!scene.cell.blobs.lock().unwrap().contains_key(&sha256(b"another image's")));
}

#[tokio::test]
async fn concurrent_requests_copy_an_image_once() {
    let scene = Scene::new();
    let id = scene.node.image(NAME);
    let (one, other) = tokio::join!(scene.ensure(&id, NAME), scene.ensure(&id, NAME));
    assert_eq!((one.unwrap(), other.unwrap()), (id.clone(), id));
    assert_eq!(scene.cell.named.lock().unwrap().len(), 1);
}

/// The barrier would block forever if the blobs were sent one after the other.
#[tokio::test(start_paused = true)]
async fn blobs_are_sent_together() {
    let mut scene = Scene::new();
    let id = scene.node.image(NAME);
    scene.cell.blobs.lock().unwrap().insert(sha256(b"small"), b"small".to_vec());
    scene.cell.together = Some(tokio::sync::Barrier::new(3));
    scene.ensure(&id, NAME).await.unwrap();
    assert_eq!(scene.cell.blobs.lock().unwrap().len(), 4);
}

/// The agent refuses a ninth concurrent blob.
#[tokio::test]
async fn concurrent_copies_to_a_cell_stay_within_the_blob_limit() {
    let scene = Scene::new();
    let names = ["a", "b", "c"].map(|name| format!("registry.example/{name}:v1"));
    names.iter().for_each(|name| drop(scene.node.image(name)));
    let copies = names.iter().map(|name| scene.ensure(name, ""));
    for copied in futures::future::join_all(copies).await {
        copied.unwrap();
    }
    assert_eq!(scene.cell.in_flight.lock().unwrap().1, 3);
}

#[tokio::test]
async fn present_image_is_asked_for_once() {
    let scene = Scene::new();
    let id = scene.node.image(NAME);
    scene.ensure(&id, NAME).await.unwrap();
    assert_eq!(*scene.cell.asked.lock().unwrap(), 2, "before and after the copy");
    scene.ensure(&id, NAME).await.unwrap();
    assert_eq!(*scene.cell.asked.lock().unwrap(), 3);
}

#[tokio::test]
async fn copy_after_a_cancelled_copy_succeeds() {
    let mut scene = Scene::new();
    let id = scene.node.image(NAME);
    scene.cell.put_hangs = true;
    {
        let mut copied = std::pin::pin!(scene.ensure(&id, NAME));
        assert!(futures::poll!(copied.as_mut()).is_pending());
        assert_eq!(scene.node.0.lock().unwrap().held, 1);
    }
    scene.cell.put_hangs = false;
    assert_eq!(scene.ensure(&id, NAME).await.unwrap(), id);
    // The lease of the cancelled copy expires by itself.
    assert_eq!(scene.node.0.lock().unwrap().held, 1);
}

#[tokio::test]
async fn failed_copy_is_not_final() {
    let mut scene = Scene::new();
    let id = scene.node.image(NAME);
    scene.cell.refuses = true;
    let failure = scene.ensure(&id, NAME).await.unwrap_err();
    assert!(failure.message().contains("the disk is full"), "{failure}");
    assert_eq!(scene.node.0.lock().unwrap().held, 0);
    scene.cell.refuses = false;
    assert_eq!(scene.ensure(&id, NAME).await.unwrap(), id);
}

/// Verifies I21.
#[tokio::test]
async fn cell_without_a_registry_gets_the_pause_image_of_the_node() {
    let scene = Scene::new();
    scene.node.image(PAUSE);
    scene.images.ensure_pause_in(&scene.id, &scene.cell).await.unwrap();
    let named = scene.cell.named.lock().unwrap();
    assert!(named.iter().any(|image| image.names.iter().any(|name| name == PAUSE)), "{named:?}");
    assert!(scene.cell.pulls.lock().unwrap().is_empty());
}

/// Verifies I29.
#[tokio::test]
async fn pruned_pause_image_is_pulled_on_the_node() {
    let scene = Scene::new();
    let id = scene.node.image(PAUSE);
    {
        let mut node = scene.node.0.lock().unwrap();
        node.registry = std::mem::take(&mut node.names);
        let content = node.registry[PAUSE].clone();
        node.names.insert(id.clone(), content);
    }
    assert_eq!(scene.images.ensure_pause_in(&scene.id, &scene.cell).await.unwrap(), id);
    assert!(scene.node.0.lock().unwrap().names.contains_key(PAUSE));
    assert!(scene.cell.pulls.lock().unwrap().is_empty());
}

/// Verifies I25.
#[tokio::test(start_paused = true)]
async fn copy_waits_for_the_restart_of_the_nodes_containerd() {
    let scene = Scene::new();
    let id = scene.node.image(PAUSE);
    scene.in_registry(PAUSE, &id);
    scene.node.0.lock().unwrap().failures = vec![
        Failure::node(Code::Unknown, "server is not initialized yet"),
        Failure::node(Code::Unavailable, "Connection refused (os error 111)"),
        Failure::node(Code::Unknown, "broken pipe"),
    ];
    assert_eq!(scene.ensure(PAUSE, "").await.unwrap(), id);
    assert!(scene.cell.pulls.lock().unwrap().is_empty());
    assert_eq!(*scene.cell.puts.lock().unwrap(), 4);
}

/// Verifies I25.
#[tokio::test(start_paused = true)]
async fn cell_pulls_if_the_nodes_containerd_stays_away() {
    let scene = Scene::new();
    let id = scene.node.image(NAME);
    scene.in_registry(NAME, &id);
    let refused = Failure::node(Code::Unavailable, "Connection refused (os error 111)");
    scene.node.0.lock().unwrap().failures = vec![refused; 100];
    let begun = tokio::time::Instant::now();
    assert_eq!(scene.ensure(NAME, "").await.unwrap(), id);
    assert_eq!(scene.cell.pulls.lock().unwrap().len(), 1);
    assert_eq!(begun.elapsed().as_secs(), 10);
}

/// Verifies I25.
#[tokio::test(start_paused = true)]
async fn image_refused_by_the_node_is_pulled_at_once() {
    let scene = Scene::new();
    let id = scene.node.image(NAME);
    scene.in_registry(NAME, &id);
    let refused = Failure::node(Code::FailedPrecondition, "namespace is required");
    scene.node.0.lock().unwrap().failures = vec![refused];
    let begun = tokio::time::Instant::now();
    assert_eq!(scene.ensure(NAME, "").await.unwrap(), id);
    assert_eq!(scene.cell.pulls.lock().unwrap().len(), 1);
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

/// Returns a scene of a cell on another machine, while ten copies to other cells never end.
async fn slow_copies() -> (Scene, Vec<AbortOnDropHandle<()>>) {
    let mut scene = Scene::new();
    let limits = Arc::new(CopyLimits::new(Arc::new(SendRate::new(1 << 20))));
    scene.images.copy_limits = Some(Arc::clone(&limits));
    scene.cell.limits = Some(Arc::clone(&limits));
    let slow = (0..10).map(|_| {
        let limits = Arc::clone(&limits);
        AbortOnDropHandle::new(tokio::spawn(async move {
            limits.in_turn(Lane::Containers, std::future::pending()).await
        }))
    });
    let slow = slow.collect();
    tokio::task::yield_now().await;
    (scene, slow)
}

/// Verifies I22.
#[tokio::test(start_paused = true)]
async fn slow_cells_on_other_machines_do_not_delay_the_pause_image() {
    let (scene, _slow) = slow_copies().await;
    scene.node.image(PAUSE);
    let begun = tokio::time::Instant::now();
    scene.ensure(PAUSE, "").await.unwrap();
    // 5 MiB at the rate limit.
    let elapsed = begun.elapsed().as_secs();
    assert!((3..=5).contains(&elapsed), "{elapsed} s");
}

/// Verifies I22.
#[tokio::test(start_paused = true)]
async fn slow_cells_on_other_machines_delay_other_copies_by_one_turn() {
    let (scene, _slow) = slow_copies().await;
    let id = scene.node.image(NAME);
    let waits = tokio::time::timeout(Duration::from_secs(1), scene.ensure(&id, NAME)).await;
    assert!(waits.is_err(), "other copies are under way");
    let begun = tokio::time::Instant::now();
    assert_eq!(scene.ensure(&id, NAME).await.unwrap(), id);
    let elapsed = begun.elapsed().as_secs();
    // The copy gets the third turn of half a minute, and then sends 5 MiB.
    assert!((63..=65).contains(&elapsed), "{elapsed} s");
}

/// Verifies I22.
#[tokio::test(start_paused = true)]
async fn fifty_cells_copy_four_images_at_a_time_in_their_order() {
    const CELLS: usize = 50;
    const AT_ONCE: usize = 4;
    // 5 MiB at the rate limit, which the copies share.
    const SECONDS_OF_AN_IMAGE: usize = 5;
    let mut scene = Scene::new();
    let limits = Arc::new(CopyLimits::new(Arc::new(SendRate::new(1 << 20))));
    scene.images.copy_limits = Some(Arc::clone(&limits));
    let id = scene.node.image(NAME);
    let copying = Arc::default();
    let cells: Vec<_> = (0..CELLS)
        .map(|_| FakeCell {
            limits: Some(Arc::clone(&limits)),
            copying: Arc::clone(&copying),
            ..FakeCell::default()
        })
        .collect();
    let begun = tokio::time::Instant::now();
    let copies = cells.iter().enumerate().map(async |(number, cell)| {
        let (own, uid) = (CellId::mint().unwrap(), format!("uid-{number}"));
        let spec = cri::ImageSpec {
            image: id.clone(),
            user_specified_image: NAME.into(),
            ..Default::default()
        };
        assert_eq!(scene.images.ensure_in(&own, cell, &spec, &uid).await.unwrap(), id);
        begun.elapsed()
    });
    let ends = futures::future::join_all(copies).await;
    assert_eq!(*copying.lock().unwrap(), (0, AT_ONCE), "cells at a time");
    assert!(cells.iter().all(|cell| cell.pulls.lock().unwrap().is_empty()), "no cell pulls");
    for (number, end) in ends.iter().enumerate() {
        // The cells before it, the cells that share its turn, and the first part of the next.
        let most = (number + AT_ONCE) * SECONDS_OF_AN_IMAGE + 1;
        assert!(end.as_secs() <= most as u64, "cell {number}: {end:?}");
    }
    let all = ends.iter().max().unwrap().as_secs();
    let paid = (CELLS * SECONDS_OF_AN_IMAGE) as u64;
    assert!((paid - 2..=paid + 2).contains(&all), "{all} s");
}
