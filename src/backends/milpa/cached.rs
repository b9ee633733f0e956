//! Data of another service, kept for a while.

use std::{error::Error, future::Future, sync::Arc, time::Duration};

use tokio::{sync::Mutex, time::Instant};

/// Caches data that is read again when it is too old. While a reading fails, the previous data is
/// used. Callers wait for a reading that is going on, and share its outcome.
#[derive(Debug)]
pub(crate) struct Cached<T> {
    /// The name of the data, for the log.
    name: &'static str,
    max_age: Duration,
    /// The pause after a failed reading while previous data is used.
    retry_pause: Duration,
    last: Mutex<Option<Last<T>>>,
}

#[derive(Debug)]
struct Last<T> {
    data: Arc<T>,
    /// The time from which on it is read again.
    until: Instant,
}

impl<T> Cached<T> {
    pub(crate) fn new(name: &'static str, max_age: Duration, retry_pause: Duration) -> Self {
        Self { name, max_age, retry_pause, last: Mutex::new(None) }
    }

    /// Returns the data; an error only if there was none before.
    pub(crate) async fn get<R, E>(&self, read: impl FnOnce() -> R) -> Result<Arc<T>, E>
    where
        R: Future<Output = Result<T, E>>,
        E: Error + 'static,
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
                let cause = &error as &dyn Error;
                tracing::warn!(data = self.name, error = cause, "not read, previous data is used");
                last.until = Instant::now() + self.retry_pause;
                Ok(Arc::clone(&last.data))
            }
            (Err(error), None) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use proptest::{collection::vec, option, prelude::*};

    use super::*;

    const MAX_AGE: Duration = Duration::from_secs(3600);
    const RETRY_PAUSE: Duration = Duration::from_secs(60);

    /// A failed reading.
    #[derive(Debug)]
    struct NotRead;

    impl fmt::Display for NotRead {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("not read")
        }
    }

    impl Error for NotRead {}

    fn cached() -> Cached<u32> {
        Cached::new("data", MAX_AGE, RETRY_PAUSE)
    }

    /// Returns the data, and true if it was read.
    async fn read(cached: &Cached<u32>, answer: Option<u32>) -> (Option<u32>, bool) {
        let mut is_read = false;
        let reading = || {
            is_read = true;
            async { answer.ok_or(NotRead) }
        };
        let data = cached.get(reading).await.ok().map(|data| *data);
        (data, is_read)
    }

    #[tokio::test(start_paused = true)]
    async fn data_is_kept_for_its_age_and_through_failures() {
        let cached = cached();
        assert_eq!(read(&cached, None).await, (None, true));
        assert_eq!(read(&cached, Some(1)).await, (Some(1), true));
        assert_eq!(read(&cached, Some(2)).await, (Some(1), false));
        tokio::time::advance(MAX_AGE).await;
        assert_eq!(read(&cached, None).await, (Some(1), true));
        assert_eq!(read(&cached, Some(3)).await, (Some(1), false), "read again within the pause");
        tokio::time::advance(RETRY_PAUSE).await;
        assert_eq!(read(&cached, Some(3)).await, (Some(3), true));
    }

    proptest! {
        #[test]
        fn data_is_the_last_that_was_read(
            steps in vec((0..5000_u64, option::of(0..9_u32)), 1..40),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_time()
                .start_paused(true)
                .build()
                .unwrap();
            runtime.block_on(async {
                let (cached, mut last, mut due) = (cached(), None, Instant::now());
                for (seconds, answer) in steps {
                    tokio::time::advance(Duration::from_secs(seconds)).await;
                    let is_due = last.is_none() || Instant::now() >= due;
                    if is_due {
                        let kept = if answer.is_some() { MAX_AGE } else { RETRY_PAUSE };
                        (last, due) = (answer.or(last), Instant::now() + kept);
                    }
                    assert_eq!(read(&cached, answer).await, (last, is_due));
                }
            });
        }
    }
}
