//! The link over networks of several frame sizes, from another network namespace.

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

use futures::stream;
use kiyot::backends::milpa::gateway::{
    Admission, Gateway, GatewayConfig, Refusal, TcpEndpoint, ca::Ca,
};
use kiyot_cell::uplink::Uplink;
use kiyot_engine::id::CellId;
use kiyot_proto::cell::{
    BlobPart, HelloReply, LogPart, PutBlobReply, ReadLogRequest, agent_client::AgentClient,
};
use kiyot_testkit::{FakeCell, LIMIT, fake_cell::Options};
use prost::Message;
use tokio_util::sync::CancellationToken;
use tonic::Request;

use super::bench::{gateway_config, run};

/// The bytes that are sent each way.
const BULK_BYTES: usize = 8 << 20;
/// The bytes of a message.
const PART_BYTES: usize = 256 << 10;
/// The address of the node.
const NODE: [u8; 4] = [10, 77, 0, 1];

/// Admits every cell.
#[derive(Debug)]
struct AdmitAll;

#[tonic::async_trait]
impl Admission for AdmitAll {
    async fn redeem(&self, cell: &str, _: &str, _: &str) -> Result<CellId, Refusal> {
        self.admits(cell, "")
    }

    fn expects(&self, cell: &str, _: &str) -> Result<CellId, Refusal> {
        self.admits(cell, "")
    }

    fn admits(&self, cell: &str, _: &str) -> Result<CellId, Refusal> {
        CellId::parse(cell).map_err(|_| Refusal::Unknown(cell.to_owned()))
    }

    fn linked(&self, _: &CellId, _: Option<HelloReply>) {}
}

/// A chain of links from the node to the namespace of a cell, with routers between them.
struct Chain {
    namespaces: Vec<String>,
}

impl Chain {
    /// Makes links with these MTUs, the node's first.
    fn new(mtus: &[u32]) -> Self {
        let namespaces: Vec<String> = (0..mtus.len()).map(|hop| format!("mtu-hop{hop}")).collect();
        for name in &namespaces {
            run("ip", &["netns", "add", name]);
            let forward = "echo 1 > /proc/sys/net/ipv4/ip_forward";
            run("ip", &["netns", "exec", name, "sh", "-c", forward]);
        }
        for (link, mtu) in mtus.iter().enumerate() {
            let (near, far) = (format!("mtu-n{link}"), format!("mtu-f{link}"));
            let (mtu, next) = (mtu.to_string(), &namespaces[link]);
            run("ip", &["link", "add", &near, "mtu", &mtu, "type", "veth", "peer", "name", &far]);
            run("ip", &["link", "set", &far, "mtu", &mtu, "netns", next]);
            let subnet = |host| format!("10.{}.0.{host}/24", 77 + link);
            let router = format!("10.{}.0.1", 77 + link);
            let far_end = ["-n", next, "link", "set", &far, "up"];
            let far_address = ["-n", next, "address", "add", &subnet(2), "dev", &far];
            let far_route = ["-n", next, "route", "add", "default", "via", &router];
            if link == 0 {
                run("ip", &["address", "add", &subnet(1), "dev", &near]);
                run("ip", &["link", "set", &near, "up"]);
            } else {
                let before = &namespaces[link - 1];
                run("ip", &["link", "set", &near, "netns", before]);
                run("ip", &["-n", before, "address", "add", &subnet(1), "dev", &near]);
                run("ip", &["-n", before, "link", "set", &near, "up"]);
            }
            run("ip", &far_address);
            run("ip", &far_end);
            run("ip", &far_route);
        }
        // Routes to the cell: each hop knows only the networks of its neighbours.
        for link in 1..mtus.len() {
            let subnet = format!("10.{}.0.0/24", 77 + link);
            for hop in 0..link {
                let via = format!("10.{}.0.2", 77 + hop);
                let route = ["route", "add", &subnet, "via", &via];
                if hop == 0 {
                    run("ip", &route);
                } else {
                    run("ip", &[&["-n", namespaces[hop - 1].as_str()], &route[..]].concat());
                }
            }
        }
        Self { namespaces }
    }

    /// Returns the namespace of the cell.
    fn cell(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(&self.namespaces[self.namespaces.len() - 1])
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        // This deletes the link at once, with its peer and routes. The kernel deletes links in a
        // namespace some time after the namespace.
        run("ip", &["link", "delete", "mtu-n0"]);
        for name in &self.namespaces {
            run("ip", &["netns", "delete", name]);
        }
    }
}

fn timed<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(LIMIT);
    request
}

/// Enrols a cell at the end of a chain, and sends bulk data in both directions.
async fn assert_works_over(mtus: &[u32]) {
    let (chain, dir) = (Chain::new(mtus), tempfile::tempdir().unwrap());
    let config = GatewayConfig {
        tcp: Some(TcpEndpoint {
            listen: SocketAddr::from((NODE, 0)),
            advertise: None,
            is_forwarded: false,
        }),
        ..gateway_config(dir.path().join("gateway.sock"), Ca::new().unwrap())
    };
    let gateway = Gateway::start(config, Arc::new(AdmitAll)).await.unwrap();
    let cell = CellId::mint().unwrap();
    let link = gateway.link(&cell);
    let uplink =
        Uplink::new(gateway.bootstrap(&cell, "token", true), &dir.path().join("private"), "agent")
            .unwrap()
            .from_namespace(chain.cell());
    let fake = FakeCell::new(cell.as_str(), uplink.handle(), Options::default());
    let part = LogPart { content: vec![b'x'; PART_BYTES].into(), gap: 0 }.encode_to_vec();
    fake.with(|state| {
        state.fixed_messages.insert("ReadLog", vec![part; BULK_BYTES / PART_BYTES]);
        state.fixed_messages.insert("PutBlob", vec![PutBlobReply {}.encode_to_vec()]);
    });
    let (end, service) = (CancellationToken::new(), fake.clone());
    let stop = end.clone();
    let agent = tokio::spawn(async move { uplink.run(|info| service.service(info), stop).await });
    let mut client = AgentClient::new(link.bulk.clone());
    let mut log = client.read_log(timed(ReadLogRequest::default())).await.unwrap().into_inner();
    let mut read = 0;
    while let Some(part) = log.message().await.unwrap() {
        read += part.content.len();
    }
    assert_eq!(read, BULK_BYTES, "{mtus:?}");
    let part = BlobPart { content: vec![b'x'; PART_BYTES].into(), ..BlobPart::default() };
    let parts = stream::iter(vec![part; BULK_BYTES / PART_BYTES]);
    client.put_blob(timed(parts)).await.unwrap();
    end.cancel();
    agent.await.unwrap();
    gateway.shutdown().await;
}

/// Verifies L26.
#[tokio::test]
async fn link_works_from_the_smallest_to_jumbo_frames_and_over_a_narrower_network_between() {
    // One after the other, because they have the same addresses.
    for mtus in [&[1280][..], &[1500], &[9001], &[1280, 9001], &[9001, 1280, 9001]] {
        tokio::time::timeout(LIMIT, assert_works_over(mtus))
            .await
            .unwrap_or_else(|_| panic!("MTUs {mtus:?}: not within {LIMIT:?}"));
    }
}
