//! Registry hosts of cells, from the configuration of the node's containerd.

use std::fs;

use kiyot_testkit::{Access, Kiyot, LIMIT, Node, Pace, Pod, Registry, wait_until};

use crate::cell::{
    containerd_version, options,
    registry::registries::{
        blob_requests, image_with_layers, image_with_word, pull_on_node, run_sandbox,
        run_until_word, with_mirrors, written_words,
    },
    remove_and_assert_clean,
};

/// Adds a `registry` section to the node's configuration. Restarts the node's containerd.
async fn configure_registry(node: &Node, registry: &str) {
    let file = node.directory().join("containerd.toml");
    let text = fs::read_to_string(&file).unwrap();
    let new = format!(
        "[plugins.\"io.containerd.grpc.v1.cri\".registry]\nconfig_path = {:?}\n",
        node.registries()
    );
    assert!(text.contains(&new), "{text}");
    fs::write(
        &file,
        text.replace(
            &new,
            &registry.replace("[registry", "[plugins.\"io.containerd.grpc.v1.cri\".registry"),
        ),
    )
    .unwrap();
    node.restart_containerd().await;
}

/// Returns whether containerd reports its registry configuration. Versions before 2.0 do.
async fn reports_registry(node: &Node) -> bool {
    containerd_version(&mut node.kubelet(&node.socket()).await.unwrap()).await < (2, 0)
}

/// Waits until the log has a warning with these words.
async fn wait_for_warning(kiyot: &Kiyot<'_>, words: &[&str]) {
    wait_until(format!("the log has a warning with {words:?}"), LIMIT, async || {
        kiyot
            .log()
            .lines()
            .any(|line| line.contains("WARN") && words.iter().all(|word| line.contains(word)))
            .then_some(())
    })
    .await;
}

/// Verifies I17.
#[tokio::test]
async fn mirrors_in_the_nodes_own_file_are_used_by_cells_too() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Basic("violet".to_owned(), "sesame".to_owned()));
    let at = registry.address();
    let (name, _) = registry.image("app:1", &image_with_word("mirrored"));
    let host = name.split_once('/').unwrap().0;
    let ca = node.directory().join("ca.crt");
    fs::write(&ca, "played").unwrap();
    // Cells can't use the first endpoint, and no registry listens at the second. The registry is
    // also configured by its address, as registries without TLS are.
    let old = format!(
        "[registry.mirrors.{host:?}]\nendpoint = \
        [\"http://127.0.0.1:1\", \"http://{}:1\", \"http://{at}\"]\n\
         [registry.mirrors.\"{at}\"]\nendpoint = [\"http://{at}\"]\n\
         [registry.configs.\"{at}\".auth]\nusername = \"violet\"\npassword = \"sesame\"\n\
         [registry.configs.\"tls.invalid\".tls]\nca_file = {ca:?}\n",
        at.ip()
    );
    configure_registry(&node, &old).await;
    let kiyot = Kiyot::start(&node, options()).await;
    if !reports_registry(&node).await {
        return wait_for_warning(
            &kiyot,
            &["registry.mirrors", "cells pull without them", "registry_config_dir"],
        )
        .await;
    }
    let mut kubelet = kiyot.kubelet().await;
    let mut pod = run_sandbox(&mut kubelet, "mirrored").await;
    let by_address = name.replace(host, &at.to_string());
    let mut pulled = Vec::new();
    for (container, name) in [("by-name", &name), ("by-address", &by_address)] {
        // The node has credentials for this host, but the kubelet does not.
        pulled.push(kubelet.pull(&pod.spec, &pod.config, name, None).await.unwrap());
        assert!(!registry.asked().is_empty());
        assert_eq!(
            &run_until_word(&mut kubelet, &mut pod, container, name, "mirrored").await,
            pulled.last().unwrap()
        );
    }
    // The node pulls in the same way.
    let local = Pod::new("local");
    for name in [&name, &by_address] {
        pulled.push(kubelet.pull(&local, &kubelet.prepare(&local), name, None).await.unwrap());
    }
    assert_eq!(pulled, vec![pulled[0].clone(); 4]);
    assert_eq!(
        fs::read_to_string(kiyot.state().join("registries/tls.invalid/0-ca.pem")).unwrap(),
        "played"
    );
    wait_for_warning(&kiyot, &["127.0.0.1:1", host, "loopback"]).await;
    assert_eq!(written_words(&node, &kiyot, &["sesame"]), Vec::<String>::new());
    let made =
        fs::read_to_string(kiyot.state().join("registries").join(host).join("hosts.toml")).unwrap();
    assert!(!made.contains("sesame"), "{made}");
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
    kubelet.forget(&local);
}

/// Verifies I17.
#[tokio::test]
async fn mirrors_of_the_node_are_used_by_default() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let (name, _) = registry.image("app:1", &image_with_word("mirrored"));
    let kiyot = Kiyot::start(
        &node,
        if reports_registry(&node).await { options() } else { with_mirrors(&node) },
    )
    .await;
    let mut kubelet = kiyot.kubelet().await;
    let mut pod = run_sandbox(&mut kubelet, "mirrored").await;
    run_until_word(&mut kubelet, &mut pod, "main", &name, "mirrored").await;
    assert!(!registry.asked().is_empty());
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
}

/// Verifies I16.
#[tokio::test]
async fn unsupported_registry_settings_are_named_in_the_log() {
    let node = Node::start().await;
    let old = "[registry.mirrors.\"old.invalid\"]\nendpoint = \
        [\"https://violet:sesame@mirror.invalid\"]\n[registry.headers]\nX-Team = [\"sesame\"]\n";
    configure_registry(&node, old).await;
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    if reports_registry(&node).await {
        wait_for_warning(&kiyot, &["registry_config_dir", "registry.mirrors", "old.invalid"]).await;
        wait_for_warning(&kiyot, &["registry.headers", "X-Team"]).await;
    }
    assert!(!kiyot.log().contains("sesame"));
}

/// Verifies I9.
#[tokio::test]
async fn pull_from_a_host_with_a_port_takes_layers_of_the_node() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Open);
    let at = registry.address();
    let [of_node, name] =
        ["app:1", "app:2"].map(|tag| registry.image(tag, &image_with_layers("base", "mine")).0);
    let (host, _) = name.split_once('/').unwrap();
    fs::rename(
        node.registries().join(host),
        node.registries().join(format!("{}_{}_", at.ip(), at.port())),
    )
    .unwrap();
    let [of_node, name] = [&of_node, &name].map(|name| name.replace(host, &at.to_string()));
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut kubelet = kiyot.kubelet().await;
    let local = pull_on_node(&mut kubelet, &registry, &of_node).await;
    let [config, base, _] = registry.parts(&name).try_into().unwrap();
    let pod = run_sandbox(&mut kubelet, "sharing").await;
    registry.pace(&config.0, Pace::Stalls(0));
    let blob =
        base.0.replace("sha256:", "containerd/io.containerd.content.v1.content/blobs/sha256/");
    let in_cell = kiyot.state().join("cells").join(kiyot.cells().remove(0)).join(blob);
    let arrives = async {
        wait_until("the base is in the cell", LIMIT, async || in_cell.exists().then_some(())).await;
        registry.release(&config.0);
    };
    let (pulled, ()) = tokio::join!(kubelet.pull(&pod.spec, &pod.config, &name, None), arrives);
    assert_eq!(pulled.unwrap(), config.0);
    assert_eq!(blob_requests(&registry.asked()), [config.0].into(), "the layers are the node's");
    remove_and_assert_clean(&mut kubelet, &kiyot, &pod).await;
    kubelet.forget(&local);
}
