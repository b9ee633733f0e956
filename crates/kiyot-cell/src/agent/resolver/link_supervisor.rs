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
    /// Recreates the link if it is absent. Returns true if it was.
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

    /// Recreates the link whenever it is absent. A failed attempt is repeated without a link
    /// change, as its cause (for example EMFILE) may cause none.
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

/// Recreates the link if it is absent. Returns true if it was.
fn restore_link(resolver: &Arc<Resolver>) -> io::Result<bool> {
    match name_to_index(netlink::route_socket()?, DEVICE) {
        Err(Errno::NODEV) => resolver.reopen().map(|()| true),
        Err(error) => Err(error.into()),
        Ok(_) => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Verifies N13.
    #[tokio::test(start_paused = true)]
    async fn failed_link_restore_is_retried_without_a_link_change() {
        static LOOKS: AtomicUsize = AtomicUsize::new(0);
        let restore = |_: &Arc<Resolver>| match LOOKS.fetch_add(1, Ordering::SeqCst) {
            0 | 1 => Err(io::Error::from(Errno::MFILE)),
            _ => Ok(true),
        };
        let (changes, kernel) = UnixDatagram::pair().unwrap();
        let resolver = Arc::new(Resolver::new(true));
        let keeping =
            tokio::spawn(LinkSupervisor { changes, restore }.run(Arc::downgrade(&resolver)));
        kernel.send(b"a link is gone").await.unwrap();
        sleep(100 * CHECK_INTERVAL).await;
        assert_eq!(LOOKS.load(Ordering::SeqCst), 3, "until it succeeds, and not after");
        keeping.abort();
    }
}
