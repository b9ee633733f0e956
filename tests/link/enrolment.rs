//! Enrolment: tokens, keys, certificates, renewal.

use kiyot_link::{bootstrap::Bootstrap, tls};
use kiyot_proto::cell::EnrolRequest;
use tonic::Code;

use crate::{
    calls::echo,
    kit::{Fixture, ManualAgent, TOKEN, dial, within},
};

/// Verifies L1.
#[tokio::test]
async fn spent_token_is_valid_for_its_key_only() {
    let fixture = Fixture::start().await;
    let (own, other) = (ManualAgent::new(), ManualAgent::new());
    own.enrol(&fixture.bootstrap()).await.unwrap();
    assert_eq!(fixture.admission.key_of(&fixture.cell), Some(own.key_sha256()));
    own.enrol(&fixture.bootstrap()).await.unwrap();
    assert!(fixture.admission.alarms().is_empty());

    assert_eq!(other.enrol(&fixture.bootstrap()).await.unwrap_err().code(), Code::PermissionDenied);
    assert_eq!(fixture.admission.alarms(), std::slice::from_ref(&fixture.cell));
    assert_eq!(fixture.admission.key_of(&fixture.cell), Some(own.key_sha256()));
}

#[tokio::test]
async fn refusals_are_indistinguishable() {
    let fixture = Fixture::start().await;
    let key = ManualAgent::new();
    let wrong_token = Bootstrap { token: "sesame-open".to_owned(), ..fixture.bootstrap() };
    let unknown = Bootstrap { cell: "cell-aaaaaaaaaaaa".to_owned(), ..fixture.bootstrap() };
    let first = key.enrol(&wrong_token).await.unwrap_err();
    let second = key.enrol(&unknown).await.unwrap_err();
    fixture.admission.expire(&fixture.cell);
    let third = key.enrol(&fixture.bootstrap()).await.unwrap_err();
    for status in [&first, &second, &third] {
        assert_eq!((status.code(), status.message()), (Code::PermissionDenied, first.message()));
    }
    assert_eq!(fixture.admission.key_of(&fixture.cell), None);
}

#[tokio::test]
async fn malformed_or_oversized_request_is_refused() {
    let fixture = Fixture::start().await;
    let key = ManualAgent::new();
    let request = |csr: Vec<u8>| EnrolRequest {
        cell: fixture.cell.to_string(),
        token: TOKEN.to_owned(),
        csr_der: csr.into(),
        build_id: String::new(),
    };
    let status =
        key.enrol_with(&fixture.bootstrap(), request(b"no request".to_vec())).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let status =
        key.enrol_with(&fixture.bootstrap(), request(vec![0; 17 * 1024])).await.unwrap_err();
    assert!(matches!(status.code(), Code::OutOfRange | Code::ResourceExhausted), "{status}");
    assert_eq!(fixture.admission.key_of(&fixture.cell), None, "no token was spent");
    // The gateway still serves enrolments.
    key.enrol(&fixture.bootstrap()).await.unwrap();
}

#[tokio::test]
async fn restarted_agent_needs_no_token() {
    let fixture = Fixture::start().await;
    let agent = fixture.agent();
    fixture.wait_linked().await;
    agent.stop().await;
    fixture.wait_unlinked().await;
    fixture.admission.expire(&fixture.cell);
    let _agent = fixture.agent_with(Bootstrap { token: String::new(), ..fixture.bootstrap() });
    echo(&fixture.link.bulk, "again").await;
}

#[tokio::test]
async fn renewal_without_a_token_requires_the_bound_key_of_a_live_cell() {
    let fixture = Fixture::start().await;
    let (own, other) = (ManualAgent::new(), ManualAgent::new());
    let without = Bootstrap { token: String::new(), ..fixture.bootstrap() };
    assert_eq!(own.enrol(&without).await.unwrap_err().code(), Code::PermissionDenied);
    own.enrol(&fixture.bootstrap()).await.unwrap();
    fixture.admission.expire(&fixture.cell);
    own.enrol(&without).await.unwrap();
    assert_eq!(other.enrol(&without).await.unwrap_err().code(), Code::PermissionDenied);
    fixture.admission.remove(&fixture.cell);
    assert_eq!(own.enrol(&without).await.unwrap_err().code(), Code::PermissionDenied);
}

#[tokio::test]
async fn agent_refuses_the_gateway_of_another_authority() {
    let (own, other) = (Fixture::start().await, Fixture::start().await);
    let imposter = Bootstrap { gateway: other.gateway.address().clone(), ..own.bootstrap() };
    let tls = tls::enrol_client(&imposter.ca_sha256).unwrap();
    let error = within("the handshake", dial(&imposter, tls)).await.unwrap_err();
    assert!(error.to_string().contains("UnknownIssuer"), "{error}");
}
