//! Traces of calls (W3C Trace Context): the span of a call is a child of the kubelet's. Without the
//! feature `otel` nothing is read or recorded.

use http::HeaderMap;
use tracing::Span;

/// Makes a span the child of the span that a request's headers name.
#[cfg(feature = "otel")]
pub(super) fn adopt(span: &Span, headers: &HeaderMap) {
    use opentelemetry::propagation::TextMapPropagator;
    use opentelemetry_sdk::propagation::TraceContextPropagator;
    use tracing_opentelemetry::OpenTelemetrySpanExt;

    if span.is_disabled() || !headers.contains_key("traceparent") {
        return;
    }
    let parent = TraceContextPropagator::new().extract(&Headers(headers));
    // Traces are not exported: there is nothing to adopt.
    let _ = span.set_parent(parent);
}

/// Makes a span the child of the span that a request's headers name.
#[cfg(not(feature = "otel"))]
pub(super) const fn adopt(_span: &Span, _headers: &HeaderMap) {}

/// Records the code of the response in the current call's span.
#[cfg(feature = "otel")]
pub(super) fn record_code(code: Option<u8>) {
    Span::current().record("code", code);
}

/// Records the code of the response in the current call's span.
#[cfg(not(feature = "otel"))]
pub(super) const fn record_code(_code: Option<u8>) {}

#[cfg(feature = "otel")]
struct Headers<'a>(&'a HeaderMap);

#[cfg(feature = "otel")]
impl opentelemetry::propagation::Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}
