//! The redb file: opening, and transactions. Blocking.

use std::{
    fs::{self, OpenOptions},
    io,
    ops::Bound,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use kiyot_engine::StoreError;
use redb::{
    Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError, TableDefinition,
    TableError, TableHandle, backends::FileBackend,
};

use super::{Change, MAX_LISTED_ROWS, Row, Table, reserve::Reserve};

/// The time to wait for a file that another process has open.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);
/// The interval between two attempts to open it.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// The mode of the file: any process that can open it can lock it.
const MODE: u32 = 0o600;
/// The page cache. Small, because all records are in memory anyway, in a smaller form.
const PAGE_CACHE_BYTES: usize = 512 << 10;
/// The table of quarantined records, by table and key.
const QUARANTINE: TableDefinition<'static, &str, &[u8]> = TableDefinition::new("broken");

/// Rows of a table as stored: key and encoded envelope.
pub(super) type Rows = Vec<(String, Vec<u8>)>;

/// The open file.
#[derive(Debug)]
pub(super) struct File {
    path: PathBuf,
    /// `None` after an I/O error, until it is opened again.
    database: Option<Open>,
}

/// The database and its reserved space. The fields are dropped in this order: closing any handle of
/// the file may release the lock.
#[derive(Debug)]
struct Open {
    database: Database,
    reserve: Reserve,
}

impl File {
    /// Opens or creates the file and its directory.
    pub(super) fn open(path: &Path) -> Result<Self, StoreError> {
        if let Some(dir) = path.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|error| {
                StoreError::new(io_context("creating", dir, error.kind()), error)
            })?;
        }
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            match open_database(path) {
                Ok(database) => {
                    return Ok(Self { path: path.to_owned(), database: Some(database) });
                }
                Err(DatabaseError::DatabaseAlreadyOpen) if Instant::now() < deadline => {
                    std::thread::sleep(LOCK_RETRY_INTERVAL)
                }
                Err(error) => return Err(open_error(path, error)),
            }
        }
    }

    /// Commits changes in a transaction.
    pub(super) fn commit<'a>(
        &mut self,
        changes: impl Iterator<Item = &'a Change>,
    ) -> Result<(), StoreError> {
        self.write(|transaction| {
            for Change { table, key, record } in changes {
                let mut table = transaction.open_table(definition(*table))?;
                match record {
                    Some(record) => table.insert(key.as_str(), record.as_slice())?,
                    None => table.remove(key.as_str())?,
                };
            }
            Ok(())
        })
    }

    pub(super) fn quarantine(&mut self, table: Table, keys: &[String]) -> Result<(), StoreError> {
        self.write(|transaction| {
            let (mut from, mut to) =
                (transaction.open_table(definition(table))?, transaction.open_table(QUARANTINE)?);
            for key in keys {
                if let Some(record) = from.remove(key.as_str())? {
                    to.insert(format!("{}/{key}", table.name()).as_str(), record.value())?;
                }
            }
            Ok(())
        })
    }

    /// Returns all rows of a table.
    pub(super) fn load(&mut self, table: Table) -> Result<Rows, StoreError> {
        let path = self.path.clone();
        let mut read = || -> Result<_, redb::Error> {
            let transaction = self.reopen()?.database.begin_read()?;
            let rows = match transaction.open_table(definition(table)) {
                Ok(rows) => rows,
                Err(TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
                Err(error) => return Err(error.into()),
            };
            rows.iter()?
                .map(|row| {
                    row.map(|(key, record)| (key.value().to_owned(), record.value().to_vec()))
                })
                .collect::<Result<_, _>>()
                .map_err(Into::into)
        };
        read().map_err(|error| {
            StoreError::new(format!("reading {} from {}", table.name(), path.display()), error)
        })
    }

    /// Returns the next rows of all tables, sorted by table name and key: the first rows after a
    /// row, or of the file.
    pub(super) fn rows(&mut self, after: Option<&Row>) -> Result<Vec<Row>, StoreError> {
        let path = self.path.clone();
        let mut read = || -> Result<_, redb::Error> {
            let transaction = self.reopen()?.database.begin_read()?;
            let tables = transaction.list_tables()?;
            let mut names: Vec<String> = tables.map(|table| table.name().to_owned()).collect();
            names.sort_unstable();
            names.retain(|name| after.is_none_or(|row| row.table <= *name));
            let mut rows = Vec::new();
            for name in names {
                let begin = match after.filter(|row| row.table == name) {
                    Some(row) => Bound::Excluded(row.key.as_str()),
                    None => Bound::Unbounded,
                };
                let table = TableDefinition::<&str, &[u8]>::new(&name);
                let table = transaction.open_table(table)?;
                let left = MAX_LISTED_ROWS - rows.len();
                for row in table.range::<&str>((begin, Bound::Unbounded))?.take(left) {
                    let (key, record) = row?;
                    let (table, key) = (name.clone(), key.value().to_owned());
                    rows.push(Row { table, key, bytes: record.value().len() });
                }
            }
            Ok(rows)
        };
        read().map_err(|error| {
            StoreError::new(format!("listing the records of {}", path.display()), error)
        })
    }

    fn write(
        &mut self,
        change: impl FnOnce(&redb::WriteTransaction) -> Result<(), redb::Error>,
    ) -> Result<(), StoreError> {
        let path = self.path.clone();
        let attempt = || -> Result<(), redb::Error> {
            let open = self.reopen()?;
            let transaction = open.database.begin_write()?;
            change(&transaction)?;
            transaction.commit()?;
            open.reserve.refill();
            Ok(())
        };
        attempt().map_err(|error| {
            if matches!(
                error,
                redb::Error::Io(_)
                    | redb::Error::PreviousIo
                    | redb::Error::DatabaseClosed
                    | redb::Error::LockPoisoned(_)
            ) {
                // After these errors redb refuses further transactions. A file that is opened again
                // has the state of the last commit.
                self.database = None;
            }
            let context = match &error {
                redb::Error::Io(io) => io_context("writing", &path, io.kind()),
                _ => format!("writing {}", path.display()),
            };
            StoreError::new(context, error)
        })
    }

    /// Returns the database. Opens it again after an I/O error.
    fn reopen(&mut self) -> Result<&mut Open, redb::Error> {
        let open = match self.database.take() {
            Some(open) => open,
            None => open_database(&self.path)?,
        };
        Ok(self.database.insert(open))
    }
}

fn open_database(path: &Path) -> Result<Open, DatabaseError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(MODE)
        .open(path)?;
    // A copy of the file may have another mode.
    file.set_permissions(fs::Permissions::from_mode(MODE))?;
    let mut reserve = Reserve::new(file.try_clone()?);
    let database = redb::Builder::new()
        .set_cache_size(PAGE_CACHE_BYTES)
        .create_with_backend(FileBackend::new(file)?)?;
    reserve.refill();
    Ok(Open { database, reserve })
}

const fn definition(table: Table) -> TableDefinition<'static, &'static str, &'static [u8]> {
    TableDefinition::new(table.name())
}

fn open_error(path: &Path, error: DatabaseError) -> StoreError {
    let context = match &error {
        DatabaseError::DatabaseAlreadyOpen | DatabaseError::LockProtocolMismatch => {
            format!(
                "{} is in use by another process: is a second kiyot running with this state_dir?",
                path.display()
            )
        }
        DatabaseError::Storage(StorageError::Io(io)) => io_context("opening", path, io.kind()),
        DatabaseError::Storage(StorageError::Corrupted(_)) => {
            format!(
                "{} is corrupted; if you move it away, a new one is made: cells on the node end, \
                 and their pods are started again; instances of EC2 end after orphan_timeout, or \
                 with --take-over, and until then no cell is launched",
                path.display()
            )
        }
        _ => format!("opening {}", path.display()),
    };
    StoreError::new(context, error)
}

/// Describes an I/O error and its remedy for an operator.
fn io_context(action: &str, path: &Path, kind: io::ErrorKind) -> String {
    let path = path.display();
    match kind {
        io::ErrorKind::ReadOnlyFilesystem => {
            format!("{action} {path}: read-only file system; state_dir must be writable")
        }
        io::ErrorKind::PermissionDenied => {
            format!("{action} {path}: permission denied; the daemon's user must own state_dir")
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            format!("{action} {path}: no space left on its file system")
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => {
            format!("{action} {path}: must be a file in a directory")
        }
        _ => format!("{action} {path}"),
    }
}
