//! Admission: answers the gateway's questions about cells.

use async_trait::async_trait;
use kiyot_proto::{cell::HelloReply, store::CellPhase};
use tokio::sync::oneshot;

use super::{
    super::{
        gateway::{Admission, Refusal},
        id::CellId,
    },
    Cells,
    message::Message,
    shared::Entry,
};

#[async_trait]
impl Admission for Cells {
    async fn claim(
        &self,
        cell: &str,
        token_sha256: &str,
        key_sha256: &str,
    ) -> Result<CellId, Refusal> {
        let (id, entry) = self.known(cell)?;
        let (answer, answered) = oneshot::channel();
        let claim = Message::Claim {
            token_sha256: token_sha256.to_owned(),
            key_sha256: key_sha256.to_owned(),
            answer,
        };
        if entry.inbox.send(claim).await.is_err() {
            return Err(Refusal::Unknown(cell.to_owned()));
        }
        answered.await.unwrap_or_else(|_| Err(Refusal::Unknown(cell.to_owned())))?;
        Ok(id)
    }

    fn admits(&self, cell: &str, key_sha256: &str) -> Result<CellId, Refusal> {
        let (id, entry) = self.known(cell)?;
        let view = entry.view();
        if !matches!(
            view.phase,
            CellPhase::Launching | CellPhase::Booting | CellPhase::Enrolled | CellPhase::Bound
        ) || view.key_sha256.is_empty()
        {
            return Err(Refusal::Unknown(cell.to_owned()));
        }
        if view.key_sha256 == key_sha256 { Ok(id) } else { Err(Refusal::OtherKey(id)) }
    }

    fn linked(&self, cell: &CellId, hello: Option<HelloReply>) {
        let Some(entry) = self.shared.entry(cell) else { return };
        if hello.is_none() {
            // The instance may have ended, which only the provider knows.
            self.shared.list_now.notify_one();
        }
        entry.linked.modify(|linked| *linked = hello.is_some());
    }
}

impl Cells {
    fn known(&self, cell: &str) -> Result<(CellId, std::sync::Arc<Entry>), Refusal> {
        let unknown = || Refusal::Unknown(cell.chars().take(80).collect());
        let id = CellId::parse(cell).map_err(|_| unknown())?;
        let entry = self.shared.entry(&id).ok_or_else(unknown)?;
        Ok((id, entry))
    }
}
