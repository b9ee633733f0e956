//! Pulls of instances from registries that the node's configuration names.

use std::fs;

use base64::{Engine, prelude::BASE64_STANDARD};
use kiyot_testkit::{Access, Container, KiyotOptions, Pod, Registry, image::ImageSpec};

use super::{WAIT, World, http_proxy::HttpProxy, tls_front::TlsFront};

/// User and password at the proxy.
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

/// Returns an image that writes a word.
fn image(word: &str) -> ImageSpec {
    ImageSpec::script(&format!("echo {word}; {WAIT}"))
}

/// Returns a pod with a container for each word, of an image in a registry that writes it.
fn pod(containers: &[(&str, &Registry)]) -> Pod {
    containers.iter().fold(Pod::new("pulls").in_cell(), |pod, (word, registry)| {
        let (image, _) = registry.image(&format!("{word}:1"), &image(word));
        pod.container(Container::of_image(word, &image))
    })
}

/// Starts a proxy that instances reach. Returns its URL too.
async fn proxy(world: &World) -> (HttpProxy, String) {
    let proxy = HttpProxy::start(&world.host().unwrap().address).await;
    let url = format!("http://{CREDENTIALS}@{}", proxy.address());
    (proxy, url)
}

/// Verifies I26.
#[tokio::test]
async fn instance_pulls_through_the_proxies_of_the_daemon_except_from_hosts_of_no_proxy() {
    let world = World::start().await;
    let [proxied, direct] = [(); 2].map(|()| Registry::start(&world.node, Access::Open));
    let (proxy, url) = proxy(&world).await;
    let mut options = options(&world);
    let no_proxy = direct.address().to_string();
    for (name, value) in [("HTTP_PROXY", url), ("NO_PROXY", no_proxy)] {
        options.environment.push((name.to_owned(), value));
    }
    let (kiyot, mut kubelet) = world.daemon(options).await;
    let running = kubelet.run_pod(&pod(&[("first", &proxied), ("second", &direct)])).await.unwrap();
    for name in ["first", "second"] {
        kubelet.logged(running.container(name), name).await;
    }

    // A manifest, its configuration and its layers, and nothing past the proxy.
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
    world.ends(&mut kubelet, &[&running]).await;
}

/// Makes a registry reachable by TLS alone, with an authority that the node's configuration names.
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
    let [proxied, direct, other] = [(); 3].map(|()| Registry::start(&world.node, Access::Open));
    let fronts = [require_tls(&world, &proxied).await, require_tls(&world, &direct).await];
    let _other_front = require_tls(&world, &other).await;
    let authority = other.configuration(&world.node).join("authority.pem");
    fs::write(authority, fronts[0].authority()).unwrap();
    let (proxy, url) = proxy(&world).await;
    let mut options = options(&world);
    let no_proxy = fronts[1].address().to_string();
    for (name, value) in [("HTTPS_PROXY", url), ("NO_PROXY", no_proxy)] {
        options.environment.push((name.to_owned(), value));
    }
    let (_kiyot, mut kubelet) = world.daemon(options).await;
    let running = kubelet.run_pod(&pod(&[("first", &proxied), ("second", &direct)])).await.unwrap();
    for name in ["first", "second"] {
        kubelet.logged(running.container(name), name).await;
    }
    let requests = proxy.requests_to(fronts[0].address());
    assert!(!requests.is_empty(), "the tunnels of the first");
    assert!(requests.iter().all(|request| request.method == "CONNECT"), "{requests:?}");
    assert!(proxy.requests_to(fronts[1].address()).is_empty());
    assert!(proxied.asked().len() >= 3 && direct.asked().len() >= 3);

    // Nothing is pulled from a server with the certificate of another authority.
    let spec = pod(&[("third", &other)]);
    let config = kubelet.prepare(&spec);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let refused_pod = kubelet.running(&spec, config, sandbox);
    let refused = kubelet.create_container(&refused_pod, &spec.containers[0], 0).await.unwrap_err();
    assert!(refused.message().contains("certificate"), "{refused:?}");
    assert!(other.asked().is_empty());
    world.ends(&mut kubelet, &[&running, &refused_pod]).await;
}
