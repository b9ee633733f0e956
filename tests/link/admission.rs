//! Admission of connections to a cell.

use std::time::{Duration, SystemTime};

use kiyot::backends::milpa::gateway::ca::Ca;
use kiyot_engine::id::CellId;
use kiyot_link::{certificate::Certificate, tls};
use kiyot_proto::cell::{ConnectionKind, HelloReply};
use kiyot_testkit::wait_for;
use tokio::io::AsyncReadExt;

use crate::kit::{
    Endpoints, FakeAgent, Fixture, ManualAgent, TOKEN, assert_refused, dial, limits, within,
};

fn hello(cell: &CellId, kind: ConnectionKind, incarnation: &str, generation: u64) -> HelloReply {
    HelloReply {
        cell: cell.to_string(),
        kind: kind.into(),
        incarnation: incarnation.to_owned(),
        generation,
        ..HelloReply::default()
    }
}

/// Verifies L2.
#[tokio::test]
async fn certificate_of_an_ended_or_unenrolled_cell_is_refused() {
    let fixture = Fixture::start().await;
    let key = ManualAgent::new();
    let identity = key.enrol(&fixture.bootstrap()).await.unwrap();
    let tls = || tls::cell_client(&fixture.bootstrap().ca_sha256, identity.clone()).unwrap();
    let control = hello(&fixture.cell, ConnectionKind::Control, "run", 1);
    let agent = FakeAgent::connect(&fixture.bootstrap(), &identity, control).await;
    fixture.wait_linked().await;
    drop(agent);
    fixture.wait_unlinked().await;

    // The cell has ended.
    fixture.admission.remove(&fixture.cell);
    assert_refused(&fixture.bootstrap(), tls()).await;
    // A cell of the same name is expected again, but has not enrolled.
    fixture.admission.expect(&fixture.cell, TOKEN);
    assert_refused(&fixture.bootstrap(), tls()).await;
    // The cell has enrolled with another key.
    ManualAgent::new().enrol(&fixture.bootstrap()).await.unwrap();
    assert_refused(&fixture.bootstrap(), tls()).await;
    assert_eq!(fixture.admission.linked_events(), [Some(1), None]);
}

/// A certificate is not secret: without its key it proves nothing.
///
/// Verifies L2.
#[tokio::test]
async fn stolen_certificate_is_refused_and_leaves_the_link_alone() {
    let fixture = Fixture::start().await;
    let bootstrap = fixture.bootstrap();
    let (owner, thief) = (ManualAgent::new(), ManualAgent::new());
    let certificate = owner.certificate(&bootstrap).await;
    assert_refused(&bootstrap, thief.tls_with(&bootstrap, certificate.clone())).await;
    let link = FakeAgent::connect(
        &bootstrap,
        &owner.identity(certificate.clone()),
        hello(&fixture.cell, ConnectionKind::Control, "run", 1),
    )
    .await;
    fixture.wait_linked().await;
    assert_refused(&bootstrap, thief.tls_with(&bootstrap, certificate.clone())).await;
    assert!(!link.has_ended());
    assert_eq!(fixture.admission.linked_events(), [Some(1)]);
    // The owner's key with the same configuration is accepted: only the key made the difference.
    let mut stream = dial(&bootstrap, owner.tls_with(&bootstrap, certificate)).await.unwrap();
    let mut first_byte = [0];
    within("the gateway's first message", stream.read_exact(&mut first_byte)).await.unwrap();
}

#[tokio::test]
async fn cell_without_a_link_is_refused() {
    let fixture = Fixture::start().await;
    let key = ManualAgent::new();
    let identity = key.enrol(&fixture.bootstrap()).await.unwrap();
    fixture.gateway.forget(&fixture.cell);
    assert_refused(
        &fixture.bootstrap(),
        tls::cell_client(&fixture.bootstrap().ca_sha256, identity).unwrap(),
    )
    .await;
}

/// Verifies L2.
#[tokio::test]
async fn foreign_or_expired_certificate_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let endpoints = Endpoints::unix(&dir);
    let ca = Ca::new().unwrap();
    let key = ManualAgent::new();
    let cell = CellId::mint().unwrap();
    let expired = key.certificate_by(&ca, &cell, Duration::ZERO);
    let fixture = Fixture::with_ca(dir, endpoints, limits(), ca).await;
    let bootstrap = fixture.bootstrap();
    let cell_tls =
        |certificate| tls::cell_client(&bootstrap.ca_sha256, key.identity(certificate)).unwrap();

    // Name and key of both cells would be admitted.
    key.enrol(&bootstrap).await.unwrap();
    let foreign = key.certificate_by(&Ca::new().unwrap(), &fixture.cell, Duration::from_secs(3600));
    assert_refused(&bootstrap, cell_tls(foreign)).await;

    fixture.admission.expect(&cell, TOKEN);
    let _link = fixture.gateway.link(&cell);
    key.enrol(&fixture.bootstrap_of(&cell)).await.unwrap();
    let not_after = Certificate::read(&expired).unwrap().not_after;
    wait_for("the certificate has expired", || {
        SystemTime::now() > not_after + Duration::from_secs(1)
    })
    .await;
    assert_refused(&bootstrap, cell_tls(expired)).await;
    assert!(fixture.admission.linked_events().is_empty());
}

/// Verifies Y83.
#[tokio::test]
async fn hello_that_contradicts_the_certificate_is_refused() {
    let fixture = Fixture::start().await;
    let key = ManualAgent::new();
    let identity = key.enrol(&fixture.bootstrap()).await.unwrap();
    let other = CellId::mint().unwrap();
    fixture.admission.expect(&other, TOKEN);
    let _link = fixture.gateway.link(&other);
    FakeAgent::connect(
        &fixture.bootstrap(),
        &identity,
        hello(&other, ConnectionKind::Control, "run", 1),
    )
    .await
    .ended()
    .await;
    FakeAgent::connect(
        &fixture.bootstrap(),
        &identity,
        hello(&fixture.cell, ConnectionKind::Unspecified, "run", 1),
    )
    .await
    .ended()
    .await;
    FakeAgent::connect(
        &fixture.bootstrap(),
        &identity,
        hello(&fixture.cell, ConnectionKind::Control, &"r".repeat(10_000), 1),
    )
    .await
    .ended()
    .await;
    assert!(fixture.admission.linked_events().is_empty());
}

/// Verifies L4.
#[tokio::test]
async fn newer_connection_replaces_an_older_connection_and_never_the_reverse() {
    let fixture = Fixture::start().await;
    let key = ManualAgent::new();
    let identity = key.enrol(&fixture.bootstrap()).await.unwrap();
    let connect = async |incarnation, generation| {
        FakeAgent::connect(
            &fixture.bootstrap(),
            &identity,
            hello(&fixture.cell, ConnectionKind::Control, incarnation, generation),
        )
        .await
    };
    let fifth = connect("first", 5).await;
    wait_for("the fifth connection is linked", || fixture.admission.linked_events() == [Some(5)])
        .await;
    connect("first", 4).await.ended().await;
    connect("first", 5).await.ended().await;
    assert!(!fifth.has_ended());
    let sixth = connect("first", 6).await;
    fifth.ended().await;
    wait_for("the sixth connection is linked", || {
        fixture.admission.linked_events() == [Some(5), Some(6)]
    })
    .await;
    // A new incarnation of the agent counts from 1.
    let first = connect("second", 1).await;
    sixth.ended().await;
    wait_for("the next incarnation is linked", || {
        fixture.admission.linked_events() == [Some(5), Some(6), Some(1)]
    })
    .await;
    drop(first);
    fixture.wait_unlinked().await;
    // A stale connection stays refused after the newer connection has ended.
    connect("second", 1).await.ended().await;
    assert_eq!(fixture.admission.linked_events(), [Some(5), Some(6), Some(1), None]);
    // The gateway can't distinguish an agent that names an earlier incarnation from an agent that
    // has started again.
    let _again = connect("first", 3).await;
    wait_for("the agent is linked again", || {
        fixture.admission.linked_events() == [Some(5), Some(6), Some(1), None, Some(3)]
    })
    .await;
}
