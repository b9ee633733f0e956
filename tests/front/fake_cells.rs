//! A fake decoded backend, whose ids begin with `milpa`.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use kiyot::backends::{Backend, BackendName, CallPath, Declared, DecodedBackend, Features, Method};
use kiyot_engine::request::RuleProviders;
use kiyot_proto::cri;
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Status;

/// Text of calls that are not answered.
pub(crate) const HANGS: &str = "milpa-hang";

type Snapshot = Result<Vec<u8>, (tonic::Code, String)>;

#[derive(Debug, Default)]
pub(crate) struct FakeCells {
    /// Responses from memory, and parts of lists.
    pub(crate) snapshots: Mutex<HashMap<Method, Snapshot>>,
    /// Number of calls that have entered [`DecodedBackend::snapshot`].
    pub(crate) in_snapshot: AtomicUsize,
    /// Number of hanging calls.
    pub(crate) hanging: Arc<AtomicUsize>,
    /// Readers of events.
    pub(crate) events: Mutex<Vec<mpsc::UnboundedSender<Result<Bytes, Status>>>>,
    /// Features that its pods may request.
    pub(crate) features: Mutex<Features>,
    /// Images of its pods.
    pub(crate) images: Mutex<HashMap<String, Vec<u8>>>,
}

struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[async_trait]
impl DecodedBackend for FakeCells {
    fn owns(&self, id: &str) -> bool {
        id.starts_with("milpa") || "milpa".starts_with(id)
    }

    fn snapshot(&self, method: Method, _: &[u8]) -> Option<Result<Bytes, Status>> {
        self.in_snapshot.fetch_add(1, Ordering::SeqCst);
        let snapshot = self.snapshots.lock().unwrap().get(&method)?.clone();
        Some(snapshot.map(Bytes::from).map_err(|(code, message)| Status::new(code, message)))
    }

    fn leaves_to_node(&self, message: &[u8]) -> Option<String> {
        let config = cri::RunPodSandboxRequest::decode(message).ok()?.config?;
        config.labels.contains_key("stays").then(|| "asks for it".to_owned())
    }

    fn features(&self) -> Features {
        *self.features.lock().unwrap()
    }

    fn owns_image(&self, method: Method, message: &[u8]) -> bool {
        match method {
            Method::PullImage => {
                let config = cri::PullImageRequest::decode(message).unwrap().sandbox_config;
                config
                    .and_then(|config| config.metadata)
                    .is_some_and(|metadata| metadata.uid == "ours")
            }
            _ => cri::ImageStatusRequest::decode(message)
                .unwrap()
                .image
                .is_some_and(|image| image.annotations.contains_key("ours")),
        }
    }

    fn reported_image(&self, reference: &str) -> Option<Bytes> {
        self.images.lock().unwrap().get(reference).map(|image| Bytes::from(image.clone()))
    }

    fn image_of_pods_like(&self, message: &[u8]) -> Option<Bytes> {
        let image = cri::ImageStatusRequest::decode(message).unwrap().image?;
        image.annotations.contains_key("like").then(|| self.reported_image(&image.image))?
    }

    fn events(&self) -> BoxStream<'static, Result<Bytes, Status>> {
        let (sender, events) = mpsc::unbounded_channel();
        self.events.lock().unwrap().push(sender);
        UnboundedReceiverStream::new(events).boxed()
    }

    async fn list_metrics(&self, descriptors: Bytes) -> Bytes {
        let pod_sandbox_id = format!("milpa by {}", String::from_utf8_lossy(&descriptors));
        let pod_metrics = vec![cri::PodSandboxMetrics { pod_sandbox_id, ..Default::default() }];
        cri::ListPodSandboxMetricsResponse { pod_metrics }.encode_to_vec().into()
    }

    /// Answers with the rule.
    async fn run_by_rule(
        &self,
        _: Bytes,
        rule: RuleProviders,
        _: Option<Instant>,
    ) -> Result<Bytes, Status> {
        Ok(rule.to_string().into())
    }

    /// Answers `cells: <method>`, unless the id requests another behaviour.
    async fn call(
        &self,
        method: Method,
        message: Bytes,
        deadline: Option<Instant>,
    ) -> Result<Bytes, Status> {
        let id = cri::StopPodSandboxRequest::decode(&message[..])
            .map(|request| request.pod_sandbox_id)
            .unwrap_or_default();
        // Requests without an id have it in another field.
        let id = if message.windows(HANGS.len()).any(|part| part == HANGS.as_bytes()) {
            HANGS.to_owned()
        } else {
            id
        };
        match id.strip_prefix("milpa-").unwrap_or_default() {
            "hang" => {
                self.hanging.fetch_add(1, Ordering::SeqCst);
                let _counted = Counted(self.hanging.clone());
                std::future::pending().await
            }
            "panic" => panic!("as the test asked for"),
            "error" => Err(Status::with_details(
                tonic::Code::NotFound,
                "no such thing: 100 %",
                Bytes::from_static(b"\x00details\xff"),
            )),
            "deadline" => Ok(deadline
                .map(|at| at.saturating_duration_since(Instant::now()).as_secs().to_string())
                .unwrap_or_default()
                .into()),
            "echo" => Ok(message),
            "large" => Ok(vec![7; 17 << 20].into()),
            _ => Ok(format!("cells: {method}").into()),
        }
    }
}

#[derive(Debug)]
pub(crate) struct FakeCellsBackend {
    name: BackendName,
    decoded: Arc<dyn DecodedBackend>,
}

impl FakeCellsBackend {
    pub(crate) fn of(cells: Arc<FakeCells>) -> Arc<dyn Backend> {
        Arc::new(Self { name: BackendName::new("cells"), decoded: cells })
    }
}

impl Backend for FakeCellsBackend {
    fn name(&self) -> &BackendName {
        &self.name
    }

    fn declares(&self) -> Declared {
        Declared { target_runtimes: &["kiyot"], runtime_handlers: &["kiyot"] }
    }

    fn path(&self) -> CallPath<'_> {
        CallPath::Decoded(&self.decoded)
    }
}
