//! A SPDY/3.1 client of the streaming URLs of CRI (moby/spdystream), as kubectl uses them through
//! an API server. Unlike WebSocket with `v4`, it can half-close a stream, and forwards several
//! ports on one connection.

use std::{collections::BTreeMap, io};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};

/// Head of a zlib stream with SPDY/3's dictionary, which its Adler-32 names.
const ZLIB_HEAD: [u8; 6] = [0x78, 0xbb, 0xe3, 0xc6, 0xa7, 0xc2];
/// An empty stored block, which flushes the decompressor.
const ZLIB_FLUSH: [u8; 5] = [0, 0, 0, 0xff, 0xff];
/// A control frame of version 3.
const CONTROL: u16 = 0x8003;
const SYN_STREAM: u16 = 1;
const RST_STREAM: u16 = 3;
/// Flag of the last frame of a half-stream.
const FLAG_FIN: u8 = 1;
/// Payload of a data frame.
const MAX_DATA_BYTES: usize = 32 << 10;

/// Connects to the URL of an Exec, Attach or PortForward, with a protocol such as
/// `v4.channel.k8s.io` or `portforward.k8s.io`.
///
/// # Errors
/// The response head if the server refuses the upgrade, or the connection's error.
pub async fn open(url: &str, protocol: &str) -> io::Result<(Sender, Receiver)> {
    let rest = url.strip_prefix("http://").expect("a streaming URL is plain HTTP");
    let (authority, path) = rest.split_once('/').expect("a streaming URL has a path");
    let mut stream = TcpStream::connect(authority).await?;
    stream.set_nodelay(true)?;
    let request = format!(
        "POST /{path} HTTP/1.1\r\n\
         Host: {authority}\r\n\
         Connection: Upgrade\r\n\
         Upgrade: SPDY/3.1\r\n\
         X-Stream-Protocol-Version: {protocol}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    if !head.starts_with(b"HTTP/1.1 101") {
        return Err(io::Error::other(String::from_utf8_lossy(&head).into_owned()));
    }
    let (reader, writer) = stream.into_split();
    Ok((
        Sender { writer, next: 1 },
        Receiver { reader, received: BTreeMap::new(), ended: Vec::new() },
    ))
}

/// The sending half of a connection.
#[derive(Debug)]
pub struct Sender {
    writer: OwnedWriteHalf,
    next: u32,
}

impl Sender {
    /// Opens a stream with headers such as `streamtype`, and returns its id.
    pub async fn begin(&mut self, headers: &[(&str, &str)]) -> u32 {
        let stream = self.next;
        self.next += 2;
        let mut block = u32::try_from(headers.len()).expect("few headers").to_be_bytes().to_vec();
        for text in headers.iter().flat_map(|(name, value)| [name, value]) {
            block.extend(u32::try_from(text.len()).expect("a short text").to_be_bytes());
            block.extend(text.as_bytes());
        }
        // All header blocks share a zlib stream, of stored blocks.
        let length = u16::try_from(block.len()).expect("short headers");
        let mut payload = [stream.to_be_bytes().as_slice(), &[0; 6]].concat();
        payload.extend(ZLIB_HEAD.iter().filter(|_| stream == 1));
        payload.extend(
            [&[0][..], &length.to_le_bytes(), &(!length).to_le_bytes(), &block, &ZLIB_FLUSH]
                .concat(),
        );
        let head = [CONTROL.to_be_bytes(), SYN_STREAM.to_be_bytes()].concat();
        self.frame(&head, 0, &payload).await;
        stream
    }

    /// Sends data on a stream.
    pub async fn send(&mut self, stream: u32, bytes: &[u8]) {
        for part in bytes.chunks(MAX_DATA_BYTES) {
            self.frame(&stream.to_be_bytes(), 0, part).await;
        }
    }

    /// Half-closes a stream.
    pub async fn end(&mut self, stream: u32) {
        self.frame(&stream.to_be_bytes(), FLAG_FIN, &[]).await;
    }

    async fn frame(&mut self, head: &[u8], flags: u8, payload: &[u8]) {
        let length = u32::try_from(payload.len()).expect("a short frame").to_be_bytes();
        let frame = [head, &[flags], &length[1..], payload].concat();
        // A server that has hung up may have responded before: the receiver reads that.
        let _ = self.writer.write_all(&frame).await;
    }
}

/// The receiving half of a connection.
#[derive(Debug)]
pub struct Receiver {
    reader: OwnedReadHalf,
    received: BTreeMap<u32, Vec<u8>>,
    ended: Vec<u32>,
}

impl Receiver {
    /// Reads until the server has closed a stream or the connection, and returns all data of the
    /// stream.
    pub async fn read_to_end(&mut self, stream: u32) -> Vec<u8> {
        while !self.ended.contains(&stream) {
            if self.frame().await.is_err() {
                break;
            }
        }
        self.received.get(&stream).cloned().unwrap_or_default()
    }

    /// Reads until a stream's data contains a text or ends, and returns all of it.
    pub async fn read_until(&mut self, stream: u32, text: &str) -> String {
        loop {
            let so_far = self
                .received
                .get(&stream)
                .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
                .unwrap_or_default();
            if so_far.contains(text) || self.ended.contains(&stream) || self.frame().await.is_err()
            {
                return so_far;
            }
        }
    }

    /// Reads until a stream has this many bytes or ends, and returns all of them.
    pub async fn read_bytes(&mut self, stream: u32, bytes: usize) -> Vec<u8> {
        while self.received.get(&stream).map_or(0, Vec::len) < bytes
            && !self.ended.contains(&stream)
        {
            if self.frame().await.is_err() {
                break;
            }
        }
        self.received.get(&stream).cloned().unwrap_or_default()
    }

    async fn frame(&mut self) -> io::Result<()> {
        let mut head = [0; 8];
        self.reader.read_exact(&mut head).await?;
        let [a, b, c, d, flags, length @ ..] = head;
        let mut payload =
            vec![0; u32::from_be_bytes([0, length[0], length[1], length[2]]) as usize];
        self.reader.read_exact(&mut payload).await?;
        if a & 0x80 == 0 {
            let stream = u32::from_be_bytes([a, b, c, d]);
            self.received.entry(stream).or_default().extend(payload);
            self.ended.extend((flags & FLAG_FIN != 0).then_some(stream));
        } else if u16::from_be_bytes([c, d]) == RST_STREAM {
            self.ended.extend(payload.first_chunk().map(|stream| u32::from_be_bytes(*stream)));
        }
        Ok(())
    }
}
