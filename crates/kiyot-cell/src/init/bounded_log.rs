//! Log files of bounded size for the output of processes.

use std::{
    fs::{File, OpenOptions},
    io::{self, PipeReader, Read, Write},
    os::{fd::AsFd, unix::fs::OpenOptionsExt},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

/// Upper bound on one read of a process's output, in bytes.
const READ_CHUNK_BYTES: usize = 8192;

/// Log file that is rotated to `<name>.old` at its limit. There is one old file.
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
    /// Opens a file and keeps its content.
    pub fn open(path: PathBuf, limit: u64) -> io::Result<Self> {
        let file = open(&path)?;
        let size = file.metadata()?.len();
        Ok(Self(Arc::new(Mutex::new(LogFile { path, limit, file, size }))))
    }

    /// Returns an unlimited log on standard error; its reader bounds the size.
    pub fn stderr() -> io::Result<Self> {
        let file = io::stderr().as_fd().try_clone_to_owned()?.into();
        let log = LogFile { path: PathBuf::new(), limit: u64::MAX, file, size: 0 };
        Ok(Self(Arc::new(Mutex::new(log))))
    }

    /// Appends to the file. Errors are ignored, as there is no place to report them.
    pub fn write(&self, content: &[u8]) {
        let _ = self.0.lock().unwrap_or_else(PoisonError::into_inner).write(content);
    }

    /// Appends all output of a pipe, on a thread that ends with the pipe.
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
                // An earlier rotation could not create a new file.
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
    fn log_is_rotated_at_its_limit() {
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
    fn log_after_failed_rotation_continues_in_a_new_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let log = BoundedLog::open(path.clone(), 10).unwrap();
        log.write(b"first ");
        // A rotation without space for a new file leaves this state.
        std::fs::rename(&path, dir.path().join("console.log.old")).unwrap();
        log.write(b"second");
        log.write(b"third ");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "third ");
    }
}
