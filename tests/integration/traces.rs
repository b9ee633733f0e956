//! The export of traces to a collector in the test.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use kiyot_testkit::{Kiyot, KiyotOptions, LIMIT, Node, Pod, cri, wait_until};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::any_value::Value,
    trace::v1::Span,
};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, transport::Server};

/// A collector that keeps all spans.
#[derive(Debug, Clone, Default)]
struct Collector {
    spans: Arc<Mutex<Vec<Span>>>,
    services: Arc<Mutex<Vec<String>>>,
}

impl Collector {
    /// Serves the collector. Returns its address.
    async fn serve(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = TraceServiceServer::new(self.clone());
        let incoming = TcpListenerStream::new(listener);
        tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
        address
    }

    /// Waits for a span. Returns the span.
    async fn span(&self, what: &str, is_it: impl Fn(&Span) -> bool) -> Span {
        wait_until(format!("the span of {what}"), LIMIT, async || {
            self.spans.lock().unwrap().iter().find(|span| is_it(span)).cloned()
        })
        .await
    }
}

#[async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for of_service in request.into_inner().resource_spans {
            let attributes = of_service.resource.unwrap_or_default().attributes;
            let name = attributes.iter().find(|attribute| attribute.key == "service.name");
            self.services.lock().unwrap().extend(name.map(|name| text(name.value.clone())));
            let spans = of_service.scope_spans.into_iter().flat_map(|scope| scope.spans);
            self.spans.lock().unwrap().extend(spans);
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn text(value: Option<opentelemetry_proto::tonic::common::v1::AnyValue>) -> String {
    match value.and_then(|value| value.value) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        _ => String::new(),
    }
}

fn attribute(span: &Span, key: &str) -> String {
    let found = span.attributes.iter().find(|attribute| attribute.key == key);
    found.map(|attribute| text(attribute.value.clone())).unwrap_or_default()
}

fn exporting(endpoint: &str) -> KiyotOptions {
    let environment =
        [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint), ("OTEL_BSP_SCHEDULE_DELAY", "50")];
    KiyotOptions {
        // Some exported spans have no line in the log.
        log: "info".to_owned(),
        environment: environment.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        ..KiyotOptions::new(env!("CARGO_BIN_EXE_kiyot"))
    }
}

/// Verifies O7.
#[tokio::test]
async fn call_is_a_child_span_of_the_kubelets_and_a_cell_has_its_own_span() {
    let collector = Collector::default();
    let address = collector.serve().await;
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, exporting(&format!("http://{address}"))).await;
    let mut kubelet = kiyot.kubelet().await;
    let (trace, parent) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
    let mut request = Request::new(cri::VersionRequest::default());
    let context = format!("00-{trace}-{parent}-01").parse().unwrap();
    request.metadata_mut().insert("traceparent", context);
    kubelet.runtime.version(request).await.unwrap();
    let is_version = |span: &Span| {
        attribute(span, "method") == "Version" && hex::encode(&span.trace_id) == trace
    };
    let span = collector.span("the call", is_version).await;
    assert_eq!(
        (span.name.as_str(), hex::encode(&span.parent_span_id)),
        ("cri_call", parent.into())
    );
    assert_eq!(attribute(&span, "code"), "0");

    let absent = kubelet.sandbox_status("milpa-absent").await.unwrap_err();
    let is_failed = |span: &Span| {
        attribute(span, "method") == "PodSandboxStatus"
            && attribute(span, "code") == (absent.code() as i32).to_string()
    };
    let failed = collector.span("the failed call", is_failed).await;
    assert_eq!(attribute(&failed, "id"), "milpa-absent");

    let pod = Pod::new("traced").in_cell();
    let running = kubelet.run_pod(&pod).await.unwrap();
    let cell = kiyot.cells().pop().unwrap();
    collector.span("the cell", |span| attribute(span, "cell") == cell).await;
    kubelet.stop_and_remove(&running).await.unwrap();
    assert!(collector.services.lock().unwrap().iter().all(|name| name == "kiyot"));
}

/// Verifies O7.
#[tokio::test]
async fn collector_that_does_not_answer_delays_neither_calls_nor_the_stop() {
    let node = Node::start().await;
    // The kernel accepts the connections, but no process answers them.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let mut kiyot = Kiyot::start(&node, exporting(&endpoint)).await;
    let mut kubelet = kiyot.kubelet().await;
    // More calls are made than fit in the queue.
    for _ in 0..3000 {
        kubelet.runtime.version(cri::VersionRequest::default()).await.unwrap();
    }
    assert!(kiyot.stop().await.success());
}
