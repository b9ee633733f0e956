//! The agent's program, for cells with an image that lacks it.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::Bytes;
use futures::stream;
use http_body_util::StreamBody;
use hyper::body::Frame;
use ring::digest::{Context, SHA256};
use tokio::task::spawn_blocking;

use super::program_form::{self, HEADER_BYTES, Header};
use crate::backends::milpa::send_rate::SendRate;

/// The most bytes of a program. A build with debug information has a quarter of this.
const MAX_PROGRAM_BYTES: u64 = 1 << 30;
/// The bytes that are read, and then hashed or sent, at once.
const PART_BYTES: usize = 64 * 1024;

/// The agent's program as it was when it was opened: the open file survives an upgrade that
/// replaces the file. A cell checks the digest, which detects other changes.
#[derive(Debug, Clone)]
pub struct AgentProgram {
    file: Arc<File>,
    size: u64,
    sha256: String,
    architecture: Option<&'static str>,
    is_dynamic: bool,
    /// The rate of the program's downloads.
    rate: Arc<SendRate>,
}

/// An error of opening the agent's program.
#[derive(Debug, thiserror::Error)]
pub enum AgentProgramError {
    /// The file could not be read.
    #[error("agent program {0:?}")]
    Io(PathBuf, #[source] io::Error),
    /// The file is not a program.
    #[error("agent program {0:?}: {1} bytes; allowed: a file of 1 to {MAX_PROGRAM_BYTES} bytes")]
    Size(PathBuf, u64),
}

impl AgentProgram {
    /// Opens and hashes a program. Its downloads have no limit of rate. Blocks.
    pub fn open(path: &Path) -> Result<Self, AgentProgramError> {
        let io = |error| AgentProgramError::Io(path.to_owned(), error);
        // Before the file is opened: opening a pipe would wait for its writer.
        let metadata = std::fs::metadata(path).map_err(io)?;
        if !metadata.is_file() {
            return Err(io(io::Error::other("not a regular file")));
        }
        let file = File::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        if !(1..=MAX_PROGRAM_BYTES).contains(&size) {
            return Err(AgentProgramError::Size(path.to_owned(), size));
        }
        let mut digest = Context::new(&SHA256);
        let mut position = 0;
        while position < size {
            let part = read_part(&file, position, size).map_err(io)?;
            position += part.len() as u64;
            digest.update(&part);
        }
        let header = header(&file).map_err(io)?;
        Ok(Self {
            size,
            sha256: hex::encode(digest.finish()),
            architecture: header.map(|header| header.architecture),
            is_dynamic: header.is_some_and(|header| needs_libraries(&file, &header)),
            file: Arc::new(file),
            rate: Arc::new(SendRate::new(0)),
        })
    }

    /// Limits the rate of downloads, together with every other sender that shares `rate`.
    pub fn with_rate(self, rate: Arc<SendRate>) -> Self {
        Self { rate, ..self }
    }

    /// Returns the SHA-256 digest in lower-case hexadecimal.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the architecture of the program, by its name in images; `None` if unknown, such as
    /// for a script.
    pub fn architecture(&self) -> Option<&'static str> {
        self.architecture
    }

    /// Returns whether the program needs libraries of the machine that runs it.
    pub fn is_dynamic(&self) -> bool {
        self.is_dynamic
    }

    /// Returns the content as the body of a response. Fails if the file has become shorter.
    pub(super) fn body(
        &self,
    ) -> StreamBody<impl futures::Stream<Item = io::Result<Frame<Bytes>>> + use<>> {
        let (file, size, rate) = (self.file.clone(), self.size, self.rate.clone());
        StreamBody::new(stream::try_unfold(0, move |position| {
            let (file, rate) = (file.clone(), rate.clone());
            async move {
                if position == size {
                    return Ok(None);
                }
                let part = spawn_blocking(move || read_part(&file, position, size))
                    .await
                    .map_err(io::Error::other)??;
                rate.ready(part.len()).await;
                let next = position + part.len() as u64;
                Ok(Some((Frame::data(Bytes::from(part)), next)))
            }
        }))
    }
}

/// Reads the header of a program; `None` for any other file.
fn header(file: &File) -> io::Result<Option<Header>> {
    let mut bytes = [0; HEADER_BYTES];
    match file.read_exact_at(&mut bytes, 0) {
        Ok(()) => Ok(Header::parse(&bytes)),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

fn needs_libraries(file: &File, header: &Header) -> bool {
    let mut headers = vec![0; header.program_headers_bytes];
    let read = file.read_exact_at(&mut headers, header.program_headers_at);
    read.is_ok() && program_form::is_dynamic(&headers)
}

fn read_part(file: &File, position: u64, size: u64) -> io::Result<Vec<u8>> {
    let left = usize::try_from(size - position).unwrap_or(usize::MAX);
    let mut part = vec![0; left.min(PART_BYTES)];
    file.read_exact_at(&mut part, position)?;
    Ok(part)
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use kiyot_link::certificate::sha256;
    use tokio::time::Instant;

    use super::*;

    /// Verifies L25.
    #[tokio::test(start_paused = true)]
    async fn downloads_share_their_rate_with_images() {
        const MIB: usize = 1 << 20;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kiyot-cell");
        std::fs::write(&path, vec![7; 4 * MIB]).unwrap();
        let rate = Arc::new(SendRate::new(8 << 20));
        let program = AgentProgram::open(&path).unwrap().with_rate(Arc::clone(&rate));
        let begun = Instant::now();
        let download = async || program.body().collect().await.unwrap().to_bytes().len();
        let (one, other, ()) = tokio::join!(download(), download(), rate.ready(8 * MIB));
        assert_eq!((one, other), (4 * MIB, 4 * MIB));
        // The last of the 16 MiB are sent a tenth of a second before their tokens are available.
        let elapsed = begun.elapsed().as_secs_f32();
        assert!((1.8..2.1).contains(&elapsed), "{elapsed} s");
    }

    #[test]
    fn program_is_hashed_whole_and_its_size_is_checked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kiyot-cell");
        for size in [1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES] {
            let content = vec![7; size];
            std::fs::write(&path, &content).unwrap();
            let program = AgentProgram::open(&path).unwrap();
            assert_eq!((program.size(), program.sha256()), (size as u64, &*sha256(&content)));
        }
        std::fs::write(&path, "").unwrap();
        assert!(matches!(AgentProgram::open(&path), Err(AgentProgramError::Size(_, 0))));
        File::options().write(true).open(&path).unwrap().set_len(MAX_PROGRAM_BYTES + 1).unwrap();
        assert!(matches!(AgentProgram::open(&path), Err(AgentProgramError::Size(..))));
        for absent in [dir.path(), &dir.path().join("absent")] {
            let error = AgentProgram::open(absent).unwrap_err().to_string();
            assert!(error.starts_with(&format!("agent program {absent:?}")), "{error}");
        }
    }
}
