//! The conformance suite: the contract with providers, as every provider must keep it.
//!
//! A subject is a provider with means to make specs and to let time pass. A case fails with the
//! provider's name.

use std::{collections::BTreeMap, time::Duration};

use kiyot::backends::milpa::{
    id::CellId,
    providers::{
        ErrorClass, Instance, InstanceId, InstanceState, LaunchSpec, Provider, Termination,
    },
};
use kiyot_link::bootstrap::{Bootstrap, GatewayAddress};

use super::{bench::Bench, sim_provider::SimProvider};

/// A provider under test.
trait Subject {
    fn provider(&self) -> &dyn Provider;
    /// Lets so much time pass that what was accepted is done, and every list is current.
    fn settle(&self);
}

impl Subject for Bench {
    fn provider(&self) -> &dyn Provider {
        &self.provider
    }

    fn settle(&self) {}
}

impl Subject for SimProvider {
    fn provider(&self) -> &dyn Provider {
        self
    }

    fn settle(&self) {
        self.pass(Duration::from_secs(600));
    }
}

async fn spec(subject: &impl Subject) -> LaunchSpec {
    let cell = CellId::mint().unwrap();
    let bootstrap = Bootstrap {
        cell: cell.to_string(),
        gateway: GatewayAddress::Unix("/nowhere".into()),
        ca_sha256: String::new(),
        token: "secret".into(),
        orphan_timeout_secs: 900,
    };
    LaunchSpec {
        cell,
        candidates: subject.provider().offerings().await.unwrap(),
        tags: BTreeMap::new(),
        bootstrap,
        parameters: BTreeMap::new(),
    }
}

async fn listed(subject: &impl Subject, cell: &CellId) -> Vec<Instance> {
    let all = subject.provider().list_owned().await.unwrap();
    all.into_iter().filter(|instance| instance.cell == *cell && is_there(instance)).collect()
}

fn is_there(instance: &Instance) -> bool {
    instance.state != InstanceState::Terminated
}

/// Terminates an instance, and asserts that its end is proven in the provider's way.
async fn end(subject: &impl Subject, id: &InstanceId) {
    let provider = subject.provider();
    let outcomes = provider.terminate(std::slice::from_ref(id)).await;
    let progress = *outcomes[id].as_ref().unwrap();
    let expected = if provider.capabilities().awaits_ends() {
        Termination::Confirmed
    } else {
        Termination::Accepted
    };
    assert_eq!(progress, expected);
    subject.settle();
    match provider.describe(id).await {
        Ok(instance) => assert!(!is_there(&instance), "{instance:?}"),
        Err(error) => assert_eq!(error.class, ErrorClass::NotFound, "{error}"),
    }
}

async fn launch_with_the_same_token_is_one_instance(subject: &impl Subject) {
    let spec = spec(subject).await;
    let provider = subject.provider();
    // As after a reply that was lost.
    let first = provider.launch(&spec, "token").await.unwrap();
    let second = provider.launch(&spec, "token").await.unwrap();
    assert_eq!((&first.id, &first.cell), (&second.id, &spec.cell));
    subject.settle();
    let listed = listed(subject, &spec.cell).await;
    assert_eq!(listed.iter().map(|one| &one.id).collect::<Vec<_>>(), [&first.id]);
    assert!(listed[0].state.is_alive());
    assert!(spec.candidates.contains(&listed[0].offering));
    end(subject, &first.id).await;
}

async fn instance_is_described_until_it_has_ended(subject: &impl Subject) {
    let spec = spec(subject).await;
    let provider = subject.provider();
    let launched = provider.launch(&spec, "token").await.unwrap();
    subject.settle();
    let described = provider.describe(&launched.id).await.unwrap();
    assert_eq!((described.cell, described.state), (spec.cell.clone(), InstanceState::Running));
    provider.console(&launched.id).await.unwrap();
    end(subject, &launched.id).await;
    assert_eq!(listed(subject, &spec.cell).await, []);
}

async fn unknown_instance_is_not_found(subject: &impl Subject) {
    let provider = subject.provider();
    let unknown = InstanceId(CellId::mint().unwrap().to_string());
    assert_eq!(provider.describe(&unknown).await.unwrap_err().class, ErrorClass::NotFound);
    provider.detach(&unknown).await.unwrap();
    match &provider.terminate(std::slice::from_ref(&unknown)).await[&unknown] {
        // Absence proves the end where there is no age from which on it counts.
        Ok(Termination::Confirmed) => {
            assert!(provider.capabilities().not_found_believed_after.is_zero());
        }
        Ok(Termination::Accepted) => panic!("an unknown instance can't end"),
        Err(error) => assert_eq!(error.class, ErrorClass::NotFound, "{error}"),
    }
}

async fn unknown_instance_spoils_no_batch(subject: &impl Subject) {
    let provider = subject.provider();
    let (one, other) = (spec(subject).await, spec(subject).await);
    let one = provider.launch(&one, "one").await.unwrap().id;
    let other = provider.launch(&other, "other").await.unwrap().id;
    subject.settle();
    let unknown = InstanceId("unknown".into());
    let batch = [one.clone(), unknown.clone(), other.clone()];
    let outcomes = provider.terminate(&batch).await;
    assert_eq!(outcomes.len(), batch.len(), "an outcome for each");
    subject.settle();
    for id in [&one, &other] {
        assert!(outcomes[id].is_ok());
        let left = provider.describe(id).await;
        assert!(left.is_err() || left.is_ok_and(|instance| !is_there(&instance)));
    }
}

async fn termination_is_repeatable(subject: &impl Subject) {
    let spec = spec(subject).await;
    let provider = subject.provider();
    let launched = provider.launch(&spec, "token").await.unwrap();
    subject.settle();
    end(subject, &launched.id).await;
    let again = provider.terminate(std::slice::from_ref(&launched.id)).await;
    match &again[&launched.id] {
        Ok(_) => {}
        Err(error) => assert_eq!(error.class, ErrorClass::NotFound, "{error}"),
    }
}

/// Runs a case with every provider.
macro_rules! conformance {
    ($($case:ident)*) => {
        mod netns {
            $(
                #[tokio::test]
                async fn $case() {
                    super::$case(&super::Bench::new()).await;
                }
            )*
        }
        mod sim {
            $(
                #[tokio::test]
                async fn $case() {
                    super::$case(&super::SimProvider::default()).await;
                }
            )*
        }
    };
}

conformance! {
    launch_with_the_same_token_is_one_instance
    instance_is_described_until_it_has_ended
    unknown_instance_is_not_found
    unknown_instance_spoils_no_batch
    termination_is_repeatable
}
