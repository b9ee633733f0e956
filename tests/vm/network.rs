//! Network of a pod in a virtual machine, beside pods of the node and of a netns cell.

use std::fs;

use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Node, Pod, Provider, RunningPod, cri, spdy,
    wait_until,
};
use tokio::sync::Mutex;

use super::{
    name_server::{ANSWER, NameServer},
    options, run,
};

/// MTU of the pods' network: less than the default of any device.
const MTU: u32 = 1400;
/// Port of the node that leads to the pod's server.
const HOST_PORT: i32 = 18_190;
/// Name server that only the node reaches.
const NODE_RESOLVER: &str = "127.0.0.53";
/// Bytes of a page that takes many segments.
const PAGE_BYTES: usize = 1 << 20;

/// CNI plugin of a network whose pods share a bridge and its subnet.
pub(crate) const BRIDGE: &str = "bridge";
/// CNI plugin of a network whose pods have a device each. A route of its own leads to their
/// gateway, which is outside their subnet's route. Pods reach each other through the node.
const POINT_TO_POINT: &str = "ptp";

/// Gives the node's CNI network a plugin, a second family, and an MTU. Returns the node's addresses
/// there.
pub(crate) fn widen_network(node: &Node, plugin: &str) -> [String; 2] {
    let path = node.cni_configuration().join("10-test.conflist");
    let mut conflist: serde_json::Value =
        serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let network = &mut conflist["plugins"][0];
    network["type"] = plugin.into();
    network["mtu"] = MTU.into();
    let subnet = network["ipam"]["ranges"][0][0]["subnet"].as_str().unwrap().to_owned();
    let number = subnet.split('.').nth(2).unwrap().to_owned();
    let of_6 = serde_json::json!([{ "subnet": format!("fd00:88:{number}::/64") }]);
    network["ipam"]["ranges"].as_array_mut().unwrap().push(of_6);
    let route = serde_json::json!({ "dst": "::/0" });
    network["ipam"]["routes"].as_array_mut().unwrap().push(route);
    let written = path.with_extension("new");
    fs::write(&written, serde_json::to_vec_pretty(&conflist).unwrap()).unwrap();
    fs::rename(&written, &path).unwrap();
    fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
    [format!("10.88.{number}.1"), format!("[fd00:88:{number}::1]")]
}

/// Returns a pod that serves a page with its name, and a large one.
fn server(name: &str) -> Pod {
    let script = format!(
        "mkdir -p /www; echo page of {name} > /www/index.html; head -c {PAGE_BYTES} /dev/zero > \
         /www/large; echo ready; exec httpd -f -p 8080 -h /www"
    );
    Pod::new(name).container(Container::script("main", &script))
}

/// A pod, with its addresses as they are in a URL.
struct Peer {
    running: RunningPod,
    hosts: Vec<String>,
}

impl Peer {
    async fn run(kubelet: &mut Kubelet, spec: &Pod) -> Self {
        let mut config = kubelet.prepare(spec);
        if !spec.annotations.is_empty() {
            config.dns_config.as_mut().unwrap().servers = vec![NODE_RESOLVER.to_owned()];
        }
        let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
        let network = kubelet.sandbox_status(&sandbox).await.unwrap().network.unwrap();
        let mut running = kubelet.running(spec, config, sandbox);
        let created = kubelet.create_container(&running, &spec.containers[0], 0).await.unwrap();
        kubelet.start_container(&created.id).await.unwrap();
        kubelet.logged(&created, "ready").await;
        running.containers.insert("main".to_owned(), created);
        let second = network.additional_ips.iter().map(|ip| format!("[{}]", ip.ip));
        let hosts: Vec<_> = [network.ip.clone()].into_iter().chain(second).collect();
        assert_eq!(hosts.len(), 2, "{} has an address of each family", spec.name);
        Self { running, hosts }
    }

    fn name(&self) -> &str {
        &self.running.spec.name
    }

    fn main(&self) -> &str {
        &self.running.container("main").id
    }

    /// Asserts that the pod reaches another by ICMP and TCP, in both families.
    async fn reaches(&self, kubelet: &mut Kubelet, other: &Self) {
        for host in &other.hosts {
            let address = host.trim_matches(['[', ']']);
            // With its headers the packet is as large as the MTU.
            let payload = MTU - if address.contains(':') { 48 } else { 28 };
            let script = format!(
                "ping -c 1 -W 10 -s {payload} {address} > /dev/null && wget -q -O - \
                 http://{host}:8080/ && wget -q -O - http://{host}:8080/large | wc -c"
            );
            assert_eq!(
                run(kubelet, self.main(), &script).await,
                format!("page of {}\n{PAGE_BYTES}\n", other.name()),
                "{} asks {} at {host}",
                self.name(),
                other.name()
            );
        }
    }
}

/// Verifies V8, V9.
#[tokio::test]
async fn pod_in_a_vm_has_the_network_of_any_pod() {
    Box::pin(check_network(BRIDGE)).await;
}

/// Verifies V8, V9.
#[tokio::test]
#[ignore = "takes long without KVM; make test-vm"]
async fn pod_in_a_vm_has_a_network_without_a_bridge() {
    Box::pin(check_network(POINT_TO_POINT)).await;
}

/// Runs a pod in a virtual machine, a pod in a netns cell and a pod on the node, in a network of
/// this CNI plugin.
async fn check_network(plugin: &str) {
    // Two tests would share the name server's address and the port of the node.
    static TURN: Mutex<()> = Mutex::const_new(());
    let _turn = TURN.lock().await;
    let _server = NameServer::start(NODE_RESOLVER);
    let node = Node::start().await;
    let nodes = widen_network(&node, plugin);
    let forward = "[backends.milpa.policy]\nnode_resolver = \"forward\"\n".to_owned();
    let kiyot = Kiyot::start(&node, KiyotOptions { sections: forward.clone(), ..options() }).await;
    let netns =
        KiyotOptions { provider: Provider::Netns, name: "netns", sections: forward, ..options() };
    let beside = Kiyot::start(&node, netns).await;
    let (mut kubelet, mut second) = (kiyot.kubelet().await, beside.kubelet().await);

    let mut spec = server("machine").in_cell();
    spec.ports =
        vec![cri::PortMapping { container_port: 8080, host_port: HOST_PORT, ..Default::default() }];
    let machine = Peer::run(&mut kubelet, &spec).await;
    let cell = Peer::run(&mut second, &server("cell").in_cell()).await;
    let local = Peer::run(&mut kubelet, &server("local")).await;

    let mtu = run(&mut kubelet, machine.main(), "cat /sys/class/net/eth0/mtu").await;
    assert_eq!(mtu.trim(), MTU.to_string(), "the guest has the MTU of the network");
    for other in [&cell, &local] {
        machine.reaches(&mut kubelet, other).await;
    }
    cell.reaches(&mut second, &machine).await;
    local.reaches(&mut kubelet, &machine).await;

    for host in &nodes {
        let url = format!("http://{host}:{HOST_PORT}/");
        let page = wait_until(format!("{url} answers"), LIMIT, async || {
            kiyot_testkit::output("busybox", &["wget", "-q", "-O", "-", &url]).ok()
        })
        .await;
        assert_eq!(page, "page of machine\n", "the hostPort leads to the pod");
    }

    let question = format!("nslookup -type=a one.test | grep -c {ANSWER}");
    assert_eq!(run(&mut kubelet, machine.main(), &question).await, "1\n");

    let request = cri::PortForwardRequest {
        pod_sandbox_id: machine.running.sandbox.clone(),
        port: vec![8080],
    };
    let url = kubelet.runtime.port_forward(request).await.unwrap().into_inner().url;
    let (mut sender, mut receiver) = spdy::open(&url, "portforward.k8s.io").await.unwrap();
    let headers = |kind| [("streamtype", kind), ("port", "8080"), ("requestid", "0")];
    let error = sender.begin(&headers("error")).await;
    sender.end(error).await;
    let data = sender.begin(&headers("data")).await;
    sender.send(data, b"GET / HTTP/1.0\r\n\r\n").await;
    let page = receiver.read_until(data, "machine").await;
    assert!(page.contains("page of machine"), "{page}");
    drop((sender, receiver));

    kubelet.stop_and_remove(&machine.running).await.unwrap();
    kubelet.stop_and_remove(&local.running).await.unwrap();
    second.stop_and_remove(&cell.running).await.unwrap();
    assert_eq!((kiyot.cells(), beside.cells()), (Vec::new(), Vec::new()));
    drop((kiyot, beside));
    let left = node.stop();
    assert!(left.is_empty(), "leftovers:\n{left}");
}
