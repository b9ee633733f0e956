//! Networks of cells, with CNI and without.

use std::fs;

use kiyot_engine::provider::Provider;

use super::bench::{Bench, assert_reachable, run};

/// Verifies N1.
#[tokio::test]
async fn cni_gives_a_cell_an_address_of_the_nodes_network() {
    let mut bench = Bench::new();
    bench.configure_cni("");
    let cell = bench.launch().await;
    let addresses =
        bench.provider.attach(&cell.instance.id, &cell.attachment).await.unwrap().addresses;
    assert_eq!(addresses.len(), 1);
    let subnet: kiyot_values::cidr::Cidr = bench.cni_subnet().parse().unwrap();
    assert!(subnet.contains(addresses[0]), "{addresses:?}");
    assert_reachable(&cell.instance.id, addresses[0]);
    assert!(
        bench.resources().iter().any(|line| line.starts_with("rule")),
        "masquerading is on: {:?}",
        bench.resources()
    );
    assert_eq!(
        bench.provider.attach(&cell.instance.id, &cell.attachment).await.unwrap().addresses,
        addresses,
        "a second attach returns the same addresses"
    );
    bench.restart();
    assert_eq!(
        bench.provider.attach(&cell.instance.id, &cell.attachment).await.unwrap().addresses,
        addresses,
        "after a restart too"
    );
    // DEL uses the configuration by which the network was created.
    fs::remove_dir_all(&bench.config.netns.network.cni_conf_dir).unwrap();
    bench.end(&cell.instance.id).await.unwrap();
    bench.assert_clean(&cell.instance.id);
}

#[tokio::test]
async fn plugin_receives_pod_arguments_and_the_previous_result() {
    let mut bench = Bench::new();
    bench.configure_cni(r#", {"type": "recorder", "word": "its own"}"#);
    let input = bench.path().join("input");
    let script = format!(
        "#!/bin/sh\n\
         {{ env | grep ^CNI_; cat; echo; }} >> {0}.$CNI_COMMAND\n\
         echo '{{\"cniVersion\": \"1.0.0\", \"ips\": [{{\"address\": \"10.1.2.3/24\"}}]}}'\n",
        input.display()
    );
    bench.add_plugin("recorder", &script);
    let cell = bench.launch().await;
    let addresses =
        bench.provider.attach(&cell.instance.id, &cell.attachment).await.unwrap().addresses;
    assert_eq!(
        addresses,
        ["10.1.2.3".parse::<std::net::IpAddr>().unwrap()],
        "the last plugin's result counts"
    );
    bench.end(&cell.instance.id).await.unwrap();
    for command in ["ADD", "DEL"] {
        let input = fs::read_to_string(input.with_extension(command)).unwrap();
        for word in [
            format!("CNI_CONTAINERID={}", cell.attachment.sandbox),
            format!("CNI_NETNS=/run/netns/kiyot-{}", cell.instance.id.0),
            "CNI_IFNAME=eth0".into(),
            format!(
                "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=a-namespace;K8S_POD_NAME=a-pod;\
                 K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID={}",
                cell.attachment.sandbox, cell.attachment.pod_uid
            ),
            r#""prevResult":"#.into(),
            format!(r#""name":"{}""#, bench.name),
            r#""word":"its own""#.into(),
        ] {
            assert!(input.contains(&word), "{command} lacks {word}: {input}");
        }
    }
    bench.assert_clean(&cell.instance.id);
}

/// Verifies N2.
#[tokio::test]
async fn failed_del_is_retried_until_it_succeeds() {
    let mut bench = Bench::new();
    bench.configure_cni(r#", {"type": "stubborn"}"#);
    let (broken, tried) = (bench.path().join("broken"), bench.path().join("tried"));
    let script = format!(
        "#!/bin/sh\n\
         if [ $CNI_COMMAND = DEL ]; then\n\
         echo x >> {}\n\
         if [ -e {} ]; then echo '{{\"code\": 11, \"msg\": \"not now\"}}'; exit 1; fi\n\
         exit 0\n\
         fi\n\
         sed 's/.*\"prevResult\":\\({{.*}}\\),\"type\".*/\\1/'\n",
        tried.display(),
        broken.display()
    );
    bench.add_plugin("stubborn", &script);
    let cell = bench.launch().await;
    bench.provider.attach(&cell.instance.id, &cell.attachment).await.unwrap();
    fs::write(&broken, "").unwrap();
    let error = bench.end(&cell.instance.id).await.unwrap_err();
    let message = format!("{error}: {}", error.source.as_ref().unwrap());
    assert!(
        message.contains(&cell.instance.id.0)
            && message.contains("stubborn")
            && message.contains("not now (code 11)"),
        "{message}"
    );
    assert_eq!(fs::read_to_string(&tried).unwrap().lines().count(), 3, "attempts are bounded");
    let listed = bench.provider.list_owned().await.unwrap();
    assert_eq!(
        listed.iter().map(|listed| (&listed.id, listed.state.is_alive())).collect::<Vec<_>>(),
        [(&cell.instance.id, false)],
        "the instance stays listed"
    );
    fs::remove_file(&broken).unwrap();
    bench.restart();
    bench.end(&cell.instance.id).await.unwrap();
    bench.assert_clean(&cell.instance.id);
}

/// Verifies N2.
#[tokio::test]
async fn masquerading_of_an_interrupted_del_is_removed() {
    let mut bench = Bench::new();
    bench.configure_cni("");
    let cell = bench.launch().await;
    bench.provider.attach(&cell.instance.id, &cell.attachment).await.unwrap();
    assert!(!bench.resources().is_empty());
    // The plugin `bridge` was killed after it had deleted the link, and before the chain: the next
    // DEL finds no address, and leaves the chain.
    run("ip", &["-n", &format!("kiyot-{}", cell.instance.id.0), "link", "delete", "eth0"]);
    bench.restart();
    bench.end(&cell.instance.id).await.unwrap();
    bench.assert_clean(&cell.instance.id);
}

/// Verifies N2.
#[tokio::test]
async fn chain_that_a_killed_plugin_has_emptied_is_removed() {
    let mut bench = Bench::new();
    bench.configure_cni("");
    let chain = bench.path().join("chain");
    let cell = bench.launch().await;
    // The plugin is killed in its first DEL, after it has flushed the chain and before it deletes
    // the chain.
    let script = format!(
        r#"#!/bin/sh
{{ [ $CNI_COMMAND = DEL ] && [ ! -e {chain} ]; }} || exec {plugin}
cat > {chain}.input
ip -n kiyot-{cell} link delete eth0
name=$(iptables -w 10 -t nat -S | sed -n 's/^-A \(CNI-[0-9a-f]*\) .*{name}.*/\1/p' | head -n 1)
{{
    echo '*nat'
    iptables -w 10 -t nat -S POSTROUTING | grep -e "-j $name\$" | sed 's/^-A/-D/'
    echo "-F $name"
    echo COMMIT
}} | iptables-restore -w 10 --noflush
echo "$name" > {chain}
kill -KILL $$
"#,
        chain = chain.display(),
        cell = cell.instance.id.0,
        name = bench.name,
        plugin = kiyot_testkit::Node::cni_plugins().join("bridge").display(),
    );
    bench.add_plugin("bridge", &script);
    bench.provider.attach(&cell.instance.id, &cell.attachment).await.unwrap();
    bench.end(&cell.instance.id).await.unwrap();
    let chain = fs::read_to_string(chain).unwrap();
    assert!(chain.starts_with("CNI-"), "{chain}");
    let rules = run("iptables-save", &["-t", "nat"]);
    assert!(!rules.contains(chain.trim()), "{chain} is left: {rules}");
    bench.assert_clean(&cell.instance.id);
}

/// Verifies N2.
#[tokio::test]
async fn failed_add_leaves_nothing() {
    let mut bench = Bench::new();
    bench.configure_cni(r#", {"type": "unwilling"}"#);
    let script = "#!/bin/sh\n\
                  [ $CNI_COMMAND = DEL ] && exit 0\n\
                  echo '{\"code\": 100, \"msg\": \"never\"}'\n\
                  exit 1\n";
    bench.add_plugin("unwilling", script);
    let cell = bench.launch().await;
    for _ in 0..2 {
        let error = bench.provider.attach(&cell.instance.id, &cell.attachment).await.unwrap_err();
        assert!(error.source.unwrap().to_string().contains("never"));
    }
    bench.end(&cell.instance.id).await.unwrap();
    bench.assert_clean(&cell.instance.id);
}

/// Verifies N1, Y46.
#[tokio::test]
async fn cells_without_cni_share_a_bridge_that_ends_with_the_last_cell() {
    let bench = Bench::new();
    let (first_cell, second_cell) = (bench.launch().await, bench.launch().await);
    let first = bench
        .provider
        .attach(&first_cell.instance.id, &first_cell.attachment)
        .await
        .unwrap()
        .addresses;
    let second = bench
        .provider
        .attach(&second_cell.instance.id, &second_cell.attachment)
        .await
        .unwrap()
        .addresses;
    assert_ne!(first, second);
    for (cell, addresses) in [(&first_cell, &first), (&second_cell, &second)] {
        assert!(bench.config.netns.network.subnet.contains(addresses[0]), "{addresses:?}");
        assert_reachable(&cell.instance.id, addresses[0]);
    }
    assert!(
        bench.resources().iter().any(|line| line.contains("MASQUERADE")),
        "{:?}",
        bench.resources()
    );
    assert_eq!(
        bench
            .provider
            .attach(&first_cell.instance.id, &first_cell.attachment)
            .await
            .unwrap()
            .addresses,
        first,
        "a second attach returns the same addresses"
    );
    bench.end(&first_cell.instance.id).await.unwrap();
    assert_eq!(bench.resources_of(&first_cell.instance.id), Vec::<String>::new());
    assert_reachable(&second_cell.instance.id, second[0]);
    // Temporary file of an allocation of an address, as a killed daemon or a full disk leaves it.
    let addresses = bench.config.state_dir.join("addresses");
    fs::write(addresses.join(format!(".{}", second_cell.instance.id.0)), "").unwrap();
    bench.end(&second_cell.instance.id).await.unwrap();
    bench.assert_clean(&second_cell.instance.id);
    assert!(!addresses.exists());
}
