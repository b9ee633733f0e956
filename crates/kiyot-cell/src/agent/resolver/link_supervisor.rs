//! Keeps the link to the DNS listeners up: a pod with CAP_NET_ADMIN can remove it.

use std::{
    io,
    sync::{Arc, Weak},
    time::Duration,
};

use kiyot_linux::netlink;
use rustix::{io::Errno, net::netdevice::name_to_index};
use tokio::{net::UnixDatagram, task::spawn_blocking, time::sleep};

use super::{DEVICE, Resolver};

/// Shortest interval between two checks, which bounds the cost of a pod that removes the link again
/// and again.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Watches link changes in this network namespace.
pub(super) struct LinkSupervisor {
    /// A netlink socket. It receives datagrams, and tokio has no type for netlink.
    changes: UnixDatagram,
    /// Recreates the link if it is absent. Returns whether it was absent.
    restore: fn(&Arc<Resolver>) -> io::Result<bool>,
}

impl LinkSupervisor {
    /// Subscribes to link changes. Must be called before the link is created, and within the tokio
    /// runtime.
    pub(super) fn new() -> io::Result<Self> {
        let socket = std::os::unix::net::UnixDatagram::from(netlink::link_changes()?);
        socket.set_nonblocking(true)?;
        Ok(Self { changes: UnixDatagram::from_std(socket)?, restore: restore_link })
    }

    /// Recreates the link whenever it is absent. A failed attempt is repeated even without a link
    /// change, because the end of its cause (for example EMFILE) may change no link.
    pub(super) async fn run(self, resolver: Weak<Resolver>) {
        let mut retry = false;
        loop {
            if !retry && let Err(error) = self.wait_for_change().await {
                tracing::warn!(%error, "link changes not received");
            }
            let Some(resolver) = resolver.upgrade() else { return };
            let restore = self.restore;
            let outcome = spawn_blocking(move || restore(&resolver)).await;
            retry = matches!(&outcome, Ok(Err(_)));
            match outcome {
                Ok(Ok(true)) => tracing::warn!("dns link removed, recreated"),
                Ok(Err(error)) => {
                    tracing::warn!(%error, "dns link not recreated, retrying")
                }
                Ok(Ok(false)) | Err(_) => {}
            }
            sleep(CHECK_INTERVAL).await;
        }
    }

    /// Waits for a link change, and discards all queued messages.
    async fn wait_for_change(&self) -> io::Result<()> {
        let mut changed = false;
        while !changed {
            self.changes.readable().await?;
            loop {
                match self.changes.try_recv(&mut [0_u8; 4096]) {
                    Ok(_) => changed = true,
                    // An overflow of the socket buffer means changes too.
                    Err(error) if error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error()) => {
                        changed = true
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

/// Recreates the link if it is absent. Returns whether it was absent.
fn restore_link(resolver: &Arc<Resolver>) -> io::Result<bool> {
    match name_to_index(netlink::route_socket()?, DEVICE) {
        Err(Errno::NODEV) => resolver.reopen().map(|()| true),
        Err(error) => Err(error.into()),
        Ok(_) => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tokio::time::Instant;

    use super::*;

    /// Verifies N13.
    #[tokio::test(start_paused = true)]
    async fn removed_link_is_restored_within_a_second_and_retried_each_second() {
        static LOOKS: Mutex<Vec<Instant>> = Mutex::new(Vec::new());
        static FAILURES_LEFT: Mutex<usize> = Mutex::new(2);
        let restore = |_: &Arc<Resolver>| {
            LOOKS.lock().unwrap().push(Instant::now());
            let mut left = FAILURES_LEFT.lock().unwrap();
            let fails = *left > 0;
            *left = left.saturating_sub(1);
            if fails { Err(io::Error::from(Errno::MFILE)) } else { Ok(true) }
        };
        let (changes, kernel) = UnixDatagram::pair().unwrap();
        let resolver = Arc::new(Resolver::new(true));
        let keeping =
            tokio::spawn(LinkSupervisor { changes, restore }.run(Arc::downgrade(&resolver)));
        sleep(100 * CHECK_INTERVAL).await;
        // Returns when the link was checked after a removal, in tenths of a second.
        let remove = async |wait: Duration| {
            let removed = Instant::now();
            kernel.send(b"link deleted").await.unwrap();
            sleep(wait).await;
            let looks = std::mem::take(&mut *LOOKS.lock().unwrap());
            looks.iter().map(|at| (*at - removed).as_millis() / 100).collect::<Vec<_>>()
        };
        let retried = remove(Duration::from_millis(2_500)).await;
        assert_eq!(retried, [0, 10, 20], "until it succeeds");
        // This removal is half a second after the last check.
        let again = remove(100 * CHECK_INTERVAL).await;
        assert_eq!(again, [5], "once within a second");
        keeping.abort();
    }
}
