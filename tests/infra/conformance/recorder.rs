//! A provider that records the calls to another.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use kiyot_engine::{
    Wanted,
    placement::Catalogue,
    provider::{
        Attached, Attachment, Capabilities, ErrorClass, Instance, InstanceId, LaunchSpec, Provider,
        ProviderError, Terminations,
    },
};

/// A call, with its outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) name: &'static str,
    /// The instance that the call names or returned.
    pub(super) instance: Option<InstanceId>,
    /// The class of its error.
    pub(super) error: Option<ErrorClass>,
}

/// The answered calls, in order.
#[derive(Debug, Clone, Default)]
pub(super) struct Calls(Arc<Mutex<Vec<Call>>>);

impl Calls {
    /// Returns the calls of a name.
    pub(super) fn of(&self, name: &str) -> Vec<Call> {
        let calls = self.0.lock().unwrap();
        calls.iter().filter(|call| call.name == name).cloned().collect()
    }

    /// Returns the number of calls of a name that failed with a class.
    pub(super) fn failed(&self, name: &str, class: ErrorClass) -> usize {
        self.of(name).iter().filter(|call| call.error == Some(class)).count()
    }

    /// Returns the instances that launches returned.
    pub(super) fn launched(&self) -> BTreeSet<InstanceId> {
        self.of("launch").into_iter().filter_map(|call| call.instance).collect()
    }
}

/// A provider that records the calls to another, once they are answered.
#[derive(Debug)]
pub(super) struct Recorder {
    inner: Arc<dyn Provider>,
    capabilities: Capabilities,
    calls: Calls,
}

impl Recorder {
    pub(super) fn new(inner: Arc<dyn Provider>, capabilities: Capabilities, calls: Calls) -> Self {
        Self { inner, capabilities, calls }
    }

    fn record<T>(
        &self,
        name: &'static str,
        instance: Option<&InstanceId>,
        outcome: &Result<T, ProviderError>,
    ) {
        let error = outcome.as_ref().err().map(|error| error.class);
        self.calls.0.lock().unwrap().push(Call { name, instance: instance.cloned(), error });
    }
}

#[async_trait]
impl Provider for Recorder {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    async fn catalogue(&self) -> Result<Catalogue, ProviderError> {
        self.inner.catalogue().await
    }

    async fn parameters(&self, wanted: &Wanted) -> Result<BTreeMap<String, String>, ProviderError> {
        self.inner.parameters(wanted).await
    }

    async fn launch(&self, spec: &LaunchSpec, token: &str) -> Result<Instance, ProviderError> {
        let launched = self.inner.launch(spec, token).await;
        self.record("launch", launched.as_ref().ok().map(|launched| &launched.id), &launched);
        launched
    }

    async fn attach(
        &self,
        instance: &InstanceId,
        to: &Attachment,
    ) -> Result<Attached, ProviderError> {
        self.inner.attach(instance, to).await
    }

    async fn detach(&self, instance: &InstanceId) -> Result<(), ProviderError> {
        self.inner.detach(instance).await
    }

    async fn list_owned(&self) -> Result<Vec<Instance>, ProviderError> {
        let listed = self.inner.list_owned().await;
        self.record("list", None, &listed);
        listed
    }

    async fn describe(&self, instance: &InstanceId) -> Result<Instance, ProviderError> {
        let described = self.inner.describe(instance).await;
        self.record("describe", Some(instance), &described);
        described
    }

    async fn terminate(&self, instances: &[InstanceId]) -> Terminations {
        let outcomes = self.inner.terminate(instances).await;
        for (instance, outcome) in &outcomes {
            self.record("terminate", Some(instance), outcome);
        }
        outcomes
    }

    async fn console(&self, instance: &InstanceId) -> Result<String, ProviderError> {
        self.inner.console(instance).await
    }

    async fn check(&self) -> Result<(), ProviderError> {
        self.inner.check().await
    }
}
