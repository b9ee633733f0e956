//! Pulls by instances from registries in the node's configuration.

use std::{fs, net::SocketAddr};

use base64::{Engine, prelude::BASE64_STANDARD};
use kiyot_testkit::{
    Access, Container, Kiyot, KiyotOptions, Kubelet, Pod, Registry, RunningPod, image::ImageSpec,
};

use super::{WAIT, World, http_proxy::HttpProxy, tls_front::TlsFront};

/// User and password of the proxy.
const CREDENTIALS: &str = "violet:hidden-word";

/// Returns the options of a daemon whose cells pull their images, with the node's configuration.
fn options(world: &World) -> KiyotOptions {
    let mut options = world.options();
    let pulls = "image_source = \"registry\"\n";
    options.milpa = options.milpa.replace("image_source = \"node\"\n", pulls);
    assert!(options.milpa.contains(pulls), "{}", options.milpa);
    options.milpa += &format!("registry_config_dir = {:?}\n", world.node.registries());
    options
}

/// Returns an image that prints a word.
fn image(word: &str) -> ImageSpec {
    ImageSpec::script(&format!("echo {word}; {WAIT}"))
}

/// Returns a pod with a container for each word. The container's image is in the registry, and
/// prints the word.
fn pod(containers: &[(&str, &Registry)]) -> Pod {
    containers.iter().fold(Pod::new("pulls").in_cell(), |pod, (word, registry)| {
        let (image, _) = registry.image(&format!("{word}:1"), &image(word));
        pod.container(Container::of_image(word, &image))
    })
}

/// A pod with two images: one of a registry behind a proxy, and one of a registry without it.
struct Pulled<'a> {
    proxy: HttpProxy,
    kiyot: Kiyot<'a>,
    kubelet: Kubelet,
    pod: RunningPod,
}

impl<'a> Pulled<'a> {
    /// Runs the pod. The daemon has the proxy in an environment variable, and the address of the
    /// second registry in `NO_PROXY`.
    async fn run(
        world: &'a World,
        variable: &str,
        no_proxy: SocketAddr,
        [proxied, direct]: [&Registry; 2],
    ) -> Self {
        let proxy = HttpProxy::start(&world.host().unwrap().address).await;
        let url = format!("http://{CREDENTIALS}@{}", proxy.address());
        let mut options = options(world);
        options.environment.push((variable.to_owned(), url));
        options.environment.push(("NO_PROXY".to_owned(), no_proxy.to_string()));
        let (kiyot, mut kubelet) = world.daemon(options).await;
        let spec = pod(&[("first", proxied), ("second", direct)]);
        let pod = kubelet.run_pod(&spec).await.unwrap();
        for name in ["first", "second"] {
            kubelet.logged(pod.container(name), name).await;
        }
        Self { proxy, kiyot, kubelet, pod }
    }
}

/// Verifies I26.
#[tokio::test]
async fn instance_pulls_through_the_proxies_of_the_daemon_except_from_hosts_of_no_proxy() {
    let world = World::start().await;
    world.admit_cells("-1", "-1").await;
    let [proxied, direct] = [(); 2].map(|()| Registry::start(&world.node, Access::Open));
    let pulled = Pulled::run(&world, "HTTP_PROXY", direct.address(), [&proxied, &direct]);
    let Pulled { proxy, kiyot, mut kubelet, pod } = pulled.await;

    // The proxy carries a manifest, its configuration and its layers; no request bypasses it.
    let requests = proxy.requests_to(proxied.address());
    assert_eq!(requests.len(), proxied.asked().len(), "{requests:?}");
    assert!(requests.len() >= 3, "{requests:?}");
    let authorization = format!("Basic {}", BASE64_STANDARD.encode(CREDENTIALS));
    for request in &requests {
        assert!(["GET", "HEAD"].contains(&&*request.method), "{request:?}");
        assert_eq!(request.authorization, authorization, "{request:?}");
    }
    assert!(proxy.requests_to(direct.address()).is_empty());
    assert!(direct.asked().len() >= 3);
    assert!(!kiyot.log().contains("hidden-word"), "{}", kiyot.log());
    world.ends(&mut kubelet, &[&pod]).await;
}

/// Makes a registry reachable by TLS only, with an authority that the node's configuration names.
async fn require_tls(world: &World, registry: &Registry) -> TlsFront {
    let front = TlsFront::start(registry.address()).await;
    let directory = registry.configuration(&world.node);
    fs::write(directory.join("authority.pem"), front.authority()).unwrap();
    let url = format!("https://{}", front.address());
    let hosts = format!(
        "server = \"{url}\"\n\n[host.\"{url}\"]\ncapabilities = [\"pull\", \"resolve\"]\n\
         ca = \"authority.pem\"\n"
    );
    fs::write(directory.join("hosts.toml"), hosts).unwrap();
    front
}

/// Verifies I26, V6.
#[tokio::test]
async fn instance_trusts_the_authority_of_a_registry_directly_and_through_a_proxy() {
    let world = World::start().await;
    world.admit_cells("-1", "-1").await;
    let [proxied, direct, other] = [(); 3].map(|()| Registry::start(&world.node, Access::Open));
    let fronts = [require_tls(&world, &proxied).await, require_tls(&world, &direct).await];
    let _other_front = require_tls(&world, &other).await;
    let authority = other.configuration(&world.node).join("authority.pem");
    fs::write(authority, fronts[0].authority()).unwrap();
    let pulled = Pulled::run(&world, "HTTPS_PROXY", fronts[1].address(), [&proxied, &direct]);
    let Pulled { proxy, kiyot: _kiyot, mut kubelet, pod: running } = pulled.await;
    let requests = proxy.requests_to(fronts[0].address());
    assert!(!requests.is_empty(), "the first registry is reached through tunnels");
    assert!(requests.iter().all(|request| request.method == "CONNECT"), "{requests:?}");
    assert!(proxy.requests_to(fronts[1].address()).is_empty());
    assert!(proxied.asked().len() >= 3 && direct.asked().len() >= 3);

    // No image is pulled from a server whose certificate is of another authority.
    let spec = pod(&[("third", &other)]);
    let config = kubelet.prepare(&spec);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let refused_pod = kubelet.running(&spec, config, sandbox);
    let refused = kubelet.create_container(&refused_pod, &spec.containers[0], 0).await.unwrap_err();
    assert!(refused.message().contains("certificate"), "{refused:?}");
    assert!(other.asked().is_empty());
    world.ends(&mut kubelet, &[&running, &refused_pod]).await;
}
