//! The check of declared capacity's needs, with a played API server.

use kiyot_kubernetes::capacity_check;
use kiyot_testkit::{ApiFault, ApiServer, Verb};
use serde_json::json;

use crate::world::options;

/// Verifies K32.
#[tokio::test]
async fn check_reads_the_node_with_the_daemons_rights_and_names_failures() {
    let api = ApiServer::start(&[]).await;
    let access = options(&api).access;
    let labels = json!({ "kiyot.elotl.co/capacity": "declared" });
    api.put("nodes", json!({ "metadata": { "name": "worker-1", "labels": labels } }));
    let check = async || capacity_check::check(&access, "worker-1", None).await;
    // The played API server serves no admission policies.
    let lines = check().await.unwrap();
    for expected in ["has no taint", "does not serve mutatingadmissionpolicies", "has no anno"] {
        assert!(lines.iter().any(|line| line.contains(expected)), "{expected}: {lines:?}");
    }
    api.fail(Some(Verb::Get), "nodes", 1, ApiFault::Status(403, None));
    let error = check().await.unwrap_err();
    assert!(error.starts_with("node worker-1: API server denied the call"), "{error}");
    let absent = capacity_check::check(&access, "worker-2", None).await.unwrap_err();
    assert!(absent.starts_with("node worker-2: absent"), "{absent}");
}
