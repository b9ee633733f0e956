//! Name servers of the cluster.

use kiyot_testkit::{Kubelet, LIMIT, RunningPod, output, wait_until};

use super::{
    WAIT, World,
    name_server::{ANSWER, NameServer},
    pod,
};

/// A name server that only the node can reach.
const NODE_RESOLVER: &str = "127.0.0.53";
/// Address of the service of the cluster's name server, which the kubelet gives to pods.
const SERVICE: &str = "10.96.0.10";

/// Runs a pod with a name server.
async fn with_server(kubelet: &mut Kubelet, name: &str, server: &str) -> RunningPod {
    let spec = pod(name, WAIT);
    let mut config = kubelet.prepare(&spec);
    config.dns_config.as_mut().unwrap().servers = vec![server.to_owned()];
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(&spec, config, sandbox);
    let created = kubelet.create_container(&running, &spec.containers[0], 0).await.unwrap();
    kubelet.start_container(&created.id).await.unwrap();
    running.containers.insert("main".to_owned(), created);
    running
}

/// Verifies V31, V39.
#[tokio::test]
async fn names_are_resolved_by_servers_of_the_node_and_of_the_cluster() {
    let world = World::start().await;
    world.route_cells().await;
    let mut options = world.options();
    options.of_provider.push_str("cluster_networks = [\"10.96.0.0/12\"]\n");
    options.sections.push_str("[backends.milpa.policy]\nnode_resolver = \"forward\"\n");
    let (_kiyot, mut kubelet) = world.daemon(options).await;
    let host = world.host().unwrap().address.clone();
    let _servers = [NODE_RESOLVER, &host].map(NameServer::start);
    // A rule of kube-proxy.
    let rule = ["-d", SERVICE, "-p", "udp", "--dport", "53", "-j", "DNAT", "--to", &host];
    let arguments = [&["-w", "10", "-t", "nat", "-A", "PREROUTING"][..], &rule].concat();
    output("iptables", &arguments).unwrap();
    for (name, server) in [("of-node", NODE_RESOLVER), ("of-cluster", SERVICE)] {
        let running = with_server(&mut kubelet, name, server).await;
        let main = &running.container("main").id;
        // Datagrams may be lost.
        wait_until(format!("a name is resolved by {server}"), LIMIT, async || {
            let output = kubelet.exec_sync(main, &["nslookup", "web.test."]).await.ok()?;
            output.stdout.contains(ANSWER).then_some(())
        })
        .await;
        kubelet.stop_and_remove(&running).await.unwrap();
    }
    world.has_no_cells().await;
}
