//! Providers that a reload adds and removes.

use super::*;

/// Verifies A41.
#[tokio::test]
async fn draining_provider_keeps_its_tasks_until_its_release() {
    let world = World::new(config()).await;
    let shared = &world.cells.shared;
    let provider = || vec![Configured::new(Arc::clone(&world.provider) as _)];
    let lists = || world.provider.lists.load(Ordering::SeqCst);
    let has_tasks = async |tasks: usize| {
        eventually(&format!("{tasks} tasks"), || shared.tasks.len() == tasks).await;
    };
    let cell = world.bound().await;
    // Timers, warm pools and the lists of the provider.
    has_tasks(3).await;
    for _ in 0..20 {
        world.cells.set_providers(Vec::new());
        let before = lists();
        eventually("a list of the draining provider", || lists() > before + 1).await;
        world.cells.set_providers(provider());
    }
    assert!(world.cells.get(&cell).is_some());
    has_tasks(3).await;
    world.cells.set_providers(Vec::new());
    world.cells.terminate(&cell, "stopped").await.unwrap();
    for _ in 0..20 {
        has_tasks(2).await;
        assert_eq!((world.cells.providers(), Arc::strong_count(&world.provider)), (vec![], 1));
        let before = lists();
        world.cells.set_providers(provider());
        eventually("a list of the added provider", || lists() > before).await;
        world.cells.set_providers(Vec::new());
    }
    has_tasks(2).await;
}
