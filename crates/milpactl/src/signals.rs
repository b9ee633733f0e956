//! Signals that end the program.

use std::io;

use futures::future::select_all;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Receives the signals that end the program.
#[derive(Debug)]
pub(crate) struct Ending {
    signals: Vec<(i32, Signal)>,
}

impl Ending {
    /// Begins to receive the signals, which no longer kill the process.
    pub(crate) fn new() -> io::Result<Self> {
        let kinds = [
            SignalKind::interrupt(),
            SignalKind::terminate(),
            SignalKind::hangup(),
            SignalKind::quit(),
        ];
        let signals = kinds.into_iter().map(|kind| Ok((kind.as_raw_value(), signal(kind)?)));
        Ok(Self { signals: signals.collect::<io::Result<_>>()? })
    }

    /// Waits for a signal, and returns its number.
    pub(crate) async fn next(&mut self) -> i32 {
        let each = self.signals.iter_mut().map(|(number, signal)| {
            Box::pin(async move {
                signal.recv().await;
                *number
            })
        });
        select_all(each).await.0
    }
}

/// Returns the exit code of a program that a signal ended, as a shell shows it.
pub(crate) fn exit_code(signal: i32) -> u8 {
    u8::try_from(signal).map_or(u8::MAX, |signal| 128u8.saturating_add(signal))
}
