//! Enrolment: exchanges the token for a certificate.

use kiyot_link::{
    bootstrap::Bootstrap, certificate::sha256, channel::Channel, clock::Clock,
    connection::Connection, http2::Profile,
};
use kiyot_proto::cell::{EnrolRequest, enrolment_client::EnrolmentClient};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    dial::{self, DialError, Endpoint},
    identity::{Credentials, IdentityError},
};

/// Errors of an enrolment.
#[derive(Debug, thiserror::Error)]
pub(super) enum EnrolError {
    #[error("dial")]
    Dial(#[from] DialError),
    #[error("key and certificate of the cell")]
    Identity(#[from] IdentityError),
    #[error("enrolment refused by the gateway")]
    Refused(#[source] Box<tonic::Status>),
    #[error("certificate from the gateway is for another cell or key, or of another CA")]
    OtherCertificate,
}

/// Makes an enrolment attempt with the token, or with an empty token to renew the certificate of
/// the key to which the cell is bound. The caller sets a timeout.
pub(super) async fn enrol(
    endpoint: &Endpoint,
    bootstrap: &Bootstrap,
    credentials: &Credentials,
    build_id: &str,
    clock: &Clock,
    end: &CancellationToken,
    tasks: &TaskTracker,
) -> Result<Vec<u8>, EnrolError> {
    // Once a certificate is stored, the token has been redeemed for its key.
    let token = if credentials.has_certificate() { "" } else { &bootstrap.token };
    let end = end.child_token();
    let _cut = end.clone().drop_guard();
    let stream = dial::to_enrol(endpoint, bootstrap, clock).await?;
    let connection =
        Connection::open(stream, Profile::ENROL, &end, tasks).await.map_err(DialError::Http2)?;
    let request = EnrolRequest {
        cell: bootstrap.cell.clone(),
        token: token.to_owned(),
        csr_der: credentials.csr()?.into(),
        build_id: build_id.to_owned(),
    };
    let reply = EnrolmentClient::new(Channel::over(connection))
        .enrol(request)
        .await
        .map_err(|status| EnrolError::Refused(Box::new(status)))?;
    let reply = reply.into_inner();
    if sha256(&reply.ca_der) != bootstrap.ca_sha256.to_ascii_lowercase() {
        return Err(EnrolError::OtherCertificate);
    }
    Ok(reply.certificate_der.to_vec())
}
