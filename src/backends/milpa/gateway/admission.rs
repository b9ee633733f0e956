//! Admission of connections with a client certificate, and their service until the connections end.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use kiyot_link::{
    certificate::{Certificate, InvalidCertificate},
    channel::{Channel, Offer, OfferError},
    connection::Connection,
    frames::Frames,
    http2::Profile,
    link_connection::LinkConnection,
};
use kiyot_proto::{
    bounds,
    cell::{ConnectionKind, HelloReply, HelloRequest, agent_client::AgentClient},
};
use tokio_rustls::server::TlsStream;

use super::{
    Refusal,
    connections::CellConnections,
    control::{ControlConnection, ControlError},
    counted_stream::CountedStream,
    shared::Shared,
};

/// The most bytes of an agent's incarnation.
const MAX_INCARNATION_BYTES: usize = 128;
/// The most bytes of the first message on a control connection. A peer with a valid certificate may
/// have as many connections in this state as the unauthenticated limit allows.
const MAX_FIRST_MESSAGE_BYTES: usize = 16 << 10;
/// The most characters of a cell's name in an error message.
const MAX_LOGGED_NAME_CHARS: usize = 80;

/// The reason for not admitting a connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum AdmitError {
    #[error("no client certificate")]
    NoCertificate,
    #[error("client certificate")]
    Certificate(#[source] InvalidCertificate),
    #[error("refused")]
    Refused(#[source] Refusal),
    #[error("cell {0} has no link (yet)")]
    NoLink(String),
    #[error("HTTP/2 handshake")]
    Http2(#[source] hyper::Error),
    #[error("no Hello from the agent")]
    Hello(#[source] tonic::Status),
    #[error("no Hello from the agent")]
    ControlHello(#[source] ControlError),
    #[error("certificate of cell {certificate}, but Hello of cell {hello:?} and kind {kind:?}")]
    HelloMismatch { certificate: String, hello: String, kind: ConnectionKind },
    #[error("not the current connection")]
    Stale(#[source] OfferError),
}

/// The current connection of its cell and kind.
pub(super) struct Admitted {
    transport: Transport,
    connections: Arc<CellConnections>,
}

enum Transport {
    Control(ControlConnection, Frames<Box<TlsStream<CountedStream>>>),
    Bulk(Connection),
}

/// Admits a connection: verifies certificate and Hello, and makes it the current connection of its
/// cell. The caller sets a timeout.
pub(super) async fn admit(
    stream: TlsStream<CountedStream>,
    kind: ConnectionKind,
    sequence: u64,
    shared: &Shared,
) -> Result<Admitted, AdmitError> {
    let (transport, tls) = stream.get_ref();
    let peer = transport.peer_ip();
    let certificate =
        tls.peer_certificates().and_then(|chain| chain.first()).ok_or(AdmitError::NoCertificate)?;
    let certificate = Certificate::read(certificate).map_err(AdmitError::Certificate)?;
    let cell = shared
        .admission
        .admits(&certificate.common_name, &certificate.key_sha256)
        .map_err(AdmitError::Refused)?;
    let connections =
        shared.connections.get(&cell).ok_or_else(|| AdmitError::NoLink(cell.to_string()))?;
    // From here on an error must abort the connection, which a task may be driving: dropping
    // `Admitted` aborts it.
    let (admitted, hello) = if kind == ConnectionKind::Bulk {
        let connection = Connection::open(stream, Profile::BULK, &shared.shutdown, &shared.tasks)
            .await
            .map_err(AdmitError::Http2)?;
        let admitted = Admitted { transport: Transport::Bulk(connection.clone()), connections };
        (admitted, call_hello(&connection, shared).await.map_err(AdmitError::Hello)?)
    } else {
        let mut frames = Frames::new(Box::new(stream), MAX_FIRST_MESSAGE_BYTES);
        let hello = ControlConnection::exchange_hello(&mut frames, hello_request(shared))
            .await
            .map_err(AdmitError::ControlHello)?;
        frames.set_max_message_bytes(bounds::MAX_CONTROL_FRAME_BYTES);
        let connection = ControlConnection::new(hello.clone(), &shared.shutdown);
        (Admitted { transport: Transport::Control(connection, frames), connections }, hello)
    };
    if hello.cell != cell.as_str()
        || hello.kind() != kind
        || hello.incarnation.len() > MAX_INCARNATION_BYTES
    {
        return Err(AdmitError::HelloMismatch {
            certificate: cell.to_string(),
            hello: hello.cell.chars().take(MAX_LOGGED_NAME_CHARS).collect(),
            kind: hello.kind(),
        });
    }
    tracing::debug!(%cell, ?kind, generation = hello.generation, sequence, "cell connected");
    let (incarnation, generation) = (hello.incarnation, hello.generation);
    match &admitted.transport {
        Transport::Bulk(connection) => admitted.connections.bulk_opened(Offer {
            connection: connection.clone(),
            incarnation,
            generation,
            sequence,
        }),
        Transport::Control(connection, _) => admitted.connections.control_opened(
            Offer { connection: connection.clone(), incarnation, generation, sequence },
            peer,
            &*shared.admission,
        ),
    }
    .map_err(AdmitError::Stale)?;
    Ok(admitted)
}

/// Returns the first message to an agent.
fn hello_request(shared: &Shared) -> HelloRequest {
    HelloRequest {
        build_id: shared.build_id.clone(),
        ephemeral_storage_limit: shared.limits.ephemeral_storage,
        unix_nanos: unix_nanos(shared.enrolment.clock.now()),
    }
}

/// Returns a time in nanoseconds since 1970, or 0, which sets no clock, for a time out of range.
fn unix_nanos(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH)
        .ok()
        .and_then(|since| i64::try_from(since.as_nanos()).ok())
        .unwrap_or(0)
}

async fn call_hello(connection: &Connection, shared: &Shared) -> Result<HelloReply, tonic::Status> {
    let mut request = tonic::Request::new(hello_request(shared));
    request.set_timeout(shared.limits.handshake);
    Ok(AgentClient::new(Channel::over(connection.clone())).hello(request).await?.into_inner())
}

impl Admitted {
    /// Runs the connection until it has ended and is no longer the current connection.
    pub(super) async fn run(mut self, shared: &Shared) {
        match &mut self.transport {
            Transport::Bulk(connection) => {
                // Boxed, because most connections are control connections, which need no room for
                // it.
                Box::pin(run_bulk(&self.connections, connection)).await;
                self.connections.bulk_ended(connection);
            }
            Transport::Control(connection, frames) => {
                if let Err(error) = connection.run(frames, self.connections.message_rate()).await {
                    tracing::debug!(
                        error = &error as &dyn std::error::Error,
                        "control connection failed"
                    );
                }
                self.connections.control_ended(connection, &*shared.admission);
            }
        }
    }
}

async fn run_bulk(connections: &CellConnections, connection: &Connection) {
    tokio::select! {
        () = connection.ended() => {}
        () = connection.close_when_idle(connections.bulk_idle_timeout()) => {
            connections.bulk_idle_closed(connection);
        }
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        match &self.transport {
            Transport::Control(connection, _) => connection.abort(),
            Transport::Bulk(connection) => connection.abort(),
        }
    }
}
