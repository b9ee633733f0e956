//! Connections with a cell's certificate: who they are, and calls over them until they end.

use std::sync::Arc;

use kiyot_link::{
    certificate::{Certificate, NotACertificate},
    channel::{Channel, Offer, Refused},
    connection::Connection,
    frames::Frames,
    held::Held,
    http2::Profile,
    stream::Stream,
};
use kiyot_proto::{
    bounds,
    cell::{ConnectionKind, HelloReply, HelloRequest, agent_client::AgentClient},
};
use tokio_rustls::server::TlsStream;

use super::{
    Refusal,
    control::{Broken, Line},
    shared::Shared,
    slots::CellSlots,
};

/// The longest name of an agent's run that is kept.
const INCARNATION_LIMIT: usize = 128;
/// The longest word of an agent about itself, in bytes: until then anybody with a certificate may
/// have as many connections as there are places for newcomers.
const HELLO_LIMIT: usize = 16 << 10;

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
    #[error("the agent did not say who it is")]
    ControlHello(#[source] Broken),
    #[error("cell {certificate} says that it is cell {hello:?}, on a connection of kind {kind:?}")]
    OtherHello { certificate: String, hello: String, kind: ConnectionKind },
    #[error("its place")]
    Refused(#[source] Refused),
}

/// A connection that is the current one of its cell and kind.
pub(super) struct Admitted {
    kind: Kind,
    slots: Arc<CellSlots>,
}

enum Kind {
    Control(Line, Frames<Box<TlsStream<Stream>>>),
    Bulk(Connection),
}

/// Lets a connection in, or says why not. The caller bounds its time.
pub(super) async fn admit(
    stream: TlsStream<Stream>,
    kind: ConnectionKind,
    arrival: u64,
    shared: &Shared,
) -> Result<Admitted, NotAdmitted> {
    let certificate = stream
        .get_ref()
        .1
        .peer_certificates()
        .and_then(|chain| chain.first())
        .ok_or(NotAdmitted::NoCertificate)?;
    let certificate = Certificate::read(certificate).map_err(NotAdmitted::Certificate)?;
    let cell = shared
        .ledger
        .admits(&certificate.common_name, &certificate.key_sha256)
        .map_err(NotAdmitted::Ledger)?;
    let slots = shared.slots.of(&cell).ok_or_else(|| NotAdmitted::NoLink(cell.to_string()))?;
    // From here on a way out must cut the connection: it may be driven by a task.
    let (admitted, hello) = if kind == ConnectionKind::Bulk {
        let connection = Connection::open(stream, Profile::BULK, &shared.end, &shared.tasks)
            .await
            .map_err(NotAdmitted::Http2)?;
        let admitted = Admitted { kind: Kind::Bulk(connection.clone()), slots };
        (admitted, hello(&connection, shared).await.map_err(NotAdmitted::Hello)?)
    } else {
        let mut frames = Frames::new(Box::new(stream), HELLO_LIMIT);
        let hello =
            Line::greet(&mut frames, said(shared)).await.map_err(NotAdmitted::ControlHello)?;
        frames.allow(bounds::CONTROL_FRAME);
        (
            Admitted { kind: Kind::Control(Line::new(hello.clone(), &shared.end), frames), slots },
            hello,
        )
    };
    if hello.cell != cell.as_str()
        || hello.kind() != kind
        || hello.incarnation.len() > INCARNATION_LIMIT
    {
        return Err(NotAdmitted::OtherHello {
            certificate: cell.to_string(),
            hello: hello.cell.chars().take(80).collect(),
            kind: hello.kind(),
        });
    }
    tracing::debug!(%cell, ?kind, generation = hello.generation, arrival, "A cell has connected.");
    let (incarnation, generation) = (hello.incarnation, hello.generation);
    match &admitted.kind {
        Kind::Bulk(connection) => admitted.slots.bulk_opened(Offer {
            connection: connection.clone(),
            incarnation,
            generation,
            arrival,
        }),
        Kind::Control(line, _) => admitted.slots.control_opened(
            Offer { connection: line.clone(), incarnation, generation, arrival },
            &*shared.ledger,
        ),
    }
    .map_err(NotAdmitted::Refused)?;
    Ok(admitted)
}

/// Returns the first message to each agent.
fn said(shared: &Shared) -> HelloRequest {
    HelloRequest {
        build_id: shared.build_id.clone(),
        ephemeral_storage_limit: shared.limits.ephemeral_storage,
    }
}

async fn hello(connection: &Connection, shared: &Shared) -> Result<HelloReply, tonic::Status> {
    let mut request = tonic::Request::new(said(shared));
    request.set_timeout(shared.limits.handshake);
    Ok(AgentClient::new(Channel::over(connection.clone())).hello(request).await?.into_inner())
}

impl Admitted {
    /// Returns when the connection has ended and its place knows.
    pub(super) async fn carry(mut self, shared: &Shared) {
        match &mut self.kind {
            Kind::Bulk(connection) => {
                // Boxed: most connections are not of this kind.
                Box::pin(carry_bulk(&self.slots, connection)).await;
                self.slots.bulk_ended(connection);
            }
            Kind::Control(line, frames) => {
                if let Err(error) = line.carry(frames).await {
                    tracing::debug!(
                        error = &error as &dyn std::error::Error,
                        "A control connection broke."
                    );
                }
                self.slots.control_ended(line, &*shared.ledger);
            }
        }
    }
}

async fn carry_bulk(slots: &CellSlots, connection: &Connection) {
    tokio::select! {
        () = connection.ended() => {}
        () = connection.run_out(slots.bulk_idle()) => slots.bulk_ran_out(connection),
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        match &self.kind {
            Kind::Control(line, _) => line.cut(),
            Kind::Bulk(connection) => connection.cut(),
        }
    }
}
