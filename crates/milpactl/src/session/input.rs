//! Standard input. A thread of its own reads it, because a read that never returns must not keep
//! the program from its end.

use std::{
    io::{self, ErrorKind, Read},
    thread,
};

use bytes::Bytes;
use rustix::{
    event::{PollFd, PollFlags, poll},
    stdio::stdin,
};
use tokio::sync::mpsc;

/// Bytes of a read.
const READ_BYTES: usize = 32 << 10;
/// Reads that wait to be sent.
const MAX_QUEUED_READS: usize = 1;

/// Begins to read standard input. The channel closes at its end.
pub(super) fn read() -> io::Result<mpsc::Receiver<Bytes>> {
    let (to, reads) = mpsc::channel(MAX_QUEUED_READS);
    thread::Builder::new().name("stdin".to_owned()).spawn(move || {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            let bytes = match io::stdin().lock().read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => Bytes::copy_from_slice(&buffer[..length]),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                // Another process may have made the shared file non-blocking.
                Err(error) if error.kind() == ErrorKind::WouldBlock && wait() => continue,
                // Such as a terminal that has hung up: the end of the input.
                Err(_) => break,
            };
            if to.blocking_send(bytes).is_err() {
                break;
            }
        }
    })?;
    Ok(reads)
}

/// Waits until standard input can be read. Returns whether the wait succeeded.
fn wait() -> bool {
    let stdin = stdin();
    poll(&mut [PollFd::new(&stdin, PollFlags::IN)], None).is_ok()
}
