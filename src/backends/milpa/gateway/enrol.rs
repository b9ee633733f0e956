//! Enrolment: a cell trades its one-time token for a certificate. Without a token the cell's own
//! key gets a new one for the one that expires.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use kiyot_link::{certificate::sha256, clock::Clock};
use kiyot_proto::cell::{EnrolReply, EnrolRequest, enrolment_server};
use tokio::time::timeout;
use tonic::{Request, Response, Status};

use super::{
    Ledger, Refusal,
    ca::{Ca, ProvenKey},
    refusal_log::RefusalLog,
};

/// The most bytes of an `Enrol` request.
pub(super) const BODY_LIMIT: usize = 16 * 1024;

/// Bytes of the longest name of a cell.
const CELL: usize = 80;
/// Characters of what an agent says of its build that go to the log.
const BUILD_ID: usize = 80;

/// How long the ledger may take to spend a token.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(10);

/// The service on connections for enrolment.
#[derive(Clone)]
pub(super) struct Enrolment {
    pub(super) ca: Arc<Ca>,
    pub(super) ledger: Arc<dyn Ledger>,
    pub(super) clock: Clock,
    pub(super) lifetime: Duration,
    pub(super) log: Arc<RefusalLog>,
}

impl Enrolment {
    pub(super) fn service(self) -> enrolment_server::EnrolmentServer<Self> {
        enrolment_server::EnrolmentServer::new(self).max_decoding_message_size(BODY_LIMIT)
    }
}

#[async_trait]
impl enrolment_server::Enrolment for Enrolment {
    async fn enrol(&self, request: Request<EnrolRequest>) -> Result<Response<EnrolReply>, Status> {
        let EnrolRequest { cell, token, csr_der, build_id } = request.into_inner();
        let key = ProvenKey::from_request(&csr_der)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let key_sha256 = key.sha256();
        if cell.len() > CELL {
            let name = cell[..cell.floor_char_boundary(CELL)].to_owned();
            return Err(self.refused(&Refusal::Unknown(name), &key_sha256));
        }
        let admitted = if token.is_empty() {
            // A renewal: the request is signed by the key that the cell's token was spent for, and
            // the cell lives.
            self.ledger.admits(&cell, &key_sha256)
        } else {
            let claim = timeout(
                CLAIM_TIMEOUT,
                self.ledger.claim(&cell, &sha256(token.as_bytes()), &key_sha256),
            )
            .await;
            claim.map_err(|_| {
                Status::unavailable(format!(
                    "spending a token took longer than {} s",
                    CLAIM_TIMEOUT.as_secs()
                ))
            })?
        };
        let id = admitted.map_err(|refusal| self.refused(&refusal, &key_sha256))?;
        let certificate = self.ca.certify(self.clock.now(), &id, &key, self.lifetime).map_err(|error| {
            if let Some(suppressed) = self.log.failure.admit() {
                tracing::error!(cell = %id, error = &error as &dyn std::error::Error, suppressed, "A cell's certificate could not be made.");
            }
            Status::unavailable("no certificate could be made")
        })?;
        if let Some(suppressed) = self.log.certificate.admit(&id) {
            let agent: String = build_id.chars().take(BUILD_ID).collect();
            tracing::info!(cell = %id, key_sha256, agent = %agent.escape_debug(), suppressed, "A cell has its certificate.");
        }
        Ok(Response::new(EnrolReply {
            certificate_der: certificate.into(),
            ca_der: self.ca.certificate_der().to_vec().into(),
        }))
    }
}

impl Enrolment {
    /// Logs a refusal, and returns what the caller is told: whether to come again, and not what it
    /// has guessed right.
    fn refused(&self, refusal: &Refusal, key_sha256: &str) -> Status {
        let error: &dyn std::error::Error = refusal;
        match refusal {
            Refusal::Store(..) => {
                if let Some(suppressed) = self.log.failure.admit() {
                    tracing::error!(error, suppressed, "A cell could not enrol.");
                }
                Status::unavailable("the store did not keep it")
            }
            Refusal::OtherKey(cell) => {
                if let Some(suppressed) = self.log.forgery.admit(cell) {
                    tracing::error!(
                        error,
                        key_sha256,
                        suppressed,
                        "A token that was spent was shown with another key: somebody else has the bootstrap data of a cell."
                    );
                }
                Status::permission_denied("not let in")
            }
            Refusal::Unknown(_) | Refusal::WrongToken(_) | Refusal::Expired(_) => {
                if let Some(suppressed) = self.log.enrolment.admit() {
                    tracing::warn!(error, key_sha256, suppressed, "An enrolment was refused.");
                }
                Status::permission_denied("not let in")
            }
        }
    }
}
