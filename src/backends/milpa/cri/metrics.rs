//! `ListPodSandboxMetrics`.

use std::time::Instant;

use bytes::Bytes;

use super::CriService;
use crate::backends::Method;

impl CriService {
    /// Lists the metrics of pods, as described by the node's encoded
    /// `ListMetricDescriptorsResponse`.
    pub async fn list_metrics(&self, descriptors: &[u8]) -> Bytes {
        let since = self.sync.renew_metrics();
        self.wait_for_usage(Method::ListPodSandboxMetrics, &[]).await;
        let left = (since + self.metrics_timeout).saturating_duration_since(Instant::now());
        self.pods.wait(left, |pods| (!pods.awaits_metrics(Instant::now())).then_some(())).await;
        self.pods.list_metrics(descriptors, Instant::now())
    }
}
