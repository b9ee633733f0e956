//! Events of pods.

use std::time::Instant;

use super::Task;
use crate::{call::Call, failure::Failure};

impl Task {
    /// Writes the next event.
    pub(super) async fn report(&mut self) -> Result<(), Failure> {
        let Some(record) = self.recorder.next_record() else { return Ok(()) };
        let client = self.connection.client().await?;
        let (namespace, name) = (record.namespace(), record.name());
        let call = if record.is_known() {
            Call::patch_event(namespace, name, record.patch())
        } else {
            Call::create_event(namespace, self.recorder.object(&record))
        };
        let outcome = client.call(&call).await;
        self.pace.wrote(Instant::now());
        match outcome {
            Ok(_) => self.recorder.written(&record),
            Err(Failure::NotFound(_)) if record.is_known() => self.recorder.expired(&record),
            // The namespace has ended with the pod, or the response to an earlier call was lost.
            Err(Failure::NotFound(_) | Failure::Conflict(_) | Failure::Invalid(_)) => {
                self.recorder.refused(&record);
            }
            // A namespace that ends refuses new objects as a denial does.
            Err(Failure::Denied(reason)) if reason.contains("being terminated") => {
                self.recorder.refused(&record);
            }
            Err(failure) => return Err(failure),
        }
        Ok(())
    }
}
