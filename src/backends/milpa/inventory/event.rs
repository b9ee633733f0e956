//! Recent events.

use std::sync::Arc;

use futures::{StreamExt, stream::BoxStream};
use kiyot_proto::admin;
use tokio::sync::broadcast;
use tokio_stream::wrappers::BroadcastStream;

use super::Inventory;
use crate::backends::{
    BackendName,
    milpa::cells::{Occurrence, Subject},
};

impl Inventory {
    /// Returns the kept events, and a stream of all later events. A slow reader misses events.
    pub fn events(&self) -> (Vec<admin::Event>, BoxStream<'static, admin::Event>) {
        let (kept, new) = self.cells.history().follow();
        let kept = kept.iter().map(|event| message(event, &self.backend)).collect();
        (kept, self.stream(new))
    }

    /// Returns a stream of all later events.
    pub fn later_events(&self) -> BoxStream<'static, admin::Event> {
        let (_, new) = self.cells.history().follow();
        self.stream(new)
    }

    fn stream(
        &self,
        new: broadcast::Receiver<Arc<Occurrence>>,
    ) -> BoxStream<'static, admin::Event> {
        let backend = self.backend.clone();
        let new = BroadcastStream::new(new).filter_map(move |event: Result<Arc<Occurrence>, _>| {
            let message = event.ok().map(|event| message(&event, &backend));
            async move { message }
        });
        new.boxed()
    }
}

fn message(event: &Occurrence, backend: &BackendName) -> admin::Event {
    let (kind, name, pod_uid) = match &event.subject {
        Subject::Cell(cell) => ("Cell", cell.to_string(), String::new()),
        Subject::Pod { name, uid } => ("Pod", name.clone(), uid.clone()),
        Subject::Backend => ("Backend", backend.to_string(), String::new()),
    };
    admin::Event {
        number: event.number,
        unix_nanos: event.unix_nanos,
        name,
        kind: kind.to_owned(),
        status: event.status.to_owned(),
        source: backend.to_string(),
        message: event.message.clone(),
        pod_uid,
    }
}
