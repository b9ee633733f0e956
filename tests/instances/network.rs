//! Host ports, and networks of the cluster that cells reach by the node.

use kiyot_testkit::{Kiyot, LIMIT, Node, cri, output, wait_until};

use super::{TestCloud, WAIT, pod, run};

/// Script of a container that serves a page with its host name on port 8080.
const SERVE: &str = "mkdir -p /tmp/www; hostname > /tmp/www/index.html; \
                     httpd -p 8080 -h /tmp/www; trap 'exit 0' TERM; \
                     while :; do sleep 0.2; done";
/// Address of a service, as kube-proxy knows it.
const SERVICE: &str = "10.96.0.10";

/// Returns the page at a URL, fetched on the node.
async fn page(url: &str) -> String {
    let page = wait_until(format!("{url} answers"), LIMIT, async || {
        output("busybox", &["timeout", "5", "wget", "-q", "-O", "-", url]).ok()
    })
    .await;
    page.trim().to_owned()
}

fn nat_rules() -> String {
    output("iptables", &["-w", "10", "-t", "nat", "-S"]).unwrap()
}

/// Verifies V30.
#[tokio::test]
async fn host_port_of_a_pod_leads_to_its_instance() {
    let cloud = TestCloud::start().await;
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, cloud.options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let port = cri::PortMapping { container_port: 8080, host_port: 18080, ..Default::default() };
    let mut server = pod("server", SERVE);
    server.ports = vec![port];
    let server = kubelet.run_pod(&server).await.unwrap();
    let client = kubelet.run_pod(&pod("client", WAIT)).await.unwrap();
    let url = format!("http://{}:18080/", cloud.host().unwrap().address);
    assert_eq!(page(&url).await, "server");
    let fetched =
        run(&mut kubelet, &client.container("main").id, &format!("timeout 5 wget -q -O - {url}"))
            .await;
    assert_eq!(fetched.trim(), "server");
    // The rules outlive the daemon, and a later one removes them.
    kiyot.kill9();
    assert_eq!(page(&url).await, "server");
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    for running in [&server, &client] {
        kubelet.stop_and_remove(running).await.unwrap();
    }
    cloud.has_no_cells().await;
    wait_until("no rule is left", LIMIT, async || (!nat_rules().contains("KIYOT")).then_some(()))
        .await;
}

/// Verifies V31.
#[tokio::test]
async fn service_of_the_cluster_is_reached_from_a_cell_by_the_node() {
    let cloud = TestCloud::start().await;
    let node = Node::start().await;
    let mut options = cloud.options();
    options.of_provider.push_str("cluster_networks = [\"10.96.0.0/12\"]\n");
    let subnet = cloud.setup().subnets[0].id.clone();
    // In the node's subnet.
    let all = options.of_provider.clone();
    let line = all.lines().find(|line| line.starts_with("subnets")).unwrap();
    options.of_provider = all.replace(line, &format!("subnets = [\"{subnet}\"]"));
    let kiyot = Kiyot::start(&node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    let server = kubelet.run_pod(&pod("server", SERVE)).await.unwrap();
    let address = kubelet.sandbox_status(&server.sandbox).await.unwrap().network.unwrap().ip;
    let client = kubelet.run_pod(&pod("client", WAIT)).await.unwrap();
    let client_id = client.container("main").id.clone();

    let route = run(&mut kubelet, &client_id, &format!("ip route get {SERVICE}")).await;
    let by_node = format!("via {}", cloud.host().unwrap().address);
    assert!(route.contains(&by_node), "{route}");
    // A rule of kube-proxy to another cell, in the same subnet as the client.
    let endpoint = format!("{address}:8080");
    let rule = ["-d", SERVICE, "-p", "tcp", "--dport", "80", "-j", "DNAT", "--to", &endpoint];
    let arguments = [&["-w", "10", "-t", "nat", "-A", "PREROUTING"][..], &rule].concat();
    output("iptables", &arguments).unwrap();
    let fetch = format!("timeout 5 wget -q -O - http://{SERVICE}/");
    assert_eq!(run(&mut kubelet, &client_id, &fetch).await.trim(), "server");

    // The endpoint is a pod on the node.
    let local =
        kiyot_testkit::Pod::new("local").container(kiyot_testkit::Container::script("main", SERVE));
    let local = kubelet.run_pod(&local).await.unwrap();
    let address = kubelet.sandbox_status(&local.sandbox).await.unwrap().network.unwrap().ip;
    let endpoint = format!("{address}:8080");
    let rule = ["-d", SERVICE, "-p", "tcp", "--dport", "81", "-j", "DNAT", "--to", &endpoint];
    let arguments = [&["-w", "10", "-t", "nat", "-A", "PREROUTING"][..], &rule].concat();
    output("iptables", &arguments).unwrap();
    let fetch = format!("timeout 5 wget -q -O - http://{SERVICE}:81/");
    let fetched = wait_until("the pod on the node serves", LIMIT, async || {
        let output = kubelet.exec_sync(&client_id, &["sh", "-c", &fetch]).await.ok()?;
        (output.code == 0).then_some(output.stdout)
    })
    .await;
    assert_eq!(fetched.trim(), "local");
    for running in [&server, &client, &local] {
        kubelet.stop_and_remove(running).await.unwrap();
    }
    cloud.has_no_cells().await;
}
