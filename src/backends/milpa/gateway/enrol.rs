//! Enrolment: a cell exchanges its one-time token for a certificate, and later renews the
//! certificate with its key alone.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use kiyot_link::{certificate::sha256, clock::Clock};
use kiyot_proto::cell::{EnrolReply, EnrolRequest, enrolment_server};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::{
    Admission, Refusal,
    ca::{Ca, ProvenKey},
    refusal_log::RefusalLog,
};

/// The most bytes of an `Enrol` request.
pub(super) const MAX_REQUEST_BYTES: usize = 16 * 1024;

/// The most requests on a connection, which the next request closes. An agent sends a single
/// request; each costs the check of a signature.
const MAX_REQUESTS_PER_CONNECTION: usize = 16;
/// The most bytes of a cell's name.
const MAX_CELL_BYTES: usize = 80;
/// The most characters of an agent's build id in the log.
const MAX_LOGGED_BUILD_ID_CHARS: usize = 80;

/// The time limit for spending a token.
const REDEEM_TIMEOUT: Duration = Duration::from_secs(10);

/// State shared by all connections for enrolment.
#[derive(Clone)]
pub(super) struct Enrolment {
    pub(super) ca: Arc<Ca>,
    pub(super) admission: Arc<dyn Admission>,
    pub(super) clock: Clock,
    pub(super) lifetime: Duration,
    pub(super) log: Arc<RefusalLog>,
}

/// The gRPC service on a connection for enrolment.
pub(super) struct EnrolmentService {
    shared: Enrolment,
    requests: AtomicUsize,
    /// Closes the connection.
    end: CancellationToken,
}

impl Enrolment {
    /// Returns the service of a connection. Cancelling `end` closes the connection.
    pub(super) fn service(
        self,
        end: CancellationToken,
    ) -> enrolment_server::EnrolmentServer<EnrolmentService> {
        let service = EnrolmentService { shared: self, requests: AtomicUsize::new(0), end };
        enrolment_server::EnrolmentServer::new(service).max_decoding_message_size(MAX_REQUEST_BYTES)
    }
}

#[async_trait]
impl enrolment_server::Enrolment for EnrolmentService {
    async fn enrol(&self, request: Request<EnrolRequest>) -> Result<Response<EnrolReply>, Status> {
        if self.requests.fetch_add(1, Ordering::Relaxed) >= MAX_REQUESTS_PER_CONNECTION {
            self.end.cancel();
            return Err(Status::resource_exhausted("too many requests on a connection"));
        }
        self.shared.enrol(request.into_inner()).await
    }
}

impl Enrolment {
    async fn enrol(&self, request: EnrolRequest) -> Result<Response<EnrolReply>, Status> {
        let EnrolRequest { cell, token, csr_der, build_id } = request;
        let key = ProvenKey::from_request(&csr_der)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let key_sha256 = key.sha256();
        if cell.len() > MAX_CELL_BYTES {
            let name = cell[..cell.floor_char_boundary(MAX_CELL_BYTES)].to_owned();
            return Err(self.refused(&Refusal::Unknown(name), &key_sha256));
        }
        let admitted = if token.is_empty() {
            // A renewal: the request is signed by the key that spent the token of a live cell.
            self.admission.admits(&cell, &key_sha256)
        } else {
            let redemption = timeout(
                REDEEM_TIMEOUT,
                self.admission.redeem(&cell, &sha256(token.as_bytes()), &key_sha256),
            )
            .await;
            redemption.map_err(|_| {
                Status::unavailable(format!(
                    "spending a token took longer than {} s",
                    REDEEM_TIMEOUT.as_secs()
                ))
            })?
        };
        let id = admitted.map_err(|refusal| self.refused(&refusal, &key_sha256))?;
        let certificate =
            self.ca.certify(self.clock.now(), &id, &key, self.lifetime).map_err(|error| {
                if let Some(suppressed) = self.log.failure.admit() {
                    let error = &error as &dyn std::error::Error;
                    tracing::error!(cell = %id, error, suppressed, "certificate not issued");
                }
                Status::unavailable("no certificate could be issued")
            })?;
        if let Some(suppressed) = self.log.certificate.admit(&id) {
            let agent: String = build_id.chars().take(MAX_LOGGED_BUILD_ID_CHARS).collect();
            let agent = agent.escape_debug();
            tracing::info!(cell = %id, key_sha256, %agent, suppressed, "certificate issued");
        }
        Ok(Response::new(EnrolReply {
            certificate_der: certificate.into(),
            ca_der: self.ca.certificate_der().to_vec().into(),
        }))
    }

    /// Logs a refusal and returns the caller's status. The status shows whether a retry can
    /// succeed, but not which part of a guess was right.
    fn refused(&self, refusal: &Refusal, key_sha256: &str) -> Status {
        let error: &dyn std::error::Error = refusal;
        match refusal {
            Refusal::Store(..) => {
                if let Some(suppressed) = self.log.failure.admit() {
                    tracing::error!(error, suppressed, "enrolment failed");
                }
                Status::unavailable("the spent token could not be recorded")
            }
            Refusal::OtherKey(cell) => {
                if let Some(suppressed) = self.log.token_reuse.admit(cell) {
                    tracing::error!(
                        error,
                        key_sha256,
                        suppressed,
                        "spent token presented with a second key: \
                         the bootstrap data of a cell has leaked"
                    );
                }
                Status::permission_denied("enrolment refused")
            }
            Refusal::Ended(_) => {
                if let Some(suppressed) = self.log.ended.admit() {
                    tracing::debug!(error, key_sha256, suppressed, "enrolment refused");
                }
                Status::permission_denied("enrolment refused")
            }
            Refusal::Unknown(_) | Refusal::WrongToken(_) | Refusal::Expired(_) => {
                if let Some(suppressed) = self.log.enrolment.admit() {
                    tracing::warn!(error, key_sha256, suppressed, "enrolment refused");
                }
                Status::permission_denied("enrolment refused")
            }
        }
    }
}
