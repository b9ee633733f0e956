//! Writer of a container's log on the node. Its position is always base + the file's length; no
//! other state is kept.

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{
    StreamExt as _,
    future::OptionFuture,
    stream::{self, BoxStream},
};
use kiyot_link::{
    log_limit::LogLimit,
    watch::{Seen, Watch},
};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::task::AbortOnDropHandle;

use super::{
    Bases, LogRoute,
    file::{FileId, NodeFile},
    gap,
    source::{Part, Source},
};
use crate::{
    backends::milpa::{
        failure::{Code, Failure},
        mailbox::Receiver,
    },
    metrics::ByteCounter,
};

/// First and longest pause after a failure of the disk or the cell; each pause doubles.
const BACKOFF_RANGE: (Duration, Duration) = if cfg!(test) {
    (Duration::from_millis(10), Duration::from_millis(10))
} else {
    (Duration::from_secs(1), Duration::from_secs(16))
};

/// Longest silence of a cell within a log.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(60);

/// Longest wait of a reopening for the end of a line, while the cell sends no line end.
const LINE_END_TIMEOUT: Duration = Duration::from_secs(5);

/// Bounds the gaps in each [`GAP_PERIOD`], because each gap writes a note and a record. A cell that
/// discards unfetched content makes twelve.
const MAX_GAPS: u32 = 60;

/// Period in which gaps are counted.
const GAP_PERIOD: Duration = Duration::from_secs(60);

/// Bytes on the node's disk after which the cell discards its copy.
const TRIM_INTERVAL_BYTES: u64 = 8 << 20;

/// Known state of a log in its cell.
#[derive(Clone)]
pub(super) struct CellLog {
    /// Link over which the log is read.
    pub(super) source: Arc<dyn Source>,
    /// Size in bytes that the cell reported.
    pub(super) size: u64,
    /// Counter of reasons to read regardless of the size.
    pub(super) rereads: u64,
}

#[derive(Debug)]
pub(super) enum Command {
    /// Respond when the current log of the cell is on the node.
    Drain(oneshot::Sender<()>),
    /// Continue in a new file with the same name, and respond with its base.
    Reopen(oneshot::Sender<Result<i64, Failure>>),
}

/// Reopening that waits for a line end.
#[derive(Debug)]
struct PendingReopen {
    done: oneshot::Sender<Result<i64, Failure>>,
    /// True if the next read is the last wait.
    last: bool,
    /// Time at which the wait ends.
    deadline: Instant,
}

#[derive(Debug, thiserror::Error)]
enum WriterError {
    /// The node's file failed.
    #[error("the file on the node")]
    Disk(#[from] io::Error),
    /// The cell failed.
    #[error("the log in the cell")]
    Cell(#[from] Failure),
    #[error("the cell was silent for {} s in the middle of the log", SILENCE_TIMEOUT.as_secs())]
    Silent,
    /// The cell reports gaps without end.
    #[error("more than {MAX_GAPS} gaps in {} s", GAP_PERIOD.as_secs())]
    Gaps,
}

pub(super) struct Writer {
    route: LogRoute,
    file: NodeFile,
    /// File before the last reopening, and its base: after a failed reopening, the kubelet renames
    /// this file back.
    previous: Option<(FileId, i64)>,
    base: i64,
    /// Position in the cell's log; `None` until the file is examined.
    position: Option<u64>,
    bases: Bases,
    cell_log: Arc<Watch<CellLog>>,
    seen: Seen,
    commands: Receiver<Command>,
    bytes: ByteCounter,
    drains: Vec<oneshot::Sender<()>>,
    /// True if the file ends within a line.
    mid_line: bool,
    /// Reopening that waits for a line end, so that no file begins within a line.
    pending_reopen: Option<PendingReopen>,
    /// Size and reread counter at the last complete read.
    read: (u64, u64),
    trimmed: u64,
    trimming: Option<AbortOnDropHandle<()>>,
    gaps: GapLimit,
    /// Limits the log messages that the cell can cause.
    log_limit: LogLimit,
}

impl Writer {
    /// Creates a writer without starting it.
    pub(super) fn new(
        route: LogRoute,
        file: NodeFile,
        bases: Bases,
        cell_log: Arc<Watch<CellLog>>,
        commands: Receiver<Command>,
        bytes: ByteCounter,
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
            cell_log,
            seen: Seen::default(),
            commands,
            bytes,
            drains,
            mid_line: false,
            pending_reopen: None,
            read,
            trimmed: position(base, 0),
            trimming: None,
            gaps: GapLimit::default(),
            log_limit: LogLimit::default(),
        }
    }

    /// Writes until its handle is dropped. Takes a box, because a future stores its arguments
    /// twice.
    pub(super) async fn run(mut self: Box<Self>) {
        let mut backoff = None;
        loop {
            if !self.is_behind() && self.pending_reopen.is_none() {
                tokio::select! {
                    // Reads on first: the end of the line may have come already.
                    command = self.commands.recv() => {
                        Box::pin(self.handle_between_lines(command)).await;
                    }
                    () = self.cell_log.changed(&mut self.seen) => {}
                }
                continue;
            }
            // Boxed, because rare state should take no room in a task that mostly waits.
            let read = Box::pin(self.read_to_end()).await;
            if let Some(pending_reopen) = self.pending_reopen.take() {
                if read.is_ok() && !pending_reopen.last && self.is_behind() {
                    // Growth during the read may end the line.
                    self.pending_reopen = Some(PendingReopen { last: true, ..pending_reopen });
                } else {
                    // The line still has no end, or the cell doesn't respond: the kubelet doesn't
                    // wait longer.
                    Box::pin(self.handle(Command::Reopen(pending_reopen.done))).await;
                }
            }
            match read {
                Ok(()) => backoff = None,
                Err(error) => {
                    if backoff.is_none()
                        && let Some(suppressed) = self.log_limit.admit()
                    {
                        let (container, path) =
                            (&self.route.container, self.route.node_path.display());
                        tracing::warn!(
                            %container,
                            %path,
                            error = &error as &dyn std::error::Error,
                            suppressed,
                            "container log interrupted"
                        );
                    }
                    let pause = backoff
                        .map_or(BACKOFF_RANGE.0, |last: Duration| (last * 2).min(BACKOFF_RANGE.1));
                    backoff = Some(pause);
                    Box::pin(self.pause(pause)).await;
                }
            }
        }
    }

    /// Returns whether the cell has, or may have, more of the log.
    fn is_behind(&mut self) -> bool {
        let known = self.cell_log.with(|cell_log| (cell_log.size, cell_log.rereads));
        !self.drains.is_empty()
            || known.1 != self.read.1
            || (self.position.is_none_or(|position| known.0 > position) && known != self.read)
    }

    /// Reads the cell's log up to its current end.
    async fn read_to_end(&mut self) -> Result<(), WriterError> {
        self.locate().await?;
        let cell_log = self.cell_log.with(|cell_log| cell_log.clone());
        let drains = self.drains.len();
        let mut parts = match self.open(&cell_log).await {
            Ok(parts) => parts,
            // The container hasn't started: its first line will cause a report.
            Err(failure) if failure.code() == Code::NotFound => stream::empty().boxed(),
            // The cell's log is shorter than the node's file, so it is another log: there is
            // nothing to copy or wait for.
            Err(failure) if failure.code() == Code::OutOfRange => {
                if let Some(suppressed) = self.log_limit.admit() {
                    let (container, path) = (&self.route.container, self.route.node_path.display());
                    tracing::warn!(
                        %container,
                        %path,
                        position = self.at(),
                        error = %failure,
                        suppressed,
                        "container log in the cell shorter than on the node"
                    );
                }
                stream::empty().boxed()
            }
            Err(failure) => return Err(failure.into()),
        };
        loop {
            let deadline = self.pending_reopen.as_ref().map(|pending| pending.deadline);
            let overdue = OptionFuture::from(deadline.map(sleep_until));
            tokio::select! {
                biased;
                command = self.commands.recv() => self.handle_between_lines(command).await,
                Some(()) = overdue => self.finish_reopen().await,
                part = timeout(SILENCE_TIMEOUT, parts.next()) => {
                    match part.map_err(|_| WriterError::Silent)?.transpose()? {
                        Some(Part::Bytes(bytes)) => self.append_part(bytes).await?,
                        Some(Part::Gap(bytes)) => Box::pin(self.skip(bytes)).await?,
                        None => break,
                    }
                }
            }
        }
        self.read = (cell_log.size, cell_log.rereads);
        for drain in self.drains.drain(..drains) {
            // The caller may have stopped waiting.
            let _ = drain.send(());
        }
        Ok(())
    }

    async fn open(
        &mut self,
        cell_log: &CellLog,
    ) -> Result<BoxStream<'static, Result<Part, Failure>>, Failure> {
        let (source, path, position) =
            (Arc::clone(&cell_log.source), self.route.cell_path.clone(), self.at());
        let mut opening = std::pin::pin!(async move { source.read(&path, position).await });
        loop {
            tokio::select! {
                biased;
                command = self.commands.recv() => self.handle_between_lines(command).await,
                opened = &mut opening => return opened,
            }
        }
    }

    /// Determines the position again. If another file has the name, opens that file.
    async fn locate(&mut self) -> io::Result<()> {
        let mut is_another = self.file.is_replaced().await?;
        if is_another {
            self.file = self.file.reopen().await?;
            if let Some((id, base)) = self.previous.take()
                && id == self.file.id()
            {
                // Bytes written to the later file are lost with it, and are read again.
                (self.base, self.position, is_another) = (base, None, false);
                self.bases.keep(&self.route.container, base).await;
            }
        }
        let end = self.file.end().await?;
        match self.position {
            // The file was replaced or truncated: as with containerd, the log continues with later
            // bytes.
            Some(before) if is_another || position(self.base, end.length) < before => {
                self.rebase(before, end.length).await
            }
            Some(_) => {}
            // Content from before this log was meanwhile removed from the file.
            None => self.base = self.base.max(0_i64.saturating_sub_unsigned(end.length)),
        }
        self.position = Some(position(self.base, end.length));
        // A previous run of kiyot or a failed append may have left a partial line.
        self.mid_line = end.within_line;
        Ok(())
    }

    /// Returns the position to continue from.
    fn at(&self) -> u64 {
        self.position.unwrap_or_else(|| position(self.base, 0))
    }

    /// Sets the position of the file's end, and records the base for the next run.
    async fn rebase(&mut self, position: u64, length: u64) {
        self.base = i64::try_from(position).unwrap_or(i64::MAX).saturating_sub_unsigned(length);
        self.position = Some(position);
        self.bases.keep(&self.route.container, self.base).await;
    }

    /// Continues after bytes that the cell has discarded, and writes a note to the file.
    async fn skip(&mut self, bytes: u64) -> Result<(), WriterError> {
        if !self.gaps.admits(Instant::now()) {
            return Err(WriterError::Gaps);
        }
        if let Some(suppressed) = self.log_limit.admit() {
            let (container, path) = (&self.route.container, self.route.node_path.display());
            tracing::warn!(
                %container,
                %path,
                bytes,
                suppressed,
                "part of a container log lost on the node and in the cell"
            );
        }
        let position = self.at().saturating_add(bytes);
        // The note precedes the new base: if the base isn't recorded, the next run finds the gap
        // again and repeats the note.
        self.file.append(gap::note(self.mid_line, bytes, jiff::Timestamp::now())).await?;
        self.mid_line = false;
        let length = self.file.end().await?.length;
        self.rebase(position, length).await;
        self.finish_reopen().await;
        Ok(())
    }

    /// Appends a part, and reopens at the first line end in it if a reopening waits.
    async fn append_part(&mut self, mut part: Bytes) -> io::Result<()> {
        if self.pending_reopen.is_some()
            && let Some(end) = part.iter().position(|byte| *byte == b'\n')
        {
            self.append(part.split_to(end + 1)).await?;
            self.finish_reopen().await;
        }
        if part.is_empty() { Ok(()) } else { self.append(part).await }
    }

    async fn append(&mut self, bytes: Bytes) -> io::Result<()> {
        let length = bytes.len() as u64;
        self.mid_line = bytes.last() != Some(&b'\n');
        self.file.append(bytes).await?;
        self.bytes.add(usize::try_from(length).unwrap_or_default());
        let position = self.at().saturating_add(length);
        self.position = Some(position);
        if position.saturating_sub(self.trimmed) >= TRIM_INTERVAL_BYTES
            && self.trimming.as_ref().is_none_or(AbortOnDropHandle::is_finished)
        {
            // The bytes must survive a power failure of the node before the cell discards them.
            self.file.sync().await?;
            self.trimmed = position;
            let (source, route) =
                (self.cell_log.with(|cell_log| Arc::clone(&cell_log.source)), self.route.clone());
            self.trimming = Some(AbortOnDropHandle::new(tokio::spawn(async move {
                if let Err(error) = source.trim(&route.cell_path, position).await {
                    tracing::debug!(
                        container = %route.container,
                        %error,
                        "log not discarded in the cell, retried later"
                    );
                }
            })));
        }
        Ok(())
    }

    /// Handles a command. A reopening within a line waits for the end of the line.
    async fn handle_between_lines(&mut self, command: Command) {
        match command {
            Command::Reopen(done) if self.mid_line && self.pending_reopen.is_none() => {
                let deadline = Instant::now() + LINE_END_TIMEOUT;
                self.pending_reopen = Some(PendingReopen { done, last: false, deadline })
            }
            command => self.handle(command).await,
        }
    }

    /// Handles the reopening that waits for the end of a line.
    async fn finish_reopen(&mut self) {
        if let Some(pending_reopen) = self.pending_reopen.take() {
            self.handle(Command::Reopen(pending_reopen.done)).await;
        }
    }

    async fn handle(&mut self, command: Command) {
        match command {
            Command::Drain(done) => self.drains.push(done),
            // The caller has left, and would not record the new base.
            Command::Reopen(done) if done.is_closed() => {}
            Command::Reopen(done) => {
                let (container, path) =
                    (self.route.container.clone(), self.route.node_path.clone());
                let failed = |error: io::Error| {
                    Failure::node(
                        Code::Internal,
                        format!("log file {} of container {container}: {error}", path.display()),
                    )
                };
                // If the caller has left, the kubelet renames the old file back, which `locate`
                // detects.
                let _ = done.send(self.reopen().await.map_err(failed));
            }
        }
    }

    async fn reopen(&mut self) -> io::Result<i64> {
        // After a failed append, the known position may be less than the file's end.
        let position = position(self.base, self.file.end().await?.length).max(self.at());
        let file = self.file.reopen().await?;
        let end = file.end().await?;
        let base =
            i64::try_from(position).map_err(io::Error::other)?.saturating_sub_unsigned(end.length);
        if file.id() != self.file.id() {
            // The new base says that the node has these bytes: a later start does not read them
            // again, even if a power failure of the node has cut them off.
            self.file.sync().await?;
            self.previous = Some((self.file.id(), self.base));
        }
        (self.file, self.base, self.position, self.mid_line) =
            (file, base, Some(position), end.within_line);
        Ok(base)
    }

    /// Waits before a retry, or until the link is replaced. Handles commands meanwhile.
    async fn pause(&mut self, pause: Duration) {
        let rereads = self.cell_log.with(|cell_log| cell_log.rereads);
        let pause = tokio::time::sleep(pause);
        tokio::pin!(pause);
        loop {
            tokio::select! {
                () = &mut pause => return,
                () = self.cell_log.changed(&mut self.seen) => {
                    if self.cell_log.with(|cell_log| cell_log.rereads) != rereads {
                        return;
                    }
                }
                command = self.commands.recv() => self.handle(command).await,
            }
        }
    }
}

/// Count of the gaps of a log.
#[derive(Debug, Default)]
struct GapLimit {
    /// Beginning of the current period; `None` before the first gap.
    began: Option<Instant>,
    gaps: u32,
}

impl GapLimit {
    /// Counts a gap. Returns whether the period has at most [`MAX_GAPS`].
    fn admits(&mut self, now: Instant) -> bool {
        if self.began.is_none_or(|began| now.saturating_duration_since(began) >= GAP_PERIOD) {
            (self.began, self.gaps) = (Some(now), 0);
        }
        self.gaps = self.gaps.saturating_add(1);
        self.gaps <= MAX_GAPS
    }
}

/// Returns the position in the cell's log for a length of the node's file.
fn position(base: i64, length: u64) -> u64 {
    u64::try_from(base.saturating_add_unsigned(length)).unwrap_or_default()
}
