//! Cells in the Kubernetes API, by a daemon before a played API server.

use kiyot_testkit::{ApiServer, Kiyot, KiyotOptions, LIMIT, Node, table, wait_until};
use serde_json::Value;

use super::{WAIT, options, pod, remove_and_assert_clean};

const DEFINITION: &str = include_str!("../../../deploy/crds/cells.kiyot.elotl.co.yaml");

fn definition() -> Value {
    serde_saphyr::from_str(DEFINITION).unwrap()
}

/// Returns the options of a daemon with access to an API server.
fn with_access(api: &ApiServer) -> KiyotOptions {
    let sections = format!("[kubernetes]\nkubeconfig = \"{}\"\n", api.kubeconfig().display());
    KiyotOptions { sections, milpa: "node = \"worker-1\"".to_owned(), ..options() }
}

/// Waits until a cell of this phase is shown, and returns its object.
async fn shown(api: &ApiServer, phase: &str) -> Value {
    wait_until(format!("a cell is shown as {phase}"), LIMIT, async || {
        let cells = api.objects("cells");
        cells.into_values().find(|cell| cell["status"]["phase"] == phase)
    })
    .await
}

/// Verifies K2, K3, K4.
#[tokio::test]
async fn cell_of_a_pod_is_shown_with_its_columns_and_removed_with_it() {
    let api = ApiServer::start(&[definition()]).await;
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, with_access(&api)).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("web", WAIT).label("app", "web")).await.unwrap();
    let cell = wait_until("the start of the cell is shown", LIMIT, async || {
        let cell = shown(&api, "Bound").await;
        let is_whole = !cell["status"]["timeline"]["firstContainer"].is_null();
        (is_whole && cell["metadata"]["labels"]["app"] == "web").then_some(cell)
    })
    .await;
    let wide = table(&definition(), [&cell], true, "3s");
    println!("{wide}");
    let header: Vec<_> = wide.lines().next().unwrap().split("   ").map(str::trim).collect();
    let header: Vec<_> = header.into_iter().filter(|name| !name.is_empty()).collect();
    assert_eq!(
        header,
        [
            "NAME",
            "POD NAME",
            "POD NAMESPACE",
            "NODE",
            "LAUNCH TYPE",
            "INSTANCE TYPE",
            "INSTANCE ID",
            "IP",
            "STATUS",
            "$/H",
            "AGE",
            "ZONE",
            "OFFERING",
            "BOOT SECONDS",
            "COST",
        ]
    );
    let address = super::address(&mut kubelet, &running.sandbox).await;
    let status = &cell["status"];
    assert_eq!(status["podName"], "web");
    assert_eq!(status["ip"], address.as_str());
    assert_eq!(cell["spec"]["nodeName"], "worker-1");
    assert_eq!(vec![cell["metadata"]["name"].as_str().unwrap().to_owned()], kiyot.cells());
    let conditions = status["conditions"].as_array().unwrap();
    let conditions: Vec<_> = conditions
        .iter()
        .map(|own| format!("{}={}", own["type"].as_str().unwrap(), own["status"].as_str().unwrap()))
        .collect();
    assert_eq!(conditions, ["Launched=True", "Enrolled=True", "PodBound=True", "Lost=False"]);

    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    wait_until("no cell is shown", LIMIT, async || api.objects("cells").is_empty().then_some(()))
        .await;
}
