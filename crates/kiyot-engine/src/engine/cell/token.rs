//! The token with which a cell's agent enrols.

use std::time::Duration;

use kiyot_proto::store;

use crate::engine::{Now, RedeemRefusal, cell::known};

/// A token, which a single key may spend.
#[derive(Debug)]
pub(in crate::engine) struct Token {
    /// The digest of the token.
    pub(in crate::engine) sha256: String,
    /// The time of its expiry for the record, in seconds since 1970.
    pub(in crate::engine) expires_unix: i64,
    /// The time of its expiry by [`Now::boot`].
    pub(in crate::engine) deadline: Duration,
    /// The digest of the key that has spent it.
    pub(in crate::engine) spent_by: Option<String>,
}

impl Token {
    pub(in crate::engine) fn new(sha256: String, ttl: Duration, now: Now) -> Self {
        let expires_unix = i64::try_from((now.unix + ttl).as_secs()).unwrap_or(i64::MAX);
        Self { sha256, expires_unix, deadline: now.boot + ttl, spent_by: None }
    }

    pub(in crate::engine) fn from_stored(record: &store::Cell, deadline: Duration) -> Option<Self> {
        Some(Self {
            sha256: known(&record.token_sha256)?,
            expires_unix: record.token_expires_unix,
            deadline,
            spent_by: known(&record.key_sha256),
        })
    }

    /// Checks that the token has this digest, that the key, if given, may spend it, and that it has
    /// not expired.
    pub(in crate::engine) fn check(
        &self,
        sha256: &str,
        key_sha256: Option<&str>,
        now: Now,
    ) -> Result<(), RedeemRefusal> {
        match (&self.spent_by, key_sha256) {
            _ if self.sha256 != sha256 => Err(RedeemRefusal::WrongToken),
            (Some(spent_by), Some(key)) if spent_by != key => Err(RedeemRefusal::OtherKey),
            _ if now.boot >= self.deadline => Err(RedeemRefusal::Expired),
            _ => Ok(()),
        }
    }
}
