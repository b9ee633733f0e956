use std::os::unix::fs::PermissionsExt;

use kiyot_proto::store::{Cell, CellPhase, SandboxStatus};
use redb::{ReadableDatabase, ReadableTable, TableDefinition};

use super::*;

fn cell(id: &str) -> Cell {
    Cell { id: id.to_owned(), token_sha256: "ab".to_owned(), ..Default::default() }
}

fn put(id: &str) -> Batch {
    let mut batch = Batch::default();
    batch.put(Table::Cells, id, &cell(id));
    batch
}

impl Store {
    /// Returns a handle of this store that fails the first commit of a cell in this phase.
    pub(in crate::backends::milpa) fn failing_once(&self, phase: CellPhase) -> Self {
        let (requests, mut queue) = mpsc::channel(MAX_QUEUED_REQUESTS);
        let store = self.requests.clone();
        std::thread::spawn(move || {
            let is_in_phase = |change: &Change| {
                let record = change.record.as_deref().filter(|_| change.table == Table::Cells);
                record.is_some_and(|record| decode::<Cell>(record).unwrap().phase() == phase)
            };
            let mut has_failed = false;
            while let Some(request) = queue.blocking_recv() {
                match request {
                    Request::Commit { changes, reply }
                        if !has_failed && changes.iter().any(is_in_phase) =>
                    {
                        has_failed = true;
                        drop(reply.send(Err(StoreError::closed())));
                    }
                    request => store.blocking_send(request).unwrap(),
                }
            }
        });
        Self { requests, path: Arc::clone(&self.path) }
    }
}

#[tokio::test]
async fn committed_records_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let store = Store::open(&state).await.unwrap();
    let mut batch = put("a");
    batch.put(Table::SandboxStatuses, "s", &SandboxStatus { ready: true, ..Default::default() });
    store.commit(batch).await.unwrap();
    store.commit(put("b")).await.unwrap();
    let mut batch = Batch::default();
    batch.remove(Table::Cells, "b").remove(Table::Cells, "absent");
    store.commit(batch).await.unwrap();
    store.close().await;

    let store = Store::open(&state).await.unwrap();
    assert_eq!(store.load::<Cell>(Table::Cells).await.unwrap(), [("a".to_owned(), cell("a"))]);
    assert_eq!(store.load::<SandboxStatus>(Table::SandboxStatuses).await.unwrap().len(), 1);
    assert_eq!(store.load::<Cell>(Table::Node).await.unwrap(), []);
    assert_eq!(std::fs::metadata(&state).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(std::fs::metadata(store.path()).unwrap().permissions().mode() & 0o777, 0o600);
}

#[tokio::test]
async fn rows_have_the_keys_and_lengths_of_all_tables() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).await.unwrap();
    assert_eq!(store.rows(None).await.unwrap(), []);
    let mut batch = put("b");
    batch.put(Table::Cells, "a", &cell("longer"));
    batch.put(Table::SandboxStatuses, "s", &SandboxStatus::default());
    store.commit(batch).await.unwrap();
    let rows = store.rows(None).await.unwrap();
    let keys: Vec<_> = rows.iter().map(|row| (row.table.as_str(), row.key.as_str())).collect();
    assert_eq!(keys, [("cells", "a"), ("cells", "b"), ("sandbox_statuses", "s")]);
    assert_eq!(rows[0].bytes, rows[1].bytes + "longer".len() - "b".len(), "{rows:?}");
    for (at, row) in rows.iter().enumerate() {
        assert_eq!(store.rows(Some(row.clone())).await.unwrap(), rows[at + 1..]);
    }
}

#[tokio::test]
async fn rows_in_parts_have_each_row_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).await.unwrap();
    let mut batch = Batch::default();
    for number in 0..MAX_LISTED_ROWS + 44 {
        batch.put(Table::Cells, &format!("{number:03}"), &cell("same"));
        batch.put(Table::SandboxStatuses, &format!("{number:03}"), &SandboxStatus::default());
    }
    store.commit(batch).await.unwrap();
    let (mut all, mut sizes, mut last) = (Vec::new(), Vec::new(), None);
    loop {
        let part = store.rows(last).await.unwrap();
        sizes.push(part.len());
        last = part.last().cloned();
        all.extend(part.into_iter().map(|row| (row.table, row.key)));
        if last.is_none() {
            break;
        }
    }
    assert_eq!(sizes, [MAX_LISTED_ROWS, MAX_LISTED_ROWS, 88, 0]);
    let tables = ["cells", "sandbox_statuses"];
    let keys = |table: &str| {
        let key = |number| (table.to_owned(), format!("{number:03}"));
        (0..MAX_LISTED_ROWS + 44).map(key).collect::<Vec<_>>()
    };
    assert_eq!(all, tables.map(keys).concat());
}

#[tokio::test]
async fn concurrent_batches_are_all_committed() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).await.unwrap();
    let commits = (0..500).map(|n| {
        let store = store.clone();
        async move { store.commit(put(&format!("{n:03}"))).await }
    });
    futures::future::try_join_all(commits).await.unwrap();
    assert_eq!(store.load::<Cell>(Table::Cells).await.unwrap().len(), 500);
}

/// Verifies X50.
#[tokio::test]
async fn file_readable_by_others_is_restricted_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.redb");
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let _store = Store::open(dir.path()).await.unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[tokio::test]
async fn store_in_use_is_a_named_error() {
    let dir = tempfile::tempdir().unwrap();
    let _first = Store::open(dir.path()).await.unwrap();
    let error = Store::open(dir.path()).await.unwrap_err();
    assert!(error.to_string().contains("in use by another process"), "{error}");
}

#[tokio::test]
async fn invalid_record_is_quarantined() {
    const CELLS: TableDefinition<'static, &str, &[u8]> = TableDefinition::new("cells");
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).await.unwrap();
    store.commit(put("good")).await.unwrap();
    store.close().await;
    let path = dir.path().join("store.redb");
    let database = redb::Database::create(&path).unwrap();
    let later = Envelope { version: RECORD_VERSION + 1, record: Vec::new().into() }.encode_to_vec();
    let transaction = database.begin_write().unwrap();
    {
        let mut cells = transaction.open_table(CELLS).unwrap();
        cells.insert("noise", b"\xff\xff\xff".as_slice()).unwrap();
        cells.insert("later", later.as_slice()).unwrap();
    }
    transaction.commit().unwrap();
    drop(database);

    let store = Store::open(dir.path()).await.unwrap();
    for _ in 0..2 {
        assert_eq!(
            store.load::<Cell>(Table::Cells).await.unwrap(),
            [("good".to_owned(), cell("good"))]
        );
    }
    store.close().await;
    let database = redb::Database::create(&path).unwrap();
    let quarantine = database
        .begin_read()
        .unwrap()
        .open_table(TableDefinition::<&str, &[u8]>::new("broken"))
        .unwrap();
    let keys: Vec<_> =
        quarantine.iter().unwrap().map(|row| row.unwrap().0.value().to_owned()).collect();
    assert_eq!(keys, ["cells/later", "cells/noise"]);
}

#[tokio::test]
async fn directory_at_the_files_path_is_a_named_error() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("store.redb")).unwrap();
    let error = Store::open(dir.path()).await.unwrap_err();
    assert!(error.to_string().contains("must be a file"), "{error}");
}
