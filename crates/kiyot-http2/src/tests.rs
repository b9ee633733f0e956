use std::time::Duration;

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
