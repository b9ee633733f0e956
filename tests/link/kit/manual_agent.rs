//! An agent whose steps a test makes one by one, for misbehaviour of hostile agents.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use kiyot::backends::milpa::gateway::ca::{Ca, ProvenKey};
use kiyot_engine::id::CellId;
use kiyot_link::{
    alpn,
    bootstrap::Bootstrap,
    certificate::sha256,
    channel::Channel,
    connection::Connection,
    frames::Frames,
    http2::{self, Profile},
    stream::Stream,
    tls::{self, Identity},
};
use kiyot_proto::cell::{
    EnrolRequest, FromCell, HelloReply, ToCell, agent_server::AgentServer,
    enrolment_client::EnrolmentClient, from_cell, to_cell,
};
use prost::Message;
use rcgen::{CertificateParams, KeyPair, PublicKeyData};
use rustls::{
    ClientConfig, SignatureScheme,
    client::ResolvesClientCert,
    crypto::ring,
    pki_types::{PrivatePkcs8KeyDer, ServerName},
    sign::CertifiedKey,
};
use tokio::io::AsyncReadExt;
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::Status;

use super::within;

/// The maximal length of a message from the gateway, in bytes.
pub(crate) const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// An agent with its own key, whose steps the test calls.
pub(crate) struct ManualAgent {
    pub(crate) key: KeyPair,
}

impl ManualAgent {
    pub(crate) fn new() -> Self {
        Self { key: KeyPair::generate().unwrap() }
    }

    pub(crate) fn key_sha256(&self) -> String {
        sha256(&self.key.subject_public_key_info())
    }

    pub(crate) fn request(&self) -> Vec<u8> {
        CertificateParams::default().serialize_request(&self.key).unwrap().der().to_vec()
    }

    /// Enrols with the cell and the token of the boot data.
    pub(crate) async fn enrol(&self, bootstrap: &Bootstrap) -> Result<Identity, Status> {
        self.enrol_with(bootstrap, self.enrolment(bootstrap)).await
    }

    pub(crate) async fn enrol_with(
        &self,
        bootstrap: &Bootstrap,
        request: EnrolRequest,
    ) -> Result<Identity, Status> {
        Ok(self.identity(certificate_for(bootstrap, request).await?))
    }

    /// Returns a TLS configuration that presents a certificate and signs with this agent's key. The
    /// certificate may be of another key.
    pub(crate) fn tls_with(&self, bootstrap: &Bootstrap, certificate: Vec<u8>) -> ClientConfig {
        let mut tls = tls::enrol_client(&bootstrap.ca_sha256).unwrap();
        tls.alpn_protocols = vec![alpn::CELL.to_vec()];
        let key = PrivatePkcs8KeyDer::from(self.key.serialize_der()).into();
        let presented = CertifiedKey::new(
            vec![certificate.into()],
            ring::sign::any_supported_type(&key).unwrap(),
        );
        tls.client_auth_cert_resolver = Arc::new(StaticCertificate(Arc::new(presented)));
        tls
    }

    /// Enrols and returns the certificate.
    pub(crate) async fn certificate(&self, bootstrap: &Bootstrap) -> Vec<u8> {
        certificate_for(bootstrap, self.enrolment(bootstrap)).await.unwrap()
    }

    fn enrolment(&self, bootstrap: &Bootstrap) -> EnrolRequest {
        let (cell, token) = (bootstrap.cell.clone(), bootstrap.token.clone());
        EnrolRequest { cell, token, csr_der: self.request().into(), build_id: "by hand".to_owned() }
    }

    /// Returns a certificate that the authority issues without an enrolment.
    pub(crate) fn certificate_by(&self, ca: &Ca, cell: &CellId, lifetime: Duration) -> Vec<u8> {
        ca.certify(
            SystemTime::now(),
            cell,
            &ProvenKey::from_request(&self.request()).unwrap(),
            lifetime,
        )
        .unwrap()
    }

    pub(crate) fn identity(&self, certificate: Vec<u8>) -> Identity {
        Identity::new(vec![certificate], self.key.serialize_der())
    }
}

async fn certificate_for(bootstrap: &Bootstrap, request: EnrolRequest) -> Result<Vec<u8>, Status> {
    let stream = dial(bootstrap, tls::enrol_client(&bootstrap.ca_sha256).unwrap()).await.unwrap();
    let connection =
        Connection::open(stream, Profile::ENROL, &CancellationToken::new(), &TaskTracker::new())
            .await
            .unwrap();
    let reply = EnrolmentClient::new(Channel::over(connection))
        .enrol(super::timed(request, super::LIMIT))
        .await?;
    Ok(reply.into_inner().certificate_der.to_vec())
}

/// A resolver that presents its certificate whatever authorities the server accepts.
#[derive(Debug)]
struct StaticCertificate(Arc<CertifiedKey>);

impl ResolvesClientCert for StaticCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

pub(crate) async fn dial(
    bootstrap: &Bootstrap,
    tls: ClientConfig,
) -> std::io::Result<TlsStream<Stream>> {
    dial_as(bootstrap, tls, alpn::GATEWAY_NAME).await
}

pub(crate) async fn dial_as(
    bootstrap: &Bootstrap,
    tls: ClientConfig,
    name: &'static str,
) -> std::io::Result<TlsStream<Stream>> {
    let stream = Stream::dial(&bootstrap.gateway).await?;
    TlsConnector::from(Arc::new(tls)).connect(ServerName::try_from(name).unwrap(), stream).await
}

/// Asserts that the gateway closes the connection without sending a byte. With TLS 1.3 the client
/// may complete its handshake before the server refuses the certificate.
pub(crate) async fn assert_refused(bootstrap: &Bootstrap, tls: ClientConfig) {
    let Ok(mut stream) = within("the handshake", dial(bootstrap, tls)).await else { return };
    let mut received = Vec::new();
    let _ = within("the end of the connection", stream.read_to_end(&mut received)).await;
    assert!(received.is_empty(), "the gateway sent {received:?}");
}

/// An agent with a single connection and a given Hello.
pub(crate) struct FakeAgent {
    end: CancellationToken,
    tasks: TaskTracker,
}

impl FakeAgent {
    pub(crate) async fn connect(
        bootstrap: &Bootstrap,
        identity: &Identity,
        hello: HelloReply,
    ) -> Self {
        let tls = tls::cell_client(&bootstrap.ca_sha256, identity.clone()).unwrap();
        let (end, tasks) = (CancellationToken::new(), TaskTracker::new());
        if hello.kind() == kiyot_proto::cell::ConnectionKind::Bulk {
            let stream = dial_as(bootstrap, tls, alpn::BULK_NAME).await.unwrap();
            let served = http2::serve(
                stream,
                Profile::BULK,
                AgentServer::new(HelloOnly(hello)),
                end.clone(),
                tasks.clone(),
            );
            tasks.spawn(async move { served.await.map_err(drop) });
        } else {
            let frames = Frames::new(
                dial_as(bootstrap, tls, alpn::GATEWAY_NAME).await.unwrap(),
                MAX_MESSAGE_BYTES,
            );
            let own = end.clone();
            tasks.spawn(async move {
                own.run_until_cancelled(reply_hello(frames, hello))
                    .await
                    .unwrap_or(Ok(()))
                    .map_err(drop)
            });
        }
        tasks.close();
        Self { end, tasks }
    }

    /// Waits until the gateway has closed the connection.
    pub(crate) async fn ended(&self) {
        within("the end of the connection", self.tasks.wait()).await;
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.tasks.is_empty()
    }
}

impl Drop for FakeAgent {
    fn drop(&mut self) {
        self.end.cancel();
    }
}

/// Replies to Hello, and to no other message, on a control connection.
async fn reply_hello(
    mut frames: Frames<TlsStream<Stream>>,
    hello: HelloReply,
) -> std::io::Result<()> {
    while let Some(message) = frames.next().await? {
        if let Some(to_cell::Message::Hello(_)) = ToCell::decode(message)?.message {
            frames
                .send(
                    &FromCell { message: Some(from_cell::Message::Hello(hello.clone())) }
                        .encode_to_vec(),
                )
                .await?;
        }
    }
    Ok(())
}

struct HelloOnly(HelloReply);

mod hello_only {
    use std::pin::Pin;

    use futures::Stream;
    use kiyot_proto::cell::*;
    use tonic::{Request, Response, Status, Streaming};

    type Reply<T> = Result<Response<T>, Status>;
    type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

    macro_rules! unimplemented_calls {
        ($($name:ident($request:ty) -> $reply:ty;)*) => {
            #[tonic::async_trait]
            impl agent_server::Agent for super::HelloOnly {
                type WatchStream = BoxStream<Event>;
                type ReadLogStream = BoxStream<LogPart>;
                type TunnelStream = BoxStream<TunnelPart>;
                type ResolveStream = BoxStream<NameQuery>;
                type WatchPullsStream = BoxStream<PullNews>;
                async fn hello(&self, _: Request<HelloRequest>) -> Reply<HelloReply> {
                    Ok(Response::new(self.0.clone()))
                }
                $(async fn $name(&self, _: Request<$request>) -> Reply<$reply> {
                    Err(Status::unimplemented("not implemented"))
                })*
            }
        };
    }

    unimplemented_calls! {
        bind(BindRequest) -> BindReply;
        resolve(Streaming<NameAnswer>) -> BoxStream<NameQuery>;
        open_bulk(OpenBulkRequest) -> OpenBulkReply;
        measure(MeasureRequest) -> MeasureReply;
        watch(WatchRequest) -> BoxStream<Event>;
        change_files(Streaming<FileChange>) -> ChangeFilesReply;
        get_file(GetFileRequest) -> GetFileReply;
        read_log(ReadLogRequest) -> BoxStream<LogPart>;
        trim_log(TrimLogRequest) -> TrimLogReply;
        tunnel(Streaming<TunnelPart>) -> BoxStream<TunnelPart>;
        missing_blobs(MissingBlobsRequest) -> MissingBlobsReply;
        put_blob(Streaming<BlobPart>) -> PutBlobReply;
        mount_layers(MountLayersRequest) -> MountLayersReply;
        put_image(PutImageRequest) -> PutImageReply;
        watch_pulls(WatchPullsRequest) -> BoxStream<PullNews>;
        shutdown(ShutdownRequest) -> ShutdownReply;
    }
}
