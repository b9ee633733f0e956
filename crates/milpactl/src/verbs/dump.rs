//! `dump`: the support bundle, as text or as a tar archive.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use futures::StreamExt;
use kiyot_proto::admin::DumpRequest;

use crate::{age, cli::Dump, client::Client, error::Error, output::Progress};

/// Bounds a text of the bundle.
const MAX_FILE_BYTES: usize = 256 << 20;

pub(super) async fn run(client: &Client, dump: Dump) -> Result<(), Error> {
    let mut parts = client.list(async |mut admin| admin.dump(DumpRequest {}).await).await?;
    let mut archive = dump.output.as_deref().map(Archive::create).transpose()?;
    // Without a file the text itself is the progress.
    let progress = dump.output.is_some().then(|| Progress::begin("waiting for the daemon"));
    while let Some(part) = parts.next().await {
        let part = part?;
        if let Some(progress) = progress.as_ref().filter(|_| !part.file.is_empty()) {
            progress.set(format!("writing {}", part.file));
        }
        match &mut archive {
            Some(archive) => archive.add(&part.file, &part.content)?,
            None => {
                let mut stdout = io::stdout().lock();
                if !part.file.is_empty() {
                    writeln!(stdout, "==> {} <==", part.file)?;
                }
                stdout.write_all(&part.content)?;
            }
        }
    }
    match archive {
        Some(archive) => archive.finish(),
        None => Ok(io::stdout().flush()?),
    }
}

/// An archive that is being written.
struct Archive {
    tar: tar::Builder<File>,
    file: String,
    content: Vec<u8>,
    seconds: u64,
}

impl Archive {
    /// Creates the file, readable by its owner only. An existing one is not replaced.
    fn create(path: &Path) -> Result<Self, Error> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let file = file.map_err(|error| Error::Failed(format!("{}: {error}", path.display())))?;
        let seconds = u64::try_from(age::now() / 1_000_000_000).unwrap_or_default();
        Ok(Self { tar: tar::Builder::new(file), file: String::new(), content: Vec::new(), seconds })
    }

    fn add(&mut self, file: &str, content: &[u8]) -> Result<(), Error> {
        if !file.is_empty() {
            self.write()?;
            file.clone_into(&mut self.file);
        }
        if self.content.len() + content.len() > MAX_FILE_BYTES {
            return Err(Error::Failed(format!("{} is larger than 256 MiB", self.file)));
        }
        self.content.extend_from_slice(content);
        Ok(())
    }

    fn write(&mut self) -> Result<(), Error> {
        if self.file.is_empty() {
            return Ok(());
        }
        let mut header = tar::Header::new_gnu();
        header.set_size(self.content.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(self.seconds);
        let name = format!("kiyot-dump/{}", self.file.replace('/', "_"));
        self.tar.append_data(&mut header, name, self.content.as_slice())?;
        self.content.clear();
        Ok(())
    }

    fn finish(mut self) -> Result<(), Error> {
        self.write()?;
        self.tar.into_inner()?.sync_all()?;
        Ok(())
    }
}
