//! Delay of PING ACKs.
//!
//! After each message that reaches it, grpc-go sends a PING, to estimate the bandwidth of the
//! connection: containerd after a request, the kubelet after a response. An immediate ACK costs
//! both sides a write, a read and a wake-up in the middle of the call. So a lone ACK waits for the
//! next frames, but no longer than two [`ACK_DELAY_TICK`]s. RFC 9113, 6.7, says that ACKs should
//! come first. The estimate becomes too low, but grpc-go would only widen its windows sooner by it,
//! between two processes of a node.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Sleep, sleep};

/// Period of the check of a waiting ACK.
const ACK_DELAY_TICK: Duration = Duration::from_millis(5);

/// Header of a PING ACK: length, type PING, flag ACK, stream 0.
pub(super) const ACK_HEAD: [u8; 9] = [0, 0, 8, 6, 1, 0, 0, 0, 0];
/// Length of a PING ACK.
const ACK_BYTES: usize = ACK_HEAD.len() + 8;

/// Returns whether the output is a single PING ACK.
pub(super) fn is_lone_ack(output: &[u8]) -> bool {
    output.len() == ACK_BYTES && output.starts_with(&ACK_HEAD)
}

/// Timer of a waiting ACK. While calls follow one another, one timer serves many ACKs.
#[derive(Debug, Default)]
pub(super) struct AckDelay {
    tick: Option<Pin<Box<Sleep>>>,
    /// Set while an ACK waits; true if it has waited since the timer began.
    waits: Option<bool>,
}

impl AckDelay {
    /// Returns whether the output should wait. `is_alone`: the output is a lone ACK. Wakes the task
    /// after the delay.
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
