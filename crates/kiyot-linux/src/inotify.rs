//! Asynchronous reader of inotify events (inotify(7)).

use std::{io, mem::MaybeUninit, os::fd::OwnedFd, path::Path};

use rustix::{fs::inotify, io::Errno};
use tokio::io::{Interest, unix::AsyncFd};

pub use rustix::fs::inotify::{ReadFlags, WatchFlags};

/// Size of the buffer for events. An event with the longest name has 272 bytes.
const BUFFER_BYTES: usize = 4 * 1024;

/// An inotify instance. The kernel allows a user 128 of them by default.
#[derive(Debug)]
pub struct Inotify(AsyncFd<OwnedFd>);

impl Inotify {
    /// Creates an instance. Must be called within a tokio runtime.
    #[expect(
        deprecated,
        reason = "its replacement is unsafe; an OwnedFd has the I/O safety that it asks for"
    )]
    pub fn new() -> io::Result<Self> {
        let fd = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
        AsyncFd::with_interest(fd, Interest::READABLE).map(Self)
    }

    /// Watches a path and returns the watch descriptor: the existing one if the file is already
    /// watched.
    pub fn add(&self, path: &Path, flags: WatchFlags) -> io::Result<i32> {
        Ok(inotify::add_watch(self.0.get_ref(), path, flags)?)
    }

    /// Removes a watch. The kernel removes the watch of a deleted file itself.
    pub fn remove(&self, watch: i32) -> io::Result<()> {
        Ok(inotify::remove_watch(self.0.get_ref(), watch)?)
    }

    /// Waits for events, and passes the watch descriptor and flags of each queued event to
    /// `handle`.
    pub async fn read(&self, mut handle: impl FnMut(i32, ReadFlags)) -> io::Result<()> {
        let mut ready = self.0.readable().await?;
        let mut buffer = [MaybeUninit::uninit(); BUFFER_BYTES];
        let mut reader = inotify::Reader::new(self.0.get_ref(), &mut buffer);
        loop {
            match reader.next() {
                Ok(event) => handle(event.wd(), event.events()),
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) => {
                    // Keeps the readiness of events that arrived after `readable`.
                    ready.clear_ready();
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn created_file_and_deleted_directory_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let inotify = Inotify::new().unwrap();
        let flags = WatchFlags::CREATE | WatchFlags::DELETE_SELF;
        let watch = inotify.add(dir.path(), flags).unwrap();
        assert_eq!(inotify.add(dir.path(), flags).unwrap(), watch);
        std::fs::write(dir.path().join("file"), "").unwrap();
        let mut seen = ReadFlags::empty();
        inotify
            .read(|descriptor, events| {
                assert_eq!(descriptor, watch);
                seen |= events;
            })
            .await
            .unwrap();
        assert_eq!(seen, ReadFlags::CREATE);
        drop(dir);
        while !seen.contains(ReadFlags::DELETE_SELF) {
            inotify.read(|_, events| seen |= events).await.unwrap();
        }
    }
}
