//! Cases of the daemon's cells over a provider: nothing ends without proof, no pod has two cells,
//! and nothing is left.

use std::{sync::Arc, time::Duration};

use kiyot_engine::{
    engine::CellError,
    provider::{ErrorClass, InstanceState},
};
use kiyot_proto::store::CellPhase;

use super::{
    super::bench::{LIMIT, wait_for},
    Subject,
    fault::{Fault, Gate},
    world::World,
};

/// The deadline of a call that can't succeed.
const SHORT: Duration = Duration::from_millis(100);
/// Listings during a fault of lists.
const LISTINGS: usize = 5;

pub(super) async fn lost_reply_of_a_launch_makes_one_cell(subject: Arc<impl Subject>) {
    let mut world = World::start(&subject).await;
    subject.inject(Fault::HeldLaunch);
    let lost = world.launch("pod", LIMIT);
    world.launch_is_held().await;
    let before = world.all();
    world.restart().await;
    assert!(matches!(lost.await.unwrap(), Err(CellError::Stopping)));
    subject.heal();
    let cell = world.run("pod").await;
    assert_eq!(before, std::slice::from_ref(&cell), "the retry joins the launch");
    world.assert_lives(&cell).await;
    assert_eq!(subject.running().len(), 1);
    world.stop_all().await;
}

pub(super) async fn late_reply_of_a_launch_leaves_nothing(subject: Arc<impl Subject>) {
    let world = World::start(&subject).await;
    // An order without time would end before the first order is handled.
    world.listings(2).await;
    subject.inject(Fault::HeldLaunch);
    // The call ends before the reply arrives.
    let late = world.launch("pod", Duration::ZERO);
    wait_for("the launch has begun", async || subject.holds_launch()).await;
    let first = world.all().remove(0);
    subject.heal();
    let error = late.await.unwrap().unwrap_err();
    assert!(matches!(error, CellError::NotLaunched { .. }), "{error:?}");
    world.ends(&first).await;
    let cell = world.run("pod").await;
    world.assert_lives(&cell).await;
    world.stop_all().await;
}

pub(super) async fn late_launch_leaves_nothing(subject: Arc<impl Subject>) {
    let world = World::start(&subject).await;
    subject.inject(Fault::LateLaunch);
    let late = world.launch("pod", Duration::ZERO);
    world.failures("launch", ErrorClass::Unanswered, 1).await;
    let first = world.all().remove(0);
    assert!(late.await.unwrap().is_err());
    assert_eq!(world.all(), std::slice::from_ref(&first), "the cell may have an instance");
    subject.heal();
    world.ends(&first).await;
    let cell = world.run("pod").await;
    world.assert_lives(&cell).await;
    assert_eq!(subject.running().len(), 1);
    world.stop_all().await;
}

pub(super) async fn refused_launch_leaves_nothing(subject: Arc<impl Subject>) {
    let world = World::start(&subject).await;
    subject.inject(Fault::RefusedLaunch);
    let error = world.launch("pod", LIMIT).await.unwrap().unwrap_err();
    let error = match error {
        CellError::Launches { last, .. } | CellError::NoProvider { last, .. } => *last,
        error => error,
    };
    assert!(matches!(error, CellError::Provider(_)), "{error:?}");
    wait_for("the cell has ended", async || world.all().is_empty()).await;
    assert_eq!(subject.running(), []);
    subject.heal();
    world.run("pod").await;
    world.stop_all().await;
}

pub(super) async fn instance_that_is_not_found_yet_ends_no_cell(subject: Arc<impl Subject>) {
    subject.inject(Fault::UnseenInstance);
    let world = World::start(&subject).await;
    let cell = world.run("pod").await;
    world.failures("describe", ErrorClass::NotFound, LISTINGS).await;
    world.assert_lives(&cell).await;
    subject.heal();
    world.listings(LISTINGS).await;
    world.assert_lives(&cell).await;
    world.stop_all().await;
}

pub(super) async fn stale_list_ends_no_cell(subject: Arc<impl Subject>) {
    let world = World::start(&subject).await;
    subject.inject(Fault::StaleList);
    let cell = world.run("pod").await;
    world.listings(LISTINGS).await;
    world.assert_lives(&cell).await;
    subject.heal();
    // A list that shows an ended instance as running causes no launch and keeps no cell.
    world.listings(1).await;
    subject.inject(Fault::StaleList);
    world.cells.terminate(&cell, "stopped").await.unwrap();
    world.listings(LISTINGS).await;
    world.ends(&cell).await;
    subject.heal();
    world.stop_all().await;
}

pub(super) async fn partial_list_ends_no_cell(subject: Arc<impl Subject>) {
    let world = World::start(&subject).await;
    let cells = [world.run("pod").await, world.run("another-pod").await];
    subject.inject(Fault::PartialList);
    world.listings(LISTINGS).await;
    for cell in &cells {
        world.assert_lives(cell).await;
    }
    subject.heal();
    world.listings(1).await;
    for cell in &cells {
        world.assert_lives(cell).await;
    }
    world.stop_all().await;
}

pub(super) async fn instance_that_ended_by_itself_ends_its_cell(subject: Arc<impl Subject>) {
    let world = World::start(&subject).await;
    let cell = world.run("pod").await;
    subject.inject(Fault::Interruption);
    world.ends(&cell).await;
    // A provider may add its own reason.
    let reason = world.cells.gone_reason(&cell).unwrap_or_default();
    assert!(reason.starts_with("its instance ended"), "{reason}");
    subject.heal();
    assert_ne!(world.run("pod").await, cell);
    world.stop_all().await;
}

pub(super) async fn daemon_that_dies_while_a_pod_stops_continues_the_stop(
    subject: Arc<impl Subject>,
) {
    let mut world = World::start(&subject).await;
    let cell = world.run("pod").await;
    subject.inject(Fault::HeldShutdown);
    let stopping = tokio::spawn({
        let (cells, cell) = (Arc::clone(&world.cells), cell.clone());
        async move { cells.terminate(&cell, "stopped").await }
    });
    let is_held = || subject.shutdowns().is_some_and(Gate::holds);
    wait_for("the agent is asked", async || is_held()).await;
    assert_eq!(world.phase(&cell).await, Some(CellPhase::Stopping));
    world.restart().await;
    assert!(matches!(stopping.await.unwrap(), Err(CellError::Stopping)));
    wait_for("the agent is asked again", async || is_held()).await;
    let blocked = world.launch("pod", SHORT).await.unwrap().unwrap_err();
    assert!(matches!(blocked, CellError::Blocked { .. }), "{blocked:?}");
    assert_eq!(world.calls.of("terminate"), []);
    subject.heal();
    world.cells.terminate(&cell, "stopped").await.unwrap();
    world.ends(&cell).await;
    assert_ne!(world.run("pod").await, cell);
    world.stop_all().await;
}

pub(super) async fn slow_termination_keeps_its_cell(subject: Arc<impl Subject>) {
    let world = World::start(&subject).await;
    let cell = world.run("pod").await;
    let provider = subject.provider();
    let instance = world.instances(&cell).remove(0);
    subject.inject(Fault::SlowEnd);
    let stopping = tokio::spawn({
        let (cells, cell) = (Arc::clone(&world.cells), cell.clone());
        async move { cells.terminate(&cell, "stopped").await }
    });
    wait_for("the termination has begun", async || {
        // An instance that has just been launched may not be found yet.
        let described = provider.describe(&instance).await;
        described.is_ok_and(|described| described.state == InstanceState::Stopped)
    })
    .await;
    world.listings(LISTINGS).await;
    assert_eq!(world.all(), std::slice::from_ref(&cell), "it counts until its end");
    if provider.capabilities().awaits_ends() {
        assert!(!stopping.is_finished());
        let blocked = world.launch("pod", SHORT).await.unwrap().unwrap_err();
        assert!(matches!(blocked, CellError::Blocked { .. }), "{blocked:?}");
    } else {
        // The agent has ended the pod, so that its next cell need not wait for the instance.
        stopping.await.unwrap().unwrap();
        assert_ne!(world.run("pod").await, cell);
    }
    subject.heal();
    world.ends(&cell).await;
    world.stop_all().await;
}

pub(super) async fn failed_termination_is_retried_until_the_end(subject: Arc<impl Subject>) {
    let world = World::start(&subject).await;
    let cell = world.run("pod").await;
    subject.inject(Fault::FailedEnd);
    let stopped = world.cells.terminate(&cell, "stopped").await;
    assert_eq!(stopped.is_err(), subject.provider().capabilities().awaits_ends());
    world.failures("terminate", ErrorClass::Transient, 2).await;
    assert_eq!(world.all(), std::slice::from_ref(&cell), "it counts until its end");
    subject.heal();
    world.ends(&cell).await;
    world.stop_all().await;
}

pub(super) async fn twin_ends_and_its_cell_lives(subject: Arc<impl Subject>) {
    let world = World::start(&subject).await;
    let cell = world.run("pod").await;
    let instance = world.instances(&cell).remove(0);
    subject.inject(Fault::Twin);
    assert_eq!(world.instances(&cell).len(), 2);
    wait_for("the twin has ended", async || world.instances(&cell).len() == 1).await;
    assert_eq!(world.instances(&cell), [instance]);
    world.assert_lives(&cell).await;
    world.stop_all().await;
}

pub(super) async fn instance_of_another_authority_lives_and_stops_launches(
    subject: Arc<impl Subject>,
) {
    let world = World::start(&subject).await;
    let cell = world.run("pod").await;
    subject.inject(Fault::OtherAuthority);
    let others = subject.running().into_iter().find(|(_, of)| *of != cell).unwrap();
    subject.settle();
    world.listings(LISTINGS).await;
    let error = world.launch("another-pod", LIMIT).await.unwrap().unwrap_err();
    assert!(matches!(&error, CellError::Foreign(named) if *named == others.0), "{error:?}");
    assert!(subject.running().contains(&others));
    assert_eq!(world.calls.of("terminate"), []);
    world.assert_lives(&cell).await;
    subject.heal();
    world.run("another-pod").await;
    world.stop_all().await;
}

pub(super) async fn outage_of_half_an_hour_ends_nothing(subject: Arc<impl Subject>) {
    let world = World::start(&subject).await;
    let (kept, stopped) = (world.run("kept").await, world.run("stopped").await);
    subject.inject(Fault::Outage);
    let launch = world.launch("new", LIMIT);
    let _retried = world.cells.terminate(&stopped, "stopped").await;
    world.listings(subject.listings_of_outage()).await;
    assert!(world.calls.failed("list", ErrorClass::Transient) > 0);
    world.assert_lives(&kept).await;
    assert!(world.all().contains(&stopped), "its end is not proven");
    assert_eq!(subject.running().len(), 2);
    subject.heal();
    world.ends(&stopped).await;
    let new = match launch.await.unwrap() {
        Ok(bound) => bound.cell.id,
        Err(_) => world.run("new").await,
    };
    world.assert_lives(&kept).await;
    world.assert_lives(&new).await;
    wait_for("no other instance is left", async || subject.running().len() == 2).await;
    world.stop_all().await;
}

pub(super) async fn denied_calls_leave_nothing(subject: Arc<impl Subject>) {
    let world = World::start(&subject).await;
    let cell = world.run("pod").await;
    subject.inject(Fault::Denied);
    let error = world.launch("another-pod", LIMIT).await.unwrap().unwrap_err();
    assert!(
        matches!(&error, CellError::Provider(error) if error.class == ErrorClass::Auth),
        "{error:?}"
    );
    world.listings(LISTINGS).await;
    world.assert_lives(&cell).await;
    // The agent ends the pod; the end of its instance waits for the permission.
    world.cells.terminate(&cell, "stopped").await.unwrap();
    world.failures("terminate", ErrorClass::Auth, 2).await;
    assert_eq!(world.all(), std::slice::from_ref(&cell));
    subject.heal();
    world.ends(&cell).await;
    world.stop_all().await;
}

pub(super) async fn throttled_calls_are_repeated(subject: Arc<impl Subject>) {
    let world = World::start(&subject).await;
    let first = world.run("pod").await;
    subject.inject(Fault::Throttled);
    let launch = world.launch("another-pod", LIMIT);
    world.failures("launch", ErrorClass::Throttled, 3).await;
    world.listings(LISTINGS).await;
    world.assert_lives(&first).await;
    assert_eq!(subject.running().len(), 1);
    subject.heal();
    let second = launch.await.unwrap().unwrap().cell.id;
    world.assert_lives(&second).await;
    assert_eq!(subject.running().len(), 2);
    world.stop_all().await;
}
