//! Bulk connections: demand, idle timeout, flow control.

use std::{sync::atomic::Ordering, time::Duration};

use kiyot_proto::cell::{ReadLogRequest, agent_client::AgentClient};
use kiyot_testkit::{wait_for, wait_until};
use tokio::task::JoinSet;

use crate::{
    calls::echo,
    kit::{Fixture, LIMIT, limits, timed, within},
};

/// The minimal idle timeout of tests that wait until a connection is closed.
const MIN_IDLE: Duration = Duration::from_millis(50);

#[tokio::test]
async fn concurrent_calls_share_a_bulk_connection_opened_on_demand() {
    let fixture = Fixture::start().await;
    let agent = fixture.agent();
    let mut calls = JoinSet::new();
    for number in 0..50 {
        let channel = fixture.link.bulk.clone();
        calls.spawn(async move { echo(&channel, &number.to_string()).await });
    }
    within("all calls", calls.join_all()).await;
    assert_eq!(agent.agent.bulk_connections.load(Ordering::SeqCst), 1);
    assert_eq!(
        fixture.admission.linked_events(),
        [Some(1)],
        "only control connections are reported"
    );
}

/// Verifies L13.
#[tokio::test]
async fn idle_bulk_connection_is_closed_and_reopened_on_demand() {
    // Shorter than the polling interval of `wait_until`.
    let idle = Duration::from_millis(1);
    let fixture = Fixture::with_limits(kiyot::backends::milpa::gateway::Limits {
        bulk_idle: idle..=idle,
        ..limits()
    })
    .await;
    let agent = fixture.agent();
    // A call that finds the connection closed opens a new connection.
    wait_until("a second connection was opened", LIMIT, async || {
        echo(&fixture.link.bulk, "another").await;
        (agent.agent.bulk_connections.load(Ordering::SeqCst) >= 2).then_some(())
    })
    .await;
    assert_eq!(fixture.admission.linked_events(), [Some(1)]);
}

/// Verifies L13.
#[tokio::test]
async fn bulk_connection_of_periodic_calls_is_kept() {
    const CALLS: usize = 20;
    // Each reopening at least doubles the idle timeout: after ten reopenings it is 50 s.
    const MAX_CONNECTIONS: usize = 10;
    let fixture = Fixture::with_limits(kiyot::backends::milpa::gateway::Limits {
        bulk_idle: MIN_IDLE..=LIMIT,
        ..limits()
    })
    .await;
    let agent = fixture.agent();
    for _ in 0..CALLS {
        echo(&fixture.link.bulk, "again").await;
        tokio::time::sleep(MIN_IDLE * 3).await;
    }
    let opened = agent.agent.bulk_connections.load(Ordering::SeqCst);
    assert!(opened <= MAX_CONNECTIONS, "{opened} connections for {CALLS} calls");
}

/// Verifies L12.
#[tokio::test]
async fn open_call_keeps_its_bulk_connection() {
    let idle = Duration::from_millis(20);
    let fixture = Fixture::with_limits(kiyot::backends::milpa::gateway::Limits {
        bulk_idle: idle..=idle,
        ..limits()
    })
    .await;
    let agent = fixture.agent();
    let mut log = AgentClient::new(fixture.link.bulk.clone())
        .read_log(timed(ReadLogRequest { position: 1, ..ReadLogRequest::default() }, LIMIT))
        .await;
    let log = log.as_mut().unwrap().get_mut();
    assert!(log.message().await.unwrap().is_some());
    // An earlier connection may have been closed before the call began.
    let opened = agent.agent.bulk_connections.load(Ordering::SeqCst);
    // No further part is sent: the open call alone keeps the connection.
    assert!(tokio::time::timeout(idle * 25, log.message()).await.is_err());
    echo(&fixture.link.bulk, "meanwhile").await;
    assert_eq!(agent.agent.bulk_connections.load(Ordering::SeqCst), opened);
}

/// Verifies L5.
#[tokio::test]
async fn stuck_readers_block_neither_control_nor_other_readers() {
    let fixture = Fixture::start().await;
    let _agent = fixture.agent();
    // Each stream fills its window, 256 KiB of its 6.25 MiB.
    let mut stuck = Vec::new();
    for _ in 0..3 {
        let request = timed(ReadLogRequest { position: 100, ..ReadLogRequest::default() }, LIMIT);
        let mut log = AgentClient::new(fixture.link.bulk.clone())
            .read_log(request)
            .await
            .unwrap()
            .into_inner();
        assert_eq!(log.message().await.unwrap().unwrap().content.len(), 64 * 1024);
        stuck.push(log);
    }
    let mut events = fixture.link.control.watch().await.unwrap();
    assert!(within("the first event", events.next()).await.unwrap().is_some());
    let mut log = AgentClient::new(fixture.link.bulk.clone())
        .read_log(timed(ReadLogRequest { position: 100, ..ReadLogRequest::default() }, LIMIT))
        .await;
    let log = log.as_mut().unwrap().get_mut();
    for _ in 0..100 {
        assert!(within("the next part", log.message()).await.unwrap().is_some());
    }
    // A stuck stream continues when it is read.
    for _ in 0..99 {
        assert!(within("the next part", stuck[0].message()).await.unwrap().is_some());
    }
    wait_for("no connection was closed", || fixture.admission.linked_events() == [Some(1)]).await;
}
