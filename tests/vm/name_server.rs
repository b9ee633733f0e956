//! Name server that only the node reaches.

use std::{
    io,
    net::UdpSocket,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

/// Address of each name.
pub(crate) const ANSWER: &str = "10.1.2.3";
/// The longest query.
const MAX_QUERY_BYTES: usize = 512;

/// Name server on a loopback address of the node that answers each name with [`ANSWER`].
pub(crate) struct NameServer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    address: String,
}

impl NameServer {
    pub(crate) fn start(address: &str) -> Self {
        let address = format!("{address}:53");
        let socket = UdpSocket::bind(&address).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let serve = move || {
            let mut query = [0; MAX_QUERY_BYTES];
            while let Ok((length, from)) = socket.recv_from(&mut query) {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                let _gone = socket.send_to(&answer(&query[..length]), from);
            }
        };
        Self { stop, thread: Some(std::thread::spawn(serve)), address }
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let wake = || -> io::Result<usize> {
            UdpSocket::bind("127.0.0.1:0")?.send_to(b"stop", &self.address)
        };
        if wake().is_ok() {
            let _ended = self.thread.take().map(JoinHandle::join);
        }
    }
}

/// Returns the answer to a query (RFC 1035): its header and question, and for type A one record.
fn answer(query: &[u8]) -> Vec<u8> {
    const HEADER_BYTES: usize = 12;
    let Some(name) = query.get(HEADER_BYTES..) else { return Vec::new() };
    let end = HEADER_BYTES + name.iter().position(|byte| *byte == 0).unwrap_or(0) + 5;
    let question = query.get(HEADER_BYTES..end).unwrap_or_default();
    let is_a = question.ends_with(&[0, 1, 0, 1]);
    let mut answer = query[..2].to_vec();
    answer.extend([0x81, 0x80, 0, 1, 0, u8::from(is_a), 0, 0, 0, 0]);
    answer.extend(question);
    if is_a {
        // Pointer to the question's name, type A, class IN, TTL 60 s, four bytes.
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 10, 1, 2, 3]);
    }
    answer
}
