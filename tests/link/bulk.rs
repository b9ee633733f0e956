//! The bulk connection.

use std::{sync::atomic::Ordering, time::Duration};

use kiyot_proto::cell::{ReadLogRequest, agent_client::AgentClient};
use kiyot_testkit::wait_until;
use tokio::task::JoinSet;

use crate::{
    calls::echo,
    kit::{Fixture, LIMIT, limits, timed, until, within},
};

/// How long one is kept at least without a call: briefly, where it is to be closed.
const IDLE: Duration = Duration::from_millis(50);

#[tokio::test]
async fn a_call_has_it_made_and_the_calls_of_a_time_share_one() {
    let fixture = Fixture::start().await;
    let agent = fixture.agent();
    let mut calls = JoinSet::new();
    for number in 0..50 {
        let channel = fixture.link.bulk.clone();
        calls.spawn(async move { echo(&channel, &number.to_string()).await });
    }
    within("all calls", calls.join_all()).await;
    assert_eq!(agent.agent.bulks.load(Ordering::SeqCst), 1);
    assert_eq!(
        fixture.admission.news(),
        [Some(1)],
        "the admission knows of control connections only"
    );
}

/// Verifies L13.
#[tokio::test]
async fn one_that_nobody_uses_is_closed_and_made_again_when_it_is_needed() {
    // Less than what is between two looks at what is waited for.
    let idle = Duration::from_millis(1);
    let fixture = Fixture::with(kiyot::backends::milpa::gateway::Limits {
        bulk_idle: idle..=idle,
        ..limits()
    })
    .await;
    let agent = fixture.agent();
    // Calls go on while it is closed: those that find none have another one made.
    wait_until("there is a second connection", LIMIT, async || {
        echo(&fixture.link.bulk, "another").await;
        (agent.agent.bulks.load(Ordering::SeqCst) >= 2).then_some(())
    })
    .await;
    assert_eq!(fixture.admission.news(), [Some(1)]);
}

/// Verifies L13.
#[tokio::test]
async fn one_that_is_needed_again_and_again_is_kept() {
    const CALLS: usize = 20;
    // Each time that it is made again, it is kept for at least twice as long as the time before:
    // after so many, for 50 s.
    const ENOUGH: usize = 10;
    let fixture = Fixture::with(kiyot::backends::milpa::gateway::Limits {
        bulk_idle: IDLE..=LIMIT,
        ..limits()
    })
    .await;
    let agent = fixture.agent();
    for _ in 0..CALLS {
        echo(&fixture.link.bulk, "again").await;
        tokio::time::sleep(IDLE * 3).await;
    }
    let made = agent.agent.bulks.load(Ordering::SeqCst);
    assert!(made <= ENOUGH, "{made} connections for {CALLS} calls");
}

/// Verifies L12.
#[tokio::test]
async fn an_open_call_keeps_it() {
    let idle = Duration::from_millis(20);
    let fixture = Fixture::with(kiyot::backends::milpa::gateway::Limits {
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
    // Nothing may come in this time; nothing is waited for.
    assert!(tokio::time::timeout(idle * 25, log.message()).await.is_err());
    echo(&fixture.link.bulk, "meanwhile").await;
    assert_eq!(agent.agent.bulks.load(Ordering::SeqCst), 1);
}

/// Verifies L5.
#[tokio::test]
async fn readers_that_are_stuck_hold_up_neither_control_nor_other_readers() {
    let fixture = Fixture::start().await;
    let _agent = fixture.agent();
    // Each has as much on its way as its window allows: 1 MiB of 4 MiB.
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
    // And a stuck one goes on when it is read.
    for _ in 0..99 {
        assert!(within("the next part", stuck[0].message()).await.unwrap().is_some());
    }
    until("nothing was cut", || fixture.admission.news() == [Some(1)]).await;
}
