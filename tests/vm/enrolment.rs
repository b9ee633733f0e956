//! Enrolment at the gateway with a cell's token in the hands of others.

use std::sync::Arc;

use kiyot_link::{
    alpn, bootstrap::Bootstrap, channel::Channel, connection::Connection, http2::Profile,
    stream::Stream, tls,
};
use kiyot_proto::cell::{EnrolRequest, enrolment_client::EnrolmentClient};
use kiyot_testkit::LIMIT;
use rcgen::{CertificateParams, KeyPair};
use rustls::{ClientConfig, pki_types::ServerName};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Code, Request};

/// Enrols as a cell at the gateway of these boot data. Returns the code of the response.
pub(crate) async fn enrol(of: &Bootstrap, cell: &str, token: &str, key: &KeyPair) -> Code {
    let stream = dial(of, tls::enrol_client(&of.ca_sha256).unwrap()).await;
    let (end, tasks) = (CancellationToken::new(), TaskTracker::new());
    let connection = Connection::open(stream, Profile::ENROL, &end, &tasks).await.unwrap();
    let csr = CertificateParams::default().serialize_request(key).unwrap();
    let mut request = Request::new(EnrolRequest {
        cell: cell.to_owned(),
        token: token.to_owned(),
        csr_der: csr.der().to_vec().into(),
        build_id: "stolen".to_owned(),
    });
    request.set_timeout(LIMIT);
    let reply = EnrolmentClient::new(Channel::over(connection)).enrol(request).await;
    reply.map_or_else(|status| status.code(), |_| Code::Ok)
}

/// Connects to the gateway of these boot data.
pub(crate) async fn dial(of: &Bootstrap, tls: ClientConfig) -> TlsStream<Stream> {
    let stream = Stream::dial(&of.gateway).await.unwrap();
    let name = ServerName::try_from(alpn::GATEWAY_NAME).unwrap();
    TlsConnector::from(Arc::new(tls)).connect(name, stream).await.unwrap()
}
