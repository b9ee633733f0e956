//! Cells in the Kubernetes API, which a fake API server serves.

use kiyot_testkit::{
    ApiServer, Kiyot, KiyotOptions, LIMIT, Node, RunningPod, cri, table, wait_until,
};
use serde_json::{Value, json};

use crate::cell::{
    WAIT,
    operator::admin::{admin, pods},
    options, pod, remove_and_assert_clean,
};

const DEFINITION: &str = include_str!("../../../../deploy/crds/cells.kiyot.elotl.co.yaml");
const BUDGETS: &str = include_str!("../../../../deploy/crds/cellbudgets.kiyot.elotl.co.yaml");

fn definition() -> Value {
    serde_saphyr::from_str(DEFINITION).unwrap()
}

/// Adds the Node object of the node, which owns the objects of its cells.
fn with_node(api: ApiServer) -> ApiServer {
    let metadata = json!({ "name": "worker-1" });
    api.put("nodes", json!({ "apiVersion": "v1", "kind": "Node", "metadata": metadata }));
    api
}

/// Returns the options of a daemon with access to an API server.
fn with_access(api: &ApiServer) -> KiyotOptions {
    let sections = format!("[kubernetes]\nkubeconfig = \"{}\"\n", api.kubeconfig().display());
    KiyotOptions { sections, milpa: "node = \"worker-1\"".to_owned(), ..options() }
}

/// Returns the object of an ended cell.
fn stale(node: &str) -> Value {
    json!({
        "apiVersion": "kiyot.elotl.co/v1",
        "kind": "Cell",
        "metadata": { "name": "cell-stale", "labels": { "kiyot.elotl.co/node": node } },
        "spec": { "nodeName": node, "backend": "milpa" },
    })
}

/// Returns the object of a pod with requests.
fn pod_with_requests(pod: &RunningPod) -> Value {
    let metadata = pod.config.metadata.as_ref().unwrap();
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": metadata.name,
            "namespace": metadata.namespace,
            "uid": metadata.uid,
        },
        "spec": {
            "nodeName": "worker-1",
            "containers": [{ "resources": { "requests": { "cpu": "1500m", "memory": "3Gi" } } }],
        },
    })
}

/// Waits until the API has a cell in this phase. Returns the object of the cell.
async fn shown(api: &ApiServer, phase: &str) -> Value {
    wait_until(format!("a cell is shown as {phase}"), LIMIT, async || {
        let cells = api.objects("cells");
        cells.into_values().find(|cell| cell["status"]["phase"] == phase)
    })
    .await
}

/// Verifies K2, K3, K4, K8.
#[tokio::test]
async fn cell_of_a_pod_is_shown_with_its_columns_and_removed_with_it() {
    let api = with_node(ApiServer::start_tls(&[definition()]).await);
    // The previous run of the daemon left this object. Its cell has ended, and the object has no
    // owner.
    api.put("cells", stale("worker-1"));
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
    println!("{}\n{wide}", table(&definition(), [&cell], false, "3s"));
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
            "PROVIDER",
            "ZONE",
            "OFFERING",
            "BOOT SECONDS",
            "COST",
        ]
    );
    // The API has the requests of memory, which CRI does not carry.
    api.put("pods", pod_with_requests(&running));
    let mut client = admin(&kiyot).await;
    wait_until("the requests of the API are shown", LIMIT, async || {
        let resources = pods(&mut client).await[0].resources?;
        ((resources.cpu_millis, resources.memory_bytes) == (1500, 3 << 30)).then_some(())
    })
    .await;
    let address = crate::cell::address(&mut kubelet, &running.sandbox).await;
    let status = &cell["status"];
    assert_eq!((&status["podName"], &status["provider"]), (&"web".into(), &"netns".into()));
    assert_eq!(status["ip"], address.as_str());
    assert_eq!(cell["spec"]["nodeName"], "worker-1");
    assert_eq!(cell["metadata"]["name"], format!("{}.worker-1", kiyot.cells()[0]));
    let conditions = status["conditions"].as_array().unwrap();
    let conditions: Vec<_> = conditions
        .iter()
        .map(|own| format!("{}={}", own["type"].as_str().unwrap(), own["status"].as_str().unwrap()))
        .collect();
    assert_eq!(conditions, ["Launched=True", "Enrolled=True", "PodBound=True", "Lost=False"]);

    let reasons = wait_until("events of the pod are reported", LIMIT, async || {
        let events = api.objects("events");
        let reasons = events.values().map(|event| event["reason"].as_str().unwrap().to_owned());
        let reasons: std::collections::BTreeSet<String> = reasons.collect();
        (reasons.len() == 3).then_some(reasons)
    })
    .await;
    assert_eq!(Vec::from_iter(reasons), ["CellEnrolled", "CellLaunched", "OfferingChosen"]);

    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    let is_empty = async || api.objects("cells").is_empty().then_some(());
    wait_until("no cell is shown", LIMIT, is_empty).await;
}

/// Verifies A39.
#[tokio::test]
async fn cells_leave_room_for_requests_of_pods_on_the_node_but_not_of_pods_in_cells() {
    const MORE_THAN_THE_NODE: &str = "900000Gi";
    let api = with_node(ApiServer::start(&[definition()]).await);
    let node = Node::start().await;
    let of_provider = "reserve_memory = \"1Mi\"\n".to_owned();
    let kiyot = Kiyot::start(&node, KiyotOptions { of_provider, ..with_access(&api) }).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("in-a-cell", WAIT)).await.unwrap();
    let large = |mut pod: Value| {
        pod["spec"]["containers"][0]["resources"]["requests"]["memory"] = json!(MORE_THAN_THE_NODE);
        pod["status"] = json!({ "phase": "Running" });
        pod
    };
    let in_cell = large(pod_with_requests(&running));
    let mut local = in_cell.clone();
    (local["metadata"]["name"], local["metadata"]["uid"]) = (json!("local"), json!("local"));
    api.put("pods", in_cell);
    api.put("pods", local);
    let counts = async |pods: &str| {
        let is_counted = || {
            kiyot
                .log()
                .lines()
                .rfind(|line| line.contains("requests of pods on the node"))
                .is_some_and(|last| last.contains(pods))
        };
        wait_until("the pods are counted", LIMIT, async || is_counted().then_some(())).await;
    };
    counts("pods=1500m CPU and 921600000 MiB").await;
    let error = kubelet.run_pod(&pod("beside", WAIT)).await.unwrap_err();
    let said =
        "0 MiB more (reserve_cpu, reserve_memory, 1500m CPU and 921600000 MiB of pods on the";
    assert!(error.message().contains(said), "{error}");
    kubelet.exec_sync(&running.container("main").id, &["true"]).await.unwrap();
    api.delete("pods", "default/local");
    counts("pods=0m CPU and 0 MiB").await;
    let beside = kubelet.run_pod(&pod("beside-again", WAIT)).await.unwrap();
    kubelet.stop_and_remove(&running).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &beside).await;
}

/// Verifies K6.
#[tokio::test]
async fn daemon_in_a_pod_uses_its_service_account_once_present_and_a_rotated_token() {
    let mut api = with_node(ApiServer::start_tls(&[definition()]).await);
    api.accept_only("hush-first");
    let mut account = api.service_account();
    let node = Node::start().await;
    let with_access = KiyotOptions {
        sections: "[kubernetes]\nkubeconfig = \"in-cluster\"\n".to_owned(),
        environment: account.environment(),
        ..with_access(&api)
    };
    let kiyot = Kiyot::start(&node, with_access).await;
    let mut kubelet = kiyot.kubelet().await;
    let said = |text: &str| kiyot.log().lines().filter(|line| line.contains(text)).count();
    let missing = "in-cluster credentials can't be used: ";
    wait_until("missing files are logged", LIMIT, async || (said(missing) > 0).then_some(())).await;
    let allowed = "ca.crt and namespace in /var/run/secrets/kubernetes.io/serviceaccount";
    assert!(said(allowed) > 0, "{}", kiyot.log());
    let first = kubelet.run_pod(&pod("first", WAIT)).await.unwrap();
    account.project("hush-first");
    shown(&api, "Bound").await;

    // The token is rotated and the previous token expires while the API server is down.
    api.stop().await;
    let not_shown = "cells are not shown in the Kubernetes API";
    let before = said(not_shown);
    let second = kubelet.run_pod(&pod("second", WAIT)).await.unwrap();
    let is_noticed = async || (said(not_shown) > before).then_some(());
    wait_until("the outage is logged", LIMIT, is_noticed).await;
    account.project("hush-second");
    api.accept_only("hush-second");
    api.restart().await;
    wait_until("both cells are shown", LIMIT, async || {
        let cells = api.objects("cells").into_values();
        (cells.filter(|cell| cell["status"]["phase"] == "Bound").count() == 2).then_some(())
    })
    .await;
    assert_eq!(said("hush"), 0, "{}", kiyot.log());
    kubelet.stop_and_remove(&first).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &second).await;
}

/// Verifies K6.
#[tokio::test]
async fn daemon_without_its_api_server_runs_pods_logs_once_and_shows_cells_later() {
    let mut api = with_node(ApiServer::start(&[definition()]).await);
    api.stop().await;
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, with_access(&api)).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("web", WAIT)).await.unwrap();
    let said = |text: &str| kiyot.log().lines().filter(|line| line.contains(text)).count();
    let not_shown = "cells are not shown in the Kubernetes API, pods are not affected";
    wait_until("the outage is logged", LIMIT, async || (said(not_shown) > 0).then_some(())).await;
    api.restart().await;
    shown(&api, "Bound").await;
    assert_eq!(said(not_shown), 1, "{}", kiyot.log());
    assert_eq!(
        said("calls of the Kubernetes API succeed again until_now=\"cells"),
        1,
        "{}",
        kiyot.log()
    );
    let of_libraries = kiyot.log().lines().filter(|line| line.contains("kube_client")).count();
    assert_eq!(of_libraries, 0, "{}", kiyot.log());
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Returns an API server with a budget for the namespace of pods, and the options of a daemon that
/// obeys the budget. Its cells have a price per GiB.
async fn budgeted(spec: Value, gib_price: u32) -> (ApiServer, KiyotOptions) {
    let budgets: Value = serde_saphyr::from_str(BUDGETS).unwrap();
    let api = with_node(ApiServer::start(&[definition(), budgets]).await);
    let metadata = json!({ "namespace": "default", "name": "cells" });
    let budget = json!({
        "apiVersion": "kiyot.elotl.co/v1",
        "kind": "CellBudget",
        "metadata": metadata,
        "spec": spec,
    });
    api.put("cellbudgets", budget);
    let mut options = with_access(&api);
    options.sections.push_str("budgets = true\n");
    options.of_provider = format!("gib_price_per_hour = \"{gib_price}\"\n");
    (api, options)
}

/// Verifies K24, K25.
#[tokio::test]
async fn cells_of_a_spent_budget_end_and_no_further_cells_are_launched() {
    // A cell of the default size costs two dollars a second.
    let spec = json!({ "dollarsPerMonth": "4", "onExhausted": "end" });
    let (api, options) = budgeted(spec, 10_000).await;
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    let first = kubelet.run_pod(&pod("first", WAIT)).await.unwrap();
    let has_ended = async || {
        let status = kubelet.sandbox_status(&first.sandbox).await.unwrap();
        (status.state() == cri::PodSandboxState::SandboxNotready).then_some(())
    };
    wait_until("the sandbox is not ready", LIMIT, has_ended).await;
    let said = "CellBudget default/cells allows $4.0000 a month on all nodes, and ";
    assert!(kiyot.log().contains(said), "{}", kiyot.log());
    let spent = || {
        let budget = api.objects("cellbudgets").into_values().next().unwrap();
        budget["status"]["spent"]["monthLeft"] == "0.0000"
    };
    wait_until("the spent budget is reported", LIMIT, async || spent().then_some(())).await;
    for _ in 0..2 {
        let error = kubelet.run_pod(&pod("second", WAIT)).await.unwrap_err();
        assert!(error.message().contains(said), "{error}");
        kiyot.kill9();
        kiyot.start_again().await;
        kubelet = kiyot.kubelet().await;
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &first).await;
}

/// Verifies K20, K22.
#[tokio::test]
async fn namespace_obeys_its_budget_and_needs_no_api_server_within_its_share() {
    // A cell of the default size costs more than half of the budget.
    let (mut api, options) = budgeted(json!({ "dollarsPerHour": "1" }), 1).await;
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    let first = kubelet.run_pod(&pod("first", WAIT)).await.unwrap();
    let share = |api: &ApiServer| {
        let budget = api.objects("cellbudgets").into_values().next().unwrap();
        budget["status"]["shares"][0]["hourlyMicros"].as_u64().unwrap_or_default()
    };
    let granted = share(&api);
    assert!((500_000..=1_000_000).contains(&granted), "{granted}");
    let error = kubelet.run_pod(&pod("second", WAIT)).await.unwrap_err();
    let said = "CellBudget default/cells allows $1.0000 an hour on all nodes: ";
    assert!(error.message().contains(said), "{error}");
    assert_eq!(kiyot.cells().len(), 1);

    // The share is on disk: a restarted daemon can use it without an API server.
    api.stop().await;
    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    kubelet.stop_and_remove(&first).await.unwrap();
    let third = kubelet.run_pod(&pod("third", WAIT)).await.unwrap();
    assert_eq!(kiyot.cells().len(), 1);
    api.restart().await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &third).await;
    let is_given_back = async || (share(&api) == 0).then_some(());
    wait_until("the share is given back", LIMIT, is_given_back).await;
}
