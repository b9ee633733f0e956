//! The streams of a command or of a container, by the protocol `v4.channel.k8s.io`.

use std::{collections::BTreeSet, io, time::Duration};

use bytes::Bytes;
use tokio::{
    io::{AsyncWrite, AsyncWriteExt, stderr, stdout},
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    task::JoinSet,
    time::timeout,
};

use crate::{
    error::Error,
    signals::Ending,
    spdy::{Closed, Frame, Receiver, Sender, Target, connect},
    terminal::{self, RawMode},
};

mod input;
mod status;

pub(crate) use status::Status;

/// The protocol, whose error stream has a status with the exit code.
const PROTOCOL: &str = "v4.channel.k8s.io";
/// Bounds the status.
const MAX_STATUS_BYTES: usize = 64 << 10;
/// Bounds the wait for output after the status: a server sends it before.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(5);

/// The wanted streams.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    /// Standard input is passed on.
    pub(crate) stdin: bool,
    /// The process has a terminal.
    pub(crate) tty: bool,
}

/// The end of a session.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The server has reported the end of the process.
    Status(Status),
    /// The connection has ended before the status.
    Lost,
    /// A signal has ended milpactl.
    Signal(i32),
}

/// Streams of a connection, by their types.
#[derive(Debug)]
struct Streams {
    error: u32,
    stdin: Option<u32>,
    stdout: u32,
    stderr: Option<u32>,
    resize: Option<u32>,
}

impl Streams {
    async fn open(sender: &Sender, wanted: Wanted) -> io::Result<Self> {
        let open = async |kind, is_wanted: bool| match is_wanted {
            true => sender.open(&[("streamtype", kind)], false).await.map(Some),
            false => Ok(None),
        };
        Ok(Self {
            error: sender.open(&[("streamtype", "error")], false).await?,
            stdin: open("stdin", wanted.stdin).await?,
            stdout: sender.open(&[("streamtype", "stdout")], false).await?,
            // A terminal has a single output.
            stderr: open("stderr", !wanted.tty).await?,
            resize: open("resize", wanted.tty).await?,
        })
    }
}

/// Connects the local streams with the streams at a URL until the remote process ends.
pub(crate) async fn run(url: &str, wanted: Wanted) -> Result<End, Error> {
    let (sender, receiver) = connect(&Target::parse(url)?, PROTOCOL).await?;
    let mut ending = Ending::new()?;
    let is_raw = wanted.tty && wanted.stdin && terminal::is_input();
    let _raw = is_raw.then(RawMode::enter).transpose()?;
    let Ok(streams) = Streams::open(&sender, wanted).await else { return Ok(End::Lost) };
    // Sends and receives at once, because a server that sends may not read meanwhile.
    let mut sending = JoinSet::new();
    if let Some(stdin) = streams.stdin {
        sending.spawn(send_input(sender.clone(), stdin, input::read()?));
    }
    if let Some(resize) = streams.resize {
        let changes = signal(SignalKind::window_change())?;
        sending.spawn(send_sizes(sender, resize, changes));
    }
    let (mut stdout, mut stderr) = (stdout(), stderr());
    tokio::select! {
        ended = receive(receiver, &streams, &mut stdout, &mut stderr) => ended,
        signal = ending.next() => Ok(End::Signal(signal)),
    }
}

/// Sends the input, and half-closes its stream at its end.
async fn send_input(
    sender: Sender,
    stream: u32,
    mut input: mpsc::Receiver<Bytes>,
) -> Result<(), Closed> {
    while let Some(bytes) = input.recv().await {
        sender.send(stream, bytes).await?;
    }
    sender.end(stream).await
}

/// Sends the size of the terminal, now and when it changes.
async fn send_sizes(
    sender: Sender,
    stream: u32,
    mut changes: tokio::signal::unix::Signal,
) -> Result<(), Closed> {
    loop {
        if let Some((columns, rows)) = terminal::size() {
            let size = format!("{{\"Width\":{columns},\"Height\":{rows}}}\n");
            sender.send(stream, size.into()).await?;
        }
        if changes.recv().await.is_none() {
            return Ok(());
        }
    }
}

/// Writes the output until the status and all output have arrived, or the connection has ended.
async fn receive(
    mut receiver: Receiver,
    streams: &Streams,
    stdout: &mut (impl AsyncWrite + Unpin),
    stderr: &mut (impl AsyncWrite + Unpin),
) -> Result<End, Error> {
    let mut open: BTreeSet<u32> =
        [Some(streams.stdout), streams.stderr].into_iter().flatten().collect();
    let (mut status, mut has_status) = (Vec::new(), false);
    while !(has_status && open.is_empty()) {
        let next = async {
            match has_status {
                true => timeout(OUTPUT_TIMEOUT, receiver.next()).await.unwrap_or(Ok(None)),
                false => receiver.next().await,
            }
        };
        let ended = match next.await {
            Ok(Some(Frame::Data { stream, bytes, end })) => {
                if stream == streams.stdout {
                    write(stdout, &bytes).await?;
                } else if Some(stream) == streams.stderr {
                    write(stderr, &bytes).await?;
                } else if stream == streams.error {
                    let room = MAX_STATUS_BYTES - status.len();
                    status.extend_from_slice(&bytes[..bytes.len().min(room)]);
                }
                end.then_some(stream)
            }
            Ok(Some(Frame::Headers { stream, end })) => end.then_some(stream),
            Ok(Some(Frame::Reset { stream, .. })) => Some(stream),
            Ok(Some(Frame::Ping(_) | Frame::GoAway)) => None,
            // The connection's end and its failure mean the same.
            Ok(None) | Err(_) => break,
        };
        open.retain(|stream| Some(*stream) != ended);
        has_status |= ended == Some(streams.error);
    }
    Ok(Status::parse(&status).map_or(End::Lost, End::Status))
}

async fn write(to: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes).await?;
    to.flush().await
}
