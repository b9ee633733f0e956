//! Sees to it that the link to the name servers is there: a pod that may administer its network can
//! remove it.

use std::{
    io,
    sync::{Arc, Weak},
    time::Duration,
};

use rustix::{io::Errno, net::netdevice::name_to_index};
use tokio::{net::UnixDatagram, task::spawn_blocking, time::sleep};

use super::{DEVICE, Resolver};
use crate::netlink;

/// The pause between two looks, however often links change: a pod that removes the link again and
/// again costs no more than that.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Hears of every change of a link in this network namespace.
pub(super) struct LinkSupervisor {
    /// Messages of netlink are received like any datagrams; tokio has no type of its own for them.
    changes: UnixDatagram,
    /// Makes the link if it is gone. Whether it was.
    restore: fn(&Arc<Resolver>) -> io::Result<bool>,
}

impl LinkSupervisor {
    /// To be made before the link is. To be called with_timeout the runtime.
    pub(super) fn new() -> io::Result<Self> {
        let socket = std::os::unix::net::UnixDatagram::from(netlink::link_changes()?);
        socket.set_nonblocking(true)?;
        Ok(Self { changes: UnixDatagram::from_std(socket)?, restore: restore_link })
    }

    /// Makes the link again whenever it is gone. What has failed is tried again: if it was for want
    /// of an open file, say, no change of a link would tell of it.
    pub(super) async fn run(self, resolver: Weak<Resolver>) {
        let mut has_failed = false;
        loop {
            if !has_failed && let Err(error) = self.change().await {
                tracing::warn!(%error, "changes of links can't be heard of");
            }
            let Some(resolver) = resolver.upgrade() else { return };
            let restore = self.restore;
            let outcome = spawn_blocking(move || restore(&resolver)).await;
            has_failed = matches!(&outcome, Ok(Err(_)));
            match outcome {
                Ok(Ok(true)) => tracing::warn!(
                    "the link to the pod's name servers was removed, and is made again"
                ),
                Ok(Err(error)) => {
                    tracing::warn!(%error, "the link to the pod's name servers can't be made again yet")
                }
                Ok(Ok(false)) | Err(_) => {}
            }
            sleep(CHECK_INTERVAL).await;
        }
    }

    /// Waits for a change, and forgets all that have been heard of.
    async fn change(&self) -> io::Result<()> {
        let mut heard = false;
        while !heard {
            self.changes.readable().await?;
            loop {
                match self.changes.try_recv(&mut [0_u8; 4096]) {
                    Ok(_) => heard = true,
                    // More changes than the kernel keeps are changes too.
                    Err(error) if error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error()) => {
                        heard = true
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

/// Makes the link if it is gone. Whether it was.
fn restore_link(resolver: &Arc<Resolver>) -> io::Result<bool> {
    match name_to_index(netlink::socket()?, DEVICE) {
        Err(Errno::NODEV) => resolver.reopen().map(|()| true),
        Err(error) => Err(error.into()),
        Ok(_) => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Verifies N13, Y102.
    #[tokio::test(start_paused = true)]
    async fn what_could_not_be_made_is_tried_again_without_another_change() {
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
        assert_eq!(LOOKS.load(Ordering::SeqCst), 3, "until it is made, and then no more");
        keeping.abort();
    }
}
