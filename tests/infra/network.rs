//! Cells' networks, by CNI and without.

use std::fs;

use kiyot::backends::milpa::providers::Provider;

use super::bench::{Bench, assert_reachable};

/// Verifies N1.
#[tokio::test]
async fn by_cni_a_cell_gets_an_address_of_the_nodes_network() {
    let mut bench = Bench::new();
    bench.configure_cni("");
    let cell = bench.launch().await;
    let addresses = bench.provider.attach(&cell.instance.id, &cell.attachment).await.unwrap();
    assert_eq!(addresses.len(), 1);
    let subnet: kiyot::config::Cidr = bench.cni_subnet().parse().unwrap();
    assert!(subnet.contains(addresses[0]), "{addresses:?}");
    assert_reachable(&cell.instance.id, addresses[0]);
    assert!(
        bench.held().iter().any(|line| line.starts_with("rule")),
        "masquerading is on: {:?}",
        bench.held()
    );
    assert_eq!(
        bench.provider.attach(&cell.instance.id, &cell.attachment).await.unwrap(),
        addresses,
        "again it returns the same"
    );
    bench.restart();
    assert_eq!(
        bench.provider.attach(&cell.instance.id, &cell.attachment).await.unwrap(),
        addresses,
        "after a restart too"
    );
    // The configuration that counts is the one that the network was made by.
    fs::remove_dir_all(&bench.config.netns.cni_conf_dir).unwrap();
    bench.provider.terminate(std::slice::from_ref(&cell.instance.id)).await.unwrap();
    bench.assert_clean(&cell.instance.id);
}

#[tokio::test]
async fn a_plugin_is_told_of_the_pod_and_of_the_result_before_it() {
    let mut bench = Bench::new();
    bench.configure_cni(r#", {"type": "telltale", "word": "its own"}"#);
    let said = bench.path().join("said");
    let script = format!(
        "#!/bin/sh\n{{ env | grep ^CNI_; cat; echo; }} >> {0}.$CNI_COMMAND\necho '{{\"cniVersion\": \"1.0.0\", \"ips\": [{{\"address\": \"10.1.2.3/24\"}}]}}'\n",
        said.display()
    );
    bench.add_plugin("telltale", &script);
    let cell = bench.launch().await;
    let addresses = bench.provider.attach(&cell.instance.id, &cell.attachment).await.unwrap();
    assert_eq!(
        addresses,
        ["10.1.2.3".parse::<std::net::IpAddr>().unwrap()],
        "the last plugin's result counts"
    );
    bench.provider.terminate(std::slice::from_ref(&cell.instance.id)).await.unwrap();
    for command in ["ADD", "DEL"] {
        let said = fs::read_to_string(said.with_extension(command)).unwrap();
        for word in [
            format!("CNI_CONTAINERID={}", cell.attachment.sandbox),
            format!("CNI_NETNS=/run/netns/kiyot-{}", cell.instance.id.0),
            "CNI_IFNAME=eth0".into(),
            format!(
                "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=a-namespace;K8S_POD_NAME=a-pod;K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID={}",
                cell.attachment.sandbox, cell.attachment.pod_uid
            ),
            r#""prevResult":"#.into(),
            format!(r#""name":"{}""#, bench.name),
            r#""word":"its own""#.into(),
        ] {
            assert!(said.contains(&word), "{command} lacks {word}: {said}");
        }
    }
    bench.assert_clean(&cell.instance.id);
}

/// Verifies N2.
#[tokio::test]
async fn a_del_that_fails_is_tried_again_until_it_works() {
    let mut bench = Bench::new();
    bench.configure_cni(r#", {"type": "stubborn"}"#);
    let (broken, tried) = (bench.path().join("broken"), bench.path().join("tried"));
    let script = format!(
        "#!/bin/sh\nif [ $CNI_COMMAND = DEL ]; then echo x >> {}; if [ -e {} ]; then echo '{{\"code\": 11, \"msg\": \"not now\"}}'; exit 1; fi; exit 0; fi\nsed 's/.*\"prevResult\":\\({{.*}}\\),\"type\".*/\\1/'\n",
        tried.display(),
        broken.display()
    );
    bench.add_plugin("stubborn", &script);
    let cell = bench.launch().await;
    bench.provider.attach(&cell.instance.id, &cell.attachment).await.unwrap();
    fs::write(&broken, "").unwrap();
    let error =
        bench.provider.terminate(std::slice::from_ref(&cell.instance.id)).await.unwrap_err();
    let why = format!("{error}: {}", error.source.as_ref().unwrap());
    assert!(
        why.contains(&cell.instance.id.0)
            && why.contains("stubborn")
            && why.contains("not now (code 11)"),
        "{why}"
    );
    assert_eq!(
        fs::read_to_string(&tried).unwrap().lines().count(),
        3,
        "it was tried a bounded number of times"
    );
    let listed = bench.provider.list_owned().await.unwrap();
    assert_eq!(
        listed.iter().map(|listed| (&listed.id, listed.running)).collect::<Vec<_>>(),
        [(&cell.instance.id, false)],
        "what is left is not forgotten"
    );
    fs::remove_file(&broken).unwrap();
    bench.restart();
    bench.provider.terminate(std::slice::from_ref(&cell.instance.id)).await.unwrap();
    bench.assert_clean(&cell.instance.id);
}

/// Verifies N2.
#[tokio::test]
async fn an_add_that_fails_leaves_nothing() {
    let mut bench = Bench::new();
    bench.configure_cni(r#", {"type": "unwilling"}"#);
    bench.add_plugin("unwilling", "#!/bin/sh\n[ $CNI_COMMAND = DEL ] && exit 0\necho '{\"code\": 100, \"msg\": \"never\"}'\nexit 1\n");
    let cell = bench.launch().await;
    for _ in 0..2 {
        let error = bench.provider.attach(&cell.instance.id, &cell.attachment).await.unwrap_err();
        assert!(error.source.unwrap().to_string().contains("never"));
    }
    bench.provider.terminate(std::slice::from_ref(&cell.instance.id)).await.unwrap();
    bench.assert_clean(&cell.instance.id);
}

/// Verifies N1, Y46.
#[tokio::test]
async fn without_cni_cells_share_a_bridge_that_goes_with_the_last() {
    let bench = Bench::new();
    let (one, other) = (bench.launch().await, bench.launch().await);
    let first = bench.provider.attach(&one.instance.id, &one.attachment).await.unwrap();
    let second = bench.provider.attach(&other.instance.id, &other.attachment).await.unwrap();
    assert_ne!(first, second);
    for (cell, addresses) in [(&one, &first), (&other, &second)] {
        assert!(bench.config.netns.subnet.contains(addresses[0]), "{addresses:?}");
        assert_reachable(&cell.instance.id, addresses[0]);
    }
    assert!(bench.held().iter().any(|line| line.contains("MASQUERADE")), "{:?}", bench.held());
    assert_eq!(
        bench.provider.attach(&one.instance.id, &one.attachment).await.unwrap(),
        first,
        "again it returns the same"
    );
    bench.provider.terminate(std::slice::from_ref(&one.instance.id)).await.unwrap();
    assert_eq!(bench.held_of(&one.instance.id), Vec::<String>::new());
    assert_reachable(&other.instance.id, second[0]);
    // What is left if the daemon is killed, or there is no space, while it takes an address.
    let addresses = bench.config.state_dir.join("addresses");
    fs::write(addresses.join(format!(".{}", other.instance.id.0)), "").unwrap();
    bench.provider.terminate(std::slice::from_ref(&other.instance.id)).await.unwrap();
    bench.assert_clean(&other.instance.id);
    assert!(!addresses.exists());
}
