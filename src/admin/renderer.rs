//! Rendering of the support bundle, at a pace and a priority that delay no CRI call.
//!
//! A piece is read at the daemon's own priority, because a thread that holds a lock while it waits
//! for a processor would delay all calls that need the lock. A thread of the lowest priority
//! renders the piece. A pause follows: all bundles together take a small share of a processor.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError, Weak, mpsc},
    thread,
    time::Duration,
};

use futures::{Stream, StreamExt};
use tokio::{
    sync::{Semaphore, oneshot},
    time::{Instant, sleep},
};
use tonic::Status;

/// All bundles together take this part (1/8) of a processor's time.
const SHARE: u32 = 8;
/// Bounds of the pause after a piece. On a busy node the thread itself waits, and the upper bound
/// limits the time of a bundle.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));
/// Name of the thread.
const THREAD: &str = "kiyot-dump";
/// The niceness of the lowest priority.
const NICENESS: i32 = 19;

/// Renders a piece of a text that was read.
pub(super) type Piece = Box<dyn FnOnce() -> String + Send>;

/// The only renderer, while a bundle is made.
#[derive(Debug)]
pub(super) struct Renderers {
    running: Mutex<Weak<Renderer>>,
    /// The turn of a piece. Pieces are read and rendered one at a time.
    turn: Arc<Semaphore>,
}

/// A thread that renders pieces. It ends with the last bundle.
#[derive(Debug)]
pub(super) struct Renderer {
    work: mpsc::Sender<Work>,
    turn: Arc<Semaphore>,
}

struct Work {
    piece: Piece,
    reply: oneshot::Sender<String>,
}

impl Default for Renderers {
    fn default() -> Self {
        Self { running: Mutex::default(), turn: Arc::new(Semaphore::new(1)) }
    }
}

impl Renderers {
    /// Returns the running renderer, or starts it.
    pub(super) fn start(&self) -> io::Result<Arc<Renderer>> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(renderer) = running.upgrade() {
            return Ok(renderer);
        }
        let (work, next) = mpsc::channel();
        thread::Builder::new().name(THREAD.to_owned()).spawn(move || render_all(&next))?;
        let renderer = Arc::new(Renderer { work, turn: Arc::clone(&self.turn) });
        *running = Arc::downgrade(&renderer);
        Ok(renderer)
    }
}

/// Renders pieces until the sender is dropped.
fn render_all(next: &mpsc::Receiver<Work>) {
    // Without a process id: this thread.
    if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
        tracing::debug!(%error, "support bundles are made at the daemon's own priority");
    }
    while let Ok(Work { piece, reply }) = next.recv() {
        // The bundle may no longer have a reader.
        let _ = reply.send(piece());
    }
}

impl Renderer {
    /// Reads the next piece and returns its text; `None` if there are no more.
    pub(super) async fn next(
        &self,
        mut pieces: Pin<&mut (impl Stream<Item = Piece> + ?Sized)>,
    ) -> Option<Result<String, Status>> {
        let turn = self.turn.acquire().await;
        let begun = Instant::now();
        let piece = pieces.next().await;
        let text = match piece {
            Some(piece) => Some(self.render(piece).await),
            None => None,
        };
        sleep(pause_after(begun.elapsed())).await;
        drop(turn);
        text
    }

    async fn render(&self, piece: Piece) -> Result<String, Status> {
        let (reply, text) = oneshot::channel();
        // If the thread has ended, the reply is dropped too.
        let _ = self.work.send(Work { piece, reply });
        text.await.map_err(|_| Status::internal("the thread of the support bundle has ended"))
    }
}

/// Returns the pause after `work` that leaves the work its share of the time.
fn pause_after(work: Duration) -> Duration {
    work.saturating_mul(SHARE - 1).clamp(PAUSES.0, PAUSES.1)
}

#[cfg(test)]
mod tests {
    use std::{fs, pin::pin};

    use futures::stream;

    use super::*;

    /// Returns name and niceness of this thread (fields 2 and 19 of proc_pid_stat(5)).
    fn own_thread() -> String {
        let stat = fs::read_to_string("/proc/thread-self/stat").unwrap();
        let (name, rest) = stat.split_once('(').unwrap().1.rsplit_once(')').unwrap();
        format!("{name} {}", rest.split_whitespace().nth(16).unwrap())
    }

    fn piece(text: impl FnOnce() -> String + Send + 'static) -> Piece {
        Box::new(text)
    }

    #[tokio::test]
    async fn piece_is_rendered_by_a_thread_of_the_lowest_priority_that_ends_with_the_bundle() {
        let renderers = Renderers::default();
        let renderer = renderers.start().unwrap();
        let same = renderers.start().unwrap();
        assert!(Arc::ptr_eq(&renderer, &same), "bundles share the thread");
        let mut pieces = pin!(stream::iter([piece(own_thread)]));
        let text = renderer.next(pieces.as_mut()).await.unwrap().unwrap();
        assert_eq!(text, format!("{THREAD} {NICENESS}"));
        assert!(renderer.next(pieces).await.is_none());
        assert!(!own_thread().ends_with(&NICENESS.to_string()), "the caller keeps its priority");
        drop((renderer, same));
        assert!(renderers.running.lock().unwrap().upgrade().is_none());
    }

    #[tokio::test]
    async fn panic_of_a_piece_is_an_error_and_the_next_bundle_has_a_thread() {
        let renderers = Renderers::default();
        let renderer = renderers.start().unwrap();
        let pieces = [piece(|| panic!("played")), piece(|| "never".to_owned())];
        let mut pieces = pin!(stream::iter(pieces));
        for _ in 0..2 {
            let error = renderer.next(pieces.as_mut()).await.unwrap().unwrap_err();
            assert_eq!(error.code(), tonic::Code::Internal);
        }
        drop(renderer);
        let renderer = renderers.start().unwrap();
        let pieces = pin!(stream::iter([piece(|| "text".to_owned())]));
        assert_eq!(renderer.next(pieces).await.unwrap().unwrap(), "text");
    }

    /// Work and pauses of two bundles follow one after the other.
    #[tokio::test(start_paused = true)]
    async fn bundles_take_turns_and_pause_after_each_piece() {
        let renderers = Renderers::default();
        let begun = Instant::now();
        let bundle = async || {
            let renderer = renderers.start().unwrap();
            let pieces = stream::iter(0..3).then(async |_| {
                // Reads a piece, while no other piece is read.
                sleep(Duration::from_millis(2)).await;
                piece(String::new)
            });
            let mut pieces = pin!(pieces);
            for _ in 0..3 {
                renderer.next(pieces.as_mut()).await.unwrap().unwrap();
            }
        };
        futures::future::join(bundle(), bundle()).await;
        assert!(begun.elapsed() >= Duration::from_millis(2) * SHARE * 6, "{:?}", begun.elapsed());
    }

    #[test]
    fn pause_leaves_the_work_its_share_within_bounds() {
        let millis = Duration::from_millis;
        for (work, pause) in [(0, 1), (1, 7), (2, 14), (8, 50), (60_000, 50)] {
            assert_eq!(pause_after(millis(work)), millis(pause), "{work}");
        }
        assert_eq!(pause_after(Duration::MAX), millis(50));
    }
}
