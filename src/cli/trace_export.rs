//! Export of traces by OTLP over gRPC, with the variables of OpenTelemetry's specification
//! (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, `OTEL_BSP_*`).
//!
//! Spans that have ended wait in a queue of a bounded length, and are dropped while it is full. The
//! exporter has a thread and a runtime of its own, so that a slow collector delays no call.

use std::time::Duration;

use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::{
    Resource,
    trace::{SdkTracer, SdkTracerProvider},
};
use tokio::runtime::{Builder, Runtime};

/// Variables with the address of the collector; the second is only for traces.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"];
/// Name of the service, unless `OTEL_SERVICE_NAME` has another.
const SERVICE: &str = "kiyot";
/// Limit on the export of the last spans at the end of the daemon.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// The export. Dropping it exports the waiting spans.
#[derive(Debug)]
pub(super) struct TraceExport {
    provider: SdkTracerProvider,
    /// Drives the provider's connection, and is dropped after the provider.
    runtime: Option<Runtime>,
}

impl TraceExport {
    /// Starts the export if a variable has the address of a collector.
    pub(super) fn start() -> Result<Option<Self>, String> {
        if ENDPOINTS.iter().all(|name| std::env::var_os(name).is_none()) {
            return Ok(None);
        }
        let failed = |error: &dyn std::fmt::Display| format!("export of traces: {error}");
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("kiyot-traces")
            .enable_all()
            .build()
            .map_err(|error| failed(&error))?;
        let exporter = {
            let _entered = runtime.enter();
            SpanExporter::builder().with_tonic().build().map_err(|error| failed(&error))?
        };
        let mut resource = Resource::builder();
        if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
            resource = resource.with_service_name(SERVICE);
        }
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource.build())
            .build();
        Ok(Some(Self { provider, runtime: Some(runtime) }))
    }

    /// Returns the tracer of the daemon's spans.
    pub(super) fn tracer(&self) -> SdkTracer {
        self.provider.tracer(SERVICE)
    }
}

impl Drop for TraceExport {
    fn drop(&mut self) {
        if let Err(error) = self.provider.shutdown_with_timeout(SHUTDOWN_TIMEOUT) {
            tracing::warn!(%error, "last traces not exported");
        }
        // A collector may not answer, so the end does not wait for it.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
