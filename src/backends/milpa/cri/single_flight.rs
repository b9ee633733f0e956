//! Single flight: work that continues after its caller leaves, and that a retry joins.

use std::{
    collections::HashMap,
    fmt::Debug,
    future::Future,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use tokio::sync::watch;
use tonic::Status;

use crate::backends::milpa::tasks::Tasks;

/// The outcome of a flight, if it has landed.
type FlightOutcome<T> = Option<Result<T, Status>>;

/// Flights by key, at most one for each key.
#[derive(Debug)]
pub(super) struct SingleFlight<K, Q, T> {
    flights: Mutex<HashMap<K, Flight<Q, T>>>,
}

#[derive(Debug)]
struct Flight<Q, T> {
    request: Arc<Q>,
    outcome: watch::Receiver<FlightOutcome<T>>,
}

/// A caller that waits for the outcome of a flight.
#[derive(Debug)]
pub(super) struct Waiter<T>(watch::Receiver<FlightOutcome<T>>);

/// The result of joining a flight.
#[derive(Debug)]
pub(super) enum Joined<T> {
    /// The flight of this request, which may be new.
    Same(Waiter<T>),
    /// The flight of another request with the same key.
    Other(Waiter<T>),
}

impl<K, Q, T> SingleFlight<K, Q, T>
where
    K: Clone + Eq + Hash + Debug + Send + 'static,
    Q: Send + Sync + 'static,
    T: Clone + Debug + Send + Sync + 'static,
{
    pub(super) fn new() -> Self {
        Self { flights: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<K, Flight<Q, T>>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the request of a key's flight.
    pub(super) fn request(&self, key: &K) -> Option<Arc<Q>> {
        self.lock().get(key).map(|flight| Arc::clone(&flight.request))
    }

    /// Joins the flight of a key, or begins a flight. `work` runs to its end in a task, even if no
    /// caller waits.
    pub(super) fn join<W, F>(
        self: &Arc<Self>,
        tasks: &Tasks,
        key: K,
        request: Q,
        same: impl FnOnce(&Q, &Q) -> bool,
        work: F,
    ) -> Joined<T>
    where
        F: FnOnce(Arc<Q>) -> W,
        W: Future<Output = Result<T, Status>> + Send + 'static,
    {
        self.join_in(self.lock(), tasks, key, request, same, work)
    }

    /// Joins the flight of a key, or begins a flight. If a flight has an excluding key, returns
    /// that key as the error.
    pub(super) fn join_unless<W, F>(
        self: &Arc<Self>,
        is_excluding: impl Fn(&K) -> bool,
        tasks: &Tasks,
        key: K,
        request: Q,
        same: impl FnOnce(&Q, &Q) -> bool,
        work: F,
    ) -> Result<Joined<T>, K>
    where
        F: FnOnce(Arc<Q>) -> W,
        W: Future<Output = Result<T, Status>> + Send + 'static,
    {
        let flights = self.lock();
        match flights.keys().find(|other| is_excluding(other)) {
            Some(other) => Err(other.clone()),
            None => Ok(self.join_in(flights, tasks, key, request, same, work)),
        }
    }

    fn join_in<W, F>(
        self: &Arc<Self>,
        mut flights: MutexGuard<'_, HashMap<K, Flight<Q, T>>>,
        tasks: &Tasks,
        key: K,
        request: Q,
        same: impl FnOnce(&Q, &Q) -> bool,
        work: F,
    ) -> Joined<T>
    where
        F: FnOnce(Arc<Q>) -> W,
        W: Future<Output = Result<T, Status>> + Send + 'static,
    {
        if let Some(flight) = flights.get(&key) {
            let waiter = Waiter(flight.outcome.clone());
            return if same(&flight.request, &request) {
                Joined::Same(waiter)
            } else {
                Joined::Other(waiter)
            };
        }
        let (sender, outcome) = watch::channel(None);
        let request = Arc::new(request);
        let waiter = Waiter(outcome.clone());
        flights.insert(key.clone(), Flight { request: Arc::clone(&request), outcome });
        drop(flights);
        let (work, entry) = (work(request), FlightEntry { all: Arc::clone(self), key });
        tasks.spawn_then(work, move |result| {
            let result =
                result.unwrap_or_else(|| Err(Status::unavailable("the daemon is stopping")));
            drop(entry);
            sender.send_replace(Some(result));
        });
        Joined::Same(waiter)
    }
}

/// Removes a flight from the map when dropped, also by a panic of the work.
struct FlightEntry<K: Eq + Hash, Q, T> {
    all: Arc<SingleFlight<K, Q, T>>,
    key: K,
}

impl<K: Eq + Hash, Q, T> Drop for FlightEntry<K, Q, T> {
    fn drop(&mut self) {
        self.all.flights.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
    }
}

impl<T: Clone> Waiter<T> {
    /// Waits for the outcome until the caller's deadline.
    pub(super) async fn outcome(
        mut self,
        deadline: Option<Instant>,
        method: &str,
    ) -> Result<T, Status> {
        let outcome = async {
            match self.0.wait_for(Option::is_some).await {
                Ok(outcome) => outcome
                    .clone()
                    .unwrap_or_else(|| Err(Status::internal(format!("{method}: no outcome")))),
                Err(_) => {
                    Err(Status::internal(format!("{method}: its task ended without an outcome")))
                }
            }
        };
        match deadline {
            None => outcome.await,
            Some(deadline) => {
                tokio::time::timeout_at(deadline.into(), outcome).await.unwrap_or_else(|_| {
                    Err(Status::deadline_exceeded(format!(
                        "{method} takes longer; the same call again waits for the same work"
                    )))
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use tokio::sync::Notify;

    use super::*;

    type Flights = Arc<SingleFlight<&'static str, u32, u32>>;

    fn same<T: Debug>(joined: Joined<T>) -> Waiter<T> {
        match joined {
            Joined::Same(waiter) => waiter,
            Joined::Other(_) => panic!("another flight"),
        }
    }

    #[tokio::test]
    async fn request_of_a_flight_is_known_until_it_lands() {
        let (flights, tasks) = (Arc::new(SingleFlight::<u8, &str, ()>::new()), Tasks::default());
        let (land, landing) = tokio::sync::oneshot::channel::<()>();
        let Joined::Same(waiter) = flights.join(
            &tasks,
            1,
            "labels",
            |_, _| true,
            |_| async {
                let _ = landing.await;
                Ok(())
            },
        ) else {
            panic!("the flight is new")
        };
        assert_eq!(flights.request(&1).as_deref(), Some(&"labels"));
        assert_eq!(flights.request(&2), None);
        land.send(()).unwrap();
        waiter.outcome(None, "RunPodSandbox").await.unwrap();
        assert_eq!(flights.request(&1), None);
    }

    #[tokio::test]
    async fn retry_joins_and_the_work_outlives_its_callers() {
        let (flights, tasks) = (Flights::new(SingleFlight::new()), Tasks::default());
        let (begun, gate) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
        let join = |request: u32| {
            let (begun, gate) = (Arc::clone(&begun), Arc::clone(&gate));
            flights.join(
                &tasks,
                "pod",
                request,
                |a, b| a == b,
                move |request| async move {
                    begun.fetch_add(1, Ordering::SeqCst);
                    gate.notified().await;
                    Ok(*request + 1)
                },
            )
        };
        drop(same(join(1)));
        let second = same(join(1));
        assert!(matches!(join(2), Joined::Other(_)));
        gate.notify_one();
        assert_eq!(second.outcome(None, "join").await.unwrap(), 2);
        assert_eq!(begun.load(Ordering::SeqCst), 1);

        drop(same(join(5)));
        gate.notify_one();
        while !flights.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        assert_eq!(begun.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn waiter_ends_at_its_deadline_and_at_the_stop_of_the_daemon() {
        let (flights, tasks) = (Flights::new(SingleFlight::new()), Tasks::default());
        let join = || same(flights.join(&tasks, "pod", 1, |_, _| true, |_| std::future::pending()));
        let status = join().outcome(Some(Instant::now()), "RunPodSandbox").await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::DeadlineExceeded);
        let waiter = join();
        tasks.shutdown(Duration::MAX).await.unwrap();
        let status = waiter.outcome(None, "RunPodSandbox").await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unavailable);
    }
}
