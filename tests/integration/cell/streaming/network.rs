//! Host ports of pods in cells, and the addresses of cells.

use std::{
    fs,
    io::{Read, Write},
    net::{IpAddr, TcpStream, UdpSocket},
    os::unix::fs::PermissionsExt,
    time::Duration,
};

use kiyot_testkit::{Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Node, Pod, cri, wait_until};
use tonic::Code;

use crate::cell::{
    WAIT, address, assert_nothing_left, options, pod, remove_and_assert_clean, wait_until_connected,
};

/// A script that serves a page.
const SERVER_SCRIPT: &str =
    "mkdir -p /www; echo served > /www/index.html; exec httpd -f -p 8080 -h /www";

fn port(protocol: cri::Protocol, host_port: i32, container_port: i32) -> cri::PortMapping {
    cri::PortMapping {
        protocol: protocol.into(),
        host_port,
        container_port,
        host_ip: String::new(),
    }
}

pub(crate) fn server(name: &str, host_port: i32) -> Pod {
    let mut spec = Pod::new(name).in_cell().container(Container::script("main", SERVER_SCRIPT));
    spec.ports = vec![
        port(cri::Protocol::Tcp, host_port, 8080),
        port(cri::Protocol::Udp, host_port, 9000),
        // A container port without a host port is for information only.
        port(cri::Protocol::Tcp, 0, 8081),
    ];
    spec
}

/// Returns the address of the pod's bridge, which is an address of the node.
pub(crate) fn node_address(pod: &str) -> String {
    let (network, _) = pod.rsplit_once('.').unwrap();
    format!("{network}.1")
}

/// Returns the response of an HTTP server to a request from the node.
pub(crate) fn http_response(address: &str, port: i32) -> std::io::Result<String> {
    let mut stream = connection(address, port)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    let mut page = String::new();
    stream.read_to_string(&mut page)?;
    Ok(page)
}

fn connection(address: &str, port: i32) -> std::io::Result<TcpStream> {
    let to = (address.parse::<IpAddr>().unwrap(), u16::try_from(port).unwrap()).into();
    TcpStream::connect_timeout(&to, Duration::from_secs(5))
}

/// Asserts that TCP and UDP reach the cell, from the node and from a pod on the node.
async fn ports_lead_to_the_cell(
    kubelet: &mut Kubelet,
    kiyot: &Kiyot<'_>,
    running: &kiyot_testkit::RunningPod,
    host_port: i32,
) {
    let cell = kiyot.cells().remove(0);
    let ip = address(kubelet, &running.sandbox).await;
    let gateway = node_address(&ip);
    wait_until("the node's port answers", LIMIT, async || {
        http_response(&gateway, host_port).ok().filter(|page| page.ends_with("served\n"))
    })
    .await;

    let neighbour = kubelet
        .run_pod(&pod(
            "neighbour",
            &format!(
                "until wget -q -O - http://{gateway}:{host_port}/; do sleep 0.1; done; {WAIT}"
            ),
        ))
        .await
        .unwrap();
    kubelet.logged(neighbour.container("main"), "served").await;
    kubelet.stop_and_remove(&neighbour).await.unwrap();

    let socket = in_cell_network(&cell, || UdpSocket::bind("0.0.0.0:9000").unwrap());
    let client = UdpSocket::bind("0.0.0.0:0").unwrap();
    client.connect(format!("{gateway}:{host_port}")).unwrap();
    client.send(b"asked").unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    let mut received = [0; 16];
    let (length, from) = socket.recv_from(&mut received).unwrap();
    assert_eq!(&received[..length], b"asked");
    socket.send_to(b"answered", from).unwrap();
    client.set_read_timeout(Some(LIMIT)).unwrap();
    let length = client.recv(&mut received).unwrap();
    assert_eq!(&received[..length], b"answered");
}

/// Runs a function in the network namespace of a cell.
pub(crate) fn in_cell_network<T: Send + 'static>(
    cell: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let namespace = fs::File::open(format!("/run/netns/kiyot-{cell}")).unwrap();
    let thread = std::thread::spawn(move || {
        // Only the namespace of this thread changes.
        nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        work()
    });
    thread.join().unwrap()
}

fn rules() -> String {
    kiyot_testkit::output("iptables-save", &["-t", "nat"]).unwrap()
}

/// Verifies N4, N5.
#[tokio::test]
async fn host_port_leads_to_the_cell_and_is_released_with_it() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&server("first", 18080)).await.unwrap();
    let cell = kiyot.cells().remove(0);
    ports_lead_to_the_cell(&mut kubelet, &kiyot, &running, 18080).await;
    assert!(!rules().contains(&format!("KIYOT-HP-{cell}")), "the node's own plugin maps them");

    let second = server("second", 18080);
    let refused = kubelet.run_pod(&second).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    for word in ["18080/tcp", "default/first"] {
        assert!(refused.message().contains(word), "{word} is not in {:?}", refused.message());
    }
    assert_eq!(kiyot.cells(), [cell], "the refused pod has no cell");
    kubelet.forget(&second);

    let gateway = node_address(&address(&mut kubelet, &running.sandbox).await);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert!(connection(&gateway, 18080).is_err(), "the port is closed with the pod");
    let running = kubelet.run_pod(&server("third", 18080)).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert!(kiyot.stop().await.success());
    drop(kiyot);
    assert_nothing_left(node);
}

/// Verifies N4.
#[tokio::test]
async fn host_ports_are_mapped_by_the_daemon_if_no_plugin_maps_them() {
    let node = Node::start().await;
    without_port_plugin(&node, |_| {});
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&server("plain", 18081)).await.unwrap();
    let cell = kiyot.cells().remove(0);
    ports_lead_to_the_cell(&mut kubelet, &kiyot, &running, 18081).await;
    assert!(rules().contains(&format!("KIYOT-HP-{cell}")));

    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    wait_until_connected(&mut kubelet, running.container("main")).await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert!(!rules().contains(&cell), "the killed daemon left no rule");
    assert!(kiyot.stop().await.success());
    drop(kiyot);
    assert_nothing_left(node);
}

/// Removes all CNI plugins but the first, so that no plugin maps ports.
pub(crate) fn without_port_plugin(node: &Node, change: impl FnOnce(&mut serde_json::Value)) {
    let conflist = node.cni_configuration().join("10-test.conflist");
    let mut network: serde_json::Value =
        serde_json::from_slice(&fs::read(&conflist).unwrap()).unwrap();
    network["plugins"].as_array_mut().unwrap().truncate(1);
    change(&mut network["plugins"][0]);
    fs::write(&conflist, network.to_string()).unwrap();
}

/// Wrappers of the firewall programs. They record each run. While a file exists, they fail as
/// `iptables` does while another process holds its lock.
pub(crate) struct Firewall {
    directory: std::path::PathBuf,
}

impl Firewall {
    pub(crate) fn new(node: &Node) -> Self {
        let directory = node.directory().join("firewall");
        fs::create_dir_all(&directory).unwrap();
        for name in ["iptables", "iptables-restore", "ip6tables", "ip6tables-restore"] {
            let program = directory.join(name);
            let here = directory.display();
            let script = format!(
                "#!/bin/sh\necho {name} $@ >> {here}/runs\n\
                 if [ -e {here}/locked ] && [ {name} != iptables ]; then\n\
                 echo 'Another app is currently holding the xtables lock.' >&2; exit 4\nfi\n\
                 exec /usr/sbin/{name} \"$@\"\n"
            );
            fs::write(&program, script).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        }
        Self { directory }
    }

    pub(crate) fn options(&self) -> KiyotOptions {
        let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", self.directory.display());
        KiyotOptions { environment: vec![("PATH".to_owned(), path)], ..options() }
    }

    /// Returns the runs for host ports since the previous call. Runs of CNI plugins are left out.
    fn runs(&self) -> Vec<String> {
        let file = self.directory.join("runs");
        let runs = fs::read_to_string(&file).unwrap_or_default();
        let _ = fs::remove_file(file);
        let for_ports = |run: &&str| run.contains("KIYOT-H") || run.contains("restore");
        runs.lines().filter(for_ports).map(str::to_owned).collect()
    }

    pub(crate) fn lock(&self, locked: bool) {
        let file = self.directory.join("locked");
        if locked { fs::write(file, "") } else { fs::remove_file(file) }.unwrap();
    }
}

/// Verifies N14.
#[tokio::test]
async fn all_ports_of_a_pod_are_mapped_in_one_transaction() {
    let node = Node::start().await;
    without_port_plugin(&node, |_| {});
    let firewall = Firewall::new(&node);
    let kiyot = Kiyot::start(&node, firewall.options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut spec = server("many", 20_000);
    spec.ports = (0..100).map(|port_| port(cri::Protocol::Tcp, 20_000 + port_, 8080)).collect();
    let running = kubelet.run_pod(&spec).await.unwrap();
    let cell = kiyot.cells().remove(0);
    let runs = firewall.runs();
    assert_eq!(runs, ["iptables-restore -w 10 --noflush"], "{} processes", runs.len());
    assert_eq!(rules().matches(&format!("-A KIYOT-HP-{cell}")).count(), 100);
    let gateway = node_address(&address(&mut kubelet, &running.sandbox).await);
    for number in [20_000, 20_099] {
        wait_until("the node's port answers", LIMIT, async || {
            http_response(&gateway, number).ok().filter(|page| page.ends_with("served\n"))
        })
        .await;
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    let runs = firewall.runs();
    let changes = runs.iter().filter(|run| run.contains("restore")).count();
    assert_eq!((changes, runs.len()), (1, 5), "one query for each chain of each family: {runs:?}");
    assert!(!rules().contains(&cell));
    drop(kiyot);
    assert_nothing_left(node);
}

/// Verifies N14.
#[tokio::test]
async fn locked_firewall_fails_the_launch_and_holds_up_the_end() {
    let node = Node::start().await;
    without_port_plugin(&node, |_| {});
    let firewall = Firewall::new(&node);
    let kiyot = Kiyot::start(&node, firewall.options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = server("waiting", 18086);
    let config = kubelet.prepare(&spec);
    firewall.lock(true);
    let refused = kubelet.run_sandbox(&config, "").await.unwrap_err();
    assert!(refused.message().contains("holding the xtables lock"), "{refused:?}");
    // Rules of other tests are left out.
    assert!(
        !rules().contains("--dport 18086 "),
        "a failed transaction leaves no rule: {}",
        rules()
    );
    firewall.lock(false);

    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let running = kubelet.running(&spec, config, sandbox);
    let cell = kiyot.cells().remove(0);
    firewall.lock(true);
    let held_up = kubelet.stop_pod(&running).await.unwrap_err();
    assert!(held_up.message().contains("holding the xtables lock"), "{held_up:?}");
    let status = kubelet.sandbox_status(&running.sandbox).await.unwrap();
    assert_eq!(
        status.state(),
        cri::PodSandboxState::SandboxReady,
        "the rules of the pod still exist"
    );
    assert_eq!(rules().matches(&format!("-A KIYOT-HP-{cell}")).count(), 2);
    firewall.lock(false);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert!(!rules().contains(&cell));
    drop(kiyot);
    assert_nothing_left(node);
}

/// Verifies N11.
#[tokio::test]
async fn flow_of_a_previous_mapping_follows_the_current_mapping() {
    let node = Node::start().await;
    without_port_plugin(&node, |_| {});
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    // The first pod creates the bridge. The bridge's address is an address of the node.
    let first = kubelet.run_pod(&pod("first", WAIT)).await.unwrap();
    let earlier = kiyot.cells();
    let gateway = node_address(&address(&mut kubelet, &first.sandbox).await);
    let client = UdpSocket::bind("0.0.0.0:0").unwrap();
    let send = || client.send_to(b"said", (gateway.as_str(), 18084));
    // No process listens, but the kernel's connection tracking remembers the destination.
    send().unwrap();

    let mut spec = pod("late", WAIT);
    spec.ports = vec![port(cri::Protocol::Udp, 18084, 9000)];
    let running = kubelet.run_pod(&spec).await.unwrap();
    let cell = kiyot.cells().into_iter().find(|cell| !earlier.contains(cell)).unwrap();
    let socket = in_cell_network(&cell, || UdpSocket::bind("0.0.0.0:9000").unwrap());
    socket.set_nonblocking(true).unwrap();
    let mut received = [0; 16];
    wait_until("the datagram reaches the cell", LIMIT, async || {
        // The call may report that no process listened at first.
        let _refused = send();
        socket.recv(&mut received).ok()
    })
    .await;
    assert_eq!(&received[..4], b"said");
    kubelet.stop_and_remove(&running).await.unwrap();
    // The flow must continue to the node, and not to the ended cell's address, which another cell
    // may get. The bridge still exists; its removal would clear the flow.
    let node_socket = UdpSocket::bind("0.0.0.0:18084").unwrap();
    node_socket.set_nonblocking(true).unwrap();
    wait_until("the datagram reaches the node", LIMIT, async || {
        let _refused = send();
        node_socket.recv(&mut received).ok()
    })
    .await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &first).await;
}

/// Verifies N11.
#[tokio::test]
async fn ports_lead_to_addresses_of_both_families() {
    let node = Node::start().await;
    let mut gateway = String::new();
    without_port_plugin(&node, |bridge| {
        let subnet = bridge["ipam"]["ranges"][0][0]["subnet"].as_str().unwrap().to_owned();
        let number = subnet.split('.').nth(2).unwrap();
        gateway = format!("fd00:88:{number}::1");
        let ranges = bridge["ipam"]["ranges"].as_array_mut().unwrap();
        ranges.push(
            serde_json::json!([{ "subnet": format!("fd00:88:{number}::/64"), "gateway": gateway }]),
        );
    });
    fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&server("dual", 18085)).await.unwrap();
    let cell = kiyot.cells().remove(0);
    let status = kubelet.sandbox_status(&running.sandbox).await.unwrap().network.unwrap();
    assert!(status.additional_ips[0].ip.starts_with("fd00:88:"), "{status:?}");
    wait_until("the port answers on the IPv6 address", LIMIT, async || {
        http_response(&gateway, 18085).ok().filter(|page| page.ends_with("served\n"))
    })
    .await;
    ports_lead_to_the_cell(&mut kubelet, &kiyot, &running, 18085).await;
    let of_6 = || kiyot_testkit::output("ip6tables-save", &["-t", "nat"]).unwrap();
    assert!(of_6().contains(&cell) && rules().contains(&cell));
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert!(!of_6().contains(&cell) && !rules().contains(&cell));
}

/// Verifies N4.
#[tokio::test]
async fn host_ports_work_on_the_bridge_of_cells() {
    let node = Node::start().await;
    fs::remove_file(node.cni_configuration().join("10-test.conflist")).unwrap();
    let mut options = options();
    options.of_provider = format!("bridge = \"b{}\"\nsubnet = \"10.201.7.0/24\"", node.name());
    let kiyot = Kiyot::start(&node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&server("bridged", 18082)).await.unwrap();
    let cell = kiyot.cells().remove(0);
    assert!(address(&mut kubelet, &running.sandbox).await.starts_with("10.201.7."));
    ports_lead_to_the_cell(&mut kubelet, &kiyot, &running, 18082).await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert!(!rules().contains(&cell) && !rules().contains("10.201.7."), "{}", rules());
}

/// Verifies N6.
#[tokio::test]
async fn name_servers_of_the_node_are_refused() {
    let node = Node::start().await;
    let mut options = options();
    let kiyot = Kiyot::start(&node, options.clone()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = pod("local-names", WAIT);
    let mut config = kubelet.prepare(&spec);
    config.dns_config.as_mut().unwrap().servers = vec!["127.0.0.53".to_owned()];
    let refused = kubelet.run_sandbox(&config, "").await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    for word in ["default/local-names", "127.0.0.53", "policy.node_resolver"] {
        assert!(refused.message().contains(word), "{word} is not in {:?}", refused.message());
    }
    assert_eq!(kiyot.cells(), Vec::<String>::new());
    drop(kiyot);

    options.sections = "[backends.milpa.policy]\nnode_resolver = \"allow\"\n".to_owned();
    let kiyot = Kiyot::start(&node, options).await;
    let mut kubelet = kiyot.kubelet().await;
    config.dns_config.as_mut().unwrap().servers = vec!["169.254.20.10".to_owned()];
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(&spec, config, sandbox);
    let main = kubelet.create_container(&running, &spec.containers[0], 0).await.unwrap();
    kubelet.start_container(&main.id).await.unwrap();
    let output = kubelet.exec_sync(&main.id, &["cat", "/etc/resolv.conf"]).await.unwrap();
    assert!(output.stdout.contains("nameserver 169.254.20.10"), "{}", output.stdout);
    running.containers.insert("main".to_owned(), main);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
