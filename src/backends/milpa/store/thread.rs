//! The thread that owns the file: takes jobs in order, and puts batches that wait at the same time
//! into one transaction.

use std::path::PathBuf;

use tokio::sync::{mpsc, oneshot};

use super::{BATCHES_IN_ONE_TRANSACTION, Change, StoreError, Table, file::File};

/// Rows of a table, as they are in the file.
pub(super) type Rows = Vec<(String, Vec<u8>)>;

/// What the thread is asked for.
#[derive(Debug)]
pub(super) enum Job {
    /// Keep these changes together.
    Commit { changes: Vec<Change>, done: oneshot::Sender<Result<(), StoreError>> },
    /// Read a table.
    Load { table: Table, done: oneshot::Sender<Result<Rows, StoreError>> },
    /// Move records to the broken ones.
    SetAside { table: Table, keys: Vec<String>, done: oneshot::Sender<Result<(), StoreError>> },
    /// Close the file, and answer by dropping this.
    Close { done: oneshot::Sender<()> },
}

/// A batch of a transaction that is being put together.
struct Waiting {
    changes: Vec<Change>,
    done: oneshot::Sender<Result<(), StoreError>>,
}

/// Runs until it is told to close, or the last handle is dropped.
pub(super) fn run(
    path: PathBuf,
    opened: oneshot::Sender<Result<(), StoreError>>,
    mut jobs: mpsc::Receiver<Job>,
) {
    let mut file = match File::open(&path) {
        Ok(file) => file,
        Err(error) => {
            // Nobody waits any more if the caller was dropped.
            let _ = opened.send(Err(error));
            return;
        }
    };
    if opened.send(Ok(())).is_err() {
        return;
    }
    let mut next = None;
    while let Some(job) = next.take().or_else(|| jobs.blocking_recv()) {
        match job {
            Job::Commit { changes, done } => {
                let mut group = vec![Waiting { changes, done }];
                while group.len() < BATCHES_IN_ONE_TRANSACTION {
                    match jobs.try_recv() {
                        Ok(Job::Commit { changes, done }) => group.push(Waiting { changes, done }),
                        Ok(other) => {
                            next = Some(other);
                            break;
                        }
                        Err(_) => break,
                    }
                }
                commit(&mut file, group);
            }
            // A caller that no longer waits is no concern of the store: it did what it was asked.
            Job::Load { table, done } => drop(done.send(file.load(table))),
            Job::SetAside { table, keys, done } => drop(done.send(file.set_aside(table, &keys))),
            Job::Close { done } => {
                drop(file);
                drop(done);
                return;
            }
        }
    }
}

fn commit(file: &mut File, group: Vec<Waiting>) {
    let error = match file.commit(group.iter().flat_map(|waiting| &waiting.changes)) {
        Ok(()) => return group.into_iter().for_each(|waiting| drop(waiting.done.send(Ok(())))),
        Err(error) => error,
    };
    tracing::error!(
        error = &error as &dyn std::error::Error,
        batches = group.len(),
        "The store could not keep records"
    );
    let mut group = group.into_iter();
    match (group.next(), group.len()) {
        (Some(only), 0) => drop(only.done.send(Err(error))),
        // One that can't be kept must not take the others with it.
        (first, _) => first
            .into_iter()
            .chain(group)
            .for_each(|Waiting { changes, done }| drop(done.send(file.commit(changes.iter())))),
    }
}
