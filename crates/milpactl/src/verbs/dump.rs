//! `dump`: the support bundle, as text or as a tar archive.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::ExitCode,
};

use futures::StreamExt;
use kiyot_proto::admin::DumpRequest;

use crate::{
    age,
    cli::Dump,
    client::Client,
    error::Error,
    output::Progress,
    signals::{self, Ending},
};

/// Bounds a text of the bundle.
const MAX_FILE_BYTES: usize = 256 << 20;

pub(super) async fn run(client: &Client, dump: Dump) -> Result<ExitCode, Error> {
    if dump.output.is_none() {
        return write(client, &dump).await.map(|()| ExitCode::SUCCESS);
    }
    // A signal drops the archive, which removes its unfinished file.
    let mut ending = Ending::new()?;
    tokio::select! {
        written = write(client, &dump) => written.map(|()| ExitCode::SUCCESS),
        signal = ending.next() => Ok(ExitCode::from(signals::exit_code(signal))),
    }
}

async fn write(client: &Client, dump: &Dump) -> Result<(), Error> {
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

/// An archive that is being written, beside its path.
struct Archive {
    tar: tar::Builder<File>,
    path: PathBuf,
    unfinished: Unfinished,
    file: String,
    content: Vec<u8>,
    seconds: u64,
}

/// The file of an archive, which is removed unless it is finished.
struct Unfinished(PathBuf);

impl Drop for Unfinished {
    fn drop(&mut self) {
        // A finished archive keeps its other name. A failed removal leaves nothing to do.
        let _ = fs::remove_file(&self.0);
    }
}

impl Archive {
    /// Creates the file, readable by its owner only. An existing file is not replaced.
    fn create(path: &Path) -> Result<Self, Error> {
        if path.symlink_metadata().is_ok() {
            return Err(of(path, &io::Error::from(io::ErrorKind::AlreadyExists)));
        }
        let unfinished = path.with_added_extension(format!("{}.unfinished", std::process::id()));
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished);
        let file = file.map_err(|error| of(path, &error))?;
        let seconds = u64::try_from(age::now() / 1_000_000_000).unwrap_or_default();
        Ok(Self {
            tar: tar::Builder::new(file),
            path: path.to_owned(),
            unfinished: Unfinished(unfinished),
            file: String::new(),
            content: Vec::new(),
            seconds,
        })
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
        // A link never replaces a file that was created meanwhile.
        fs::hard_link(&self.unfinished.0, &self.path).map_err(|error| of(&self.path, &error))
    }
}

fn of(path: &Path, error: &io::Error) -> Error {
    Error::Failed(format!("{}: {error}", path.display()))
}
