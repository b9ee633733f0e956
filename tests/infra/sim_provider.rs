//! The simulated cloud behind the contract with providers, with a clock that a test sets.

use std::{net::IpAddr, sync::Mutex, time::Duration};

use async_trait::async_trait;
use kiyot::backends::milpa::providers::{
    Attachment, Capabilities, Instance, InstanceId, LaunchSpec, Offering, Provider, ProviderError,
    Terminations,
    sim::{CAPABILITIES, SimCloud},
};

/// The time in which a terminated instance ends.
const END: Duration = Duration::from_secs(60);
/// The time after which a new instance is listed.
const VISIBLE: Duration = Duration::from_secs(5);

/// The simulated cloud as a provider.
#[derive(Debug, Default)]
pub(crate) struct SimProvider {
    state: Mutex<(SimCloud, Duration)>,
}

impl SimProvider {
    /// Lets time pass.
    pub(crate) fn pass(&self, time: Duration) {
        self.state.lock().unwrap().1 += time;
    }
}

#[async_trait]
impl Provider for SimProvider {
    fn capabilities(&self) -> Capabilities {
        CAPABILITIES
    }

    async fn offerings(&self) -> Result<Vec<Offering>, ProviderError> {
        Ok(SimCloud::offerings())
    }

    async fn launch(&self, spec: &LaunchSpec, token: &str) -> Result<Instance, ProviderError> {
        let mut state = self.state.lock().unwrap();
        let (cloud, now) = &mut *state;
        let id = cloud.launch(spec, token, "ours", *now, VISIBLE)?;
        cloud.describe(&id, *now + VISIBLE)
    }

    async fn attach(
        &self,
        _instance: &InstanceId,
        _to: &Attachment,
    ) -> Result<Vec<IpAddr>, ProviderError> {
        Ok(Vec::new())
    }

    async fn detach(&self, _instance: &InstanceId) -> Result<(), ProviderError> {
        Ok(())
    }

    async fn list_owned(&self) -> Result<Vec<Instance>, ProviderError> {
        let state = self.state.lock().unwrap();
        Ok(state.0.list(state.1))
    }

    async fn describe(&self, instance: &InstanceId) -> Result<Instance, ProviderError> {
        let state = self.state.lock().unwrap();
        state.0.describe(instance, state.1)
    }

    async fn terminate(&self, instances: &[InstanceId]) -> Terminations {
        let mut state = self.state.lock().unwrap();
        let (cloud, now) = &mut *state;
        let end = |id: &InstanceId| (id.clone(), cloud.terminate(id, *now, END));
        instances.iter().map(end).collect()
    }

    async fn console(&self, instance: &InstanceId) -> Result<String, ProviderError> {
        self.describe(instance).await.map(|_| String::new())
    }

    async fn check(&self) -> Result<(), ProviderError> {
        Ok(())
    }
}
