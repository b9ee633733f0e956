//! The beginning of a connection: the TLS handshake, then enrolment, download or admission, by ALPN
//! and SNI.

use std::io;

use kiyot_link::{alpn, http2, stream::Stream};
use kiyot_proto::cell::ConnectionKind;
use rustls::server::Acceptor;
use tokio::time::timeout;
use tokio_rustls::{LazyConfigAcceptor, server::TlsStream};

use super::{
    admission::{self, Admitted},
    conn_limit::ConnPermit,
    counted_stream::CountedStream,
    downloads::Downloads,
    shared::Shared,
};

/// The use of a connection, by ALPN and SNI.
enum Purpose<'a> {
    Enrolment,
    Download(&'a Downloads),
    Link(ConnectionKind),
}

/// Performs the handshake of a connection, then enrols the cell, serves a download or admits the
/// connection.
pub(super) async fn establish(
    stream: Stream,
    permit: ConnPermit,
    sequence: u64,
    shared: &Shared,
) -> Option<Admitted> {
    let stream = CountedStream::new(stream, shared.bytes.clone());
    let (purpose, stream) = handshake(stream, shared).await?;
    match purpose {
        Purpose::Download(downloads) => {
            // Boxed, because few connections enrol.
            let (admission, limit) = (&*shared.admission, shared.limits.handshake);
            Box::pin(downloads.serve(stream, permit, admission, &shared.log, limit)).await;
            None
        }
        Purpose::Enrolment => {
            serve_enrolment(stream, shared).await;
            None
        }
        Purpose::Link(kind) => {
            let admitted = admit(stream, kind, sequence, shared).await;
            drop(permit);
            admitted
        }
    }
}

/// Performs the TLS handshake. Logs an error and returns `None`.
async fn handshake(
    stream: CountedStream,
    shared: &Shared,
) -> Option<(Purpose<'_>, TlsStream<CountedStream>)> {
    // Cells on the node have the program already.
    let downloads = shared.downloads.as_ref().filter(|_| stream.is_tcp());
    let handshake = async {
        let start = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
        let hello = start.client_hello();
        let kind = match hello.server_name() {
            Some(alpn::BULK_NAME) => ConnectionKind::Bulk,
            _ => ConnectionKind::Control,
        };
        let offers = |wanted: &[u8]| {
            hello.alpn().is_some_and(|mut protocols| protocols.any(|protocol| protocol == wanted))
        };
        let (purpose, config) = if hello.alpn().is_none() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no ALPN"));
        } else if offers(alpn::CELL) {
            // If several protocols are offered, the strictest.
            (Purpose::Link(kind), shared.cell_tls.clone())
        } else if let Some(downloads) = downloads.filter(|_| offers(alpn::DOWNLOAD)) {
            (Purpose::Download(downloads), downloads.tls.clone())
        } else {
            // An unknown protocol gets TLS's alert no_application_protocol.
            (Purpose::Enrolment, shared.enrol_tls.clone())
        };
        Ok((purpose, start.into_stream(config).await?))
    };
    match timeout(shared.limits.handshake, handshake).await {
        Ok(Ok(established)) => Some(established),
        Ok(Err(error)) => {
            if is_outside_validity(&error) {
                if let Some(suppressed) = shared.log.expiry.admit() {
                    tracing::info!(
                        %error,
                        suppressed,
                        "certificate of a cell has expired by this node's clock, its key gets a \
                         new one"
                    );
                }
            } else if let Some(suppressed) = shared.log.handshake.admit() {
                tracing::debug!(%error, suppressed, "TLS handshake failed");
            }
            None
        }
        Err(_) => {
            if let Some(suppressed) = shared.log.handshake.admit() {
                tracing::debug!(suppressed, "TLS handshake timed out");
            }
            None
        }
    }
}

async fn serve_enrolment(stream: TlsStream<CountedStream>, shared: &Shared) {
    let end = shared.shutdown.child_token();
    let service = shared.enrolment.clone().service(end.clone());
    let served = http2::serve(stream, http2::Profile::ENROL, service, end, shared.tasks.clone());
    if timeout(shared.limits.enrolment, served).await.is_err()
        && let Some(suppressed) = shared.log.handshake.admit()
    {
        tracing::debug!(suppressed, "connection for enrolment timed out");
    }
}

/// Admits a connection. Logs an error and returns `None`.
async fn admit(
    stream: TlsStream<CountedStream>,
    kind: ConnectionKind,
    sequence: u64,
    shared: &Shared,
) -> Option<Admitted> {
    // Twice the limit: once for HTTP/2, and once for the reply to Hello, which has the same limit.
    let limit = shared.limits.handshake * 2;
    match timeout(limit, admission::admit(stream, kind, sequence, shared)).await {
        Ok(Ok(admitted)) => Some(admitted),
        Ok(Err(error)) => {
            if let Some(suppressed) = shared.log.admission.admit() {
                let error = &error as &dyn std::error::Error;
                tracing::info!(error, suppressed, "connection with a certificate not admitted");
            }
            None
        }
        Err(_) => {
            if let Some(suppressed) = shared.log.admission.admit() {
                tracing::info!(suppressed, "connection with a certificate timed out");
            }
            None
        }
    }
}

/// Returns whether a handshake failed because the certificate is not valid at this time.
fn is_outside_validity(error: &io::Error) -> bool {
    let error = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let Some(rustls::Error::InvalidCertificate(problem)) = error else { return false };
    use rustls::CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};
    matches!(problem, Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. })
}
