//! Cache for data of another service.

use std::{
    error::Error,
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{sync::Mutex, time::Instant};

/// Caches data, and reads it again when it is too old. While reading fails, the previous data is
/// used. Callers wait for a running reading, and share its result or its error.
#[derive(Debug)]
pub struct Cached<T, E> {
    /// The name of the data, for the log.
    name: &'static str,
    max_age: Duration,
    /// Pause after a failed reading while previous data is used, and shortest time between the
    /// reading of data and its next reading after [`Self::expire`].
    retry_pause: Duration,
    /// Returns the longer pause after an error, if the error needs one.
    longer_pause: fn(&E) -> Option<Duration>,
    /// The number of readings that have ended.
    ended: AtomicU64,
    state: Mutex<State<T, E>>,
}

/// Substitute for data that was never read, and its meaning for the log.
type Substitute<T> = (fn() -> T, &'static str);

#[derive(Debug)]
struct State<T, E> {
    last: Option<Last<T>>,
    /// The error of the last reading, with its number, while there is no data.
    failure: Option<(u64, E)>,
    /// True if the last reading failed and this was logged.
    is_logged: bool,
}

#[derive(Debug)]
struct Last<T> {
    data: Arc<T>,
    /// Time from which the data is read again.
    until: Instant,
    /// Time before which even expired data is not read again.
    pause_end: Instant,
}

impl<T, E: Error + Clone + 'static> Cached<T, E> {
    /// Returns a cache without data. `name` is the name in log lines.
    pub fn new(name: &'static str, max_age: Duration, retry_pause: Duration) -> Self {
        let state = Mutex::new(State { last: None, failure: None, is_logged: false });
        let (ended, longer_pause) = (AtomicU64::new(0), |_: &E| None);
        Self { name, max_age, retry_pause, longer_pause, ended, state }
    }

    /// Pauses for longer after errors for which `longer_pause` returns a time.
    pub fn with_longer_pause(self, longer_pause: fn(&E) -> Option<Duration>) -> Self {
        Self { longer_pause, ..self }
    }

    /// Returns the data of the last reading, at any age.
    pub async fn last(&self) -> Option<Arc<T>> {
        self.state.lock().await.last.as_ref().map(|last| Arc::clone(&last.data))
    }

    /// Returns the data that was read last, however old; `None` during a reading.
    pub fn peek(&self) -> Option<Arc<T>> {
        self.state.try_lock().ok()?.last.as_ref().map(|last| Arc::clone(&last.data))
    }

    /// Makes the next use read the data again, but not within the pause after the last reading.
    pub fn expire(&self) {
        // Only a reading holds the lock for long, and its data will be new.
        if let Ok(mut state) = self.state.try_lock()
            && let Some(last) = &mut state.last
        {
            last.until = last.pause_end.min(last.until);
        }
    }

    /// Returns the data. Fails only if no data was ever read.
    pub async fn get<R>(&self, read: impl FnOnce() -> R) -> Result<Arc<T>, E>
    where
        R: Future<Output = Result<T, E>>,
    {
        self.get_or(None, read).await
    }

    /// Returns the data, or the default if no data was ever read. The default is also used during
    /// the pause after a failed reading. The log has its meaning.
    pub async fn get_or_default<R>(&self, meaning: &'static str, read: impl FnOnce() -> R) -> Arc<T>
    where
        T: Default,
        R: Future<Output = Result<T, E>>,
    {
        self.get_or(Some((T::default, meaning)), read).await.unwrap_or_default()
    }

    async fn get_or<R>(
        &self,
        default: Option<Substitute<T>>,
        read: impl FnOnce() -> R,
    ) -> Result<Arc<T>, E>
    where
        R: Future<Output = Result<T, E>>,
    {
        let arrived = self.ended.load(Ordering::Acquire);
        let mut state = self.state.lock().await;
        let State { last, failure, is_logged } = &mut *state;
        let fresh = last.as_ref().filter(|last| Instant::now() < last.until);
        if let Some(last) = fresh {
            return Ok(Arc::clone(&last.data));
        }
        // This reading failed while the caller waited: another reading would take as long.
        if let Some((_, error)) = failure.as_ref().filter(|(number, _)| *number > arrived) {
            return Err(error.clone());
        }
        let outcome = read().await;
        let now = Instant::now();
        let number = self.ended.fetch_add(1, Ordering::AcqRel) + 1;
        *failure = None;
        let error = match outcome {
            Ok(data) => {
                let data = Arc::new(data);
                let (until, pause_end) = (now + self.max_age, now + self.retry_pause);
                *last = Some(Last { data: Arc::clone(&data), until, pause_end });
                *is_logged = false;
                return Ok(data);
            }
            Err(error) => error,
        };
        let (data, meaning) = match (last.as_ref(), default) {
            (Some(last), _) => (Arc::clone(&last.data), "previous data is used"),
            (None, Some((default, meaning))) => (Arc::new(default()), meaning),
            (None, None) => {
                *failure = Some((number, error.clone()));
                return Err(error);
            }
        };
        if !std::mem::replace(is_logged, true) {
            let error = &error as &dyn Error;
            tracing::warn!(data = self.name, error, "not read, {meaning}");
        }
        let pause_end = now + (self.longer_pause)(&error).unwrap_or(self.retry_pause);
        *last = Some(Last { data: Arc::clone(&data), until: pause_end, pause_end });
        Ok(data)
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
    #[derive(Debug, Clone)]
    struct NotRead;

    impl fmt::Display for NotRead {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("not read")
        }
    }

    impl Error for NotRead {}

    fn cached() -> Cached<u32, NotRead> {
        Cached::new("data", MAX_AGE, RETRY_PAUSE)
    }

    /// Returns the data, and whether it was read.
    async fn read(cached: &Cached<u32, NotRead>, answer: Option<u32>) -> (Option<u32>, bool) {
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

    #[tokio::test(start_paused = true)]
    async fn expired_data_is_read_again_but_not_within_the_pause() {
        let cached = cached();
        cached.expire();
        assert_eq!(read(&cached, Some(1)).await, (Some(1), true));
        cached.expire();
        assert_eq!(read(&cached, Some(2)).await, (Some(1), false), "read within the pause");
        tokio::time::advance(RETRY_PAUSE).await;
        assert_eq!(read(&cached, None).await, (Some(1), true));
        cached.expire();
        assert_eq!(read(&cached, Some(2)).await, (Some(1), false), "read within the pause");
        tokio::time::advance(RETRY_PAUSE).await;
        assert_eq!(read(&cached, Some(2)).await, (Some(2), true));
        tokio::time::advance(RETRY_PAUSE).await;
        assert_eq!(read(&cached, Some(3)).await, (Some(2), false), "the data has not expired");
        cached.expire();
        assert_eq!(read(&cached, Some(3)).await, (Some(3), true));
    }

    #[tokio::test(start_paused = true)]
    async fn default_replaces_data_that_was_never_read_and_is_kept_for_a_pause() {
        const LONGER: Duration = Duration::from_secs(1000);
        let read = async |cached: &Cached<u32, NotRead>, answer: Option<u32>| {
            let mut is_read = false;
            let reading = || {
                is_read = true;
                async { answer.ok_or(NotRead) }
            };
            (*cached.get_or_default("default is used", reading).await, is_read)
        };
        for (cached, pause) in
            [(cached(), RETRY_PAUSE), (cached().with_longer_pause(|_| Some(LONGER)), LONGER)]
        {
            assert_eq!(read(&cached, None).await, (0, true));
            tokio::time::advance(pause - Duration::from_secs(1)).await;
            assert_eq!(read(&cached, Some(1)).await, (0, false), "read within the pause");
            tokio::time::advance(Duration::from_secs(1)).await;
            assert_eq!(read(&cached, Some(1)).await, (1, true));
            tokio::time::advance(MAX_AGE).await;
            assert_eq!(read(&cached, None).await, (1, true), "previous data is used");
            assert_eq!(read(&cached, Some(2)).await, (1, false), "read within the pause");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failure_is_shared_by_all_callers_that_waited_for_the_reading() {
        const SLOW: Duration = Duration::from_secs(10);
        let (cached, began) = (cached(), Instant::now());
        let readings = AtomicU64::new(0);
        let failing = || {
            cached.get(async || {
                readings.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(SLOW).await;
                Err(NotRead)
            })
        };
        let outcomes = futures::future::join_all((0..5).map(|_| failing())).await;
        assert!(outcomes.iter().all(Result::is_err));
        assert_eq!((began.elapsed(), readings.load(Ordering::Relaxed)), (SLOW, 1));
        // A later caller reads again.
        failing().await.unwrap_err();
        assert_eq!((began.elapsed(), readings.load(Ordering::Relaxed)), (SLOW * 2, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn dropped_reading_is_repeated_by_a_waiting_caller() {
        let cached = cached();
        let dropped = cached.get(std::future::pending);
        let waiting = read(&cached, Some(1));
        tokio::pin!(waiting);
        {
            tokio::pin!(dropped);
            assert!(futures::poll!(dropped.as_mut()).is_pending());
            assert!(futures::poll!(waiting.as_mut()).is_pending());
        }
        assert_eq!(waiting.await, (Some(1), true));
    }

    proptest! {
        #[test]
        fn data_is_of_the_last_reading(
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
