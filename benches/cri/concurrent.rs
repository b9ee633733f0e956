//! The same action with many pods.

use futures::{StreamExt, stream};
use kiyot_testkit::Kubelet;

/// Does the same with each pod, with so many at a time, which begin in their order.
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
