//! Fixture of the tests: a daemon with fake cells.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use kiyot_config::{HostPath, ImageSource, Policy, ProviderKind, Rule};
use kiyot_engine::{provider::Owner, request::RuleProviders};
use kiyot_local::PauseImage;

use kiyot::{
    backends::{
        Method,
        milpa::{
            cells::{Cells, CellsConfig, Configured},
            cri::{CriService, Parts},
            gateway::{Gateway, GatewayConfig, Limits, ca::Ca},
            images::{Images, NodeImages, Registries},
            logs::Logs,
            store::{Batch, Store},
            streaming::Streaming,
            volumes::Volumes,
        },
    },
    metrics::{Exposition, ORDERS_WAITING},
};
use kiyot_link::clock::Clock;
use kiyot_proto::cri;
use kiyot_testkit::wait_for;
use prost::Message;
use tempfile::TempDir;
use tonic::Status;

use crate::fake_provider::FakeProvider;

pub(crate) use kiyot_testkit::LIMIT;

/// A backend with fake cells.
pub(crate) struct Fixture {
    pub(crate) dir: TempDir,
    pub(crate) provider: Arc<FakeProvider>,
    pub(crate) daemon: Daemon,
}

/// Time limits of the daemon.
#[derive(Debug, Clone, Copy)]
struct Timeouts {
    owner: Duration,
    launch: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { owner: Parts::OWNER_TIMEOUT, launch: LIMIT }
    }
}

/// The parts that end with the daemon.
pub(crate) struct Daemon {
    pub(crate) cri: Arc<CriService>,
    pub(crate) cells: Arc<Cells>,
    gateway: Gateway,
    pub(crate) store: Store,
}

impl Fixture {
    pub(crate) async fn start() -> Self {
        Self::with(Timeouts::default(), "").await
    }

    pub(crate) async fn with_owner_timeout(owner: Duration) -> Self {
        Self::with(Timeouts { owner, ..Timeouts::default() }, "").await
    }

    /// Starts a backend whose launches fail after this time.
    pub(crate) async fn with_launch_timeout(launch: Duration) -> Self {
        Self::with(Timeouts { launch, ..Timeouts::default() }, "").await
    }

    /// Starts a backend whose cells choose ids with this prefix.
    pub(crate) async fn with_ids(ids: &str) -> Self {
        Self::with(Timeouts::default(), ids).await
    }

    async fn with(timeouts: Timeouts, ids: &str) -> Self {
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_test_writer()
            .try_init();
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("log")).unwrap();
        let provider = FakeProvider::new(dir.path().join("agents"), ids);
        let daemon = Daemon::start(dir.path(), &provider, timeouts).await;
        Self { dir, provider, daemon }
    }

    /// Restarts the daemon.
    pub(crate) async fn restart(self) -> Self {
        self.restart_with(Batch::default()).await
    }

    /// Restarts the daemon, and changes records meanwhile.
    pub(crate) async fn restart_with(self, records: Batch) -> Self {
        self.restart_after(records, |_| {}).await
    }

    /// Restarts the daemon, and changes records and cells meanwhile.
    pub(crate) async fn restart_after(
        self,
        records: Batch,
        meanwhile: impl FnOnce(&FakeProvider),
    ) -> Self {
        let Self { dir, provider, daemon } = self;
        daemon.stop(records).await;
        meanwhile(&provider);
        let daemon = Daemon::start(dir.path(), &provider, Timeouts::default()).await;
        Self { dir, provider, daemon }
    }

    /// Returns the number of pods that wait for the launch of a cell, by the metrics.
    pub(crate) fn waiting_orders(&self) -> f64 {
        self.sample(ORDERS_WAITING.name).unwrap()
    }

    /// Returns the value of a sample of the page of metrics, by its name with labels.
    pub(crate) fn sample(&self, name: &str) -> Option<f64> {
        let page = Exposition::new(vec![Arc::new(self.daemon.cells.metrics())]).text();
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
        Some(value.parse().unwrap())
    }

    /// Calls the service as the proxy does.
    pub(crate) async fn call<A: Message + Default>(
        &self,
        method: Method,
        request: impl Message,
    ) -> Result<A, Status> {
        let deadline = Instant::now() + LIMIT;
        let answer =
            self.daemon.cri.call(method, request.encode_to_vec().into(), Some(deadline)).await?;
        Ok(A::decode(answer).unwrap())
    }

    /// Runs a pod whose routing rule, with this name, allows these providers.
    pub(crate) async fn run_by_rule(
        &self,
        request: cri::RunPodSandboxRequest,
        (name, providers): (&str, &[ProviderKind]),
    ) -> Result<cri::RunPodSandboxResponse, Status> {
        let (name, providers) = (name.to_owned(), providers.to_vec());
        let rule = RuleProviders::of(&Rule { name, providers, ..Rule::default() }).unwrap();
        let deadline = Some(Instant::now() + LIMIT);
        let ran = self.daemon.cri.run_by_rule(&request.encode_to_vec(), rule, deadline).await?;
        Ok(cri::RunPodSandboxResponse::decode(ran).unwrap())
    }

    pub(crate) async fn list_metrics(
        &self,
        descriptors: &cri::ListMetricDescriptorsResponse,
    ) -> cri::ListPodSandboxMetricsResponse {
        let list = self.daemon.cri.list_metrics(&descriptors.encode_to_vec()).await;
        cri::ListPodSandboxMetricsResponse::decode(list).unwrap()
    }

    pub(crate) fn sandbox_request(&self, name: &str) -> cri::RunPodSandboxRequest {
        let config = cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata {
                name: name.to_owned(),
                namespace: "shop".to_owned(),
                uid: format!("uid-{name}"),
                attempt: 0,
            }),
            hostname: name.to_owned(),
            log_directory: self.dir.path().join("log").to_str().unwrap().to_owned(),
            annotations: [("kubernetes.io/config.seen".to_owned(), name.to_owned())].into(),
            ..Default::default()
        };
        cri::RunPodSandboxRequest { config: Some(config), runtime_handler: "kiyot".to_owned() }
    }

    pub(crate) fn container_request(
        &self,
        sandbox: &str,
        name: &str,
    ) -> cri::CreateContainerRequest {
        let config = cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: name.to_owned(), attempt: 0 }),
            image: Some(cri::ImageSpec {
                image: "busybox".to_owned(),
                user_specified_image: "busybox".to_owned(),
                ..Default::default()
            }),
            command: vec!["sh".to_owned()],
            envs: vec![cri::KeyValue { key: "PASSWORD".to_owned(), value: b"secret".to_vec() }],
            log_path: format!("{name}.log"),
            ..Default::default()
        };
        cri::CreateContainerRequest {
            pod_sandbox_id: sandbox.to_owned(),
            config: Some(config),
            sandbox_config: self.sandbox_request("web").config,
        }
    }

    pub(crate) async fn run(&self, name: &str) -> String {
        let answer: cri::RunPodSandboxResponse =
            self.call(Method::RunPodSandbox, self.sandbox_request(name)).await.unwrap();
        answer.pod_sandbox_id
    }

    pub(crate) async fn create(&self, sandbox: &str, name: &str) -> String {
        let answer: cri::CreateContainerResponse = self
            .call(Method::CreateContainer, self.container_request(sandbox, name))
            .await
            .unwrap();
        answer.container_id
    }

    pub(crate) async fn start_container(&self, id: &str) {
        let request = cri::StartContainerRequest { container_id: id.to_owned() };
        self.call::<cri::StartContainerResponse>(Method::StartContainer, request).await.unwrap();
    }

    pub(crate) async fn stop_sandbox(&self, id: &str) {
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
        self.call::<cri::StopPodSandboxResponse>(Method::StopPodSandbox, request).await.unwrap();
    }

    pub(crate) fn cached<A: Message + Default>(
        &self,
        method: Method,
        request: impl Message,
    ) -> Result<A, Status> {
        let answer: Bytes = self.daemon.cri.snapshot(method, &request.encode_to_vec()).unwrap()?;
        Ok(A::decode(answer).unwrap())
    }

    pub(crate) fn status(&self, container: &str) -> Result<cri::ContainerStatus, Status> {
        let request =
            cri::ContainerStatusRequest { container_id: container.to_owned(), verbose: false };
        Ok(self
            .cached::<cri::ContainerStatusResponse>(Method::ContainerStatus, request)?
            .status
            .unwrap())
    }

    pub(crate) fn sandbox_status(&self, sandbox: &str) -> Result<cri::PodSandboxStatus, Status> {
        let request =
            cri::PodSandboxStatusRequest { pod_sandbox_id: sandbox.to_owned(), verbose: false };
        Ok(self
            .cached::<cri::PodSandboxStatusResponse>(Method::PodSandboxStatus, request)?
            .status
            .unwrap())
    }

    pub(crate) fn sandboxes(&self) -> Vec<cri::PodSandbox> {
        self.cached::<cri::ListPodSandboxResponse>(
            Method::ListPodSandbox,
            cri::ListPodSandboxRequest::default(),
        )
        .unwrap()
        .items
    }

    pub(crate) fn containers(&self) -> Vec<cri::Container> {
        self.cached::<cri::ListContainersResponse>(
            Method::ListContainers,
            cri::ListContainersRequest::default(),
        )
        .unwrap()
        .containers
    }

    pub(crate) async fn exited(&self, container: &str) -> cri::ContainerStatus {
        wait_for("the container's end", || {
            self.status(container).unwrap().state() == cri::ContainerState::ContainerExited
        })
        .await;
        self.status(container).unwrap()
    }
}

impl Daemon {
    async fn start(dir: &Path, provider: &Arc<FakeProvider>, timeouts: Timeouts) -> Self {
        let state = dir.join("state");
        let store = Store::open(&state).await.unwrap();
        let ca = Ca::load_or_make(&store).await.unwrap();
        let owner = Owner {
            cluster: "production".to_owned(),
            node: "worker-1".to_owned(),
            fingerprint: ca.sha256(),
        };
        let config =
            CellsConfig { launch_timeout: timeouts.launch, owner, ..CellsConfig::default() };
        let cells =
            Cells::start(config, store.clone(), vec![Configured::new(Arc::clone(provider) as _)])
                .await
                .unwrap();
        let limits = Limits {
            handshake: LIMIT,
            enrolment: LIMIT,
            bulk_idle: LIMIT..=LIMIT,
            ..Limits::default()
        };
        let config = GatewayConfig {
            socket: state.join("gateway.sock"),
            tcp: None,
            agent: None,
            ca,
            build_id: "test".to_owned(),
            orphan_timeout: Duration::from_secs(900),
            clock: Clock::default(),
            limits,
        };
        let gateway = Gateway::start(config, cells.clone()).await.unwrap();
        cells.serve(Arc::new(gateway.clone()));
        let node =
            NodeImages { socket: dir.join("no-containerd.sock"), namespace: "k8s.io".to_owned() };
        let registries =
            Registries::new(node.clone(), None, dir, PauseImage::new(Some("pause".into())));
        let parts = Parts {
            store: store.clone(),
            cells: Arc::clone(&cells),
            images: Images::new(node, LIMIT, registries, ImageSource::Auto, None, None),
            volumes: Volumes::new(vec![dir.join("kubelet")], HostPath::Refuse),
            logs: Logs::new(),
            streaming: Arc::new(Streaming::start().await),
            policy: Policy::default(),
            owner_timeout: timeouts.owner,
            usage_timeout: LIMIT,
            metrics_timeout: LIMIT,
        };
        let cri = CriService::start(parts).await.unwrap();
        Self { cri, cells, gateway, store }
    }

    async fn stop(self, records: Batch) {
        self.cri.shutdown().await;
        self.gateway.shutdown().await;
        self.cells.shutdown().await;
        self.store.commit(records).await.unwrap();
        drop((self.cri, self.cells, self.gateway));
        self.store.close().await;
    }
}
