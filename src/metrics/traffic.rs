//! Bytes to and from cells.

use std::fmt;

use super::{ByteCounter, IMAGE_BYTES, LINK_BYTES, LOG_BYTES, Page, Source, VOLUME_BYTES};

/// Bytes to and from cells.
#[derive(Debug, Clone, Default)]
pub struct Traffic {
    /// Received on all connections of the link, with TLS.
    pub link_received: ByteCounter,
    /// Sent on all connections of the link, with TLS.
    pub link_sent: ByteCounter,
    /// Content of container logs.
    pub logs: ByteCounter,
    /// Content of files of volumes.
    pub volumes: ByteCounter,
    /// Content of images that are copied from the node.
    pub images: ByteCounter,
}

impl Source for Traffic {
    fn write(&self, page: &mut Page<'_>) -> fmt::Result {
        let mut link = page.family(&LINK_BYTES)?;
        link.counter(&["received"], self.link_received.get())?;
        link.counter(&["sent"], self.link_sent.get())?;
        page.family(&LOG_BYTES)?.counter(&[], self.logs.get())?;
        page.family(&VOLUME_BYTES)?.counter(&[], self.volumes.get())?;
        page.family(&IMAGE_BYTES)?.counter(&[], self.images.get())
    }
}
