//! Data of EC2 that changes rarely, kept for a while.

use std::{future::Future, sync::Arc, time::Duration};

use kiyot_ec2::CallError;
use tokio::{sync::Mutex, time::Instant};

/// The pause after a failed reading while older data is used.
const RETRY_PAUSE: Duration = Duration::from_secs(60);

/// Data that is read again when it is too old. While EC2 does not answer, older data is used.
#[derive(Debug)]
pub(super) struct Cached<T> {
    /// The name of the data, for the log.
    name: &'static str,
    max_age: Duration,
    last: Mutex<Option<Last<T>>>,
}

#[derive(Debug)]
struct Last<T> {
    data: Arc<T>,
    /// The time from which on it is read again.
    until: Instant,
}

impl<T> Cached<T> {
    pub(super) fn new(name: &'static str, max_age: Duration) -> Self {
        Self { name, max_age, last: Mutex::new(None) }
    }

    /// Returns the data; an error only if there was none before.
    pub(super) async fn get<R>(&self, read: impl FnOnce() -> R) -> Result<Arc<T>, CallError>
    where
        R: Future<Output = Result<T, CallError>>,
    {
        let mut last = self.last.lock().await;
        let fresh = last.as_ref().filter(|last| Instant::now() < last.until);
        if let Some(last) = fresh {
            return Ok(Arc::clone(&last.data));
        }
        match (read().await, last.as_mut()) {
            (Ok(data), _) => {
                let data = Arc::new(data);
                let until = Instant::now() + self.max_age;
                *last = Some(Last { data: Arc::clone(&data), until });
                Ok(data)
            }
            (Err(error), Some(last)) => {
                let cause = &error as &dyn std::error::Error;
                tracing::warn!(data = self.name, error = cause, "older data of EC2 is used");
                last.until = Instant::now() + RETRY_PAUSE;
                Ok(Arc::clone(&last.data))
            }
            (Err(error), None) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use kiyot_ec2::Failure;

    use super::*;

    async fn read(cached: &Cached<u32>, answer: Option<u32>) -> Option<u32> {
        let error =
            || CallError { operation: "Describe", failure: Failure::NotSent(String::new()) };
        cached.get(|| async { answer.ok_or_else(error) }).await.ok().map(|data| *data)
    }

    #[tokio::test(start_paused = true)]
    async fn data_is_kept_for_its_age_and_through_failures() {
        let cached = Cached::new("data", Duration::from_secs(3600));
        assert_eq!(read(&cached, None).await, None);
        assert_eq!(read(&cached, Some(1)).await, Some(1));
        assert_eq!(read(&cached, Some(2)).await, Some(1));
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!(read(&cached, None).await, Some(1));
        assert_eq!(read(&cached, Some(3)).await, Some(1), "read again within the pause");
        tokio::time::advance(RETRY_PAUSE).await;
        assert_eq!(read(&cached, Some(3)).await, Some(3));
    }
}
