//! Admission: answers the gateway's questions about cells.

use std::time::Duration;

use async_trait::async_trait;
use kiyot_engine::{
    engine::{Event, RedeemRefusal},
    id::CellId,
};
use kiyot_proto::cell::HelloReply;

use super::{
    super::gateway::{Admission, Refusal},
    Cells,
    shared::now,
};

/// Bounds the characters of an unknown id in a refusal.
const MAX_SHOWN_CHARS: usize = 80;

#[async_trait]
impl Admission for Cells {
    async fn redeem(
        &self,
        cell: &str,
        token_sha256: &str,
        key_sha256: &str,
    ) -> Result<CellId, Refusal> {
        let id = CellId::parse(cell).map_err(|_| unknown(cell))?;
        let redeemed =
            self.shared.redeem(id.clone(), token_sha256.to_owned(), key_sha256.to_owned());
        match redeemed.await {
            Ok(()) => Ok(id),
            Err(refusal) => Err(self.refusal(id, refusal)),
        }
    }

    fn expects(&self, cell: &str, token_sha256: &str) -> Result<CellId, Refusal> {
        let id = CellId::parse(cell).map_err(|_| unknown(cell))?;
        let checked = self.shared.core().engine.check_token(&id, token_sha256, now());
        match checked {
            Ok(()) => Ok(id),
            Err(refusal) => Err(self.refusal(id, refusal)),
        }
    }

    fn admits(&self, cell: &str, key_sha256: &str) -> Result<CellId, Refusal> {
        let id = CellId::parse(cell).map_err(|_| unknown(cell))?;
        let is_admitted =
            self.shared.core().engine.admitted_key(&id).map(|admitted| admitted == key_sha256);
        match is_admitted {
            Some(true) => Ok(id),
            Some(false) => Err(Refusal::OtherKey(id)),
            None => Err(self.refusal(id, RedeemRefusal::Unknown)),
        }
    }

    fn linked(&self, cell: &CellId, hello: Option<HelloReply>) {
        if let Some(hello) = hello {
            if hello.running_millis > 0 {
                let time = Duration::from_millis(hello.running_millis);
                self.shared.handle(Event::Running(cell.clone(), time));
            }
            self.shared.handle(Event::Connected(cell.clone()));
        } else {
            self.shared.handle(Event::Disconnected(cell.clone()));
            // Only the provider knows whether the instance has ended.
            if let Some(source) = self.shared.source_of(&self.shared.core(), cell) {
                source.list_now.notify_one();
            }
        }
    }
}

impl Cells {
    fn refusal(&self, id: CellId, refusal: RedeemRefusal) -> Refusal {
        match refusal {
            RedeemRefusal::Unknown if self.has_ended(&id) => Refusal::Ended(id),
            RedeemRefusal::Unknown => unknown(id.as_str()),
            RedeemRefusal::WrongToken => Refusal::WrongToken(id),
            RedeemRefusal::Expired => Refusal::Expired(id),
            // The gateway logs it, within its limits.
            RedeemRefusal::OtherKey => Refusal::OtherKey(id),
            RedeemRefusal::Store(error) => Refusal::Store(id, error),
        }
    }

    /// Returns whether a known cell is being ended or has ended. The agent of an interrupted launch
    /// may dial for the first time while its cell is being ended.
    fn has_ended(&self, id: &CellId) -> bool {
        let core = self.shared.core();
        let is_ending = core.engine.contains(id) && core.engine.is_ending(id);
        is_ending || core.engine.gone_reason(id).is_some()
    }
}

fn unknown(cell: &str) -> Refusal {
    Refusal::Unknown(cell.chars().take(MAX_SHOWN_CHARS).collect())
}
