//! The same action with many pods.

use futures::{StreamExt, stream};
use kiyot_testkit::Kubelet;

/// Runs an action for each pod, at most `at_a_time` concurrently. Actions begin in the order of the
/// pods.
pub(crate) async fn each<P, R, F>(
    kubelet: &Kubelet,
    pods: impl IntoIterator<Item = P>,
    at_a_time: usize,
    action: fn(Kubelet, P) -> F,
) -> Vec<R>
where
    F: Future<Output = R>,
{
    let doing = stream::iter(pods).map(|pod| action(kubelet.clone(), pod));
    doing.buffer_unordered(at_a_time).collect().await
}
