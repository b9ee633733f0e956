//! The qemu provider under test, with a stub in place of its machines, with machines whose guest is
//! a shell, or with machines of the cell image, which have an agent. Its faults are the faults of
//! the netns provider, because both share the instances of the node.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use kiyot_engine::{
    id::CellId,
    placement::Catalogue,
    provider::{
        Attached, Attachment, Capabilities, Instance, InstanceId, LaunchSpec, Provider,
        ProviderError, Terminations,
    },
};
use kiyot_local::{
    PauseImage,
    qemu::{CAPABILITIES, Qemu},
};
use tokio::{process::Command, time::timeout};

use super::{
    super::{
        bench::{Bench, LIMIT},
        qemu,
    },
    Subject,
    fault::{Fault, Gate},
    listings,
    netns::NetnsSubject,
};

/// The qemu provider under test.
pub(super) struct QemuSubject {
    local: NetnsSubject,
    launches: Arc<Gate>,
    has_agents: bool,
}

impl QemuSubject {
    pub(super) fn new() -> Self {
        let mut local = NetnsSubject::new();
        qemu::use_stub(&mut local.bench);
        Self { local, launches: Arc::default(), has_agents: false }
    }

    /// Returns a provider of machines, which boot while a case runs.
    pub(super) fn with_machines() -> Self {
        let mut local = NetnsSubject::new();
        qemu::use_machines(&mut local.bench);
        use_launcher(&mut local.bench);
        Self { local, launches: Arc::default(), has_agents: false }
    }

    /// Returns a provider of machines of the cell image, whose agents enrol once they have booted.
    pub(super) fn with_agents() -> Self {
        let mut local = NetnsSubject::new();
        qemu::use_image(&mut local.bench, kiyot_testkit::cell_image());
        use_launcher(&mut local.bench);
        Self { local, launches: Arc::default(), has_agents: true }
    }
}

/// Makes the real launcher start a fixture's cells, through a file of this test that faults change.
fn use_launcher(bench: &mut Bench) {
    let program = bench.config.netns.cell_binary.clone().unwrap();
    let real = Path::new(env!("CARGO_BIN_EXE_kiyot")).with_file_name("kiyot-cell");
    fs::write(&program, format!("#!/bin/sh\nexec {} \"$@\"\n", real.display())).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    bench.config.qemu.cell_binary = Some(program);
}

impl Subject for QemuSubject {
    /// Returns a new provider, which knows only the files.
    fn provider(&self) -> Arc<dyn Provider> {
        let provider = Qemu::new(&self.local.bench.config, PauseImage::new(None));
        Arc::new(Held { provider, launches: Arc::clone(&self.launches) })
    }

    fn inject(&self, fault: Fault) -> bool {
        if fault == Fault::HeldLaunch {
            self.launches.close();
            return true;
        }
        self.local.inject(fault)
    }

    fn heal(&self) {
        self.launches.open();
        self.local.heal();
    }

    fn holds_launch(&self) -> bool {
        self.launches.holds()
    }

    fn gateway_socket(&self) -> Option<PathBuf> {
        self.has_agents.then(|| self.local.bench.config.state_dir.join("gateway.sock"))
    }

    fn shutdowns(&self) -> Option<&Gate> {
        None
    }

    fn settle(&self) {}

    fn running(&self) -> Vec<(InstanceId, CellId)> {
        self.local.running()
    }

    fn assert_nothing_left(&self, launched: &[InstanceId]) {
        self.local.assert_nothing_left(launched);
    }

    fn listings_of_outage(&self) -> usize {
        listings(CAPABILITIES.listing_period)
    }
}

/// Waits until the launcher has made the devices of a machine.
async fn has_devices(namespace: String) {
    loop {
        let arguments = ["-n", &namespace, "link", "show", "tap-pod"];
        if Command::new("ip").args(arguments).output().await.unwrap().status.success() {
            return;
        }
    }
}

/// A provider whose answers to launches may be held.
#[derive(Debug)]
struct Held {
    provider: Qemu,
    launches: Arc<Gate>,
}

#[async_trait]
impl Provider for Held {
    fn capabilities(&self) -> Capabilities {
        self.provider.capabilities()
    }

    async fn catalogue(&self) -> Result<Catalogue, ProviderError> {
        self.provider.catalogue().await
    }

    async fn launch(&self, spec: &LaunchSpec, token: &str) -> Result<Instance, ProviderError> {
        let launched = self.provider.launch(spec, token).await;
        self.launches.pass().await;
        launched
    }

    async fn attach(&self, id: &InstanceId, to: &Attachment) -> Result<Attached, ProviderError> {
        // A bound agent has connected over the devices.
        if self.provider.describe(id).await.is_ok_and(|instance| instance.state.is_alive()) {
            timeout(LIMIT, has_devices(format!("kiyot-{id}"))).await.unwrap();
        }
        self.provider.attach(id, to).await
    }

    async fn detach(&self, id: &InstanceId) -> Result<(), ProviderError> {
        self.provider.detach(id).await
    }

    async fn list_owned(&self) -> Result<Vec<Instance>, ProviderError> {
        self.provider.list_owned().await
    }

    async fn describe(&self, id: &InstanceId) -> Result<Instance, ProviderError> {
        self.provider.describe(id).await
    }

    async fn terminate(&self, ids: &[InstanceId]) -> Terminations {
        self.provider.terminate(ids).await
    }

    async fn console(&self, id: &InstanceId) -> Result<String, ProviderError> {
        self.provider.console(id).await
    }

    async fn check(&self) -> Result<(), ProviderError> {
        self.provider.check().await
    }
}
