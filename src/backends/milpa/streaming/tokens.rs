//! Tokens of streaming URLs, for one request within a minute.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use ring::rand::{SecureRandom, SystemRandom};
use tokio::sync::Semaphore;

use super::tunnel::Tunnels;
use crate::backends::milpa::failure::{Code, Failure};

/// Random bytes of a token: 160 bits.
const TOKEN_BYTES: usize = 20;

/// Lifetime of an unused token, as in containerd.
const TOKEN_TTL: Duration = Duration::from_secs(60);

/// Most unused tokens, as in containerd.
const MAX_UNUSED_TOKENS: usize = 1_000;

#[derive(Clone)]
pub(super) struct Route {
    /// Port of the streaming server on the cell's loopback.
    pub(super) port: u16,
    /// Path and query of the cell's URL. Secret, because it contains the token of the cell's
    /// containerd.
    pub(super) target: String,
    pub(super) tunnels: Arc<dyn Tunnels>,
    /// Limit of the cell's streams.
    pub(super) streams: Arc<Semaphore>,
}

/// Unused tokens.
#[derive(Default)]
pub(super) struct Tokens {
    waiting: Mutex<HashMap<String, (Instant, Route)>>,
}

impl Tokens {
    /// Creates a token. RESOURCE_EXHAUSTED if too many are unused.
    pub(super) fn add(&self, route: Route) -> Result<String, Failure> {
        self.add_at(route, Instant::now())
    }

    /// Removes a token and returns its route; `None` if it is unknown, used or expired.
    pub(super) fn take(&self, token: &str) -> Option<Route> {
        self.take_at(token, Instant::now())
    }

    fn add_at(&self, route: Route, now: Instant) -> Result<String, Failure> {
        let mut random = [0_u8; TOKEN_BYTES];
        SystemRandom::new()
            .fill(&mut random)
            .map_err(|_| Failure::node(Code::Internal, "no random bytes from the kernel"))?;
        let token = hex::encode(random);
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.retain(|_, (since, _)| now.saturating_duration_since(*since) < TOKEN_TTL);
        if waiting.len() >= MAX_UNUSED_TOKENS {
            return Err(Failure::node(
                Code::ResourceExhausted,
                format!(
                    "{MAX_UNUSED_TOKENS} streaming requests wait for their client, and \
                 no more are allowed"
                ),
            ));
        }
        waiting.insert(token.clone(), (now, route));
        Ok(token)
    }

    fn take_at(&self, token: &str, now: Instant) -> Option<Route> {
        let (since, route) =
            self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(token)?;
        (now.saturating_duration_since(since) < TOKEN_TTL).then_some(route)
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
    use crate::backends::milpa::streaming::tests::FakeCell;

    fn route() -> Route {
        Route {
            port: 1,
            target: "/exec/x".into(),
            tunnels: Arc::new(FakeCell::default()),
            streams: Arc::new(Semaphore::new(1)),
        }
    }

    #[test]
    fn token_is_valid_once() {
        let tokens = Tokens::default();
        let token = tokens.add(route()).unwrap();
        assert_eq!(token.len(), 40);
        assert_eq!(tokens.take(&token).unwrap().target, "/exec/x");
        assert!(tokens.take(&token).is_none());
    }

    #[test]
    fn token_expires_after_a_minute() {
        let (tokens, now) = (Tokens::default(), Instant::now());
        let token = tokens.add_at(route(), now).unwrap();
        assert!(tokens.take_at(&token, now + TOKEN_TTL).is_none());
        let token = tokens.add_at(route(), now).unwrap();
        assert!(tokens.take_at(&token, now + TOKEN_TTL - Duration::from_nanos(1)).is_some());
    }

    #[test]
    fn unused_tokens_are_limited_until_they_expire() {
        let (tokens, now) = (Tokens::default(), Instant::now());
        for _ in 0..MAX_UNUSED_TOKENS {
            tokens.add_at(route(), now).unwrap();
        }
        assert_eq!(tokens.add_at(route(), now).unwrap_err().code(), Code::ResourceExhausted);
        tokens.add_at(route(), now + TOKEN_TTL).unwrap();
    }
}
