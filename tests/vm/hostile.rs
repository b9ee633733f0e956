//! Root of a machine against other cells, the node and the daemon. The report "root of a machine"
//! in docs/reports has a table of its attempts and their results.

use std::{
    fs,
    net::{TcpListener, UdpSocket},
    thread,
};

use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Node, Pod, RunningPod, Source, cri, output,
    wait_until,
};
use rcgen::KeyPair;
use tonic::Code;

use super::{WAIT, pod, run, stolen::Stolen, strong, strong_options};

/// Enters the network namespace of the link.
const ON_LINK: &str = "nsenter -n/proc/1/root/run/kiyot/link-ns";
/// The launcher's address on the link.
const LINK_HOST: &str = "169.254.77.1";
/// Ports at which the node listens during the test. The UDP ports include the link's own number.
const TCP_PORTS: [u16; 4] = [22, 53, 7701, 10250];
/// See [`TCP_PORTS`].
const UDP_PORTS: [u16; 2] = [53, 7700];
/// Hardware address of no device.
const FOREIGN_MAC: &str = "02:00:5e:00:53:99";
/// Limit of a file of a console, in bytes. The node keeps a full file and the next file.
const MAX_CONSOLE_BYTES: u64 = 1 << 20;

/// A pod in a machine that must not be harmed.
struct Victim {
    pod: RunningPod,
    address: String,
}

/// A pod whose root has all power over its machine.
struct Attacker {
    pod: RunningPod,
    cell: String,
}

impl Attacker {
    fn main(&self) -> &str {
        &self.pod.container("main").id
    }

    async fn run(&self, kubelet: &mut Kubelet, script: &str) -> String {
        run(kubelet, self.main(), script).await
    }

    /// Asserts that an attempt fails.
    async fn fails(&self, kubelet: &mut Kubelet, script: &str) {
        let ended = kubelet.exec_sync(self.main(), &["sh", "-c", script]).await.unwrap();
        assert_ne!(ended.code, 0, "{script} succeeds: {}", ended.stdout);
    }
}

/// Returns the hardware address that the node knows for an address of the pods' network.
fn neighbour(address: &str) -> Option<String> {
    let found = output("ip", &["neighbour", "show", address]).unwrap();
    let mut words = found.split_whitespace().skip_while(|word| *word != "lladdr");
    words.nth(1).map(str::to_owned)
}

/// Listens at ports of the link, in the network namespace of a cell. A connection shows that the
/// link leads there.
fn listen_on_link(cell: &str) -> (Vec<TcpListener>, Vec<UdpSocket>) {
    let namespace = fs::File::open(format!("/run/netns/kiyot-{cell}")).unwrap();
    let listening = thread::spawn(move || {
        // Changes the namespace of this thread only.
        nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        let tcp = TCP_PORTS.map(|port| TcpListener::bind((LINK_HOST, port)).unwrap());
        let udp = UDP_PORTS.map(|port| UdpSocket::bind((LINK_HOST, port)).unwrap());
        (tcp.into(), udp.into())
    });
    listening.join().unwrap()
}

/// Tries the credentials of the cell at the gateway.
async fn credentials_serve_their_own_cell_alone(
    kubelet: &mut Kubelet,
    kiyot: &Kiyot<'_>,
    attacker: &Attacker,
    other: &str,
) {
    let gateway = kiyot.state().join("gateway.sock");
    let stolen = Stolen::read(kubelet, attacker.main(), gateway).await;
    assert_eq!(stolen.cell(), attacker.cell);
    let (fresh, own) = (KeyPair::generate().unwrap(), stolen.key());
    for (what, cell, token, key) in [
        ("a spent token with another key", stolen.cell(), stolen.token(), &fresh),
        ("its token for another cell", other, stolen.token(), &own),
        ("its key for another cell", other, "", &own),
        ("no token with another key", stolen.cell(), "", &fresh),
    ] {
        let code = stolen.enrol(cell, token, key).await;
        assert_eq!(code, Code::PermissionDenied, "enrolment with {what}");
    }
    assert!(kiyot.log().contains("spent token presented with a second key"), "{}", kiyot.log());
    assert_eq!(stolen.claim_to_be(other).await, 0, "no call of another cell reaches it");
}

/// Tries the link's device, by which the machine reaches the node.
async fn link_leads_to_the_gateway_alone(
    kubelet: &mut Kubelet,
    attacker: &Attacker,
    victim: &Victim,
) {
    let (tcp, udp) = listen_on_link(&attacker.cell);
    let gateway = format!("{ON_LINK} nc -w 10 {LINK_HOST} 7700 < /dev/null");
    assert_eq!(attacker.run(kubelet, &gateway).await, "", "the gateway is reached");
    let script = format!(
        "for port in {}; do ({ON_LINK} timeout 4 nc -w 2 {LINK_HOST} $port < /dev/null && echo \
         TCP $port) & done; for port in {}; do (echo x | {ON_LINK} timeout 2 nc -u {LINK_HOST} \
         $port) & done; ({ON_LINK} ping -c 1 -W 2 {LINK_HOST} > /dev/null && echo ICMP) & wait",
        TCP_PORTS.map(|port| port.to_string()).join(" "),
        UDP_PORTS.map(|port| port.to_string()).join(" ")
    );
    assert_eq!(attacker.run(kubelet, &script).await, "", "the link leads to no other port");
    for listener in &tcp {
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err(), "{listener:?} is reached by the link");
    }
    for socket in &udp {
        socket.set_nonblocking(true).unwrap();
        assert!(socket.recv(&mut [0; 8]).is_err(), "{socket:?} is reached by the link");
    }

    // The link leads neither to the node's addresses nor to addresses of pods.
    let bridge = format!("{}.1", victim.address.rsplit_once('.').unwrap().0);
    let on_node = TcpListener::bind((bridge.as_str(), 0)).unwrap();
    on_node.set_nonblocking(true).unwrap();
    let node_port = on_node.local_addr().unwrap().port();
    for (host, port) in [(&bridge, node_port), (&victim.address, 8080)] {
        let script = format!(
            "{ON_LINK} ip route add {host}/32 via {LINK_HOST} && {ON_LINK} nc -w 2 {host} {port} < \
             /dev/null"
        );
        attacker.fails(kubelet, &script).await;
    }
    assert!(on_node.accept().is_err(), "the node is reached by the link");
    // By its own device the pod reaches the node, like any pod.
    attacker.run(kubelet, &format!("timeout 5 nc {bridge} {node_port} < /dev/null; :")).await;
    assert!(on_node.accept().is_ok(), "the node's port is reached");
}

/// Tries frames of other pods on the pod's own device.
async fn frames_of_others_do_not_leave(
    kubelet: &mut Kubelet,
    attacker: &Attacker,
    victim: &Victim,
    local: &str,
) {
    let address = &victim.address;
    let bridge = format!("{}.1", address.rsplit_once('.').unwrap().0);
    let page = format!("timeout 20 wget -q -O - http://{address}:8080/");
    assert_eq!(run(kubelet, local, &page).await, "page of victim\n");
    // The node knows the victim's address too.
    output("busybox", &["wget", "-q", "-O", "-", &format!("http://{address}:8080/")]).unwrap();
    let (of_victim, of_bridge) = (neighbour(address).unwrap(), "cat /sys/class/net/eth0/address");
    let own = attacker.run(kubelet, of_bridge).await.trim().to_owned();

    attacker.run(kubelet, &format!("ip address add {address}/24 dev eth0")).await;
    let arping = format!("arping -c 3 -w 3 -I eth0 -s {address} {address}");
    attacker.run(kubelet, &format!("{arping} -U & {arping} -A & wait")).await;
    attacker.fails(kubelet, &format!("arping -c 1 -w 2 -I eth0 -s {address} {bridge}")).await;
    attacker.fails(kubelet, &format!("ping -c 1 -W 2 -I {address} {bridge}")).await;
    assert_eq!(neighbour(address), Some(of_victim), "the node knows the victim's device");
    let cache = run(kubelet, local, "cat /proc/net/arp").await;
    assert!(!cache.contains(&own), "a local pod knows {own} for an address: {cache}");
    // Asks again for the victim's hardware address.
    run(kubelet, local, "ip neigh flush dev eth0; :").await;
    assert_eq!(run(kubelet, local, &page).await, "page of victim\n");
    attacker.run(kubelet, &format!("ip address del {address}/24 dev eth0")).await;

    let set = |mac: &str| format!("ip link set eth0 address {mac}");
    attacker.run(kubelet, &set(FOREIGN_MAC)).await;
    attacker.fails(kubelet, &format!("arping -c 1 -w 2 -I eth0 {bridge}")).await;
    attacker.fails(kubelet, &format!("ping -c 1 -W 2 {bridge}")).await;
    let learnt = output("bridge", &["fdb", "show"]).unwrap();
    assert!(!learnt.contains(FOREIGN_MAC), "{learnt}");
    attacker.run(kubelet, &set(&own)).await;
    attacker.run(kubelet, &format!("ping -c 3 -W 10 {bridge}")).await;
}

/// Searches the machine for values: its disk, its files in memory, its boot data, and the
/// environments of its processes.
async fn machine_has_secrets_of_its_own_pod_alone(
    kubelet: &mut Kubelet,
    kiyot: &Kiyot<'_>,
    attacker: &Attacker,
    own: &str,
    other: &str,
) {
    attacker.run(kubelet, "sync").await;
    let disk = kiyot.state().join("cells").join(&attacker.cell).join("disk.img");
    let disk = disk.display().to_string();
    let on_disk = |value: &str| output("grep", &["-q", "-a", "-F", value, &disk]).is_ok();
    let in_memory = async |kubelet: &mut Kubelet, value: &str| {
        let script = format!(
            "root=/proc/1/root; (find $root/var/lib/kiyot-cell/memory $root/run $root/tmp -xdev \
             -type f -exec grep -l -F {value} {{}} + ; grep -l -F {value} /proc/[0-9]*/environ \
             $root/sys/firmware/qemu_fw_cfg/by_name/opt/org.kiyot/cell.json/raw) 2> /dev/null; :"
        );
        attacker.run(kubelet, &script).await
    };
    assert!(on_disk(own), "the search finds the machine's own on its disk");
    assert_ne!(in_memory(kubelet, own).await, "", "the search finds the machine's own in memory");
    assert!(!on_disk(other), "another pod's secret is on the disk");
    assert_eq!(in_memory(kubelet, other).await, "", "another pod's secret is in memory");
}

/// Floods the console and the link.
async fn floods_are_bounded(
    kubelet: &mut Kubelet,
    kiyot: &Kiyot<'_>,
    attacker: &Attacker,
    victim: &Victim,
) {
    let log = kiyot.log().len();
    // Little more than a file: the serial port of an emulated machine costs seconds a megabyte.
    let flood = "yes 'kiyot: forged line' | head -c 1100000 > /proc/1/root/dev/console";
    attacker.run(kubelet, flood).await;
    let dir = kiyot.state().join("cells").join(&attacker.cell);
    for name in ["console.log.old", "console.log"] {
        let size = fs::metadata(dir.join(name)).unwrap().len();
        assert!(size <= MAX_CONSOLE_BYTES, "{name} has {size} bytes");
    }
    let added = kiyot.log()[log..].to_owned();
    assert!(!added.contains("forged line"), "{added}");

    let hold = format!(
        "i=0; while [ $i -lt 40 ]; do (sleep 600 | {ON_LINK} nc {LINK_HOST} 7700) > /dev/null 2>&1 \
         & i=$((i+1)); done; sleep 2; echo held"
    );
    attacker.run(kubelet, &hold).await;
    // The other cell's calls need connections too.
    for _ in 0..3 {
        let there = run(kubelet, &victim.pod.container("main").id, "echo there").await;
        assert_eq!(there, "there\n");
    }
    // The flood keeps its own agent from the gateway until it ends, at most.
    wait_until("the flood has ended", LIMIT, async || {
        let ended = kubelet.exec_sync(attacker.main(), &["killall", "nc", "sleep"]).await;
        ended.is_ok().then_some(())
    })
    .await;
}

/// Verifies V18, V19.
#[tokio::test]
async fn root_of_a_machine_harms_only_its_own_cell() {
    let node = Node::start().await;
    let of_provider = "disk_size = \"96Mi\"\n".to_owned();
    let kiyot = Kiyot::start(&node, KiyotOptions { of_provider, ..strong_options() }).await;
    let mut kubelet = kiyot.kubelet().await;
    let [own, other] = ["sesame-of-the-attacker", "sesame-of-the-victim"];
    let secret = |value: &str| Source::Secret(Source::files(&[("value", value)]));

    let spec = strong(pod("attacker", &format!("cp /secret/value /copy; echo up; {WAIT}")));
    let mut spec = spec.volume("secret", secret(own));
    spec.containers[0] = spec.containers[0].clone().mount("secret", "/secret");
    let pod = kubelet.run_pod(&spec).await.unwrap();
    kubelet.logged(pod.container("main"), "up").await;
    let attacker = Attacker { pod, cell: kiyot.cells().remove(0) };

    let script = "mkdir -p /www; echo page of victim > /www/index.html; cp /secret/value /copy; \
                  echo up; exec httpd -f -p 8080 -h /www";
    let mut spec = super::pod("victim", script).volume("secret", secret(other));
    spec.containers[0] = spec.containers[0].clone().mount("secret", "/secret").env("WORD", other);
    let pod = kubelet.run_pod(&spec).await.unwrap();
    kubelet.logged(pod.container("main"), "up").await;
    let network = kubelet.sandbox_status(&pod.sandbox).await.unwrap().network.unwrap();
    let victim = Victim { pod, address: network.ip };
    let cells = kiyot.cells();
    let of_victim = cells.iter().find(|cell| **cell != attacker.cell).unwrap().clone();
    let local = Pod::new("local").container(Container::script("main", WAIT));
    let local = kubelet.run_pod(&local).await.unwrap();

    credentials_serve_their_own_cell_alone(&mut kubelet, &kiyot, &attacker, &of_victim).await;
    link_leads_to_the_gateway_alone(&mut kubelet, &attacker, &victim).await;
    let main = &local.container("main").id;
    frames_of_others_do_not_leave(&mut kubelet, &attacker, &victim, main).await;
    machine_has_secrets_of_its_own_pod_alone(&mut kubelet, &kiyot, &attacker, own, other).await;
    floods_are_bounded(&mut kubelet, &kiyot, &attacker, &victim).await;

    let main = &victim.pod.container("main").id;
    let container = kubelet.container_status(main).await.unwrap();
    assert_eq!(container.state(), cri::ContainerState::ContainerRunning);
    for pod in [&attacker.pod, &victim.pod, &local] {
        kubelet.stop_and_remove(pod).await.unwrap();
    }
    assert_eq!(kiyot.cells(), Vec::<String>::new());
    drop(kiyot);
    let left = node.stop();
    assert!(left.is_empty(), "leftovers:\n{left}");
}
