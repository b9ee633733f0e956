//! Trading the token for a certificate.

use kiyot_link::{
    bootstrap::Bootstrap, certificate::sha256, channel::Channel, clock::Clock,
    connection::Connection, http2::Profile,
};
use kiyot_proto::cell::{EnrolRequest, enrolment_client::EnrolmentClient};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    dial::{self, DialError},
    identity::{Credentials, IdentityError},
};

/// Why the cell has no certificate.
#[derive(Debug, thiserror::Error)]
pub(super) enum EnrolError {
    #[error("dialling")]
    Dial(#[from] DialError),
    #[error("the cell's key")]
    Identity(#[from] IdentityError),
    #[error("the gateway refused")]
    Refused(#[source] Box<tonic::Status>),
    #[error("the gateway gave a certificate for another cell or key, or of another authority")]
    OtherCertificate,
}

/// One attempt, with the token, or without one for a key that the cell is bound to. The caller
/// bounds its time.
pub(super) async fn enrol(
    bootstrap: &Bootstrap,
    token: &str,
    credentials: &Credentials,
    build_id: &str,
    clock: &Clock,
    end: &CancellationToken,
    tasks: &TaskTracker,
) -> Result<Vec<u8>, EnrolError> {
    let end = end.child_token();
    let _cut = end.clone().drop_guard();
    let stream = dial::to_enrol(bootstrap, clock).await?;
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
