//! The file itself: opening it, and transactions. Blocking.

use std::{
    fs::{self, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use redb::{
    Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError, TableDefinition,
    TableError, backends::FileBackend,
};

use super::{Change, StoreError, Table, reserve::Reserve};

/// How long a file is waited for that another process has open.
const LOCK_PATIENCE: Duration = Duration::from_secs(3);
/// How often it is looked at meanwhile.
const LOCK_RETRY: Duration = Duration::from_millis(50);
/// Memory for pages of the file. All records are in memory anyway, in a smaller form.
const CACHE_BYTES: usize = 512 << 10;
/// Where records are put that can't be read, by table and key.
const BROKEN: TableDefinition<'static, &str, &[u8]> = TableDefinition::new("broken");

/// The open file.
#[derive(Debug)]
pub(super) struct File {
    path: PathBuf,
    /// `None` while it could not be opened again after a failure.
    database: Option<Open>,
}

/// The database, and the space that it has. In this order: a lock of the file may end with any of
/// its handles.
#[derive(Debug)]
struct Open {
    database: Database,
    reserve: Reserve,
}

impl File {
    /// Opens or makes it, and its directory.
    pub(super) fn open(path: &Path) -> Result<Self, StoreError> {
        if let Some(dir) = path.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|error| {
                StoreError::new(described("the directory", dir, error.kind()), error)
            })?;
        }
        let end = Instant::now() + LOCK_PATIENCE;
        loop {
            match opened(path) {
                Ok(database) => {
                    return Ok(Self { path: path.to_owned(), database: Some(database) });
                }
                Err(DatabaseError::DatabaseAlreadyOpen) if Instant::now() < end => {
                    std::thread::sleep(LOCK_RETRY)
                }
                Err(error) => return Err(opening(path, error)),
            }
        }
    }

    /// Keeps all of these changes, or none.
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

    /// Moves records to the broken ones.
    pub(super) fn set_aside(&mut self, table: Table, keys: &[String]) -> Result<(), StoreError> {
        self.write(|transaction| {
            let (mut from, mut to) =
                (transaction.open_table(definition(table))?, transaction.open_table(BROKEN)?);
            for key in keys {
                if let Some(record) = from.remove(key.as_str())? {
                    to.insert(format!("{}/{key}", table.name()).as_str(), record.value())?;
                }
            }
            Ok(())
        })
    }

    /// All of a table.
    pub(super) fn load(&mut self, table: Table) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        let path = self.path.clone();
        let mut read = || -> Result<_, redb::Error> {
            let transaction = self.open_again()?.database.begin_read()?;
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

    fn write(
        &mut self,
        change: impl FnOnce(&redb::WriteTransaction) -> Result<(), redb::Error>,
    ) -> Result<(), StoreError> {
        let path = self.path.clone();
        let attempt = || -> Result<(), redb::Error> {
            let open = self.open_again()?;
            let transaction = open.database.begin_write()?;
            change(&transaction)?;
            transaction.commit()?;
            open.reserve.keep();
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
                // After such an error redb refuses all else; opened anew, the file is as after the
                // last commit.
                self.database = None;
            }
            let doing = match &error {
                redb::Error::Io(io) => described("writing", &path, io.kind()),
                _ => format!("writing {}", path.display()),
            };
            StoreError::new(doing, error)
        })
    }

    fn open_again(&mut self) -> Result<&mut Open, redb::Error> {
        let open = match self.database.take() {
            Some(open) => open,
            None => opened(&self.path)?,
        };
        Ok(self.database.insert(open))
    }
}

fn opened(path: &Path) -> Result<Open, DatabaseError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)?;
    let mut reserve = Reserve::of(file.try_clone()?);
    let database = redb::Builder::new()
        .set_cache_size(CACHE_BYTES)
        .create_with_backend(FileBackend::new(file)?)?;
    reserve.keep();
    Ok(Open { database, reserve })
}

const fn definition(table: Table) -> TableDefinition<'static, &'static str, &'static [u8]> {
    TableDefinition::new(table.name())
}

fn opening(path: &Path, error: DatabaseError) -> StoreError {
    let doing = match &error {
        DatabaseError::DatabaseAlreadyOpen | DatabaseError::LockProtocolMismatch => {
            format!(
                "{} is in use by another process: is a second kiyot running with this state_dir?",
                path.display()
            )
        }
        DatabaseError::Storage(StorageError::Io(io)) => described("opening", path, io.kind()),
        DatabaseError::Storage(StorageError::Corrupted(_)) => {
            format!(
                "{} is damaged; moved away, it is made anew and its pods are started again",
                path.display()
            )
        }
        _ => format!("opening {}", path.display()),
    };
    StoreError::new(doing, error)
}

/// What failed, with what an operator can do about it.
fn described(doing: &str, path: &Path, kind: io::ErrorKind) -> String {
    let path = path.display();
    match kind {
        io::ErrorKind::ReadOnlyFilesystem => {
            format!("{doing} {path}: its file system is read-only; state_dir must be writable")
        }
        io::ErrorKind::PermissionDenied => {
            format!("{doing} {path}: this process may not; it must own state_dir")
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            format!("{doing} {path}: no space is left on its file system")
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => {
            format!("{doing} {path}: it must be a file in a directory")
        }
        _ => format!("{doing} {path}"),
    }
}
