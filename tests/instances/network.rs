//! Host ports, and networks of the cluster that cells reach through the node.

use kiyot_testcloud::Hold;
use kiyot_testkit::{LIMIT, cri, output, wait_until};

use super::{WAIT, World, pod, run};

/// Script of a container that serves a page with its host name on port 8080.
const SERVE: &str = "mkdir -p /tmp/www; hostname > /tmp/www/index.html; \
                     httpd -p 8080 -h /tmp/www; trap 'exit 0' TERM; \
                     while :; do sleep 0.2; done";
/// Cluster address of a service, for a rule as kube-proxy makes it.
const SERVICE: &str = "10.96.0.10";

/// Returns the page at a URL, fetched on the node.
async fn page(url: &str) -> String {
    let page = wait_until(format!("{url} answers"), LIMIT, async || {
        output("busybox", &["timeout", "5", "wget", "-q", "-O", "-", url]).ok()
    })
    .await;
    page.trim().to_owned()
}

/// Returns a pod that serves on port 18080 of the node.
fn server(name: &str) -> kiyot_testkit::Pod {
    let port = cri::PortMapping { container_port: 8080, host_port: 18080, ..Default::default() };
    kiyot_testkit::Pod { ports: vec![port], ..pod(name, SERVE) }
}

fn nat_rules() -> String {
    output("iptables", &["-w", "10", "-t", "nat", "-S"]).unwrap()
}

/// Verifies V30.
#[tokio::test]
async fn host_port_of_a_pod_leads_to_its_instance() {
    let world = World::start().await;
    world.admit_cells("tcp", "18080").await;
    let (mut kiyot, mut kubelet) = world.daemon(world.options()).await;
    let server = kubelet.run_pod(&server("server")).await.unwrap();
    let client = kubelet.run_pod(&pod("client", WAIT)).await.unwrap();
    let url = format!("http://{}:18080/", world.host().unwrap().address);
    assert_eq!(page(&url).await, "server");
    let fetched =
        run(&mut kubelet, &client.container("main").id, &format!("timeout 5 wget -q -O - {url}"))
            .await;
    assert_eq!(fetched.trim(), "server");
    // The rules outlive the daemon, and a later daemon removes them.
    kiyot.kill9();
    assert_eq!(page(&url).await, "server");
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    world.ends(&mut kubelet, &[&server, &client]).await;
    wait_until("no rule is left", LIMIT, async || (!nat_rules().contains("KIYOT")).then_some(()))
        .await;
}

/// Returns the daemon's rules, sorted: they may be created in any order.
fn sorted_rules() -> Vec<String> {
    let of_daemon = |rule: &&str| rule.contains("KIYOT");
    let mut rules: Vec<_> = nat_rules().lines().filter(of_daemon).map(ToOwned::to_owned).collect();
    rules.sort();
    rules
}

/// Deletes all rules of the node, as a reboot does.
fn delete_nat_rules() {
    for action in ["-F", "-X"] {
        output("iptables", &["-w", "10", "-t", "nat", action]).unwrap();
    }
}

/// Verifies V51.
#[tokio::test]
async fn host_port_leads_to_its_instance_again_after_a_reboot_of_the_node() {
    let world = World::start().await;
    world.admit_cells("tcp", "18080").await;
    let mut options = world.options();
    // With cluster networks, pods without host ports have rules too.
    options.of_provider.push_str("cluster_networks = [\"10.96.0.0/12\"]\n");
    let (mut kiyot, mut kubelet) = world.daemon(options).await;
    let server = kubelet.run_pod(&server("server")).await.unwrap();
    let client = kubelet.run_pod(&pod("client", WAIT)).await.unwrap();
    let url = format!("http://{}:18080/", world.host().unwrap().address);
    assert_eq!(page(&url).await, "server");
    let before = sorted_rules();
    kiyot.kill9();
    delete_nat_rules();
    kiyot.start_again().await;
    wait_until("all rules are restored", LIMIT, async || (sorted_rules() == before).then_some(()))
        .await;
    assert_eq!(page(&url).await, "server");
    let mut kubelet = kiyot.kubelet().await;
    let fetch = format!("timeout 5 wget -q -O - {url}");
    let fetched = run(&mut kubelet, &client.container("main").id, &fetch).await;
    assert_eq!(fetched.trim(), "server");
    // A restart leaves existing rules unchanged.
    kiyot.restart().await;
    assert_eq!(page(&url).await, "server");
    let mut kubelet = kiyot.kubelet().await;
    world.ends(&mut kubelet, &[&server, &client]).await;
    wait_until("no rule is left", LIMIT, async || (!nat_rules().contains("KIYOT")).then_some(()))
        .await;
    let log = kiyot.log();
    assert_eq!(log.matches("rules of an instance restored").count(), 2, "{log}");
}

/// Verifies V76.
#[tokio::test]
async fn cgroup_of_a_running_pod_is_restored_after_a_reboot_of_the_node() {
    let world = World::start().await;
    let (mut kiyot, mut kubelet) = world.daemon(world.options()).await;
    let spec = pod("running", WAIT);
    let linux = kubelet.prepare(&spec).linux.unwrap();
    let running = kubelet.run_pod(&spec).await.unwrap();
    let ended = kubelet.run_pod(&pod("ended", WAIT)).await.unwrap();
    kubelet.stop_and_remove(&ended).await.unwrap();
    // The test's kubelet does not create the pod's cgroup, so that the cgroup is absent as after a
    // reboot.
    let absent = || {
        let mut controllers = ["cpu", "cpuset", "memory", "pids", "systemd"].into_iter();
        controllers.find(|name| !is_cgroup(&format!("{name}{}", linux.cgroup_parent)))
    };
    assert!(absent().is_some());
    kiyot.kill9();
    kiyot.start_again().await;
    // The daemon creates the cgroup before it answers.
    assert_eq!(absent(), None, "{}", kiyot.log());
    let cpus = format!("/sys/fs/cgroup/cpuset{}/cpuset.cpus", linux.cgroup_parent);
    assert_ne!(std::fs::read_to_string(cpus).unwrap().trim(), "");
    assert_eq!(kiyot.log().matches("cgroups of running pods made again").count(), 1);
    let mut kubelet = kiyot.kubelet().await;
    kubelet.stop_and_remove(&running).await.unwrap();
    world.has_no_cells().await;
}

/// Returns whether a cgroup of version 1 exists.
fn is_cgroup(path: &str) -> bool {
    std::path::Path::new("/sys/fs/cgroup").join(path).is_dir()
}

/// Verifies V30.
#[tokio::test]
async fn attachment_succeeds_despite_rules_of_a_killed_daemon() {
    let world = World::start().await;
    let (_kiyot, mut kubelet) = world.daemon(world.options()).await;
    world.faults().set_hold("RunInstances", Some(Hold::Reply));
    let mut caller = kubelet.clone();
    let running = tokio::spawn(async move { caller.run_pod(&server("server")).await });
    let launched =
        wait_until("an instance is launched", LIMIT, async || world.launched().into_iter().next())
            .await;
    let chain = format!("KIYOT-HP-{}", launched.id);
    output("iptables", &["-w", "10", "-t", "nat", "-N", &chain]).unwrap();
    world.faults().set_hold("RunInstances", None);
    let running = running.await.unwrap().unwrap();
    assert_eq!(page(&format!("http://{}:18080/", world.host().unwrap().address)).await, "server");
    assert_eq!(world.launched().len(), 1, "{:?}", world.launched());
    world.ends(&mut kubelet, &[&running]).await;
}

/// Verifies V50.
#[tokio::test]
async fn host_port_of_another_pod_is_refused_before_an_instance_is_launched() {
    let world = World::start().await;
    let (mut kiyot, mut kubelet) = world.daemon(world.options()).await;
    let first = kubelet.run_pod(&server("first")).await.unwrap();
    for is_restarted in [false, true] {
        if is_restarted {
            kiyot.kill9();
            kiyot.start_again().await;
            kubelet = kiyot.kubelet().await;
        }
        let refused = kubelet.run_pod(&server("second")).await.unwrap_err();
        let message = refused.message();
        assert_eq!(refused.code(), tonic::Code::Unavailable, "{message}");
        assert!(message.contains("hostPort 18080/tcp is taken by pod default/first"), "{message}");
    }
    assert_eq!(world.launched().len(), 1, "{:?}", world.launched());
    kubelet.stop_and_remove(&first).await.unwrap();
    let second = kubelet.run_pod(&server("second")).await.unwrap();
    let url = format!("http://{}:18080/", world.host().unwrap().address);
    assert_eq!(page(&url).await, "second");
    world.ends(&mut kubelet, &[&second]).await;
}

/// Verifies V31.
#[tokio::test]
async fn service_of_the_cluster_is_reached_from_a_cell_by_the_node() {
    let world = World::start().await;
    world.route_cells().await;
    let mut options = world.options();
    options.of_provider.push_str("cluster_networks = [\"10.96.0.0/12\"]\n");
    let subnet = world.setup().subnets[0].id.clone();
    // The cluster network contains the node's subnet.
    let all = options.of_provider.clone();
    let line = all.lines().find(|line| line.starts_with("subnets")).unwrap();
    options.of_provider = all.replace(line, &format!("subnets = [\"{subnet}\"]"));
    let (_kiyot, mut kubelet) = world.daemon(options).await;
    let server = kubelet.run_pod(&pod("server", SERVE)).await.unwrap();
    let address = kubelet.sandbox_status(&server.sandbox).await.unwrap().network.unwrap().ip;
    let client = kubelet.run_pod(&pod("client", WAIT)).await.unwrap();
    let client_id = client.container("main").id.clone();

    let route = run(&mut kubelet, &client_id, &format!("ip route get {SERVICE}")).await;
    let by_node = format!("via {}", world.host().unwrap().address);
    assert!(route.contains(&by_node), "{route}");
    // A rule as of kube-proxy leads to another cell, in the subnet of the client.
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
    world.ends(&mut kubelet, &[&server, &client, &local]).await;
}
