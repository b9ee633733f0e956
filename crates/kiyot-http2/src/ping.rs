//! The answer to a PING, which need not be a write of its own.
//!
//! grpc-go sends a PING whenever a message reaches it, to estimate the bandwidth of the connection:
//! containerd for a request, the kubelet for an answer. Answered at once, each costs both sides a
//! write, a read and a wake-up in the middle of the call. So an answer that has nothing to leave
//! with waits for the next frames, but for no more than two [`TICK`]s. (RFC 9113, 6.7, would like
//! it to come first. What is then measured too low is the bandwidth between two processes of one
//! node, by which grpc-go would widen its windows sooner.)

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Sleep, sleep};

/// How often it is looked whether an answer has waited long enough.
const ACK_DELAY_TICK: Duration = Duration::from_millis(5);

/// What the answer begins with: its length, the type PING, the flag ACK, and the connection as its
/// stream.
pub(super) const ACK_HEAD: [u8; 9] = [0, 0, 8, 6, 1, 0, 0, 0, 0];
/// Its length with the eight bytes that came with the PING.
const ACK_BYTES: usize = ACK_HEAD.len() + 8;

/// Whether what is to be written is one answer to a PING, and nothing else.
pub(super) fn is_lone_ack(output: &[u8]) -> bool {
    output.len() == ACK_BYTES && output.starts_with(&ACK_HEAD)
}

/// Lets answers wait. While calls follow one another, one timer serves for many answers.
#[derive(Debug, Default)]
pub(super) struct AckDelay {
    tick: Option<Pin<Box<Sleep>>>,
    /// Whether an answer waits, and if so, whether it has waited since the tick began.
    waits: Option<bool>,
}

impl AckDelay {
    /// Whether what is to be written may wait, given whether it is an answer alone. Wakes the task
    /// when it may no longer.
    pub(super) fn poll_should_delay(&mut self, cx: &mut Context<'_>, is_alone: bool) -> bool {
        if !is_alone {
            self.waits = None;
            return false;
        }
        loop {
            let for_long = self.waits.get_or_insert(false);
            match &mut self.tick {
                Some(tick) => match tick.as_mut().poll(cx) {
                    Poll::Pending => return true,
                    Poll::Ready(()) => self.tick = None,
                },
                None if *for_long => {
                    self.waits = None;
                    return false;
                }
                None => {
                    *for_long = true;
                    self.tick = Some(Box::pin(sleep(ACK_DELAY_TICK)));
                }
            }
        }
    }
}
