//! Who may connect as a cell.

use std::time::{Duration, SystemTime};

use kiyot::backends::milpa::{gateway::ca::Ca, id::CellId};
use kiyot_link::{certificate::Certificate, tls};
use kiyot_proto::cell::{ConnectionKind, HelloReply};

use tokio::io::AsyncReadExt;

use crate::kit::{Fake, Fixture, ManualAgent, TOKEN, dial, is_refused, limits, until, within};

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
async fn a_certificate_without_its_key_or_its_cell_is_worth_nothing() {
    let fixture = Fixture::start().await;
    let key = ManualAgent::new();
    let identity = key.enrol(&fixture.bootstrap()).await.unwrap();
    let tls = || tls::cell_client(&fixture.bootstrap().ca_sha256, identity.clone()).unwrap();
    let control = hello(&fixture.cell, ConnectionKind::Control, "run", 1);
    let fake = Fake::connect(&fixture.bootstrap(), &identity, control).await;
    fixture.linked().await;
    drop(fake);
    fixture.unlinked().await;

    // The cell has ended.
    fixture.admission.remove(&fixture.cell);
    is_refused(&fixture.bootstrap(), tls()).await;
    // A cell of that name is to be, but it has not enrolled.
    fixture.admission.expect(&fixture.cell, TOKEN);
    is_refused(&fixture.bootstrap(), tls()).await;
    // It has, with another key.
    ManualAgent::new().enrol(&fixture.bootstrap()).await.unwrap();
    is_refused(&fixture.bootstrap(), tls()).await;
    assert_eq!(fixture.admission.news(), [Some(1), None]);
}

/// Whoever has read a cell's certificate, which is no secret, is not that cell.
/// Verifies L2.
#[tokio::test]
async fn a_stolen_certificate_lets_nobody_in_and_touches_no_link() {
    let fixture = Fixture::start().await;
    let bootstrap = fixture.bootstrap();
    let (owner, thief) = (ManualAgent::new(), ManualAgent::new());
    let certificate = owner.certificate(&bootstrap).await;
    is_refused(&bootstrap, thief.showing(&bootstrap, certificate.clone())).await;
    let link = Fake::connect(
        &bootstrap,
        &owner.identity(certificate.clone()),
        hello(&fixture.cell, ConnectionKind::Control, "run", 1),
    )
    .await;
    fixture.linked().await;
    is_refused(&bootstrap, thief.showing(&bootstrap, certificate.clone())).await;
    assert!(!link.has_ended());
    assert_eq!(fixture.admission.news(), [Some(1)]);
    // Shown so by its owner it is taken: what was refused is the other key.
    let mut stream = dial(&bootstrap, owner.showing(&bootstrap, certificate)).await.unwrap();
    let mut greeted = [0];
    within("the gateway's first word", stream.read_exact(&mut greeted)).await.unwrap();
}

#[tokio::test]
async fn a_cell_that_nobody_calls_is_not_let_in() {
    let fixture = Fixture::start().await;
    let key = ManualAgent::new();
    let identity = key.enrol(&fixture.bootstrap()).await.unwrap();
    fixture.gateway.forget(&fixture.cell);
    is_refused(
        &fixture.bootstrap(),
        tls::cell_client(&fixture.bootstrap().ca_sha256, identity).unwrap(),
    )
    .await;
}

/// Verifies L2.
#[tokio::test]
async fn certificates_of_another_authority_or_time_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let listen = kiyot_link::bootstrap::GatewayAddress::Unix(dir.path().join("gateway.sock"));
    let ca = Ca::new().unwrap();
    let key = ManualAgent::new();
    let cell = CellId::mint().unwrap();
    let expired = key.certified_by(&ca, &cell, Duration::ZERO);
    let fixture = Fixture::at(dir, listen, limits(), ca).await;
    let bootstrap = fixture.bootstrap();
    let cell_tls =
        |certificate| tls::cell_client(&bootstrap.ca_sha256, key.identity(certificate)).unwrap();

    // The admission would admit both.
    key.enrol(&bootstrap).await.unwrap();
    let foreign = key.certified_by(&Ca::new().unwrap(), &fixture.cell, Duration::from_secs(3600));
    is_refused(&bootstrap, cell_tls(foreign)).await;

    fixture.admission.expect(&cell, TOKEN);
    let _link = fixture.gateway.link(&cell);
    key.enrol(&fixture.gateway.bootstrap(&cell, TOKEN)).await.unwrap();
    let not_after = Certificate::read(&expired).unwrap().not_after;
    until("the certificate has expired", || SystemTime::now() > not_after + Duration::from_secs(1))
        .await;
    is_refused(&bootstrap, cell_tls(expired)).await;
    assert!(fixture.admission.news().is_empty());
}

/// Verifies Y83.
#[tokio::test]
async fn hello_must_say_what_the_certificate_and_the_connection_say() {
    let fixture = Fixture::start().await;
    let key = ManualAgent::new();
    let identity = key.enrol(&fixture.bootstrap()).await.unwrap();
    let other = CellId::mint().unwrap();
    fixture.admission.expect(&other, TOKEN);
    let _link = fixture.gateway.link(&other);
    Fake::connect(
        &fixture.bootstrap(),
        &identity,
        hello(&other, ConnectionKind::Control, "run", 1),
    )
    .await
    .ended()
    .await;
    Fake::connect(
        &fixture.bootstrap(),
        &identity,
        hello(&fixture.cell, ConnectionKind::Unspecified, "run", 1),
    )
    .await
    .ended()
    .await;
    Fake::connect(
        &fixture.bootstrap(),
        &identity,
        hello(&fixture.cell, ConnectionKind::Control, &"r".repeat(10_000), 1),
    )
    .await
    .ended()
    .await;
    assert!(fixture.admission.news().is_empty());
}

/// Verifies L4.
#[tokio::test]
async fn a_later_connection_replaces_an_earlier_one_and_never_the_other_way_round() {
    let fixture = Fixture::start().await;
    let key = ManualAgent::new();
    let identity = key.enrol(&fixture.bootstrap()).await.unwrap();
    let connect = async |incarnation, generation| {
        Fake::connect(
            &fixture.bootstrap(),
            &identity,
            hello(&fixture.cell, ConnectionKind::Control, incarnation, generation),
        )
        .await
    };
    let fifth = connect("one", 5).await;
    until("the fifth is there", || fixture.admission.news() == [Some(5)]).await;
    connect("one", 4).await.ended().await;
    connect("one", 5).await.ended().await;
    assert!(!fifth.has_ended());
    let sixth = connect("one", 6).await;
    fifth.ended().await;
    until("the sixth is there", || fixture.admission.news() == [Some(5), Some(6)]).await;
    // Another run of the agent begins with another count.
    let first = connect("two", 1).await;
    sixth.ended().await;
    until("the next run is there", || fixture.admission.news() == [Some(5), Some(6), Some(1)])
        .await;
    drop(first);
    fixture.unlinked().await;
    // What was late while a newer one was there is late when that one is gone.
    connect("two", 1).await.ended().await;
    assert_eq!(fixture.admission.news(), [Some(5), Some(6), Some(1), None]);
}
