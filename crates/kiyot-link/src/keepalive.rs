//! Keepalive of a control connection: sends pings, and closes a silent connection.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::http2::{
    AGENT_PING_INTERVAL, AGENT_PING_TIMEOUT, GATEWAY_PING_INTERVAL, GATEWAY_PING_TIMEOUT,
};

/// The keepalive timer of a connection.
#[derive(Debug)]
pub struct Keepalive {
    interval: Duration,
    timeout: Duration,
    last_received: Instant,
    ping_sent: bool,
}

/// The action that a [`Keepalive`] asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepaliveAction {
    /// Send a ping.
    Ping,
    /// Close the connection: no message followed the ping.
    Close,
}

impl Keepalive {
    /// Creates the gateway's timer: 20 s without a message end a connection.
    pub fn gateway() -> Self {
        Self::new(GATEWAY_PING_INTERVAL, GATEWAY_PING_TIMEOUT)
    }

    /// Creates the agent's timer: 30 s without a message end a connection.
    pub fn agent() -> Self {
        Self::new(AGENT_PING_INTERVAL, AGENT_PING_TIMEOUT)
    }

    fn new(interval: Duration, timeout: Duration) -> Self {
        Self { interval, timeout, last_received: Instant::now(), ping_sent: false }
    }

    /// Returns the time within which the peer must answer a ping and receive a sent message.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Restarts the timer: a message was received.
    pub fn received(&mut self) {
        (self.last_received, self.ping_sent) = (Instant::now(), false);
    }

    /// Waits until a ping is due or the connection has timed out.
    pub async fn next_action(&mut self) -> KeepaliveAction {
        if self.ping_sent {
            sleep_until(self.last_received + self.interval + self.timeout).await;
            return KeepaliveAction::Close;
        }
        sleep_until(self.last_received + self.interval).await;
        self.ping_sent = true;
        // A process that was stopped pings late, but gives the peer the whole timeout.
        self.last_received = Instant::now() - self.interval;
        KeepaliveAction::Ping
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn keepalive_pings_then_closes_and_a_message_restarts_it() {
        let (interval, timeout) = (Duration::from_millis(10), Duration::from_millis(20));
        let begun = Instant::now();
        let mut keepalive = Keepalive::new(interval, timeout);
        assert_eq!(keepalive.next_action().await, KeepaliveAction::Ping);
        assert!(begun.elapsed() >= interval);
        keepalive.received();
        assert_eq!(keepalive.next_action().await, KeepaliveAction::Ping);
        let pinged = Instant::now();
        assert_eq!(keepalive.next_action().await, KeepaliveAction::Close);
        assert!(pinged.elapsed() >= timeout && begun.elapsed() >= interval * 2 + timeout);
    }
}
