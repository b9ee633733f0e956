//! Closing of an instance's metadata service at EC2 before a pod is bound.
//!
//! A pod with `NET_RAW` can bypass the agent's route with its own frames, but not the option of the
//! instance.

use std::{sync::Arc, time::Duration};

use kiyot_engine::provider::{ErrorClass, InstanceId, ProviderError};
use tokio::time::sleep;

use crate::{CallError, Ec2Api, MetadataOptionsState, provider::error_codes::classify};

/// Bounds the calls for an instance.
const MAX_CALLS: u32 = 6;
/// The pause after the first failed call, which doubles.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Closes the metadata service of instances.
#[derive(Debug)]
pub(super) struct MetadataFence {
    api: Arc<dyn Ec2Api>,
}

impl MetadataFence {
    pub(super) fn new(api: Arc<dyn Ec2Api>) -> Self {
        Self { api }
    }

    /// Closes the metadata service of an instance. Closing is idempotent, so throttled and
    /// unanswered calls are repeated.
    pub(super) async fn close(&self, instance: &InstanceId) -> Result<(), ProviderError> {
        let mut pause = FIRST_PAUSE;
        let mut calls = 0;
        let error = loop {
            match self.api.disable_metadata(&instance.0).await {
                Ok(state) => {
                    let is_applied = state == MetadataOptionsState::Applied;
                    tracing::debug!(%instance, is_applied, "metadata service closed");
                    return Ok(());
                }
                Err(error) => {
                    calls += 1;
                    if calls >= MAX_CALLS || !may_succeed(&error) {
                        break error;
                    }
                    tracing::debug!(%instance, %error, "metadata service not closed yet");
                    sleep(pause).await;
                    pause *= 2;
                }
            }
        };
        let class = classify(&error).0;
        let doing = format!("close the metadata service of instance {instance}");
        Err(ProviderError::new(class, doing, error))
    }
}

/// Returns whether a repeated call may succeed. EC2 may not know a new instance yet.
fn may_succeed(error: &CallError) -> bool {
    matches!(
        classify(error).0,
        ErrorClass::Throttled
            | ErrorClass::Transient
            | ErrorClass::Unanswered
            | ErrorClass::NotFound
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use crate::Failure;
    use tokio::time::Instant;

    use super::{super::fake_api::FakeApi, *};

    /// Closes a metadata service while calls fail, and returns the number of calls and the outcome.
    async fn close(failures: &[&str]) -> (usize, Result<(), ErrorClass>) {
        let refused =
            |code: &&str| Failure::Refused { code: Some((*code).into()), message: "".into() };
        let metadata_failures = Mutex::new(failures.iter().map(refused).collect());
        let api = Arc::new(FakeApi { metadata_failures, ..FakeApi::default() });
        let fence = MetadataFence::new(Arc::clone(&api) as _);
        let closed = fence.close(&InstanceId("i-1".into())).await;
        (api.metadata_calls.lock().unwrap().len(), closed.map_err(|error| error.class))
    }

    #[tokio::test(start_paused = true)]
    async fn throttled_call_is_repeated_and_bounded() {
        assert_eq!(close(&[]).await, (1, Ok(())));
        let passing = ["RequestLimitExceeded", "InvalidInstanceID.NotFound", "Unavailable"];
        assert_eq!(close(&passing).await, (4, Ok(())));
        let began = Instant::now();
        let refused = (MAX_CALLS as usize, Err(ErrorClass::Throttled));
        assert_eq!(close(&["RequestLimitExceeded"; 50]).await, refused);
        assert_eq!(began.elapsed(), Duration::from_secs(1 + 2 + 4 + 8 + 16));
    }

    #[tokio::test(start_paused = true)]
    async fn refused_call_fails_at_once() {
        assert_eq!(close(&["UnauthorizedOperation"]).await, (1, Err(ErrorClass::Auth)));
        assert_eq!(close(&["UnsupportedOperation"]).await, (1, Err(ErrorClass::Invalid)));
    }
}
