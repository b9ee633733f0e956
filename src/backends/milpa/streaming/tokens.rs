//! Tokens of streaming URLs: each is good for one request, for a minute.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use ring::rand::{SecureRandom, SystemRandom};
use tonic::Status;

use super::tunnel::Tunnels;

/// Random bytes of a token: 160 bits.
const TOKEN_BYTES: usize = 20;

/// How long a token may wait to be used, as containerd has it.
const TTL: Duration = Duration::from_secs(60);

/// Tokens that may wait at a time, as containerd has it.
const MAX_IN_FLIGHT: usize = 1_000;

/// Where a token leads.
#[derive(Clone)]
pub(super) struct Way {
    /// Port of the streaming server on the cell's loopback.
    pub(super) port: u16,
    /// Path and query of the cell's URL; a secret, as it has the cell containerd's own token.
    pub(super) target: String,
    /// To the cell.
    pub(super) tunnels: Arc<dyn Tunnels>,
}

/// The tokens that wait to be used.
#[derive(Default)]
pub(super) struct Tokens {
    waiting: Mutex<HashMap<String, (Instant, Way)>>,
}

impl Tokens {
    /// A new token. RESOURCE_EXHAUSTED if too many wait.
    pub(super) fn add(&self, way: Way) -> Result<String, Status> {
        self.add_at(way, Instant::now())
    }

    /// Takes what a token leads to; `None` if there is no such token, it was used, or its time is
    /// over.
    pub(super) fn take(&self, token: &str) -> Option<Way> {
        self.take_at(token, Instant::now())
    }

    fn add_at(&self, way: Way, now: Instant) -> Result<String, Status> {
        let mut random = [0_u8; TOKEN_BYTES];
        SystemRandom::new()
            .fill(&mut random)
            .map_err(|_| Status::internal("no random bytes from the kernel"))?;
        let token = hex::encode(random);
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.retain(|_, (since, _)| now.saturating_duration_since(*since) < TTL);
        if waiting.len() >= MAX_IN_FLIGHT {
            return Err(Status::resource_exhausted(format!(
                "{MAX_IN_FLIGHT} streaming requests wait for their client, and no more are allowed"
            )));
        }
        waiting.insert(token.clone(), (now, way));
        Ok(token)
    }

    fn take_at(&self, token: &str, now: Instant) -> Option<Way> {
        let (since, way) =
            self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(token)?;
        (now.saturating_duration_since(since) < TTL).then_some(way)
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::milpa::streaming::tests::Played;

    fn way() -> Way {
        Way { port: 1, target: "/exec/x".into(), tunnels: Arc::new(Played::default()) }
    }

    #[test]
    fn a_token_is_good_once() {
        let tokens = Tokens::default();
        let token = tokens.add(way()).unwrap();
        assert_eq!(token.len(), 40);
        assert_eq!(tokens.take(&token).unwrap().target, "/exec/x");
        assert!(tokens.take(&token).is_none());
    }

    #[test]
    fn a_token_is_good_for_a_minute() {
        let (tokens, now) = (Tokens::default(), Instant::now());
        let token = tokens.add_at(way(), now).unwrap();
        assert!(tokens.take_at(&token, now + TTL).is_none());
        let token = tokens.add_at(way(), now).unwrap();
        assert!(tokens.take_at(&token, now + TTL - Duration::from_nanos(1)).is_some());
    }

    #[test]
    fn so_many_may_wait_and_the_old_make_room() {
        let (tokens, now) = (Tokens::default(), Instant::now());
        for _ in 0..MAX_IN_FLIGHT {
            tokens.add_at(way(), now).unwrap();
        }
        assert_eq!(tokens.add_at(way(), now).unwrap_err().code(), tonic::Code::ResourceExhausted);
        tokens.add_at(way(), now + TTL).unwrap();
    }
}
