//! Work that goes on when its caller is gone, and that a retry joins.

use std::{
    collections::HashMap,
    fmt::Debug,
    future::Future,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::Status;

/// An answer, or nothing yet.
type Landed<T> = Option<Result<T, Status>>;

/// What is being done, by key.
#[derive(Debug)]
pub(super) struct Flights<K, Q, T> {
    flights: Mutex<HashMap<K, Flight<Q, T>>>,
}

#[derive(Debug)]
struct Flight<Q, T> {
    request: Arc<Q>,
    landed: watch::Receiver<Landed<T>>,
    number: u64,
}

/// One caller's part in a flight: while it is held, somebody waits.
#[derive(Debug)]
pub(super) struct Seat<T>(watch::Receiver<Landed<T>>);

/// What a caller finds.
#[derive(Debug)]
pub(super) enum Boarded<T> {
    /// A flight that it has begun or joined.
    Seat(Seat<T>),
    /// The same key is in the air with another request.
    Other(Seat<T>),
}

impl<K, Q, T> Flights<K, Q, T>
where
    K: Clone + Eq + Hash + Debug + Send + 'static,
    Q: Send + Sync + 'static,
    T: Clone + Debug + Send + Sync + 'static,
{
    /// None.
    pub(super) fn new() -> Self {
        Self { flights: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<K, Flight<Q, T>>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether something is being done of this key. What was done before is done.
    pub(super) fn has(&self, key: &K) -> bool {
        self.lock().contains_key(key)
    }

    /// Joins the flight of a key, or begins it. `work` runs in a task of `tasks` to its end,
    /// whoever still waits.
    pub(super) fn board<W, F>(
        self: &Arc<Self>,
        tasks: &TaskTracker,
        stop: &CancellationToken,
        key: K,
        request: Q,
        same: impl FnOnce(&Q, &Q) -> bool,
        work: F,
    ) -> Boarded<T>
    where
        F: FnOnce(Arc<Q>) -> W,
        W: Future<Output = Result<T, Status>> + Send + 'static,
    {
        let mut flights = self.lock();
        if let Some(flight) = flights.get(&key) {
            let seat = Seat(flight.landed.clone());
            return if same(&flight.request, &request) {
                Boarded::Seat(seat)
            } else {
                Boarded::Other(seat)
            };
        }
        let (sender, landed) = watch::channel(None);
        let request = Arc::new(request);
        let number = NUMBERS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let seat = Seat(landed.clone());
        flights.insert(key.clone(), Flight { request: Arc::clone(&request), landed, number });
        drop(flights);
        let work = work(request);
        let (all, stop) = (Arc::clone(self), stop.clone());
        tasks.spawn(async move {
            let entry = Entry { all, key, number };
            let result = stop.run_until_cancelled(work).await;
            let result =
                result.unwrap_or_else(|| Err(Status::unavailable("the daemon is stopping")));
            drop(entry);
            sender.send_replace(Some(result));
        });
        Boarded::Seat(seat)
    }
}

static NUMBERS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// Takes a flight out of the list, whatever ends it.
struct Entry<K: Eq + Hash, Q, T> {
    all: Arc<Flights<K, Q, T>>,
    key: K,
    number: u64,
}

impl<K: Eq + Hash, Q, T> Drop for Entry<K, Q, T> {
    fn drop(&mut self) {
        let mut flights = self.all.flights.lock().unwrap_or_else(PoisonError::into_inner);
        if flights.get(&self.key).is_some_and(|flight| flight.number == self.number) {
            flights.remove(&self.key);
        }
    }
}

impl<T: Clone> Seat<T> {
    /// The answer, unless the caller's time is over before.
    pub(super) async fn wait(mut self, deadline: Option<Instant>, what: &str) -> Result<T, Status> {
        let landed = async {
            match self.0.wait_for(Option::is_some).await {
                Ok(landed) => landed
                    .clone()
                    .unwrap_or_else(|| Err(Status::internal(format!("{what}: no answer")))),
                Err(_) => {
                    Err(Status::internal(format!("{what}: its task ended without an answer")))
                }
            }
        };
        match deadline {
            None => landed.await,
            Some(deadline) => {
                tokio::time::timeout_at(deadline.into(), landed).await.unwrap_or_else(|_| {
                    Err(Status::deadline_exceeded(format!(
                        "{what} takes longer; the same call again waits for the same work"
                    )))
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Notify;

    use super::*;

    type All = Arc<Flights<&'static str, u32, u32>>;

    fn seat<T: Debug>(boarded: Boarded<T>) -> Seat<T> {
        match boarded {
            Boarded::Seat(seat) => seat,
            Boarded::Other(_) => panic!("another flight"),
        }
    }

    #[tokio::test]
    async fn a_retry_joins_and_the_work_outlives_its_callers() {
        let (all, tasks, stop): (All, _, _) =
            (Arc::new(Flights::new()), TaskTracker::new(), CancellationToken::new());
        let (begun, gate) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
        let board = |request: u32| {
            let (begun, gate) = (Arc::clone(&begun), Arc::clone(&gate));
            all.board(
                &tasks,
                &stop,
                "pod",
                request,
                |one, other| one == other,
                move |request| async move {
                    begun.fetch_add(1, Ordering::SeqCst);
                    gate.notified().await;
                    Ok(*request + 1)
                },
            )
        };
        drop(seat(board(1)));
        let second = seat(board(1));
        assert!(matches!(board(2), Boarded::Other(_)));
        gate.notify_one();
        assert_eq!(second.wait(None, "it").await.unwrap(), 2);
        assert_eq!(begun.load(Ordering::SeqCst), 1);

        drop(seat(board(5)));
        gate.notify_one();
        tasks.close();
        tasks.wait().await;
        assert_eq!(begun.load(Ordering::SeqCst), 2);
        assert!(all.lock().is_empty());
    }

    #[tokio::test]
    async fn a_caller_whose_time_is_over_is_told_so() {
        let (all, tasks, stop): (All, _, _) =
            (Arc::new(Flights::new()), TaskTracker::new(), CancellationToken::new());
        let board =
            || seat(all.board(&tasks, &stop, "pod", 1, |_, _| true, |_| std::future::pending()));
        let status = board().wait(Some(Instant::now()), "RunPodSandbox").await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::DeadlineExceeded);
        let seat = board();
        stop.cancel();
        assert_eq!(seat.wait(None, "it").await.unwrap_err().code(), tonic::Code::Unavailable);
    }
}
