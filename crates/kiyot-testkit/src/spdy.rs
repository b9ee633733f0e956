//! SPDY clients of streaming URLs, as kubectl uses them through an API server. They keep all
//! received data.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use bytes::Bytes;
use milpactl::spdy::{Frame, Target};

use crate::{Kubelet, cri};

/// Connects to the URL of an Exec, Attach or PortForward, with a protocol such as
/// `v4.channel.k8s.io` or `portforward.k8s.io`.
///
/// # Errors
/// If the server refuses the upgrade, or the connection fails.
pub async fn open(url: &str, protocol: &str) -> io::Result<(Sender, Receiver)> {
    let target = Target::parse(url).map_err(io::Error::other)?;
    let (sender, inner) =
        milpactl::spdy::connect(&target, protocol).await.map_err(io::Error::other)?;
    let receiver = Receiver { inner, received: BTreeMap::new(), ended: BTreeSet::new() };
    Ok((Sender(sender), receiver))
}

/// Outputs and status of a program.
#[derive(Debug, PartialEq, Eq)]
pub struct ExecOutput {
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// The stream `error`, with the exit code.
    pub status: String,
}

/// Executes a program in a container as kubectl does, with an input that ends.
///
/// # Panics
/// If the runtime returns no URL, or its server refuses the connection.
pub async fn exec(
    kubelet: &mut Kubelet,
    container: &str,
    command: &[&str],
    input: &[u8],
) -> ExecOutput {
    let request = cri::ExecRequest {
        container_id: container.to_owned(),
        cmd: command.iter().map(|word| (*word).to_owned()).collect(),
        tty: false,
        stdin: true,
        stdout: true,
        stderr: true,
    };
    let response = kubelet.runtime.exec(request).await.expect("the runtime gives a URL");
    let connected = open(&response.into_inner().url, "v4.channel.k8s.io").await;
    let (mut sender, mut receiver) = connected.expect("the URL takes connections");
    let mut streams = Vec::new();
    for kind in ["error", "stdin", "stdout", "stderr"] {
        streams.push(sender.begin(&[("streamtype", kind)]).await);
    }
    sender.send(streams[1], input).await;
    sender.end(streams[1]).await;
    let mut read = async |stream: u32| {
        String::from_utf8_lossy(&receiver.read_to_end(stream).await).into_owned()
    };
    ExecOutput {
        stdout: read(streams[2]).await,
        stderr: read(streams[3]).await,
        status: read(streams[0]).await,
    }
}

/// The sending half of a connection. Its errors are ignored: a server that has hung up may have
/// responded before, which the receiver reads.
#[derive(Debug)]
pub struct Sender(milpactl::spdy::Sender);

impl Sender {
    /// Opens a stream with headers such as `streamtype`, and returns its id.
    pub async fn begin(&mut self, headers: &[(&str, &str)]) -> u32 {
        self.0.open(headers, false).await.unwrap_or_default()
    }

    /// Sends data on a stream.
    pub async fn send(&mut self, stream: u32, bytes: &[u8]) {
        let _ = self.0.send(stream, Bytes::copy_from_slice(bytes)).await;
    }

    /// Half-closes a stream.
    pub async fn end(&mut self, stream: u32) {
        let _ = self.0.end(stream).await;
    }
}

/// The receiving half of a connection.
#[derive(Debug)]
pub struct Receiver {
    inner: milpactl::spdy::Receiver,
    received: BTreeMap<u32, Vec<u8>>,
    ended: BTreeSet<u32>,
}

impl Receiver {
    /// Reads until the server has closed a stream or the connection, and returns all data of the
    /// stream.
    pub async fn read_to_end(&mut self, stream: u32) -> Vec<u8> {
        self.read_while(stream, |_| true).await
    }

    /// Reads until a stream's data contains a text or ends, and returns all of it.
    pub async fn read_until(&mut self, stream: u32, text: &str) -> String {
        let lacks = |bytes: &[u8]| !String::from_utf8_lossy(bytes).contains(text);
        String::from_utf8_lossy(&self.read_while(stream, lacks).await).into_owned()
    }

    /// Reads until a stream has this many bytes or ends, and returns all its bytes.
    pub async fn read_bytes(&mut self, stream: u32, bytes: usize) -> Vec<u8> {
        self.read_while(stream, |so_far| so_far.len() < bytes).await
    }

    async fn read_while(&mut self, stream: u32, is_wanted: impl Fn(&[u8]) -> bool) -> Vec<u8> {
        loop {
            let so_far = self.received.get(&stream).map(Vec::as_slice).unwrap_or_default();
            let goes_on = is_wanted(so_far) && !self.ended.contains(&stream);
            let Ok(Some(frame)) = (if goes_on { self.inner.next().await } else { Ok(None) }) else {
                return self.received.get(&stream).cloned().unwrap_or_default();
            };
            match frame {
                Frame::Data { stream, bytes, end } => {
                    self.received.entry(stream).or_default().extend(bytes);
                    self.ended.extend(end.then_some(stream));
                }
                Frame::Headers { stream, end } => self.ended.extend(end.then_some(stream)),
                Frame::Reset { stream, .. } => self.ended.extend([stream]),
                Frame::Ping(_) | Frame::GoAway => {}
            }
        }
    }
}
