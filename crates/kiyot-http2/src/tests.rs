use std::{future::poll_fn, time::Duration};

use bytes::Bytes;
use http::Request;
use proptest::prelude::*;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixStream, unix},
    task::JoinSet,
};

mod client;
mod server;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Copies bytes in pieces of these lengths.
async fn cut(mut from: unix::OwnedReadHalf, mut to: unix::OwnedWriteHalf, cuts: Vec<usize>) {
    for cut in cuts.into_iter().cycle() {
        let mut piece = vec![0; cut];
        let Ok(length @ 1..) = from.read(&mut piece).await else { return };
        if to.write_all(&piece[..length]).await.is_err() {
            return;
        }
    }
}

/// Returns both ends of a connection; bytes to the first arrive in pieces.
fn joined(cuts: Vec<usize>) -> (UnixStream, UnixStream, JoinSet<()>) {
    let (ours, near) = UnixStream::pair().unwrap();
    let (far, theirs) = UnixStream::pair().unwrap();
    let (mut tasks, (near_read, near_write), (far_read, far_write)) =
        (JoinSet::new(), near.into_split(), far.into_split());
    tasks.spawn(cut(near_read, far_write, vec![1 << 16]));
    tasks.spawn(cut(far_read, near_write, cuts));
    (ours, theirs, tasks)
}

fn within<F: Future>(work: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(TIMEOUT, work).await.expect("in time") })
}

fn value() -> impl Strategy<Value = String> {
    prop_oneof![4 => "[!-~]{0,20}", 1 => (0_usize..20_000).prop_map(|length| "v".repeat(length))]
}

/// Names and values.
type Metadata = Vec<(String, String)>;

/// Returns a request with this metadata.
fn request(metadata: &[(String, String)]) -> Request<()> {
    let mut request = Request::post("http://localhost/a.b/C").header("te", "trailers");
    for (name, value) in metadata {
        request = request.header(name, value);
    }
    request.body(()).unwrap()
}

/// Sends a part of a body with the crate h2, as far as the peer grants capacity.
async fn send_part(stream: &mut h2::SendStream<Bytes>, mut part: Bytes) {
    while !part.is_empty() {
        stream.reserve_capacity(part.len());
        match stream.capacity() {
            0 => assert!(poll_fn(|cx| stream.poll_capacity(cx)).await.unwrap().is_ok()),
            room => stream.send_data(part.split_to(room.min(part.len())), false).unwrap(),
        }
    }
}

/// Generates the metadata of calls and the lengths of the parts of their bodies.
fn calls() -> impl Strategy<Value = Vec<(Metadata, Vec<usize>)>> {
    let metadata = proptest::collection::vec(("x-[a-d]{1,2}", value()), 0..4);
    let lengths = proptest::collection::vec(prop_oneof![0_usize..40, 0_usize..20_000], 1..4);
    proptest::collection::vec((metadata, lengths), 1..12)
}

/// Limits the cases of a test with sockets.
fn few_cases() -> ProptestConfig {
    ProptestConfig { cases: 24, max_shrink_iters: 20, ..ProptestConfig::default() }
}

/// Generates lengths of pieces.
fn cuts() -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(prop_oneof![1_usize..60, 1_usize..40_000], 1..20)
}
