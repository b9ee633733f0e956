//! One container's log on its way to the node. Its position is base + the file's length, always;
//! nothing else is remembered.

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{
    StreamExt as _,
    stream::{self, BoxStream},
};
use kiyot_link::log_limit::LogLimit;
use tokio::{sync::oneshot, time::timeout};
use tokio_util::task::AbortOnDropHandle;
use tonic::{Code, Status};

use super::{
    Bases, LogRoute,
    file::{FileId, NodeFile},
    gap,
    source::{Part, Source},
};
use crate::backends::milpa::{latest::Latest, mailbox::Receiver};

/// Pause after a failure, of the disk or of the cell: doubled from the first to the second.
const BACKOFF: (Duration, Duration) = if cfg!(test) {
    (Duration::from_millis(10), Duration::from_millis(10))
} else {
    (Duration::from_secs(1), Duration::from_secs(16))
};

/// How long a cell may be silent in the middle of a log.
const SILENCE: Duration = Duration::from_secs(60);

/// The cell is told to give back its disk after so many more bytes are on the node's.
const TRIM_EVERY: u64 = 8 << 20;

/// What is known of a log in its cell.
#[derive(Clone)]
pub(super) struct News {
    /// Where it is read.
    pub(super) source: Arc<dyn Source>,
    /// How large the cell said it is.
    pub(super) size: u64,
    /// Counts the times that it must be read whatever its size.
    pub(super) again: u64,
}

/// What is asked of a writer.
#[derive(Debug)]
pub(super) enum Ask {
    /// Answer when all that is in the cell now is on the node.
    Drain(oneshot::Sender<()>),
    /// Go on in a new file under the same name, and answer with the position at which it begins.
    Reopen(oneshot::Sender<Result<i64, Status>>),
}

/// A reopening that waits.
#[derive(Debug)]
struct Held {
    done: oneshot::Sender<Result<i64, Status>>,
    /// Whether a reading that began after it was asked for is the next one that ends.
    last: bool,
}

/// Why a log doesn't go on.
#[derive(Debug, thiserror::Error)]
enum WriterError {
    /// The node's file.
    #[error("the file on the node")]
    Disk(#[from] io::Error),
    /// The cell.
    #[error("the log in the cell")]
    Cell(#[from] Status),
    /// The cell says nothing more.
    #[error("the cell was silent for {} s in the middle of the log", SILENCE.as_secs())]
    Silent,
}

/// Writes one container's log.
pub(super) struct Writer {
    route: LogRoute,
    file: NodeFile,
    /// The file before the last reopening, and its base: the kubelet gives it its name back if it
    /// takes the reopening for failed.
    previous: Option<(FileId, i64)>,
    base: i64,
    /// In the cell's log; `None` until the file has been looked at.
    position: Option<u64>,
    bases: Bases,
    news: Arc<Latest<News>>,
    asks: Receiver<Ask>,
    drains: Vec<oneshot::Sender<()>>,
    /// Whether the file ends within a line.
    mid_line: bool,
    /// A reopening that waits for the end of the line: no file is to begin within one.
    held: Option<Held>,
    /// The news that the last whole reading knew.
    read: (u64, u64),
    trimmed: u64,
    trimming: Option<AbortOnDropHandle<()>>,
    /// Limits the lines of the daemon's log that the cell can cause.
    lines: LogLimit,
}

impl Writer {
    /// A writer that has not begun.
    pub(super) fn new(
        route: LogRoute,
        file: NodeFile,
        bases: Bases,
        news: Arc<Latest<News>>,
        asks: Receiver<Ask>,
    ) -> Self {
        let base = route.base;
        let (drains, read) = (Vec::new(), (0, 0));
        Self {
            route,
            file,
            previous: None,
            base,
            position: None,
            bases,
            news,
            asks,
            drains,
            mid_line: false,
            held: None,
            read,
            trimmed: position(base, 0),
            trimming: None,
            lines: LogLimit::default(),
        }
    }

    /// Writes until its handle is dropped. Of a box, because a future has room for its arguments
    /// twice.
    pub(super) async fn run(mut self: Box<Self>) {
        let mut backoff = None;
        loop {
            if !self.is_behind() && self.held.is_none() {
                tokio::select! {
                    // Within a line the end of the line is looked for: it may have come by now.
                    ask = self.asks.recv() => Box::pin(self.take_between_lines(ask)).await,
                    () = self.news.changed() => {}
                }
                continue;
            }
            // Boxed: what is seldom takes no room in a task that mostly waits.
            let read = Box::pin(self.read_to_end()).await;
            if let Some(held) = self.held.take() {
                if read.is_ok() && !held.last && self.is_behind() {
                    // What came meanwhile may end the line.
                    self.held = Some(Held { last: true, ..held });
                } else {
                    // The line has no end yet, or the cell doesn't say: the kubelet is not kept
                    // waiting for it.
                    Box::pin(self.take(Ask::Reopen(held.done))).await;
                }
            }
            match read {
                Ok(()) => backoff = None,
                Err(error) => {
                    if backoff.is_none()
                        && let Some(suppressed) = self.lines.admit()
                    {
                        let (container, path) =
                            (&self.route.container, self.route.node_path.display());
                        tracing::warn!(%container, %path, error = &error as &dyn std::error::Error, suppressed, "the log of a container does not go on for now");
                    }
                    let pause =
                        backoff.map_or(BACKOFF.0, |last: Duration| (last * 2).min(BACKOFF.1));
                    backoff = Some(pause);
                    Box::pin(self.pause(pause)).await;
                }
            }
        }
    }

    /// Whether there is more in the cell, or may be.
    fn is_behind(&mut self) -> bool {
        let known = self.news.with(|news| (news.size, news.again));
        !self.drains.is_empty()
            || known.1 != self.read.1
            || (self.position.is_none_or(|position| known.0 > position) && known != self.read)
    }

    /// Reads the cell's log to the end that it has now.
    async fn read_to_end(&mut self) -> Result<(), WriterError> {
        self.settle().await?;
        let news = self.news.get();
        let drains = self.drains.len();
        let mut parts = match self.open(&news).await {
            Ok(parts) => parts,
            // The container has not begun: there is nothing to read, and news will come with its
            // first line.
            Err(status) if status.code() == Code::NotFound => stream::empty().boxed(),
            // The node's file has more than the cell's log: it is not the log that it was. There is
            // nothing to bring home, and nobody should wait for it.
            Err(status) if status.code() == Code::OutOfRange => {
                if let Some(suppressed) = self.lines.admit() {
                    let (container, path) = (&self.route.container, self.route.node_path.display());
                    tracing::warn!(%container, %path, position = self.at(), status = status.message(), suppressed, "the log in a cell is shorter than what is on the node");
                }
                stream::empty().boxed()
            }
            Err(status) => return Err(status.into()),
        };
        loop {
            tokio::select! {
                biased;
                ask = self.asks.recv() => self.take_between_lines(ask).await,
                part = timeout(SILENCE, parts.next()) => match part.map_err(|_| WriterError::Silent)?.transpose()? {
                    Some(Part::Bytes(bytes)) => self.bring(bytes).await?,
                    Some(Part::Gap(bytes)) => Box::pin(self.skip(bytes)).await?,
                    None => break,
                },
            }
        }
        self.read = (news.size, news.again);
        for drain in self.drains.drain(..drains) {
            // Whoever asked may have stopped waiting.
            let _ = drain.send(());
        }
        Ok(())
    }

    async fn open(
        &mut self,
        news: &News,
    ) -> Result<BoxStream<'static, Result<Part, Status>>, Status> {
        let (source, path, position) =
            (Arc::clone(&news.source), self.route.cell_path.clone(), self.at());
        let mut opening = std::pin::pin!(async move { source.read(&path, position).await });
        loop {
            tokio::select! {
                biased;
                ask = self.asks.recv() => self.take_between_lines(ask).await,
                opened = &mut opening => return opened,
            }
        }
    }

    /// Finds the position anew, and the file, if another has taken its name.
    async fn settle(&mut self) -> io::Result<()> {
        let mut is_another = self.file.is_replaced().await?;
        if is_another {
            self.file = self.file.anew().await?;
            if let Some((id, base)) = self.previous.take()
                && id == self.file.id()
            {
                // What went to the file after it is lost with that one, and comes again.
                (self.base, self.position, is_another) = (base, None, false);
                self.bases.keep(&self.route.container, base).await;
            }
        }
        let end = self.file.end().await?;
        match self.position {
            // Somebody has put another in its place, or made it shorter: as with containerd, the
            // log goes on with what comes next.
            Some(before) if is_another || position(self.base, end.length) < before => {
                self.rebase(before, end.length).await
            }
            Some(_) => {}
            // What the file had before this log was taken from it meanwhile.
            None => self.base = self.base.max(0_i64.saturating_sub_unsigned(end.length)),
        }
        self.position = Some(position(self.base, end.length));
        // What an earlier life of kiyot, or an append that failed, has left may end within a line.
        self.mid_line = end.within_line;
        Ok(())
    }

    /// Where the log goes on.
    fn at(&self) -> u64 {
        self.position.unwrap_or_else(|| position(self.base, 0))
    }

    /// From now on the file's end, after so many bytes, is this position; that is kept, for a later
    /// daemon.
    async fn rebase(&mut self, position: u64, length: u64) {
        self.base = i64::try_from(position).unwrap_or(i64::MAX).saturating_sub_unsigned(length);
        self.position = Some(position);
        self.bases.keep(&self.route.container, self.base).await;
    }

    /// Goes on after what the cell does not keep, and says so in the file.
    async fn skip(&mut self, bytes: u64) -> io::Result<()> {
        if let Some(suppressed) = self.lines.admit() {
            let (container, path) = (&self.route.container, self.route.node_path.display());
            tracing::warn!(%container, %path, bytes, suppressed, "a part of the log of a container is neither on the node nor in its cell any more");
        }
        let position = self.at().saturating_add(bytes);
        // The note comes first: until the new base is kept, a later daemon finds the same gap, and
        // says so once more.
        self.file.append(gap::note(self.mid_line, bytes, jiff::Timestamp::now())).await?;
        self.mid_line = false;
        let length = self.file.end().await?.length;
        self.rebase(position, length).await;
        if let Some(held) = self.held.take() {
            self.take(Ask::Reopen(held.done)).await;
        }
        Ok(())
    }

    /// Appends a part, and reopens at the end of a line in it if that was asked for.
    async fn bring(&mut self, mut part: Bytes) -> io::Result<()> {
        if self.held.is_some()
            && let Some(end) = part.iter().position(|byte| *byte == b'\n')
        {
            self.append(part.split_to(end + 1)).await?;
            if let Some(held) = self.held.take() {
                self.take(Ask::Reopen(held.done)).await;
            }
        }
        if part.is_empty() { Ok(()) } else { self.append(part).await }
    }

    async fn append(&mut self, bytes: Bytes) -> io::Result<()> {
        let length = bytes.len() as u64;
        self.mid_line = bytes.last() != Some(&b'\n');
        self.file.append(bytes).await?;
        let position = self.at().saturating_add(length);
        self.position = Some(position);
        if position.saturating_sub(self.trimmed) >= TRIM_EVERY
            && self.trimming.as_ref().is_none_or(AbortOnDropHandle::is_finished)
        {
            // What the cell forgets must outlive the node's power.
            self.file.sync().await?;
            self.trimmed = position;
            let (source, route) =
                (self.news.with(|news| Arc::clone(&news.source)), self.route.clone());
            self.trimming = Some(AbortOnDropHandle::new(tokio::spawn(async move {
                if let Err(error) = source.trim(&route.cell_path, position).await {
                    tracing::debug!(container = %route.container, %error, "a cell did not give back the disk of a log; it is asked again later");
                }
            })));
        }
        Ok(())
    }

    /// Takes what is asked, a reopening within a line at the end of that line.
    async fn take_between_lines(&mut self, ask: Ask) {
        match ask {
            Ask::Reopen(done) if self.mid_line && self.held.is_none() => {
                self.held = Some(Held { done, last: false })
            }
            ask => self.take(ask).await,
        }
    }

    async fn take(&mut self, ask: Ask) {
        match ask {
            Ask::Drain(done) => self.drains.push(done),
            // One whose caller is gone is not begun: nobody would keep the new base.
            Ask::Reopen(done) if done.is_closed() => {}
            Ask::Reopen(done) => {
                let (container, path) =
                    (self.route.container.clone(), self.route.node_path.clone());
                let failed = |error: io::Error| {
                    Status::internal(format!(
                        "log file {} of container {container}: {error}",
                        path.display()
                    ))
                };
                // If the caller is gone by now, the kubelet names the old file as before, which
                // `settle` notices.
                let _ = done.send(self.reopen().await.map_err(failed));
            }
        }
    }

    async fn reopen(&mut self) -> io::Result<i64> {
        // After a failed append, the position that is remembered may be less than what is in the
        // file.
        let position = position(self.base, self.file.end().await?.length).max(self.at());
        let file = self.file.anew().await?;
        let end = file.end().await?;
        let base =
            i64::try_from(position).map_err(io::Error::other)?.saturating_sub_unsigned(end.length);
        if file.id() != self.file.id() {
            self.previous = Some((self.file.id(), self.base));
        }
        (self.file, self.base, self.position, self.mid_line) =
            (file, base, Some(position), end.within_line);
        Ok(base)
    }

    /// Waits before another try, or until there is another link; questions are answered meanwhile.
    async fn pause(&mut self, pause: Duration) {
        let again = self.news.with(|news| news.again);
        let pause = tokio::time::sleep(pause);
        tokio::pin!(pause);
        loop {
            tokio::select! {
                () = &mut pause => return,
                () = self.news.changed() => if self.news.with(|news| news.again) != again { return },
                ask = self.asks.recv() => self.take(ask).await,
            }
        }
    }
}

/// The position in the cell's log to go on from, with so many bytes in the node's file.
fn position(base: i64, length: u64) -> u64 {
    u64::try_from(base.saturating_add_unsigned(length)).unwrap_or_default()
}
