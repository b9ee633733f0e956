//! The thread that owns the file. It serves requests in order, and commits batches that wait at the
//! same time in a single transaction.

use std::path::PathBuf;

use kiyot_engine::StoreError;
use tokio::sync::{mpsc, oneshot};

use super::{
    Change, MAX_BATCHES_PER_TRANSACTION, Row, Table,
    file::{File, Rows},
};

type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

/// A request to the thread.
#[derive(Debug)]
pub(super) enum Request {
    /// Commit these changes atomically.
    Commit { changes: Vec<Change>, reply: Reply<()> },
    /// Read a table.
    Load { table: Table, reply: Reply<Rows> },
    /// List the next rows.
    List { after: Option<Row>, reply: Reply<Vec<Row>> },
    /// Move records to the quarantine.
    Quarantine { table: Table, keys: Vec<String>, reply: Reply<()> },
    /// Close the file, then drop the sender.
    Close { reply: oneshot::Sender<()> },
}

/// A batch that waits for its transaction.
struct PendingBatch {
    changes: Vec<Change>,
    reply: Reply<()>,
}

/// Runs until a request to close, or until the last handle is dropped.
pub(super) fn run(path: PathBuf, opened: Reply<()>, mut requests: mpsc::Receiver<Request>) {
    let mut file = match File::open(&path) {
        Ok(file) => file,
        Err(error) => {
            // The caller may have been dropped.
            let _ = opened.send(Err(error));
            return;
        }
    };
    if opened.send(Ok(())).is_err() {
        return;
    }
    let mut next = None;
    while let Some(request) = next.take().or_else(|| requests.blocking_recv()) {
        match request {
            Request::Commit { changes, reply } => {
                let mut batches = vec![PendingBatch { changes, reply }];
                while batches.len() < MAX_BATCHES_PER_TRANSACTION {
                    match requests.try_recv() {
                        Ok(Request::Commit { changes, reply }) => {
                            batches.push(PendingBatch { changes, reply });
                        }
                        Ok(other) => {
                            next = Some(other);
                            break;
                        }
                        Err(_) => break,
                    }
                }
                commit(&mut file, batches);
            }
            // A caller that was dropped needs no reply.
            Request::Load { table, reply } => drop(reply.send(file.load(table))),
            Request::List { after, reply } => drop(reply.send(file.rows(after.as_ref()))),
            Request::Quarantine { table, keys, reply } => {
                drop(reply.send(file.quarantine(table, &keys)));
            }
            Request::Close { reply } => {
                drop(file);
                drop(reply);
                return;
            }
        }
    }
}

fn commit(file: &mut File, batches: Vec<PendingBatch>) {
    let error = match file.commit(batches.iter().flat_map(|batch| &batch.changes)) {
        Ok(()) => return batches.into_iter().for_each(|batch| drop(batch.reply.send(Ok(())))),
        Err(error) => error,
    };
    tracing::error!(
        error = &error as &dyn std::error::Error,
        batches = batches.len(),
        "commit to the store failed"
    );
    let mut batches = batches.into_iter();
    match (batches.next(), batches.len()) {
        (Some(only), 0) => drop(only.reply.send(Err(error))),
        // Each batch by itself: a batch that can't be stored must not fail the others.
        (first, _) => {
            first.into_iter().chain(batches).for_each(|PendingBatch { changes, reply }| {
                drop(reply.send(file.commit(changes.iter())))
            })
        }
    }
}
