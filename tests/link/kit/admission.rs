//! An [`Admission`] in memory.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard},
};

use kiyot::backends::milpa::gateway::{Admission, Refusal};
use kiyot_engine::id::CellId;
use kiyot_link::certificate::sha256;
use kiyot_proto::cell::HelloReply;

struct ExpectedCell {
    token_sha256: String,
    expired: bool,
    key_sha256: Option<String>,
}

#[derive(Default)]
pub(crate) struct TestAdmission {
    cells: Mutex<HashMap<CellId, ExpectedCell>>,
    alarms: Mutex<Vec<CellId>>,
    linked_events: Mutex<Vec<Option<u64>>>,
}

impl TestAdmission {
    pub(crate) fn expect(&self, cell: &CellId, token: &str) {
        self.cells().insert(
            cell.clone(),
            ExpectedCell {
                token_sha256: sha256(token.as_bytes()),
                expired: false,
                key_sha256: None,
            },
        );
    }

    pub(crate) fn expire(&self, cell: &CellId) {
        self.cells().get_mut(cell).unwrap().expired = true;
    }

    pub(crate) fn remove(&self, cell: &CellId) {
        self.cells().remove(cell);
    }

    pub(crate) fn key_of(&self, cell: &CellId) -> Option<String> {
        self.cells()[cell].key_sha256.clone()
    }

    /// Returns the cells whose token was presented with a second key.
    pub(crate) fn alarms(&self) -> Vec<CellId> {
        self.alarms.lock().unwrap().clone()
    }

    /// Returns the generations of control connections in the order of their establishment, with
    /// `None` for each end.
    pub(crate) fn linked_events(&self) -> Vec<Option<u64>> {
        self.linked_events.lock().unwrap().clone()
    }

    fn cells(&self) -> MutexGuard<'_, HashMap<CellId, ExpectedCell>> {
        self.cells.lock().unwrap()
    }
}

#[tonic::async_trait]
impl Admission for TestAdmission {
    async fn redeem(
        &self,
        cell: &str,
        token_sha256: &str,
        key_sha256: &str,
    ) -> Result<CellId, Refusal> {
        let mut cells = self.cells();
        let id = CellId::parse(cell).map_err(|_| Refusal::Unknown(cell.to_owned()))?;
        let entry = cells.get_mut(&id).ok_or_else(|| Refusal::Unknown(cell.to_owned()))?;
        if entry.token_sha256 != token_sha256 {
            return Err(Refusal::WrongToken(id));
        }
        if entry.expired {
            return Err(Refusal::Expired(id));
        }
        if entry.key_sha256.get_or_insert_with(|| key_sha256.to_owned()) != key_sha256 {
            self.alarms.lock().unwrap().push(id.clone());
            return Err(Refusal::OtherKey(id));
        }
        Ok(id)
    }

    fn expects(&self, cell: &str, token_sha256: &str) -> Result<CellId, Refusal> {
        let id = CellId::parse(cell).map_err(|_| Refusal::Unknown(cell.to_owned()))?;
        match self.cells().get(&id) {
            None => Err(Refusal::Unknown(cell.to_owned())),
            Some(entry) if entry.token_sha256 != token_sha256 => Err(Refusal::WrongToken(id)),
            Some(entry) if entry.expired => Err(Refusal::Expired(id)),
            Some(_) => Ok(id),
        }
    }

    fn admits(&self, cell: &str, key_sha256: &str) -> Result<CellId, Refusal> {
        let id = CellId::parse(cell).map_err(|_| Refusal::Unknown(cell.to_owned()))?;
        match self.cells().get(&id) {
            None => Err(Refusal::Unknown(cell.to_owned())),
            Some(entry) if entry.key_sha256.as_deref() != Some(key_sha256) => {
                Err(Refusal::OtherKey(id))
            }
            Some(_) => Ok(id),
        }
    }

    fn linked(&self, _: &CellId, hello: Option<HelloReply>) {
        self.linked_events.lock().unwrap().push(hello.map(|hello| hello.generation));
    }
}
