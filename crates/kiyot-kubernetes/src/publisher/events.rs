//! Events of pods.

use std::time::Instant;

use super::Task;
use crate::{call::Call, failure::Failure, recorder::Record};

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
        let is_denial_awaited = self.denials.is_awaited(Instant::now());
        let outcome = client.call(&call).await;
        self.pace.wrote(Instant::now());
        match outcome {
            Ok(_) => {
                self.recorder.written(&record);
                self.reported_in(namespace);
            }
            Err(Failure::NotFound(_)) if record.is_known() => self.recorder.expired(&record),
            // The namespace has ended with the pod, or the response to an earlier create was lost.
            Err(Failure::NotFound(_) | Failure::Conflict(_) | Failure::Invalid(_)) => {
                self.recorder.refused(&record);
            }
            // A namespace that ends refuses new objects with the status of a denial.
            Err(Failure::Denied(reason)) if reason.contains("being terminated") => {
                self.recorder.refused(&record);
            }
            Err(failure) if is_denial(&failure) => {
                self.denied(&record, &failure, is_denial_awaited);
            }
            Err(failure) => {
                if self.recorder.failed(&record) {
                    self.counter.event_dropped();
                }
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Notes that an event was denied. The event is dropped, like client-go does, so that a
    /// namespace that accepts no events does not hold up others.
    fn denied(&mut self, record: &Record, failure: &Failure, is_awaited: bool) {
        self.denials.denied(record.namespace(), Instant::now());
        if is_awaited {
            self.recorder.refused(record);
            self.counter.event_dropped();
            return;
        }
        // The credentials may have expired: the event is tried again once with current credentials.
        self.connection.failed(failure);
        if self.denials.pause(failure, Instant::now(), fastrand::f64()) {
            tracing::warn!(
                namespace = record.namespace(),
                error = %failure,
                "{}, pods are not affected",
                self.events_lane.meaning
            );
        }
    }

    /// Notes that an event of a namespace was reported.
    fn reported_in(&mut self, namespace: &str) {
        if self.denials.written(namespace, Instant::now()) {
            tracing::info!(
                until_now = self.events_lane.meaning,
                "calls of the Kubernetes API succeed again"
            );
        }
    }
}

/// Returns whether a failure may be limited to a namespace: a quota, a right or a webhook.
fn is_denial(failure: &Failure) -> bool {
    match failure {
        Failure::Denied(_) | Failure::Unauthenticated(_) => true,
        Failure::Server { message, .. } => message.contains("failed calling webhook"),
        _ => false,
    }
}
