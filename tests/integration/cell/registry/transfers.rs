//! TCP connections of a pod to a name server that only the node can reach.

use std::{
    io::{Read, Write},
    net::TcpStream,
    process::Command,
    time::Duration,
};

use kiyot_testkit::{Kiyot, LIMIT, Node, wait_until};

use crate::cell::{
    WAIT, pod, remove_and_assert_clean,
    streaming::network::in_cell_network,
    streaming::resolvers::{
        CELL_DNS_ADDRESS, NameServer, ZONE_MESSAGE_BYTES, ZONE_MESSAGES, answer, assert_resolves,
        options_with_forwarding, query, query_by_udp, read_message, run_with_servers,
    },
};

/// A pause of the client that is longer than a query may take.
const CLIENT_PAUSE: Duration = Duration::from_secs(7);

fn connect() -> TcpStream {
    let stream = TcpStream::connect((CELL_DNS_ADDRESS, 53)).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

fn length_prefixed(message: &[u8]) -> Vec<u8> {
    [&u16::try_from(message.len()).unwrap().to_be_bytes()[..], message].concat()
}

/// Verifies N12.
#[tokio::test]
async fn dns_connection_carries_every_answer_of_the_name_server() {
    let _server = NameServer::start("127.0.0.83");
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options_with_forwarding()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running =
        run_with_servers(&mut kubelet, &pod("transferring", WAIT), &["127.0.0.83", "127.0.0.84"])
            .await;
    let cell = kiyot.cells().remove(0);
    query_by_udp(&cell, "one.test", CELL_DNS_ADDRESS).await;

    // A zone transfer has 2.4 MB, in messages with one answer each.
    let zone = in_cell_network(&cell, || {
        let mut stream = connect();
        stream.write_all(&length_prefixed(&query(1, "zone.test"))).unwrap();
        (0..ZONE_MESSAGES).map(|_| read_message(&mut stream).unwrap()).collect::<Vec<_>>()
    });
    assert!(zone.iter().enumerate().all(|(number, message)| message.len() == ZONE_MESSAGE_BYTES
        && message.last() == Some(&u8::try_from(number).unwrap())));

    // The client sends several queries at once and another query after a pause. A message may
    // arrive in parts.
    let answers = in_cell_network(&cell, || {
        let mut stream = connect();
        let all: Vec<u8> =
            (1..=5).flat_map(|id| length_prefixed(&query(id, "many.test"))).collect();
        let (first, rest) = all.split_at(7);
        stream.write_all(first).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        stream.write_all(rest).unwrap();
        let mut answers: Vec<_> = (1..=5).map(|_| read_message(&mut stream).unwrap()).collect();
        std::thread::sleep(CLIENT_PAUSE);
        stream.write_all(&length_prefixed(&query(6, "one.test"))).unwrap();
        answers.push(read_message(&mut stream).unwrap());
        // After the client has shut down its side, the name server shuts down the other side
        // without sending more.
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(stream.read_to_end(&mut Vec::new()).unwrap(), 0);
        answers
    });
    let expected: Vec<_> = (1..=5)
        .map(|id| answer(&query(id, "many.test"), true))
        .chain([answer(&query(6, "one.test"), true)])
        .collect();
    assert_eq!(answers, expected);

    // The connection ends without data if the name server does not listen.
    let length = in_cell_network(&cell, || {
        let mut stream = TcpStream::connect(("169.254.253.54", 53)).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.read(&mut [0; 8]).unwrap_or(0)
    });
    assert_eq!(length, 0);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies N13.
#[tokio::test]
async fn link_to_name_servers_removed_by_a_pod_is_created_again() {
    let _server = NameServer::start("127.0.0.93");
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options_with_forwarding()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = run_with_servers(&mut kubelet, &pod("removing", WAIT), &["127.0.0.93"]).await;
    let main = running.container("main").id.clone();
    assert_resolves(&mut kubelet, &main).await;
    let cell = kiyot.cells().remove(0);
    for _ in 0..2 {
        // A container with NET_ADMIN may delete the link.
        let removed = in_cell_network(&cell, || {
            Command::new("ip").args(["link", "delete", "kiyot-dns"]).output().unwrap()
        });
        assert!(removed.status.success(), "{removed:?}");
        assert_resolves(&mut kubelet, &main).await;
    }
    // The name server's only sockets are the new sockets of the cell.
    let by_tcp = wait_until("the name server answers by TCP", LIMIT, async || {
        in_cell_network(&cell, || {
            let mut stream = TcpStream::connect((CELL_DNS_ADDRESS, 53)).ok()?;
            stream.set_read_timeout(Some(LIMIT)).ok()?;
            stream.write_all(&length_prefixed(&query(1, "one.test"))).ok()?;
            read_message(&mut stream).ok()
        })
    })
    .await;
    assert_eq!(by_tcp, answer(&query(1, "one.test"), true));
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
