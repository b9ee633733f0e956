//! Disconnects and reconnects.

use std::{
    sync::atomic::Ordering,
    time::{Duration, SystemTime},
};

use kiyot::backends::milpa::{
    gateway::{Limits, ca::Ca},
    store::Store,
};
use kiyot_cell::uplink::{LinkState, Outcome};
use kiyot_link::bootstrap::{Bootstrap, GatewayAddress};
use kiyot_proto::cell::{BindRequest, agent_client::AgentClient};
use kiyot_testkit::wait_for;
use tonic::Code;

use crate::{
    calls::echo,
    kit::{Endpoints, Fixture, LIMIT, limits, start_gateway, timed, within},
};

/// Verifies L3.
#[tokio::test]
async fn disconnect_fails_running_calls_and_the_next_call_reconnects() {
    let fixture = Fixture::start().await;
    let relay = fixture.relay();
    let agent =
        fixture.agent_with(Bootstrap { gateway: relay.address.clone(), ..fixture.bootstrap() });
    for round in 1..=3 {
        echo(&fixture.link.bulk, "before").await;
        let calls = fixture.link.bulk.clone();
        let running = tokio::spawn(async move {
            AgentClient::new(calls).bind(timed(BindRequest::default(), LIMIT)).await
        });
        wait_for("the call runs", || agent.agent.bind_calls.load(Ordering::SeqCst) == round).await;
        let mut events = fixture.link.control.watch().await.unwrap();
        assert!(events.next().await.unwrap().is_some());

        relay.cut();
        assert_eq!(
            within("the running call", running).await.unwrap().unwrap_err().code(),
            Code::Unavailable
        );
        assert_eq!(
            within("the running stream", events.next()).await.unwrap_err().code(),
            Code::Unavailable
        );
        echo(&fixture.link.bulk, "after").await;
    }
    // Each connection began after the end of the previous connection, or replaced it.
    let generations: Vec<u64> = fixture.admission.linked_events().into_iter().flatten().collect();
    assert!(generations.len() >= 4 && generations.is_sorted(), "{generations:?}");
}

/// Verifies L3.
#[tokio::test]
async fn silent_connection_is_detected_on_both_sides() {
    let fixture = Fixture::start().await;
    let relay = fixture.relay();
    let agent =
        fixture.agent_with(Bootstrap { gateway: relay.address.clone(), ..fixture.bootstrap() });
    fixture.wait_linked().await;
    let mut state = agent.handle.state();
    within("the agent is linked", state.wait_for(|state| matches!(state, LinkState::Linked(_))))
        .await
        .unwrap();
    relay.vanish();
    // Gateway and agent both ping, and neither gets a response.
    let agent_side = within(
        "the agent notices",
        state.wait_for(|state| matches!(state, LinkState::Unlinked(_))),
    )
    .await
    .map(|_| ());
    agent_side.unwrap();
    echo(&fixture.link.bulk, "over a new connection").await;
    wait_for("the gateway has noticed", || fixture.admission.linked_events().contains(&None)).await;
}

#[tokio::test]
async fn cells_reconnect_to_a_restarted_gateway() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).await.unwrap();
    let endpoints = Endpoints::unix(&dir);
    let mut fixture =
        Fixture::with_ca(dir, endpoints.clone(), limits(), Ca::load_or_make(&store).await.unwrap())
            .await;
    let agent = fixture.agent();
    echo(&fixture.link.bulk, "before").await;

    fixture.gateway.shutdown().await;
    assert_eq!(
        fixture.admission.linked_events(),
        [Some(1)],
        "a shutdown of the gateway is not reported as the end of a link"
    );
    assert!(!endpoints.socket.exists(), "the gateway has removed its socket");
    let mut state = agent.handle.state();
    within("the agent notices", state.wait_for(|state| matches!(state, LinkState::Unlinked(_))))
        .await
        .unwrap();

    // The token has expired, but the authority is the same.
    fixture.admission.expire(&fixture.cell);
    fixture.gateway = start_gateway(
        &fixture.admission,
        endpoints,
        limits(),
        Ca::load_or_make(&store).await.unwrap(),
    )
    .await;
    fixture.link = fixture.gateway.link(&fixture.cell);
    echo(&fixture.link.bulk, "after").await;
    assert_eq!(agent.stop().await, Outcome::Shutdown);
}

/// Verifies L7.
#[tokio::test]
async fn expired_certificate_is_renewed_with_its_key() {
    let lifetime = Duration::from_secs(4);
    let fixture = Fixture::with_limits(Limits { certificate: lifetime, ..limits() }).await;
    let relay = fixture.relay();
    let _agent =
        fixture.agent_with(Bootstrap { gateway: relay.address.clone(), ..fixture.bootstrap() });
    echo(&fixture.link.bulk, "before").await;
    fixture.admission.expire(&fixture.cell);
    let expired = SystemTime::now() + lifetime + Duration::from_secs(1);
    wait_for("the certificate has expired", || SystemTime::now() > expired).await;
    relay.cut();
    fixture.wait_unlinked().await;
    echo(&fixture.link.bulk, "after").await;
    assert!(fixture.admission.alarms().is_empty());
}

#[tokio::test]
async fn cell_without_contact_for_the_orphan_timeout_is_orphaned() {
    let fixture = Fixture::start().await;
    let bootstrap = Bootstrap {
        gateway: GatewayAddress::Unix(fixture.dir.path().join("absent.sock")),
        orphan_timeout_secs: 1,
        ..fixture.bootstrap()
    };
    assert_eq!(fixture.agent_with(bootstrap).outcome().await, Outcome::Orphaned);
}
