//! Connections with a cell's certificate: who they are, and calls over them until they end.

use std::{sync::Arc, time::Duration};

use kiyot_link::{
    certificate::{Certificate, NotACertificate},
    channel::{Channel, Offer, Refused},
    connection::Connection,
    http2::Profile,
    stream::Stream,
};
use kiyot_proto::cell::{ConnectionKind, HelloReply, HelloRequest, agent_client::AgentClient};
use tokio_rustls::server::TlsStream;

use super::{Refusal, listener::Shared, slots::CellSlots};

/// The longest name of an agent's run that is kept.
const INCARNATION_LIMIT: usize = 128;

/// Why a connection is not let in.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotAdmitted {
    #[error("it shows no certificate")]
    NoCertificate,
    #[error("its certificate")]
    Certificate(#[source] NotACertificate),
    #[error("the ledger")]
    Ledger(#[source] Refusal),
    #[error("nobody calls cell {0} (yet)")]
    NoLink(String),
    #[error("HTTP/2")]
    Http2(#[source] hyper::Error),
    #[error("the agent did not say who it is")]
    Hello(#[source] tonic::Status),
    #[error("cell {certificate} says that it is cell {hello:?}, on a connection of kind {kind:?}")]
    OtherHello { certificate: String, hello: String, kind: ConnectionKind },
    #[error("its place")]
    Refused(#[source] Refused),
}

/// A connection that is the current one of its cell and kind.
pub(super) struct Admitted {
    connection: Connection,
    slots: Arc<CellSlots>,
    kind: ConnectionKind,
}

/// Lets a connection in, or says why not. The caller bounds its time.
pub(super) async fn admit(stream: TlsStream<Stream>, kind: ConnectionKind, arrival: u64, shared: &Shared) -> Result<Admitted, NotAdmitted> {
    let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first()).ok_or(NotAdmitted::NoCertificate)?;
    let certificate = Certificate::read(certificate).map_err(NotAdmitted::Certificate)?;
    let cell = shared.ledger.admits(&certificate.common_name, &certificate.key_sha256).map_err(NotAdmitted::Ledger)?;
    let slots = shared.slots.of(&cell).ok_or_else(|| NotAdmitted::NoLink(cell.to_string()))?;
    let profile = if kind == ConnectionKind::Bulk { Profile::BULK } else { Profile::CONTROL };
    let connection = Connection::open(stream, profile, &shared.end, &shared.tasks).await.map_err(NotAdmitted::Http2)?;
    // From here on a way out must cut the connection: its driver is a task.
    let admitted = Admitted { connection, slots, kind };
    let hello = hello(&admitted.connection, shared).await.map_err(NotAdmitted::Hello)?;
    if hello.cell != cell.as_str() || hello.kind() != kind || hello.incarnation.len() > INCARNATION_LIMIT {
        return Err(NotAdmitted::OtherHello { certificate: cell.to_string(), hello: hello.cell.chars().take(80).collect(), kind: hello.kind() });
    }
    tracing::debug!(%cell, ?kind, generation = hello.generation, arrival, "A cell has connected.");
    let offer = Offer { connection: admitted.connection.clone(), incarnation: hello.incarnation.clone(), generation: hello.generation, arrival };
    match kind {
        ConnectionKind::Bulk => admitted.slots.bulk_opened(offer),
        _ => admitted.slots.control_opened(offer, hello, &*shared.ledger),
    }
    .map_err(NotAdmitted::Refused)?;
    Ok(admitted)
}

async fn hello(connection: &Connection, shared: &Shared) -> Result<HelloReply, tonic::Status> {
    let mut request = tonic::Request::new(HelloRequest { build_id: shared.build_id.clone() });
    request.set_timeout(shared.limits.handshake);
    Ok(AgentClient::new(Channel::over(connection.clone())).hello(request).await?.into_inner())
}

impl Admitted {
    /// Returns when the connection has ended and its place knows.
    pub(super) async fn carry(self, shared: &Shared) {
        match self.kind {
            ConnectionKind::Bulk => {
                self.carry_bulk(shared.limits.bulk_idle).await;
                self.slots.bulk_ended(&self.connection);
            }
            _ => {
                self.connection.ended().await;
                self.slots.control_ended(&self.connection, &*shared.ledger);
            }
        }
    }

    async fn carry_bulk(&self, idle: Duration) {
        tokio::select! {
            () = self.connection.ended() => return,
            () = self.connection.idle_for(idle) => {}
        }
        // New calls ask for a new connection; one that has just begun may go on over this one.
        self.slots.bulk_ended(&self.connection);
        tokio::select! {
            () = self.connection.ended() => {}
            () = self.connection.idle_for(Duration::ZERO) => {}
        }
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.connection.cut();
    }
}
