//! The agent's side by hand, for what a well-behaved agent does not do.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use kiyot::backends::milpa::{
    gateway::ca::{Ca, ProvenKey},
    id::CellId,
};
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

/// The longest message that is taken from a gateway, in bytes.
pub(crate) const LONGEST: usize = 1 << 20;

/// A key of one's own.
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

    /// Enrols, with whatever is in the bootstrap.
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

    /// The agent's side of a connection on which a certificate is shown by who has this key, and
    /// not the certificate's.
    pub(crate) fn showing(&self, bootstrap: &Bootstrap, certificate: Vec<u8>) -> ClientConfig {
        let mut tls = tls::enrol_client(&bootstrap.ca_sha256).unwrap();
        tls.alpn_protocols = vec![alpn::CELL.to_vec()];
        let key = PrivatePkcs8KeyDer::from(self.key.serialize_der()).into();
        let shown = CertifiedKey::new(
            vec![certificate.into()],
            ring::sign::any_supported_type(&key).unwrap(),
        );
        tls.client_auth_cert_resolver = Arc::new(Shows(Arc::new(shown)));
        tls
    }

    /// The certificate that the gateway gives for this key.
    pub(crate) async fn certificate(&self, bootstrap: &Bootstrap) -> Vec<u8> {
        certificate_for(bootstrap, self.enrolment(bootstrap)).await.unwrap()
    }

    fn enrolment(&self, bootstrap: &Bootstrap) -> EnrolRequest {
        let (cell, token) = (bootstrap.cell.clone(), bootstrap.token.clone());
        EnrolRequest { cell, token, csr_der: self.request().into(), build_id: "by hand".to_owned() }
    }

    /// A certificate without enrolment.
    pub(crate) fn certified_by(&self, ca: &Ca, cell: &CellId, lifetime: Duration) -> Vec<u8> {
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

/// Shows one certificate, whoever is asked for one.
#[derive(Debug)]
struct Shows(Arc<CertifiedKey>);

impl ResolvesClientCert for Shows {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// Dials with a TLS configuration.
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

/// Says that a connection is refused: it ends, and nothing has been said over it. With TLS 1.3 the
/// handshake itself may look fine from this side.
pub(crate) async fn is_refused(bootstrap: &Bootstrap, tls: ClientConfig) {
    let Ok(mut stream) = within("the handshake", dial(bootstrap, tls)).await else { return };
    let mut heard = Vec::new();
    let _ = within("the end of the connection", stream.read_to_end(&mut heard)).await;
    assert!(heard.is_empty(), "the gateway spoke: {heard:?}");
}

/// An agent that makes one connection, and says of it what it is told to say.
pub(crate) struct Fake {
    end: CancellationToken,
    tasks: TaskTracker,
}

impl Fake {
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
                AgentServer::new(Says(hello)),
                end.clone(),
                tasks.clone(),
            );
            tasks.spawn(async move { served.await.map_err(drop) });
        } else {
            let frames =
                Frames::new(dial_as(bootstrap, tls, alpn::GATEWAY_NAME).await.unwrap(), LONGEST);
            let own = end.clone();
            tasks.spawn(async move {
                own.run_until_cancelled(says(frames, hello)).await.unwrap_or(Ok(())).map_err(drop)
            });
        }
        tasks.close();
        Self { end, tasks }
    }

    /// Waits until the gateway has ended the connection.
    pub(crate) async fn ended(&self) {
        within("the end of the connection", self.tasks.wait()).await;
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.tasks.is_empty()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.end.cancel();
    }
}

/// Answers `hello` only, on a control connection.
async fn says(mut frames: Frames<TlsStream<Stream>>, hello: HelloReply) -> std::io::Result<()> {
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

/// Answers `Hello` only.
struct Says(HelloReply);

mod says {
    use std::pin::Pin;

    use futures::Stream;
    use kiyot_proto::cell::*;
    use tonic::{Request, Response, Status, Streaming};

    type Answer<T> = Result<Response<T>, Status>;
    type Parts<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

    macro_rules! not_here {
        ($($name:ident($request:ty) -> $reply:ty;)*) => {
            #[tonic::async_trait]
            impl agent_server::Agent for super::Says {
                type WatchStream = Parts<Event>;
                type ReadLogStream = Parts<LogPart>;
                type TunnelStream = Parts<TunnelPart>;
                type ResolveStream = Parts<NameQuery>;
                type WatchPullsStream = Parts<PullNews>;
                async fn hello(&self, _: Request<HelloRequest>) -> Answer<HelloReply> {
                    Ok(Response::new(self.0.clone()))
                }
                $(async fn $name(&self, _: Request<$request>) -> Answer<$reply> {
                    Err(Status::unimplemented("not here"))
                })*
            }
        };
    }

    not_here! {
        bind(BindRequest) -> BindReply;
        resolve(Streaming<NameAnswer>) -> Parts<NameQuery>;
        open_bulk(OpenBulkRequest) -> OpenBulkReply;
        measure(MeasureRequest) -> MeasureReply;
        watch(WatchRequest) -> Parts<Event>;
        change_files(Streaming<FileChange>) -> ChangeFilesReply;
        get_file(GetFileRequest) -> GetFileReply;
        read_log(ReadLogRequest) -> Parts<LogPart>;
        trim_log(TrimLogRequest) -> TrimLogReply;
        tunnel(Streaming<TunnelPart>) -> Parts<TunnelPart>;
        missing_blobs(MissingBlobsRequest) -> MissingBlobsReply;
        put_blob(Streaming<BlobPart>) -> PutBlobReply;
        put_image(PutImageRequest) -> PutImageReply;
        watch_pulls(WatchPullsRequest) -> Parts<PullNews>;
        shutdown(ShutdownRequest) -> ShutdownReply;
    }
}
