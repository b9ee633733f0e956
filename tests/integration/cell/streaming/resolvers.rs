//! Name servers that only the node can reach, forwarded for pods in cells.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, Kubelet, LIMIT, Node, Pod, RunningPod, wait_until,
};

use crate::cell::{
    WAIT, assert_nothing_left,
    failures::faults::{kill9, processes},
    options, pod, remove_and_assert_clean,
    streaming::network::in_cell_network,
};

/// The address of a pod's first name server in its cell.
pub(crate) const CELL_DNS_ADDRESS: &str = "169.254.253.53";
/// The number of records in the answer to a name that begins with "many". They do not fit in UDP.
const MANY_RECORDS: usize = 300;

/// The number of messages in the TCP answer to a name that begins with "zone". They simulate a zone
/// transfer.
pub(crate) const ZONE_MESSAGES: usize = 40;
pub(crate) const ZONE_MESSAGE_BYTES: usize = 60_000;

/// A name server on the node that answers each name with 10.1.2.3.
pub(crate) struct NameServer {
    stop: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
    address: SocketAddr,
}

impl NameServer {
    pub(crate) fn start(address: &str) -> Self {
        let address: SocketAddr = (address.parse::<IpAddr>().unwrap(), 53).into();
        let (udp, tcp) = (UdpSocket::bind(address).unwrap(), TcpListener::bind(address).unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let (stop_udp, stop_tcp) = (Arc::clone(&stop), Arc::clone(&stop));
        let by_udp = move || {
            let mut query = [0; 512];
            while let Ok((length, from)) = udp.recv_from(&mut query) {
                if stop_udp.load(Ordering::SeqCst) {
                    return;
                }
                assert!(from.ip().is_loopback(), "the query comes from the node: {from}");
                let _gone = udp.send_to(&answer(&query[..length], false), from);
            }
        };
        let by_tcp = move || {
            for stream in tcp.incoming().flatten() {
                if stop_tcp.load(Ordering::SeqCst) {
                    return;
                }
                // The thread ends with its client.
                std::thread::spawn(move || serve(stream));
            }
        };
        Self {
            stop,
            threads: vec![std::thread::spawn(by_udp), std::thread::spawn(by_tcp)],
            address,
        }
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let any = SocketAddr::new(
            if self.address.is_ipv4() { IpAddr::from([127, 0, 0, 1]) } else { self.address.ip() },
            0,
        );
        let _ = UdpSocket::bind(any).and_then(|socket| socket.send_to(b"stop", self.address));
        drop(TcpStream::connect(self.address));
        let failed =
            self.threads.drain(..).map(std::thread::JoinHandle::join).any(|ended| ended.is_err());
        assert!(!failed || std::thread::panicking(), "a thread of the name server failed");
    }
}

/// Answers the queries of a connection in order, until the connection ends.
fn serve(mut stream: TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(LIMIT))?;
    loop {
        let query = read_message(&mut stream)?;
        let wanted = if query[13..].starts_with(b"zone") { ZONE_MESSAGES } else { 1 };
        for number in 0..wanted {
            let mut answer = answer(&query, true);
            if wanted > 1 {
                // The content is arbitrary, because it is not parsed.
                answer.resize(ZONE_MESSAGE_BYTES, u8::try_from(number).unwrap_or(0));
            }
            stream.write_all(
                &[&u16::try_from(answer.len()).unwrap().to_be_bytes()[..], &answer].concat(),
            )?;
        }
    }
}

/// Reads a message with its length prefix.
pub(crate) fn read_message(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut message = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut message)?;
    Ok(message)
}

/// Returns the header and the question of a query. A query of type A also gets address records.
pub(crate) fn answer(query: &[u8], tcp: bool) -> Vec<u8> {
    let end_of_name = 12 + query[12..].iter().position(|byte| *byte == 0).unwrap() + 1;
    let question = &query[12..end_of_name + 4];
    let of_type_a = question[question.len() - 3] == 1;
    let wanted = if query[13..].starts_with(b"many") { MANY_RECORDS } else { 1 };
    let cut = wanted > 1 && !tcp;
    let records = if cut || !of_type_a { 0 } else { wanted };
    let mut answer = query[..2].to_vec();
    answer.extend([0x81 | if cut { 2 } else { 0 }, 0x80, 0, 1]);
    answer.extend(u16::try_from(records).unwrap().to_be_bytes());
    answer.extend([0; 4]);
    answer.extend(question);
    for _ in 0..records {
        // The record points to the question's name, and has type A, class IN, TTL 60 s, and four
        // bytes.
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 10, 1, 2, 3]);
    }
    answer
}

/// Returns a query for the address of a name (type A).
pub(crate) fn query(id: u8, name: &str) -> Vec<u8> {
    let mut query = vec![7, id, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        query.push(u8::try_from(label.len()).unwrap());
        query.extend(label.bytes());
    }
    query.extend([0, 0, 1, 0, 1]);
    query
}

/// Sends a query by UDP from a cell. Repeats it, because datagrams may be lost.
pub(crate) async fn query_by_udp(cell: &str, name: &str, server: &'static str) -> Vec<u8> {
    let query = query(1, name);
    wait_until(format!("{server} answers in {cell}"), LIMIT, async || {
        let query = query.clone();
        in_cell_network(cell, move || {
            let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
            socket.connect((server, 53)).ok()?;
            socket.set_read_timeout(Some(Duration::from_secs(6))).ok()?;
            socket.send(&query).ok()?;
            let mut answer = vec![0; 65535];
            let length = socket.recv(&mut answer).ok()?;
            answer.truncate(length);
            Some(answer)
        })
    })
    .await
}

/// Returns options of a daemon that forwards queries of pods to the node's name servers.
pub(crate) fn options_with_forwarding() -> KiyotOptions {
    let mut options = options();
    options.sections = "[backends.milpa.policy]\nnode_resolver = \"forward\"\n".to_owned();
    options
}

/// Runs a pod with these name servers.
pub(crate) async fn run_with_servers(
    kubelet: &mut Kubelet,
    spec: &Pod,
    servers: &[&str],
) -> RunningPod {
    let mut config = kubelet.prepare(spec);
    config.dns_config.as_mut().unwrap().servers =
        servers.iter().map(|server| (*server).to_owned()).collect();
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(spec, config, sandbox);
    for container in &spec.containers {
        let created = kubelet.create_container(&running, container, 0).await.unwrap();
        kubelet.start_container(&created.id).await.unwrap();
        running.containers.insert(container.name.clone(), created);
    }
    running
}

/// Asserts that a container resolves a name by its resolv.conf.
pub(crate) async fn assert_resolves(kubelet: &mut Kubelet, container: &str) {
    wait_until("the pod resolves a name", LIMIT, async || {
        let output =
            kubelet.exec_sync(container, &["nslookup", "-type=a", "one.test"]).await.ok()?;
        (output.code == 0 && output.stdout.contains("10.1.2.3")).then_some(())
    })
    .await;
}

/// Verifies N7.
#[tokio::test]
async fn pod_resolves_by_name_servers_that_only_the_node_reaches() {
    let server = NameServer::start("127.0.0.53");
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options_with_forwarding()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running =
        run_with_servers(&mut kubelet, &pod("asking", WAIT), &["127.0.0.53", "127.0.0.54"]).await;
    let main = running.container("main").id.clone();
    let conf = kubelet.exec_sync(&main, &["cat", "/etc/resolv.conf"]).await.unwrap().stdout;
    assert!(
        conf.contains("nameserver 169.254.253.53\nnameserver 169.254.253.54\n")
            && conf.contains("ndots:5"),
        "{conf}"
    );
    assert_resolves(&mut kubelet, &main).await;

    let cell = kiyot.cells().remove(0);
    // The pod can use port 53 on all its addresses.
    let own_socket = in_cell_network(&cell, || {
        (UdpSocket::bind("0.0.0.0:53").unwrap(), TcpListener::bind("[::]:53").unwrap())
    });
    assert_eq!(
        query_by_udp(&cell, "one.test", CELL_DNS_ADDRESS).await,
        answer(&query(1, "one.test"), false)
    );
    drop(own_socket);

    // An answer that is too long for UDP is truncated. By TCP it is complete, also repeatedly on a
    // connection.
    let many = query(1, "many.test");
    let cut = query_by_udp(&cell, "many.test", CELL_DNS_ADDRESS).await;
    assert_eq!(cut, answer(&many, false));
    assert_ne!(cut[2] & 2, 0, "the answer is truncated");
    let by_tcp = in_cell_network(&cell, move || {
        let mut stream = TcpStream::connect((CELL_DNS_ADDRESS, 53)).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        [1, 2].map(|id| {
            let query = query(id, "many.test");
            stream
                .write_all(
                    &[&u16::try_from(query.len()).unwrap().to_be_bytes()[..], &query].concat(),
                )
                .unwrap();
            read_message(&mut stream).unwrap()
        })
    });
    assert_eq!(by_tcp, [answer(&many, true), answer(&query(2, "many.test"), true)]);
    assert!(by_tcp[0].len() > 4096);

    // No process listens at the second name server: SERVFAIL makes a resolver try the next server.
    let failed = query_by_udp(&cell, "one.test", "169.254.253.54").await;
    assert_eq!((failed[2] & 0x80, failed[3] & 0xf), (0x80, 2), "{failed:?}");

    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert!(kiyot.stop().await.success());
    drop((kiyot, server));
    assert_nothing_left(node);
}

/// Verifies N8.
#[tokio::test]
async fn pod_resolves_names_again_after_the_agent_and_the_daemon_were_killed() {
    let _server = NameServer::start("127.0.0.63");
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options_with_forwarding()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = run_with_servers(&mut kubelet, &pod("persistent", WAIT), &["127.0.0.63"]).await;
    let main = running.container("main").id.clone();
    let cell = kiyot.cells().remove(0);
    assert_resolves(&mut kubelet, &main).await;
    kill9(&processes(&["kiyot-cell agent", &cell]));
    query_by_udp(&cell, "one.test", CELL_DNS_ADDRESS).await;
    assert_resolves(&mut kubelet, &main).await;
    kiyot.kill9();
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    query_by_udp(&cell, "one.test", CELL_DNS_ADDRESS).await;
    wait_until("the cell takes exec again", LIMIT, async || {
        kubelet.exec_sync(&main, &["true"]).await.ok()
    })
    .await;
    assert_resolves(&mut kubelet, &main).await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies N10.
#[tokio::test]
async fn pod_that_rewrites_its_network_keeps_its_link_and_its_names() {
    let _server = NameServer::start("127.0.0.73");
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options_with_forwarding()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("rewriting").in_cell();
    let mut running = run_with_servers(&mut kubelet, &spec, &["127.0.0.73"]).await;
    let may = |config: &mut kiyot_testkit::cri::ContainerConfig| {
        let context = config.linux.get_or_insert_default().security_context.get_or_insert_default();
        context.capabilities.get_or_insert_default().add_capabilities.push("NET_ADMIN".to_owned());
    };
    let created = kubelet
        .create_container_with(&running, &Container::script("main", WAIT), 0, may)
        .await
        .unwrap();
    kubelet.start_container(&created.id).await.unwrap();
    let main = created.id.clone();
    running.containers.insert("main".to_owned(), created);
    let cut = "ip route flush table main; ip addr flush dev eth0 && ip link set eth0 down && \
        ip -o addr show dev eth0";
    let output = kubelet.exec_sync(&main, &["sh", "-c", cut]).await.unwrap();
    assert_eq!((output.stdout.as_str(), output.code), ("", 0), "{output:?}");
    assert_eq!(kubelet.exec_sync(&main, &["echo", "here"]).await.unwrap().stdout, "here\n");

    // The daemon's calls use the link, which is outside the pod's network. The pod's queries
    // succeed again when the route is back.
    let back = format!("ip route add {CELL_DNS_ADDRESS} dev kiyot-dns");
    let output = kubelet.exec_sync(&main, &["sh", "-c", &back]).await.unwrap();
    assert_eq!(output.code, 0, "{output:?}");
    assert_resolves(&mut kubelet, &main).await;
    let cell = kiyot.cells().remove(0);
    kill9(&processes(&["kiyot-cell agent", &cell]));
    wait_until("a new agent is linked", LIMIT, async || {
        kubelet.exec_sync(&main, &["true"]).await.ok()
    })
    .await;
    assert_resolves(&mut kubelet, &main).await;
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
