//! The calls that the provider makes, and the policy.

use std::collections::BTreeSet;

use kiyot_engine::{
    placement::Market,
    provider::{Attachment, Provider},
};
use kiyot_testkit::{LIMIT, wait_until};
use serde_json::Value;

use crate::world::World;

/// Returns the policy that operators copy.
pub(crate) fn policy() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/config/iam-policy.json");
    std::fs::read_to_string(path).unwrap()
}

/// Returns the actions of a policy, without the service.
pub(crate) fn actions_of(policy: &str) -> BTreeSet<String> {
    let policy: Value = serde_json::from_str(policy).unwrap();
    let mut actions = BTreeSet::new();
    for statement in policy["Statement"].as_array().unwrap() {
        let listed = match &statement["Action"] {
            Value::Array(actions) => actions.clone(),
            action => vec![action.clone()],
        };
        let names = listed.iter().map(|action| action.as_str().unwrap().split_once(':').unwrap());
        actions.extend(names.map(|(service, action)| {
            let expected = if action == "GetProducts" { "pricing" } else { "ec2" };
            assert_eq!(service, expected, "{action}");
            action.to_owned()
        }));
    }
    actions
}

#[tokio::test]
async fn policy_has_only_the_actions_of_a_cells_life() {
    let world = World::new().await;
    world.provider.check().await.unwrap();
    world.provider.catalogue().await.unwrap();
    let spec = world.spec(&[world.offering(0, Market::OnDemand)]).await;
    let launched = world.provider.launch(&spec, "token").await.unwrap();
    world.provider.list_owned().await.unwrap();
    world.provider.console(&launched.id).await.unwrap();
    world.provider.attach(&launched.id, &Attachment::default()).await.unwrap();
    world.provider.terminate(std::slice::from_ref(&launched.id)).await;
    // Prices are read in the background.
    wait_until("the price list is read", LIMIT, async || {
        world.cloud.calls_of("GetProducts").into_iter().next()
    })
    .await;
    let mut called: BTreeSet<String> =
        world.cloud.calls().into_iter().map(|call| call.action).collect();
    // Tags in a launch need the permission to create them.
    called.insert("CreateTags".to_owned());
    assert_eq!(actions_of(&policy()), called);
    // The subnet of the node needs no further action.
    world.cloud.clear_calls();
    world.with_node_at([10, 77, 0, 5].into()).await.check().await.unwrap_err();
    let called: BTreeSet<String> =
        world.cloud.calls().into_iter().map(|call| call.action).collect();
    assert!(called.is_subset(&actions_of(&policy())), "{called:?}");
}
