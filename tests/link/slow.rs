//! Slow, distant, asymmetric and stalling links over TCP.

use std::{pin::pin, time::Duration};

use futures::stream;
use kiyot::backends::milpa::gateway::Limits;
use kiyot_cell::uplink::LinkState;
use kiyot_engine::id::CellId;
use kiyot_link::{bootstrap::Bootstrap, certificate::sha256, channel::Channel};
use kiyot_proto::cell::{
    BlobPart, GetFileRequest, ReadLogRequest, TunnelPart, agent_client::AgentClient,
};
use kiyot_testkit::{
    relay::{Direction, Rate, Relay},
    wait_for,
};
use tokio::time::sleep;

use crate::{
    calls::echo,
    kit::{Fixture, LIMIT, RunningAgent, TOKEN, limits, timed, within},
};

/// The latency of each direction.
const DELAY: Duration = Duration::from_millis(300);
/// 256 kbit/s from the cell to the node; [`DOWN`] is 8 Mbit/s, from the node to the cell.
const UP: Rate = Rate::new(32 << 10, DELAY);
const DOWN: Rate = Rate::new(1 << 20, DELAY);
/// The length of a part of a test agent's log, in bytes.
const LOG_PART_BYTES: usize = 64 << 10;

fn behind(fixture: &Fixture, relay: &Relay) -> RunningAgent {
    fixture.agent_with(Bootstrap { gateway: relay.address.clone(), ..fixture.bootstrap() })
}

/// Returns bytes without a short period.
fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251 + at / 251) as u8).collect()
}

/// Reads this many parts of a log.
async fn read_log(channel: &Channel, parts: u64) -> usize {
    let request = timed(ReadLogRequest { position: parts, ..ReadLogRequest::default() }, LIMIT);
    let mut log = AgentClient::new(channel.clone()).read_log(request).await.unwrap().into_inner();
    let mut read = 0;
    for _ in 0..parts {
        read += log.message().await.unwrap().unwrap().content.len();
    }
    read
}

/// Sends content through a stream of a program that returns its input, and returns the output.
async fn exec(channel: &Channel, content: &[u8]) -> Vec<u8> {
    let parts: Vec<_> = content
        .chunks(16 << 10)
        .map(|part| TunnelPart { content: part.to_vec().into(), ..TunnelPart::default() })
        .collect();
    let request = timed(stream::iter(parts), LIMIT);
    let mut output = AgentClient::new(channel.clone()).tunnel(request).await.unwrap().into_inner();
    let mut received = Vec::new();
    while let Some(part) = output.message().await.unwrap() {
        received.extend_from_slice(&part.content);
    }
    received
}

async fn put_blob(channel: &Channel, content: Vec<u8>) {
    let parts: Vec<_> = content
        .chunks(256 << 10)
        .map(|part| BlobPart { content: part.to_vec().into(), ..BlobPart::default() })
        .collect();
    let request = timed(stream::iter(parts), LIMIT);
    AgentClient::new(channel.clone()).put_blob(request).await.unwrap();
}

/// Verifies L22.
#[tokio::test]
async fn cell_behind_a_slow_and_distant_link_does_everything_at_once() {
    let fixture = Fixture::over_tcp(Limits::default()).await;
    let relay = fixture.relay_with(UP, DOWN);
    let agent = behind(&fixture, &relay);
    let bulk = &fixture.link.bulk;
    echo(bulk, "enrolled").await;
    let (image, input) = (pattern(4 << 20), pattern(128 << 10));
    let digest = sha256(&image);
    // As most calls, these have no deadline of their own.
    let calls = async {
        for number in 0..3 {
            let request =
                GetFileRequest { path: format!("call {number}"), ..GetFileRequest::default() };
            let reply = AgentClient::new(bulk.clone()).get_file(request).await.unwrap();
            assert!(reply.into_inner().exists);
        }
    };
    let ((), logs, output, ()) = tokio::join!(
        put_blob(bulk, image),
        futures::future::join_all((0..3).map(|_| read_log(bulk, 4))),
        exec(bulk, &input),
        calls,
    );
    assert_eq!(logs, [4 * LOG_PART_BYTES; 3]);
    assert!(output == input, "{} of {} bytes", output.len(), input.len());
    assert_eq!(*agent.agent.blobs.lock().unwrap(), [digest]);
    assert_eq!(fixture.admission.linked_events().len(), 1, "the same control connection");
    assert!(relay.carried(Direction::Up) > 12 * LOG_PART_BYTES as u64);
    assert!(relay.carried(Direction::Down) > 4 << 20);
}

/// Verifies L23.
#[tokio::test]
async fn stall_shorter_than_the_silence_limit_loses_nothing() {
    let fixture = Fixture::over_tcp(limits()).await;
    let relay = fixture.relay();
    let agent = behind(&fixture, &relay);
    let bulk = fixture.link.bulk.clone();
    echo(&bulk, "before").await;
    let image = pattern(64 << 20);
    let digest = sha256(&image);
    let channel = bulk.clone();
    let copied = tokio::spawn(async move { put_blob(&channel, image).await });
    let before = relay.carried(Direction::Down);
    wait_for("the copy has begun", || relay.carried(Direction::Down) > before + (1 << 20)).await;
    relay.stall();
    // Each side has sent a ping and waits for the response. The limit of 20 s is far away.
    sleep(Duration::from_secs(11)).await;
    assert!(!copied.is_finished(), "the copy had ended before the stall");
    relay.resume();
    within("the copy", copied).await.unwrap();
    assert_eq!(*agent.agent.blobs.lock().unwrap(), [digest]);
    assert_eq!(fixture.admission.linked_events(), [Some(1)], "the same control connection");
    assert_eq!(relay.connections(), 3, "for enrolment, control and bulk");
}

/// Verifies L23.
#[tokio::test]
async fn stall_longer_than_the_silence_limit_unlinks_the_cell_until_it_reconnects() {
    let fixture = Fixture::over_tcp(limits()).await;
    let relay = fixture.relay();
    let agent = behind(&fixture, &relay);
    echo(&fixture.link.bulk, "before").await;
    let mut state = agent.handle.state();
    relay.stall();
    fixture.wait_unlinked().await;
    within("the agent notices", state.wait_for(|state| matches!(state, LinkState::Unlinked(_))))
        .await
        .unwrap();
    // Delayed bytes arrive late, on connections that have ended.
    relay.resume();
    echo(&fixture.link.bulk, "after").await;
    assert_eq!(read_log(&fixture.link.bulk, 4).await, 4 * LOG_PART_BYTES);
}

/// Verifies L23.
#[tokio::test]
async fn half_closed_connection_is_replaced_whichever_side_reads_the_end() {
    let fixture = Fixture::over_tcp(limits()).await;
    let relay = fixture.relay();
    let _agent = behind(&fixture, &relay);
    for direction in [Direction::Down, Direction::Up, Direction::Down] {
        echo(&fixture.link.bulk, "before").await;
        let (connections, events) = (relay.connections(), fixture.admission.linked_events().len());
        relay.half_close(direction);
        wait_for("another control connection", || {
            relay.connections() > connections
                && fixture.admission.linked_events().len() > events
                && fixture.link.control.is_connected()
        })
        .await;
    }
    echo(&fixture.link.bulk, "after").await;
}

/// Verifies L22.
#[tokio::test]
async fn slow_cell_slows_no_other_cell() {
    let fixture = Fixture::over_tcp(limits()).await;
    // At this rate, a copy of 1 MiB takes more than a minute.
    let rate = Rate::new(16 << 10, DELAY);
    let relay = fixture.relay_with(rate, rate);
    let _slow = behind(&fixture, &relay);
    let cell = CellId::mint().unwrap();
    fixture.admission.expect(&cell, TOKEN);
    let fast = fixture.gateway.link(&cell);
    let bootstrap = fixture.bootstrap_of(&cell);
    let _fast = RunningAgent::start(bootstrap, fixture.dir.path().join("fast"));
    echo(&fixture.link.bulk, "enrolled").await;
    let mut slow = pin!(async {
        tokio::join!(
            put_blob(&fixture.link.bulk, pattern(1 << 20)),
            read_log(&fixture.link.bulk, 16)
        )
    });
    let others = async {
        for number in 0..200 {
            echo(&fast.bulk, &number.to_string()).await;
        }
        put_blob(&fast.bulk, pattern(16 << 20)).await;
        assert_eq!(read_log(&fast.bulk, 100).await, 100 * LOG_PART_BYTES);
        let content = pattern(1 << 20);
        assert!(exec(&fast.bulk, &content).await == content);
        let mut events = fast.control.watch().await.unwrap();
        assert!(events.next().await.unwrap().is_some());
    };
    tokio::select! {
        _ = &mut slow => panic!("the slow cell was faster"),
        () = within("the fast cell", others) => {}
    }
}
