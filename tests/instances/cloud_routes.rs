//! Routes of the VPC to instances (`pod.elotl.co/cloud-route`).

use std::collections::BTreeMap;

use kiyot_testcloud::Cloud;
use kiyot_testkit::{Kubelet, LIMIT, Pod, wait_until};

use super::{State, WAIT, World, pod, sandbox_ends};

/// Returns a pod with a route.
fn routed(name: &str, network: &str) -> Pod {
    let mut pod = pod(name, WAIT);
    pod.annotations.insert("pod.elotl.co/cloud-route".to_owned(), network.to_owned());
    pod
}

/// Returns the networks that the API routes to instances.
async fn routes(cloud: &Cloud) -> BTreeMap<String, String> {
    let reply = cloud.call("DescribeRouteTables", &[]).await.unwrap();
    let root = reply.root();
    let routes = root.items("routeTableSet").iter().flat_map(|table| table.items("routeSet"));
    let pairs = routes.map(|route| {
        (route.at("destinationCidrBlock").to_owned(), route.at("instanceId").to_owned())
    });
    pairs.filter(|(_, instance)| !instance.is_empty()).collect()
}

/// Checks that another pod is refused the route of the pod `stays`.
async fn is_taken(kubelet: &mut Kubelet) {
    let refused = kubelet.run_pod(&routed("second", "10.8.1.0/24")).await.unwrap_err();
    let taken = "cloud-route 10.8.1.0/24 is taken by pod default/stays";
    assert!(refused.message().contains(taken), "{refused}");
}

/// Verifies V45, V47, V48, V63.
#[tokio::test]
async fn route_of_a_pod_outlives_the_daemon_and_ends_with_its_instance() {
    let world = World::start().await;
    let mut options = world.options();
    options.of_provider.push_str("cloud_routes = [\"10.8.0.0/16\"]\n");
    let (mut kiyot, mut kubelet) = world.daemon(options).await;
    let error = kubelet.run_pod(&routed("wrong", "10.9.0.0/16")).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::InvalidArgument, "{error}");
    assert!(error.message().contains("cloud-route = 10.9.0.0/16: is not allowed"), "{error}");
    assert!(world.launched().is_empty());

    let stays = kubelet.run_pod(&routed("stays", "10.8.1.0/24")).await.unwrap();
    let first = world.running()[0].id.clone();
    is_taken(&mut kubelet).await;
    let ends = kubelet.run_pod(&routed("ends", "10.8.2.0/24")).await.unwrap();
    let second = world.running().into_iter().find(|it| it.id != first).unwrap().id;
    let both = BTreeMap::from([
        ("10.8.1.0/24".to_owned(), first.clone()),
        ("10.8.2.0/24".to_owned(), second.clone()),
    ]);
    assert_eq!(routes(&world).await, both);

    // The instance is terminated from the console while no daemon runs: its route stays.
    kiyot.kill9();
    world.change("TerminateInstances", &second).await;
    world.reaches(&second, State::Terminated).await;
    assert_eq!(routes(&world).await, both);
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    sandbox_ends(&mut kubelet, &ends.sandbox).await;
    wait_until("its route is removed", LIMIT, async || {
        (!routes(&world).await.contains_key("10.8.2.0/24")).then_some(())
    })
    .await;
    assert_eq!(routes(&world).await, BTreeMap::from([("10.8.1.0/24".to_owned(), first)]));

    wait_until("the pod `stays` answers again", LIMIT, async || {
        kubelet.exec_sync(&stays.container("main").id, &["true"]).await.ok()
    })
    .await;
    let launched = world.launched().len();
    is_taken(&mut kubelet).await;
    assert_eq!(world.launched().len(), launched);
    world.ends(&mut kubelet, &[&stays, &ends]).await;
    assert_eq!(routes(&world).await, BTreeMap::new());
}
