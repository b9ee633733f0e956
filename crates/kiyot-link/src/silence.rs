//! When a silent connection is asked for a sign of life, and when it is given up.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::http2::{AGENT_PING_AFTER, AGENT_PONG_WITHIN, PING_AFTER, PONG_WITHIN};

/// Since when nothing has been heard.
#[derive(Debug)]
pub struct Silence {
    ask_after: Duration,
    answer_within: Duration,
    heard: Instant,
    asked: bool,
}

/// What is to be done about a silence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// The other side is to be asked for a sign of life.
    Ask,
    /// It was asked, and nothing came: the connection is to be ended.
    End,
}

impl Silence {
    /// On the gateway's side: 20 s of silence end a connection.
    pub fn of_gateway() -> Self {
        Self::new(PING_AFTER, PONG_WITHIN)
    }

    /// On the agent's side: 30 s of silence end a connection.
    pub fn of_agent() -> Self {
        Self::new(AGENT_PING_AFTER, AGENT_PONG_WITHIN)
    }

    fn new(ask_after: Duration, answer_within: Duration) -> Self {
        Self { ask_after, answer_within, heard: Instant::now(), asked: false }
    }

    /// How long the other side may take to take what is sent to it.
    pub fn patience(&self) -> Duration {
        self.answer_within
    }

    /// Something came.
    pub fn broken(&mut self) {
        (self.heard, self.asked) = (Instant::now(), false);
    }

    /// Returns when something is to be done.
    pub async fn due(&mut self) -> Due {
        if self.asked {
            sleep_until(self.heard + self.ask_after + self.answer_within).await;
            return Due::End;
        }
        sleep_until(self.heard + self.ask_after).await;
        self.asked = true;
        // A process that did not run for a while has not asked in time: the other side gets all of
        // its own.
        self.heard = Instant::now() - self.ask_after;
        Due::Ask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn asks_once_then_ends_and_what_is_heard_begins_anew() {
        let (ask, answer) = (Duration::from_millis(10), Duration::from_millis(20));
        let begun = Instant::now();
        let mut silence = Silence::new(ask, answer);
        assert_eq!(silence.due().await, Due::Ask);
        assert!(begun.elapsed() >= ask);
        silence.broken();
        assert_eq!(silence.due().await, Due::Ask);
        let asked = Instant::now();
        assert_eq!(silence.due().await, Due::End);
        assert!(asked.elapsed() >= answer / 2 && begun.elapsed() >= ask * 2 + answer);
    }
}
