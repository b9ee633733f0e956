//! Two concurrent futures; a failure of the first cancels the second.

use std::{future::Future, pin::pin};

/// Runs two futures concurrently and returns both results, or the first's failure, or else the
/// second's. The first future always runs to its end; its failure cancels the second.
pub(super) async fn finish_first<A, B, E>(
    first: impl Future<Output = Result<A, E>>,
    second: impl Future<Output = Result<B, E>>,
) -> Result<(A, B), E> {
    let (mut first, mut second) = (pin!(first), pin!(second));
    tokio::select! {
        done = &mut first => {
            let done = done?;
            Ok((done, second.await?))
        }
        also_done = &mut second => {
            let done = first.await?;
            Ok((done, also_done?))
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn failure_of_the_first_future_cancels_the_second() {
        let (held, cancelled) = oneshot::channel::<()>();
        let second = async move {
            let _held = held;
            std::future::pending::<Result<(), &str>>().await
        };
        let result = finish_first(async { Err::<(), _>("no volume") }, second).await;
        assert_eq!(result, Err("no volume"));
        assert!(cancelled.await.is_err());
    }

    #[tokio::test]
    async fn failure_of_the_second_future_waits_for_the_first() {
        let (finish, finished) = oneshot::channel::<()>();
        let first = async move { finished.await.map_err(|_| "dropped") };
        let mut both = pin!(finish_first(first, async { Err::<(), _>("no image") }));
        assert!(both.as_mut().now_or_never().is_none());
        finish.send(()).unwrap();
        assert_eq!(both.await, Err("no image"));
    }

    #[tokio::test]
    async fn failure_of_the_first_future_is_returned_if_both_fail() {
        let first = async {
            tokio::task::yield_now().await;
            Err::<(), _>("no volume")
        };
        let result = finish_first(first, async { Err::<(), _>("no image") }).await;
        assert_eq!(result, Err("no volume"));
    }

    #[tokio::test]
    async fn futures_run_concurrently() {
        let (ask, asked) = oneshot::channel();
        let (reply, replied) = oneshot::channel();
        let first = async move {
            ask.send(1).unwrap();
            replied.await.map_err(|_| "dropped")
        };
        let second = async move {
            let number: i32 = asked.await.map_err(|_| "dropped")?;
            reply.send(number + 1).map_err(|_| "dropped")?;
            Ok(number)
        };
        assert_eq!(finish_first(first, second).await, Ok((2, 1)));
    }
}
