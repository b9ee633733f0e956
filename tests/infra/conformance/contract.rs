//! Cases of single calls: classes of errors, and repeated calls.

use std::sync::Arc;

use kiyot_engine::{
    Wanted,
    id::CellId,
    placement::{Needs, Rules, rank},
    provider::{
        Attachment, ErrorClass, Instance, InstanceId, InstanceState, LaunchSpec, Provider,
        ProviderError, TagRules, Termination,
    },
};

use super::{
    super::bench::{launch_spec, wait_for},
    Subject,
    fault::Fault,
};

async fn spec(subject: &impl Subject, provider: &dyn Provider) -> LaunchSpec {
    let catalogue = provider.catalogue().await.unwrap();
    let ranked = rank(&catalogue, &Needs::default(), &Rules::default(), &());
    let offerings = ranked.into_iter().map(|candidate| candidate.offering).collect();
    let cell = CellId::mint().unwrap();
    LaunchSpec {
        tags: subject.owner().tags(&TagRules::default(), &cell, &Wanted::default()).tags,
        parameters: provider.parameters(&Wanted::default()).await.unwrap(),
        ..launch_spec(cell, offerings)
    }
}

async fn listed(provider: &dyn Provider, cell: &CellId) -> Vec<Instance> {
    let all = provider.list_owned().await.unwrap();
    all.into_iter().filter(|instance| instance.cell == *cell && is_left(instance)).collect()
}

fn is_left(instance: &Instance) -> bool {
    instance.state != InstanceState::Terminated
}

async fn terminate(provider: &dyn Provider, id: &InstanceId) -> Result<Termination, ProviderError> {
    provider.terminate(std::slice::from_ref(id)).await.remove(id).unwrap()
}

/// Launches an instance, and lets time pass until every call knows it.
async fn launched(subject: &impl Subject, provider: &dyn Provider) -> Instance {
    let instance = provider.launch(&spec(subject, provider).await, "token").await.unwrap();
    subject.settle();
    wait_for("the instance runs", async || !subject.running().is_empty()).await;
    instance
}

fn attachment(instance: &Instance) -> Attachment {
    Attachment {
        pod_name: "a-pod".into(),
        pod_namespace: "a-namespace".into(),
        pod_uid: instance.cell.to_string(),
        sandbox: instance.cell.to_string(),
        ..Attachment::default()
    }
}

/// Terminates an instance, and asserts that the provider proves its end.
async fn end(subject: &impl Subject, provider: &dyn Provider, id: &InstanceId) {
    let progress = terminate(provider, id).await.unwrap();
    let expected = if provider.capabilities().awaits_ends() {
        Termination::Confirmed
    } else {
        Termination::Accepted
    };
    assert_eq!(progress, expected);
    subject.settle();
    match provider.describe(id).await {
        Ok(instance) => assert!(!is_left(&instance), "{instance:?}"),
        Err(error) => assert_eq!(error.class, ErrorClass::NotFound, "{error}"),
    }
    subject.assert_nothing_left(std::slice::from_ref(id));
}

pub(super) async fn launch_with_the_same_token_is_one_instance(subject: Arc<impl Subject>) {
    let provider = &*subject.provider();
    let spec = spec(&*subject, provider).await;
    // The reply of the first was lost.
    let first = provider.launch(&spec, "token").await.unwrap();
    let second = provider.launch(&spec, "token").await.unwrap();
    assert_eq!((&first.id, &first.cell), (&second.id, &spec.cell));
    subject.settle();
    let listed = listed(provider, &spec.cell).await;
    assert_eq!(listed.iter().map(|instance| &instance.id).collect::<Vec<_>>(), [&first.id]);
    assert!(listed[0].state.is_alive());
    assert!(spec.offerings().any(|offering| *offering == listed[0].offering));
    end(&*subject, provider, &first.id).await;
}

pub(super) async fn launch_that_was_cut_is_repeated_as_one_instance(subject: Arc<impl Subject>) {
    let provider = subject.provider();
    let spec = spec(&*subject, &*provider).await;
    subject.inject(Fault::HeldLaunch);
    let cut = tokio::spawn({
        let (provider, spec) = (Arc::clone(&provider), spec.clone());
        async move { provider.launch(&spec, "token").await }
    });
    wait_for("the launch has begun", async || subject.holds_launch()).await;
    cut.abort();
    assert!(cut.await.unwrap_err().is_cancelled());
    subject.heal();
    let launched = provider.launch(&spec, "token").await.unwrap();
    subject.settle();
    assert_eq!(listed(&*provider, &spec.cell).await.len(), 1);
    wait_for("an instance runs", async || !subject.running().is_empty()).await;
    assert_eq!(subject.running(), [(launched.id.clone(), spec.cell)]);
    end(&*subject, &*provider, &launched.id).await;
}

pub(super) async fn launch_that_arrives_late_is_the_repeated_launch(subject: Arc<impl Subject>) {
    let provider = &*subject.provider();
    let spec = spec(&*subject, provider).await;
    subject.inject(Fault::LateLaunch);
    let error = provider.launch(&spec, "token").await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Unanswered, "{error}");
    assert_eq!(subject.running(), []);
    subject.heal();
    let launched = provider.launch(&spec, "token").await.unwrap();
    assert_eq!(subject.running(), [(launched.id.clone(), spec.cell)]);
    subject.settle();
    end(&*subject, provider, &launched.id).await;
}

pub(super) async fn refused_launch_runs_nothing(subject: Arc<impl Subject>) {
    let provider = &*subject.provider();
    let spec = spec(&*subject, provider).await;
    subject.inject(Fault::RefusedLaunch);
    let error = provider.launch(&spec, "token").await.unwrap_err();
    match error.class {
        ErrorClass::Capacity | ErrorClass::Quota => {
            // A provider may try only the first offering.
            let (refusal, first) = (error.refusal.unwrap(), spec.offerings().next().unwrap());
            assert!(refusal.refuses(first), "{refusal:?}");
        }
        class => assert_eq!(class, ErrorClass::Invalid, "{error}"),
    }
    assert_eq!(subject.running(), []);
    subject.heal();
    let launched = provider.launch(&spec, "token").await.unwrap();
    subject.settle();
    end(&*subject, provider, &launched.id).await;
}

pub(super) async fn instance_is_described_until_it_has_ended(subject: Arc<impl Subject>) {
    let provider = &*subject.provider();
    let launched = launched(&*subject, provider).await;
    let described = provider.describe(&launched.id).await.unwrap();
    assert_eq!((&described.cell, described.state), (&launched.cell, InstanceState::Running));
    provider.console(&launched.id).await.unwrap();
    end(&*subject, provider, &launched.id).await;
    assert_eq!(listed(provider, &launched.cell).await, []);
}

pub(super) async fn instance_that_ended_by_itself_is_listed_as_ended(subject: Arc<impl Subject>) {
    let provider = &*subject.provider();
    let launched = launched(&*subject, provider).await;
    subject.inject(Fault::Interruption);
    wait_for("the end is listed", async || {
        let listed = provider.list_owned().await.unwrap();
        listed.iter().all(|instance| instance.id != launched.id || !instance.state.is_alive())
    })
    .await;
    let described = provider.describe(&launched.id).await.unwrap();
    assert!(!described.state.is_alive(), "{described:?}");
    // Termination removes the rest.
    terminate(provider, &launched.id).await.unwrap();
    subject.settle();
    subject.assert_nothing_left(&[launched.id]);
}

pub(super) async fn unknown_instance_is_not_found(subject: Arc<impl Subject>) {
    let provider = &*subject.provider();
    let unknown = subject.unknown();
    assert_eq!(provider.describe(&unknown).await.unwrap_err().class, ErrorClass::NotFound);
    provider.detach(&unknown).await.unwrap();
    match terminate(provider, &unknown).await {
        // Absence proves the end if no minimum age is declared for it.
        Ok(Termination::Confirmed) => {
            assert!(provider.capabilities().not_found_believed_after.is_zero());
        }
        Ok(Termination::Accepted) => panic!("an unknown instance can't end"),
        Err(error) => assert_eq!(error.class, ErrorClass::NotFound, "{error}"),
    }
}

pub(super) async fn unknown_instance_spoils_no_batch(subject: Arc<impl Subject>) {
    let provider = &*subject.provider();
    let spec = async || spec(&*subject, provider).await;
    let first = provider.launch(&spec().await, "first").await.unwrap().id;
    let second = provider.launch(&spec().await, "second").await.unwrap().id;
    subject.settle();
    let batch = [first.clone(), subject.unknown(), second.clone()];
    let outcomes = provider.terminate(&batch).await;
    assert_eq!(outcomes.len(), batch.len(), "an outcome for each");
    assert!(outcomes[&first].is_ok() && outcomes[&second].is_ok());
    subject.settle();
    subject.assert_nothing_left(&[first, second]);
}

pub(super) async fn attachment_is_repeatable(subject: Arc<impl Subject>) {
    let provider = &*subject.provider();
    let launched = launched(&*subject, provider).await;
    let to = attachment(&launched);
    let addresses = provider.attach(&launched.id, &to).await.unwrap();
    assert_eq!(provider.attach(&launched.id, &to).await.unwrap(), addresses);
    for _ in 0..2 {
        provider.detach(&launched.id).await.unwrap();
    }
    end(&*subject, provider, &launched.id).await;
}

pub(super) async fn termination_is_repeatable(subject: Arc<impl Subject>) {
    let provider = &*subject.provider();
    let launched = launched(&*subject, provider).await;
    end(&*subject, provider, &launched.id).await;
    if let Err(error) = terminate(provider, &launched.id).await {
        assert_eq!(error.class, ErrorClass::NotFound, "{error}");
    }
}

pub(super) async fn slow_termination_is_no_end(subject: Arc<impl Subject>) {
    let provider = subject.provider();
    let launched = launched(&*subject, &*provider).await;
    provider.attach(&launched.id, &attachment(&launched)).await.unwrap();
    subject.inject(Fault::SlowEnd);
    let ending = tokio::spawn({
        let (provider, id) = (Arc::clone(&provider), launched.id.clone());
        async move { terminate(&*provider, &id).await }
    });
    wait_for("the termination has begun", async || {
        !provider.describe(&launched.id).await.unwrap().state.is_alive()
    })
    .await;
    let listed_meanwhile = listed(&*provider, &launched.cell).await;
    assert_eq!(listed_meanwhile.len(), 1, "a part of the instance is left");
    assert!(!ending.is_finished() || !provider.capabilities().awaits_ends());
    subject.heal();
    ending.await.unwrap().unwrap();
    subject.settle();
    assert_eq!(listed(&*provider, &launched.cell).await, []);
    subject.assert_nothing_left(&[launched.id]);
}

pub(super) async fn failed_termination_is_repeated(subject: Arc<impl Subject>) {
    let provider = &*subject.provider();
    let launched = launched(&*subject, provider).await;
    provider.attach(&launched.id, &attachment(&launched)).await.unwrap();
    subject.inject(Fault::FailedEnd);
    let error = terminate(provider, &launched.id).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Transient, "{error}");
    assert_eq!(listed(provider, &launched.cell).await.len(), 1, "a part of the instance is left");
    subject.heal();
    end(&*subject, provider, &launched.id).await;
}

pub(super) async fn call_in_an_outage_proves_nothing(subject: Arc<impl Subject>) {
    has_no_effect(subject, Fault::Outage, &[ErrorClass::Transient, ErrorClass::Unanswered]).await;
}

pub(super) async fn denied_call_has_no_effect(subject: Arc<impl Subject>) {
    has_no_effect(subject, Fault::Denied, &[ErrorClass::Auth]).await;
}

pub(super) async fn throttled_call_has_no_effect(subject: Arc<impl Subject>) {
    has_no_effect(subject, Fault::Throttled, &[ErrorClass::Throttled]).await;
}

/// Asserts that all calls fail during a fault, with these classes, and that nothing has changed.
async fn has_no_effect(subject: Arc<impl Subject>, fault: Fault, classes: &[ErrorClass]) {
    let provider = &*subject.provider();
    let launched = launched(&*subject, provider).await;
    let before = subject.running();
    subject.inject(fault);
    let errors = [
        provider.launch(&spec(&*subject, provider).await, "another token").await.map(drop),
        provider.describe(&launched.id).await.map(drop),
        provider.list_owned().await.map(drop),
        terminate(provider, &launched.id).await.map(drop),
    ];
    for error in errors.map(Result::unwrap_err) {
        assert!(classes.contains(&error.class), "{:?}: {}", error.class, error.text());
    }
    assert_eq!(subject.running(), before);
    subject.heal();
    assert!(provider.describe(&launched.id).await.unwrap().state.is_alive());
    end(&*subject, provider, &launched.id).await;
}
