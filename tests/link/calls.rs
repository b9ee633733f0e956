//! Calls over the link.

use std::{sync::atomic::Ordering, time::Duration};

use kiyot_cell::uplink::{LinkState, Outcome};
use kiyot_link::channel::Channel;
use kiyot_proto::cell::{
    BindRequest, GetFileRequest, ReadLogRequest, TrimLogRequest, agent_client::AgentClient,
};
use kiyot_testkit::wait_for;
use tonic::Code;

use crate::kit::{Fixture, LIMIT, limits, timed, within};

/// Makes a call that returns its argument.
pub(crate) async fn echo(channel: &Channel, text: &str) {
    let request =
        timed(GetFileRequest { path: text.to_owned(), ..GetFileRequest::default() }, LIMIT);
    let reply = AgentClient::new(channel.clone()).get_file(request).await.unwrap();
    assert_eq!(reply.into_inner().content, text.as_bytes());
}

/// Verifies L1.
#[tokio::test]
async fn cell_enrols_connects_and_answers() {
    let fixture = Fixture::start().await;
    let agent = fixture.agent();
    // The call waits for the connection.
    echo(&fixture.link.bulk, "hello").await;
    let connection = fixture.link.control.connected().await.unwrap();
    let hello = connection.hello();
    assert_eq!(
        (hello.cell.as_str(), hello.build_id.as_str(), hello.generation),
        (fixture.cell.as_str(), "agent", 1)
    );
    assert_eq!(fixture.admission.linked_events(), [Some(1)]);
    assert!(fixture.admission.alarms().is_empty());
    assert!(matches!(*agent.handle.state().borrow(), LinkState::Linked(_)));
    // The status from the agent's service is returned unchanged.
    let status = AgentClient::new(fixture.link.bulk.clone())
        .trim_log(TrimLogRequest::default())
        .await
        .unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::NotFound, "no such log"));

    assert_eq!(agent.stop().await, Outcome::Shutdown);
    fixture.wait_unlinked().await;
    assert_eq!(fixture.admission.linked_events(), [Some(1), None]);
    fixture.gateway.shutdown().await;
}

#[tokio::test]
async fn cell_enrols_connects_and_answers_over_tcp() {
    let fixture = Fixture::over_tcp(limits()).await;
    let _agent = fixture.agent();
    echo(&fixture.link.bulk, "hello").await;
    assert!(fixture.link.control.watch().await.unwrap().next().await.unwrap().is_some());
    fixture.gateway.shutdown().await;
}

/// Verifies L6.
#[tokio::test]
async fn call_without_a_connection_fails_at_its_deadline() {
    let fixture = Fixture::start().await;
    let request = timed(GetFileRequest::default(), Duration::from_millis(50));
    let status =
        within("the deadline", AgentClient::new(fixture.link.bulk.clone()).get_file(request))
            .await
            .unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.message().contains(fixture.cell.as_str()), "{status}");
}

/// Verifies L6.
#[tokio::test]
async fn call_without_a_response_fails_at_its_deadline() {
    let fixture = Fixture::start().await;
    let _agent = fixture.agent();
    // The connection is opened first, because the deadline is short.
    echo(&fixture.link.bulk, "before").await;
    let request = timed(BindRequest::default(), Duration::from_millis(50));
    let status = within("the deadline", AgentClient::new(fixture.link.bulk.clone()).bind(request))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    // The connection is still usable.
    echo(&fixture.link.bulk, "after").await;
    assert_eq!(fixture.admission.linked_events(), [Some(1)]);
}

/// Verifies L6.
#[tokio::test]
async fn call_with_a_partial_response_fails_at_its_deadline() {
    let fixture = Fixture::start().await;
    let _agent = fixture.agent();
    echo(&fixture.link.bulk, "before").await;
    let request =
        timed(ReadLogRequest { position: 1, ..Default::default() }, Duration::from_secs(5));
    let mut parts =
        AgentClient::new(fixture.link.bulk.clone()).read_log(request).await.unwrap().into_inner();
    let ended = async {
        while parts.message().await?.is_some() {}
        Ok::<_, tonic::Status>(())
    };
    let status = within("the deadline", ended).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    // The connection is still usable.
    echo(&fixture.link.bulk, "after").await;
    assert_eq!(fixture.admission.linked_events(), [Some(1)]);
}

#[tokio::test]
async fn forgotten_cell_is_disconnected_and_its_calls_fail_at_once() {
    let fixture = Fixture::start().await;
    let agent = fixture.agent();
    fixture.wait_linked().await;
    let calls = fixture.link.bulk.clone();
    let running = tokio::spawn(async move {
        AgentClient::new(calls).bind(timed(BindRequest::default(), LIMIT)).await
    });
    wait_for("the call is running", || agent.agent.bind_calls.load(Ordering::SeqCst) == 1).await;
    let mut events = fixture.link.control.watch().await.unwrap();
    assert!(events.next().await.unwrap().is_some());

    fixture.gateway.forget(&fixture.cell);
    assert_eq!(
        within("the running call", running).await.unwrap().unwrap_err().code(),
        Code::Unavailable
    );
    assert_eq!(
        within("the running stream", events.next()).await.unwrap_err().code(),
        Code::Unavailable
    );
    let status = AgentClient::new(fixture.link.bulk.clone())
        .get_file(timed(GetFileRequest::default(), LIMIT * 10))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(fixture.link.control.watch().await.unwrap_err().code(), Code::Unavailable);
    assert!(!fixture.link.control.is_connected());
    // The end of a forgotten link is not reported.
    assert_eq!(fixture.admission.linked_events(), [Some(1)]);
    within("the end of the gateway", fixture.gateway.shutdown()).await;
}
