use std::sync::{Mutex, atomic::Ordering};

use kiyot_engine::{engine::Now, provider::InstanceId};
use kiyot_link::log_limit::MAX_LINES;
use kiyot_proto::{cell::HelloReply, store::CellPhase};

use super::{
    super::gateway::{Admission, Refusal},
    *,
};

mod played;
mod provider_set;

use played::{Act, PATIENCE, World, config, eventually, instance_of, locked, next_gone, wanted};

#[tokio::test]
async fn launch_binds_the_cell() {
    let world = World::new(config()).await;
    let mut events = world.cells.events();
    let cell = world.bound().await;
    assert_eq!(world.provider.calls(), ["launch", "attach"]);
    assert!(
        matches!(events.recv().await.unwrap(), CellEvent::Connected(connected) if connected == cell)
    );
    let stored = world.stored().await.remove(0);
    assert_eq!(
        (stored.phase(), stored.instance, stored.addresses),
        (CellPhase::Bound, instance_of(&cell), vec!["10.0.0.7".to_owned()])
    );
    assert_eq!(
        (stored.key_sha256.as_str(), stored.pod_uid.as_str(), stored.boot_id.as_str()),
        ("its key", "uid", "this boot")
    );
    let token = locked(&world.links.tokens)[&cell].clone();
    assert_eq!(token.len(), 64);
    assert_ne!(stored.token_sha256, token, "the token itself is not kept");
    assert!(world.cells.get(&cell).is_some());
}

/// Verifies A23.
#[tokio::test]
async fn cell_without_callers_joins_a_warm_pool() {
    let key = || wanted("uid").key.clone();
    let limits = Limits { boots: Some(1), ..config().limits };
    for leaving in [1, 2] {
        let world = World::new(CellsConfig { limits, ..config() }).await;
        let mut calls = vec![world.cells.caller(key()), world.cells.caller(key())];
        let launch = world.launch().1;
        world.called(&["launch"]).await;
        let cell = world.only();
        world.cells.set_warm(&[WarmPool { count: 1, ..WarmPool::default() }]);
        let core = || world.cells.shared.core();
        eventually("the pool has offerings", || core().engine.pool_offerings() > 0).await;
        calls.truncate(calls.len() - leaving);
        world.comes_home(&cell).await;
        let bound = launch.await.unwrap();
        if leaving == 1 {
            assert_eq!(bound.unwrap().cell.id, cell);
            continue;
        }
        assert!(matches!(bound, Err(CellError::Ended(ended, _)) if ended == cell));
        assert_eq!((world.only(), world.provider.calls()), (cell.clone(), vec!["launch".into()]));
        let next = world.launch().1.await.unwrap().unwrap();
        assert_eq!(next.cell.id, cell);
        assert!(world.stored_orders().await.is_empty());
    }
}

#[tokio::test]
async fn termination_leaves_only_the_reason() {
    let world = World::new(config()).await;
    let mut events = world.cells.events();
    let cell = world.bound().await;
    world.cells.terminate(&cell, "its pod was stopped").await.unwrap();
    assert_eq!(world.provider.calls(), ["launch", "attach", "terminate"]);
    assert_eq!(next_gone(&mut events).await, (cell.clone(), "its pod was stopped".to_owned()));
    assert!(world.cells.get(&cell).is_none() && world.cells.all().is_empty());
    assert_eq!(world.cells.gone_reason(&cell).as_deref(), Some("its pod was stopped"));
    assert_eq!(*locked(&world.links.forgotten), std::slice::from_ref(&cell));
    world.cells.terminate(&cell, "again").await.unwrap();
    let renewal = world.cells.admits(cell.as_str(), "its key");
    assert!(matches!(renewal, Err(Refusal::Ended(ended)) if ended == cell));
    let redemption = world.cells.redeem(cell.as_str(), &world.token_sha256(&cell), "its key").await;
    assert!(matches!(redemption, Err(Refusal::Ended(ended)) if ended == cell));
}

#[tokio::test]
async fn redemption_and_renewal_of_an_ending_cell_are_refused() {
    let mut world = World::new(config()).await;
    world.provider.act("attach", &[Act::Hang]);
    let launch = world.launch().1;
    world.called(&["launch"]).await;
    let cell = world.only();
    world.comes_home(&cell).await;
    world.called(&["launch", "attach"]).await;
    // An interrupted launch is not continued while its cell is being ended.
    world.provider.act("terminate", &[Act::Hang]);
    world.restart().await;
    assert!(matches!(launch.await.unwrap(), Err(CellError::Stopping)));
    world.called(&["launch", "attach", "terminate"]).await;
    let redemption = world.cells.redeem(cell.as_str(), &world.token_sha256(&cell), "its key").await;
    assert!(matches!(redemption, Err(Refusal::Ended(ended)) if ended == cell));
    let renewal = world.cells.admits(cell.as_str(), "its key");
    assert!(matches!(renewal, Err(Refusal::Ended(ended)) if ended == cell));
}

#[tokio::test]
async fn failed_launch_is_cleaned_up() {
    // Without an instance, and with an instance in the provider's list.
    for (act, calls) in
        [(Act::Fail, vec!["launch"]), (Act::FailDone, vec!["launch", "console", "terminate"])]
    {
        let world = World::new(config()).await;
        world.provider.act("launch", &[act]);
        let error = world.launch().1.await.unwrap().unwrap_err();
        assert!(
            matches!(&error, CellError::Provider(error) if error.doing == "played launch"),
            "{error:?}"
        );
        assert_eq!(world.provider.calls(), calls);
        assert!(world.cells.all().is_empty() && world.stored().await.is_empty());
    }
}

/// Verifies X5.
#[tokio::test]
async fn unrecorded_bound_cell_fails_its_launch_and_the_next_succeeds() {
    let mut world = World::new(config()).await;
    world.store = world.store.failing_once(CellPhase::Bound);
    world.restart().await;
    let launch = world.launch().1;
    world.called(&["launch"]).await;
    let cell = world.only();
    world.comes_home(&cell).await;
    let error = tokio::time::timeout(PATIENCE, launch).await.unwrap().unwrap().unwrap_err();
    assert!(matches!(&error, CellError::Store(of, _) if *of == cell), "{error}");
    eventually("the cell has ended", || world.cells.all().is_empty()).await;
    world.bound().await;
}

#[tokio::test]
async fn failed_attach_terminates_the_cell() {
    let world = World::new(config()).await;
    world.provider.act("attach", &[Act::Fail]);
    let launch = world.launch().1;
    world.called(&["launch"]).await;
    world.comes_home(&world.only()).await;
    let error = launch.await.unwrap().unwrap_err();
    assert!(
        matches!(&error, CellError::Provider(error) if error.doing == "played attach"),
        "{error:?}"
    );
    assert_eq!(world.provider.calls(), ["launch", "attach", "console", "terminate"]);
    assert!(world.stored().await.is_empty());
}

/// Verifies V29.
#[tokio::test]
async fn agent_on_another_machine_than_its_instance_gets_no_pod() {
    for (peer, is_bound) in [([10, 0, 0, 7], true), ([10, 0, 0, 8], false)] {
        let world = World::new(config()).await;
        *locked(&world.links.peer) = Some(peer.into());
        let launch = world.launch().1;
        world.called(&["launch"]).await;
        world.comes_home(&world.only()).await;
        match launch.await.unwrap() {
            Ok(_) => assert!(is_bound),
            Err(error) => {
                let CellError::Provider(error) = error else { panic!("{error}") };
                assert!(!is_bound && error.doing.contains("dials from 10.0.0.8"), "{error}");
                assert!(world.cells.all().is_empty());
            }
        }
    }
}

#[tokio::test]
async fn launch_timeout_ends_the_cell_and_quotes_its_console() {
    // Long enough for the launch, because an unknown instance has no console.
    let world =
        World::new(CellsConfig { launch_timeout: Duration::from_secs(2), ..config() }).await;
    let error = world.launch().1.await.unwrap().unwrap_err();
    assert!(
        matches!(&error, CellError::Silent { console, .. } if console.ends_with("kernel panic")),
        "{error}"
    );
    assert_eq!(world.provider.calls(), ["launch", "console", "terminate"]);
    assert!(world.cells.all().is_empty());
}

#[tokio::test]
async fn earlier_deadline_of_the_caller_bounds_the_launch() {
    let world = World::new(config()).await;
    // Otherwise the order would wait for the listing.
    eventually("instances are listed", || world.provider.lists.load(Ordering::SeqCst) > 1).await;
    let sandbox = SandboxId::mint().unwrap();
    assert!(matches!(
        world.cells.launch(wanted("uid"), sandbox, Some(Duration::ZERO)).await,
        Err(CellError::NotLaunched { seconds: 0, .. })
    ));
}

#[tokio::test]
async fn instance_end_during_launch_fails_the_launch() {
    let world = World::new(config()).await;
    let launch = world.launch().1;
    world.stored_phase(CellPhase::Booting).await;
    world.provider.end(&instance_of(&world.only()), true);
    let error = launch.await.unwrap().unwrap_err();
    assert!(
        matches!(
            &error,
            CellError::Ended(_, reason)
                if reason.contains("its instance ended") && reason.contains("kernel panic")
        ),
        "{error}"
    );
    assert_eq!(world.provider.calls(), ["launch", "console", "terminate"]);
}

#[tokio::test]
async fn launch_continues_without_its_caller() {
    let world = World::new(config()).await;
    let launch = world.launch().1;
    world.called(&["launch"]).await;
    launch.abort();
    assert!(launch.await.unwrap_err().is_cancelled());
    let cell = world.only();
    world.comes_home(&cell).await;
    world.stored_phase(CellPhase::Bound).await;
    world.cells.terminate(&cell, "its pod was deleted").await.unwrap();
}

#[tokio::test]
async fn failed_detachment_does_not_prevent_termination() {
    let world = World::new(config()).await;
    let cell = world.bound().await;
    world.provider.act("detach", &[Act::Fail, Act::Fail]);
    world.cells.terminate(&cell, "its pod was stopped").await.unwrap_err();
    assert_eq!(world.provider.calls(), ["launch", "attach", "detach", "terminate"]);
    // The repetition removes what is left on the node.
    eventually("the cell has ended", || world.cells.all().is_empty()).await;
    let expected = ["launch", "attach", "detach", "terminate", "detach", "terminate", "terminate"];
    assert_eq!(world.provider.calls(), expected);
}

#[tokio::test]
async fn termination_during_launch_fails_the_launch() {
    let world = World::new(config()).await;
    let launch = world.launch().1;
    world.stored_phase(CellPhase::Booting).await;
    world.cells.terminate(&world.only(), "its pod was stopped").await.unwrap();
    let error = launch.await.unwrap().unwrap_err();
    assert!(
        matches!(&error, CellError::Ended(_, reason) if reason.starts_with("its pod was stopped")),
        "{error}"
    );
}

#[tokio::test]
async fn launch_beyond_max_cells_is_refused() {
    let world = World::new(CellsConfig {
        limits: Limits { max_cells: 1, ..Limits::default() },
        ..config()
    })
    .await;
    let cell = world.bound().await;
    let sandbox = SandboxId::mint().unwrap();
    assert!(matches!(
        world.cells.launch(wanted("another pod"), sandbox, None).await,
        Err(CellError::Full { limit: 1, cells: 1, .. })
    ));
    world.cells.terminate(&cell, "stopped").await.unwrap();
    world.bound().await;
}

#[tokio::test]
async fn ended_instance_is_cleaned_up_before_the_event() {
    for listed in [true, false] {
        let world = World::new(config()).await;
        let mut events = world.cells.events();
        let cell = world.bound().await;
        world.provider.end(&instance_of(&cell), listed);
        world.cells.linked(&cell, None);
        assert_eq!(next_gone(&mut events).await, (cell, "its instance ended".to_owned()));
        assert_eq!(world.provider.calls(), ["launch", "attach", "terminate"]);
    }
}

#[tokio::test]
async fn broken_link_ends_no_cell() {
    let world = World::with_listing_period(config(), PATIENCE).await;
    let cell = world.bound().await;
    let lists = world.provider.lists.load(Ordering::SeqCst);
    let mut events = world.cells.events();
    world.cells.linked(&cell, None);
    eventually("a listing long before the end of the period", || {
        world.provider.lists.load(Ordering::SeqCst) > lists
    })
    .await;
    world.cells.linked(&cell, Some(HelloReply::default()));
    assert!(
        matches!(events.recv().await.unwrap(), CellEvent::Connected(connected) if connected == cell)
    );
    assert!(world.cells.get(&cell).is_some());
    assert_eq!(world.provider.calls(), ["launch", "attach"]);
}

/// Verifies V24.
#[tokio::test]
async fn idle_daemon_only_lists_instances_once_a_period() {
    const PERIOD: Duration = Duration::from_secs(30);
    for cells in [0, 1, 20] {
        let limits = Limits { max_cells: 20, ..Limits::default() };
        let world = World::with_listing_period(CellsConfig { limits, ..config() }, PERIOD).await;
        for pod in 0..cells {
            world.bound_to(&pod.to_string()).await;
        }
        let lists = || world.provider.lists.load(Ordering::SeqCst);
        tokio::time::pause();
        let before = lists();
        eventually("a list", || lists() > before).await;
        let (before, calls) = (lists(), world.provider.calls());
        tokio::time::sleep(PERIOD * 10 + PERIOD / 2).await;
        assert_eq!((lists() - before, world.provider.calls()), (10, calls), "{cells} cells");
        tokio::time::resume();
    }
}

/// Verifies L17.
#[tokio::test]
async fn reconnecting_cell_pushes_out_no_event_of_other_cells() {
    const TIMES: usize = 1500;
    let world = World::with_listing_period(config(), PATIENCE).await;
    let (other, cell) = (world.bound_to("other").await, world.bound_to("hostile").await);
    for _ in 0..TIMES {
        world.cells.linked(&cell, None);
        world.cells.linked(&cell, Some(HelloReply::default()));
    }
    // Effects of a cell are carried out in order.
    world.cells.terminate(&cell, "stopped").await.unwrap();
    let (events, _) = world.cells.shared.history.follow();
    let connects = |cell: &CellId| {
        let subject = history::Subject::Cell(cell.clone());
        events.iter().filter(|it| it.subject == subject && it.status == "Connected").count()
    };
    assert_eq!((connects(&other), connects(&cell)), (1, MAX_LINES as usize));
}

#[tokio::test]
async fn termination_is_retried_until_confirmed() {
    let world = World::new(config()).await;
    let mut events = world.cells.events();
    let cell = world.bound().await;
    world.provider.act("terminate", &[Act::Fail, Act::FailDone, Act::Fail]);
    let error = world.cells.terminate(&cell, "stopped").await.unwrap_err();
    assert!(
        matches!(
            &error,
            CellError::Provider(error) if error.text() == "played terminate: as the test says"
        ),
        "{error:?}"
    );
    assert_eq!(next_gone(&mut events).await, (cell, "stopped".to_owned()));
    assert_eq!(world.provider.calls().iter().filter(|call| *call == "terminate").count(), 4);
}

#[tokio::test]
async fn failed_termination_is_resumed_after_a_restart() {
    let mut world = World::new(CellsConfig { retry_pause: PATIENCE * 10, ..config() }).await;
    let cell = world.bound().await;
    world.provider.act("terminate", &[Act::Fail]);
    world.cells.terminate(&cell, "stopped").await.unwrap_err();
    assert_eq!(world.stored().await.remove(0).phase(), CellPhase::Terminating);
    let mut events = world.restart().await;
    assert_eq!(next_gone(&mut events).await, (cell.clone(), "stopped".to_owned()));
    assert_eq!(world.stored().await.remove(0).phase(), CellPhase::Gone);
    world.restart().await;
    assert_eq!(world.cells.gone_reason(&cell).as_deref(), Some("stopped"));
}

/// A cell's work starts further work as long as the cell lives: a chain of spans would grow with
/// each retry.
#[tokio::test]
async fn log_lines_of_a_cell_name_it_once() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::DEBUG)
        .with_ansi(false)
        .with_writer(log.clone())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let world = World::new(config()).await;
    let mut events = world.cells.events();
    let cell = world.bound().await;
    world.provider.act("terminate", &[Act::Fail; 5]);
    world.cells.terminate(&cell, "stopped").await.unwrap_err();
    assert_eq!(next_gone(&mut events).await, (cell.clone(), "stopped".to_owned()));
    let text = String::from_utf8(locked(&log.0).clone()).unwrap();
    let span = format!("cell{{cell={cell}}}");
    let names = |line: &&str| line.matches(&span).count() > 1;
    // Parallel tests without a log may have disabled the spans.
    assert_eq!(text.lines().filter(names).count(), 0, "{text}");
}

/// A log in memory.
#[derive(Debug, Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        locked(&self.0).extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl tracing_subscriber::fmt::MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

/// Verifies P6.
#[tokio::test]
async fn restart_continues_a_launch_and_the_retry_joins_it() {
    // The provider call that hangs, the phase on disk, and all calls at the end: a launch without
    // an answer is replayed.
    for (hangs, phase, calls) in [
        (Some("launch"), CellPhase::Launching, &["launch", "launch", "attach"][..]),
        (None, CellPhase::Booting, &["launch", "attach"]),
    ] {
        let mut world = World::new(config()).await;
        if let Some(call) = hangs {
            world.provider.act(call, &[Act::Hang]);
        }
        let (sandbox, launch) = world.launch();
        world.stored_phase(phase).await;
        // The record precedes the call.
        world.called(&["launch"]).await;
        let cell = world.only();
        world.restart().await;
        assert!(matches!(launch.await.unwrap(), Err(CellError::Stopping)));
        let (_, retry) = world.launch();
        if hangs.is_some() {
            world.called(&["launch", "launch"]).await;
        }
        world.comes_home(&cell).await;
        let bound = retry.await.unwrap().unwrap();
        assert_eq!(
            (&bound.cell.id, &bound.sandbox),
            (&cell, &sandbox),
            "the cell and the sandbox of the first call"
        );
        assert_eq!(world.provider.calls(), calls);
        assert_eq!(world.stored().await.remove(0).phase(), CellPhase::Bound);
        assert!(world.stored_orders().await.is_empty(), "the order is done");
    }
}

/// Verifies P6.
#[tokio::test]
async fn retry_joins_a_launch_of_the_previous_daemon_while_the_catalogue_is_not_read() {
    let mut world = World::new(config()).await;
    let (sandbox, launch) = world.launch();
    world.stored_phase(CellPhase::Booting).await;
    let cell = world.only();
    world.provider.act("catalogue", &[Act::Fail]);
    world.restart().await;
    assert!(matches!(launch.await.unwrap(), Err(CellError::Stopping)));
    let (_, retry) = world.launch();
    world.comes_home(&cell).await;
    let bound = retry.await.unwrap().unwrap();
    assert_eq!((&bound.cell.id, &bound.sandbox), (&cell, &sandbox));
}

#[tokio::test]
async fn previous_launch_without_a_caller_ends() {
    let mut world = World::new(config()).await;
    world.launch();
    world.stored_phase(CellPhase::Booting).await;
    let cell = world.only();
    let mut events = world.restart().await;
    // The cell waits for its pod, even when it is ready.
    world.comes_home(&cell).await;
    world.stored_phase(CellPhase::Idle).await;
    world.cells.shared.with_core(|core, now| {
        let later = Now { boot: now.boot + PATIENCE, ..now };
        ((), core.engine.handle(Event::Tick, later))
    });
    let (gone, reason) = next_gone(&mut events).await;
    assert_eq!((gone, reason.as_str()), (cell, "no call of the kubelet joined its launch"));
    // Without a caller the console is not read.
    assert_eq!(world.provider.calls(), ["launch", "terminate"]);
    assert!(world.stored().await.is_empty() && world.stored_orders().await.is_empty());
}

#[tokio::test]
async fn changed_pod_gets_another_cell_after_a_restart() {
    let mut world = World::new(config()).await;
    world.launch();
    world.stored_phase(CellPhase::Booting).await;
    let first = world.only();
    let mut events = world.restart().await;
    let mut changed = wanted("uid");
    Arc::make_mut(&mut changed).identity = "another machine".into();
    let (cells, sandbox) = (Arc::clone(&world.cells), SandboxId::mint().unwrap());
    let launch = tokio::spawn(async move { cells.launch(changed, sandbox, None).await });
    assert_eq!(next_gone(&mut events).await.0, first, "no two cells of a pod");
    world.called(&["launch", "terminate", "launch"]).await;
    let second = world.only();
    world.comes_home(&second).await;
    assert_eq!(launch.await.unwrap().unwrap().cell.id, second);
}

#[tokio::test]
async fn restart_ends_a_half_bound_cell() {
    let mut world = World::new(config()).await;
    world.provider.act("attach", &[Act::Hang]);
    world.launch();
    world.called(&["launch"]).await;
    world.comes_home(&world.only()).await;
    world.called(&["launch", "attach"]).await;
    let cell = world.only();
    let mut events = world.restart().await;
    let (gone, reason) = next_gone(&mut events).await;
    assert_eq!((gone, reason.contains("restarted")), (cell, true));
    assert_eq!(world.provider.calls(), ["launch", "attach", "terminate"]);
    assert!(locked(&world.provider.instances).is_empty() && world.stored().await.is_empty());
}

/// Verifies P15.
#[tokio::test]
async fn launch_waits_for_the_end_of_the_pods_previous_cell() {
    let world = World::new(config()).await;
    let cell = world.bound().await;
    world.provider.act("terminate", &[Act::Hang]);
    let terminating = tokio::spawn({
        let (cells, cell) = (Arc::clone(&world.cells), cell.clone());
        async move { cells.terminate(&cell, "stopped").await }
    });
    world.called(&["launch", "attach", "terminate"]).await;
    let (sandbox, timeout) = (SandboxId::mint().unwrap(), Some(Duration::from_millis(100)));
    let error = world.cells.launch(wanted("uid"), sandbox, timeout).await.unwrap_err();
    assert!(
        matches!(&error, CellError::Blocked { cell: Some(blocking), .. } if *blocking == cell),
        "{error}"
    );
    assert_eq!(world.provider.calls(), ["launch", "attach", "terminate"]);
    terminating.abort();
}

#[tokio::test]
async fn restart_keeps_bound_cells() {
    let mut world = World::new(config()).await;
    let cell = world.bound().await;
    let mut events = world.restart().await;
    assert!(world.cells.admits(cell.as_str(), "its key").is_ok());
    world.cells.linked(&cell, Some(HelloReply::default()));
    assert!(
        matches!(events.recv().await.unwrap(), CellEvent::Connected(connected) if connected == cell)
    );
    eventually("a link", || world.cells.get(&cell).is_some()).await;
    // The daemon still notices the end of the cell.
    world.provider.end(&instance_of(&cell), false);
    assert_eq!(next_gone(&mut events).await.0, cell);
}

#[tokio::test]
async fn bound_cell_without_a_sandbox_record_ends() {
    let mut world = World::new(config()).await;
    let cell = world.bound().await;
    let (sandbox, _) = world.store.load::<SandboxMeta>(Table::Sandboxes).await.unwrap().remove(0);
    let mut batch = super::super::store::Batch::default();
    batch.remove(Table::Sandboxes, &sandbox);
    world.store.commit(batch).await.unwrap();
    let mut events = world.restart().await;
    assert_eq!(next_gone(&mut events).await.0, cell);
    assert!(world.stored().await.is_empty());
}

/// Verifies O22.
#[tokio::test]
async fn warm_cell_of_a_previous_daemon_ends_under_a_cordon() {
    let warm = vec![WarmPool { count: 1, ..WarmPool::default() }];
    let mut world = World::new(CellsConfig { warm, ..config() }).await;
    world.called(&["launch"]).await;
    let cell = world.only();
    world.comes_home(&cell).await;
    world.stored_phase(CellPhase::Idle).await;
    let mut batch = Batch::default();
    batch.put(Table::Cordon, "cells", &Cordon { since_unix_nanos: 1 });
    world.store.commit(batch).await.unwrap();
    let mut events = world.restart().await;
    let reason = "launches of cells were stopped by an operator".to_owned();
    assert_eq!(next_gone(&mut events).await, (cell, reason));
    assert_eq!(world.provider.calls(), ["launch", "terminate"]);
    assert!(world.stored().await.is_empty());
}

#[tokio::test]
async fn reboot_ends_all_cells() {
    let mut world = World::new(config()).await;
    let cell = world.bound().await;
    world.config.boot_id = "the next boot".into();
    let mut events = world.restart().await;
    assert_eq!(next_gone(&mut events).await, (cell, "the node was rebooted".to_owned()));
    assert_eq!(world.provider.calls(), ["launch", "attach", "terminate"]);
}

#[tokio::test]
async fn stray_instances_are_terminated() {
    let world = World::new(config()).await;
    let cell = world.bound().await;
    world.provider.act("terminate", &[Act::Fail]);
    let stray = InstanceId(instance_of(&CellId::mint().unwrap()));
    locked(&world.provider.instances).insert(stray.clone(), true);
    eventually("the end of a stray", || !locked(&world.provider.instances).contains_key(&stray))
        .await;
    assert_eq!(world.cells.all(), [cell]);
}

/// Verifies L1.
#[tokio::test]
async fn token_is_spent_once() {
    let world = World::new(config()).await;
    let launch = world.launch().1;
    world.called(&["launch"]).await;
    let cell = world.only();
    let token = world.token_sha256(&cell);
    let redeem = |token: String, key: &'static str| {
        let (cells, cell) = (&world.cells, cell.clone());
        async move { cells.redeem(cell.as_str(), &token, key).await }
    };
    assert!(matches!(
        world.cells.redeem("cell-aaaaaaaaaaaa", &token, "key").await,
        Err(Refusal::Unknown(_))
    ));
    assert!(matches!(
        world.cells.redeem("no cell at all", &token, "key").await,
        Err(Refusal::Unknown(_))
    ));
    let forged = world
        .cells
        .redeem("x\n2026-11-22T00:00:00Z  INFO kiyot: all is well", &token, "key")
        .await
        .unwrap_err();
    assert!(!forged.to_string().contains('\n'), "an unknown id adds no line to the log: {forged}");
    assert!(matches!(redeem("another".into(), "key").await, Err(Refusal::WrongToken(_))));
    assert!(matches!(world.cells.admits(cell.as_str(), ""), Err(Refusal::Unknown(_))));
    assert_eq!(redeem(token.clone(), "key").await.unwrap(), cell);
    assert_eq!(world.stored().await.remove(0).key_sha256, "key");
    assert_eq!(redeem(token.clone(), "key").await.unwrap(), cell, "the same key may ask again");
    assert!(matches!(world.cells.admits(cell.as_str(), "other"), Err(Refusal::OtherKey(_))));
    // A second key ends the cell.
    assert!(matches!(redeem(token, "other").await, Err(Refusal::OtherKey(_))));
    let error = launch.await.unwrap().unwrap_err();
    assert!(
        matches!(&error, CellError::Ended(_, reason) if reason.contains("another key")),
        "{error}"
    );
    assert!(locked(&world.provider.instances).is_empty());
}

#[tokio::test]
async fn expired_token_is_refused() {
    let world = World::new(CellsConfig { token_ttl: Duration::ZERO, ..config() }).await;
    let _launch = world.launch();
    world.called(&["launch"]).await;
    let cell = world.only();
    assert!(matches!(
        world.cells.redeem(cell.as_str(), &world.token_sha256(&cell), "key").await,
        Err(Refusal::Expired(_))
    ));
}

#[tokio::test]
async fn shutdown_leaves_cells_running() {
    let world = World::new(config()).await;
    let cell = world.bound().await;
    world.cells.shutdown().await;
    assert_eq!(world.provider.calls(), ["launch", "attach"]);
    assert!(matches!(world.cells.terminate(&cell, "late").await, Err(CellError::Stopping)));
    assert!(matches!(world.launch().1.await.unwrap(), Err(CellError::Starting)));
}

/// Verifies K26.
#[tokio::test]
async fn places_exclude_providers_whose_instances_end_with_the_node() {
    let mut world = World::new(config()).await;
    assert_eq!(world.cells.places(), Some((vec![], vec![])));
    for (shared, expected) in [("", None), ("here", Some((vec!["here".to_owned()], vec![])))] {
        *locked(&world.provider.shared) = Some(shared);
        world.restart().await;
        assert_eq!(world.cells.places(), expected);
    }
    let found = async |node, place| world.cells.has_instances_of(node, place).await;
    assert!(found("other", "here").await.unwrap());
    assert!(!found("third", "here").await.unwrap());
    found("third", "there").await.unwrap_err();
}
