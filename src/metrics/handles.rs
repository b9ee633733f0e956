//! The handles of the parts below the CRI service.

use std::{fmt, sync::Arc};

use super::{
    ApiCalls, ByteCounter, IMAGE_BYTES, LINK_BYTES, LOG_BYTES, Launches, Page, Source, VOLUME_BYTES,
};

/// The handles into which a milpa backend counts.
#[derive(Debug, Clone, Default)]
pub struct Handles {
    /// Launches of its cells.
    pub launches: Arc<Launches>,
    /// Calls of the cloud's API.
    pub api_calls: Arc<ApiCalls>,
    /// Bytes to and from its cells.
    pub traffic: Traffic,
}

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

impl Handles {
    /// Returns the sources of all handles.
    pub fn sources(&self) -> Vec<Arc<dyn Source>> {
        vec![
            Arc::clone(&self.launches) as _,
            Arc::clone(&self.api_calls) as _,
            Arc::new(self.traffic.clone()),
        ]
    }
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
