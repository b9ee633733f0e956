//! Files of what processes print, kept within bounds.

use std::{
    fs::{File, OpenOptions},
    io::{self, PipeReader, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

/// The most that is read from a process at once, in bytes.
const READ_CHUNK_BYTES: usize = 8192;

/// A file that is put aside as `<name>.old`, replacing the one before, when it has grown to its
/// limit.
#[derive(Debug, Clone)]
pub struct BoundedLog(Arc<Mutex<LogFile>>);

#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    limit: u64,
    file: File,
    size: u64,
}

impl BoundedLog {
    /// Opens it; what is there already stays.
    pub fn open(path: PathBuf, limit: u64) -> io::Result<Self> {
        let file = open(&path)?;
        let size = file.metadata()?.len();
        Ok(Self(Arc::new(Mutex::new(LogFile { path, limit, file, size }))))
    }

    /// Appends. An error is nobody's concern: there is nowhere to tell it.
    pub fn write(&self, content: &[u8]) {
        let _ = self.0.lock().unwrap_or_else(PoisonError::into_inner).write(content);
    }

    /// Appends all that comes out of a pipe, on a thread that exits with the pipe.
    pub fn drain(&self, mut pipe: PipeReader) -> io::Result<()> {
        let log = self.clone();
        thread::Builder::new().name("log".into()).spawn(move || {
            let mut buffer = [0; READ_CHUNK_BYTES];
            loop {
                match pipe.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(length) => log.write(&buffer[..length]),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
            }
        })?;
        Ok(())
    }
}

impl LogFile {
    fn write(&mut self, content: &[u8]) -> io::Result<()> {
        if self.size > 0 && self.size + content.len() as u64 > self.limit {
            let mut old = self.path.clone().into_os_string();
            old.push(".old");
            match std::fs::rename(&self.path, old) {
                // Put aside before, when no new one could be made.
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            self.file = open(&self.path)?;
            self.size = 0;
        }
        self.size += content.len() as u64;
        self.file.write_all(content)
    }
}

fn open(path: &PathBuf) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_never_grows_beyond_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        std::fs::write(&path, "before\n").unwrap();
        let log = BoundedLog::open(path.clone(), 100).unwrap();
        for n in 0..50 {
            log.write(format!("line {n}\n").as_bytes());
            assert!(std::fs::metadata(&path).unwrap().len() <= 100);
        }
        assert!(std::fs::read_to_string(&path).unwrap().ends_with("line 49\n"));
        assert!(std::fs::metadata(dir.path().join("console.log.old")).unwrap().len() <= 100);
    }

    #[test]
    fn it_goes_on_once_a_new_file_can_be_made() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let log = BoundedLog::open(path.clone(), 10).unwrap();
        log.write(b"first ");
        // As it is after the file was put aside, and there was no space for another one.
        std::fs::rename(&path, dir.path().join("console.log.old")).unwrap();
        log.write(b"second");
        log.write(b"third ");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "third ");
    }
}
