//! Pods that request host namespaces and privileges, with the policy `cell`.

use std::fs;

use kiyot_testkit::{
    Container, Kiyot, KiyotOptions, LIMIT, Node, Pod,
    cri::{self, NamespaceMode},
    wait_until,
};
use tonic::Code;

use crate::cell::{
    WAIT, address, assert_nothing_left, options, pod, remove_and_assert_clean,
    streaming::network::{http_response, node_address},
};

/// A script that serves a page.
const SERVER_SCRIPT: &str =
    "mkdir -p /www; echo served > /www/index.html; exec httpd -f -p 8080 -h /www";
/// Prints the namespaces of the own process.
const PRINT_NAMESPACES: &str = "for name in net ipc pid uts; do readlink /proc/self/ns/$name; done";

fn options_with_own_namespaces() -> KiyotOptions {
    let keys = ["host_network", "host_pid", "host_ipc", "host_users", "privileged"]
        .map(|key| format!("{key} = \"cell\"\n"));
    KiyotOptions { sections: format!("[backends.milpa.policy]\n{}", keys.concat()), ..options() }
}

/// Returns the node's namespaces in the order of [`PRINT_NAMESPACES`].
fn node_namespaces() -> Vec<String> {
    ["net", "ipc", "pid", "uts"]
        .map(|name| fs::read_link(format!("/proc/self/ns/{name}")).unwrap().display().to_string())
        .to_vec()
}

fn lines(text: &str) -> Vec<String> {
    text.lines().map(str::to_owned).collect()
}

/// Verifies R1.
#[tokio::test]
async fn host_namespaces_become_those_of_the_cell() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options_with_own_namespaces()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut spec = Pod::new("at-home")
        .in_cell()
        .container(Container::script("main", SERVER_SCRIPT))
        .container(Container::script("other", WAIT));
    (spec.host_network, spec.host_pid) = (true, true);
    // For hostNetwork, the API server sets both ports to the same number.
    spec.ports =
        vec![cri::PortMapping { container_port: 8080, host_port: 8080, ..Default::default() }];
    let mut config = kubelet.prepare(&spec);
    let all = |options: &mut cri::NamespaceOption| options.ipc = NamespaceMode::Node.into();
    all(config
        .linux
        .as_mut()
        .unwrap()
        .security_context
        .as_mut()
        .unwrap()
        .namespace_options
        .as_mut()
        .unwrap());
    let requested = config.linux.clone().unwrap().security_context.unwrap().namespace_options;
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    assert!(sandbox.starts_with("milpa"), "the pod is in a cell");
    let mut running = kubelet.running(&spec, config, sandbox);
    for container in &spec.containers {
        let created = kubelet
            .create_container_with(&running, container, 0, |config| {
                all(config
                    .linux
                    .as_mut()
                    .unwrap()
                    .security_context
                    .as_mut()
                    .unwrap()
                    .namespace_options
                    .as_mut()
                    .unwrap());
            })
            .await
            .unwrap();
        kubelet.start_container(&created.id).await.unwrap();
        running.containers.insert(container.name.clone(), created);
    }
    let (main, other) =
        (running.container("main").id.clone(), running.container("other").id.clone());

    // The status has the requested namespaces, and the address of the cell: the pod does not listen
    // on the node's address.
    let status = kubelet.sandbox_status(&running.sandbox).await.unwrap();
    assert_eq!(status.linux.unwrap().namespaces.unwrap().options, requested);
    let ip = address(&mut kubelet, &running.sandbox).await;
    wait_until("the pod answers at its address", LIMIT, async || {
        http_response(&ip, 8080).ok().filter(|page| page.ends_with("served\n"))
    })
    .await;
    // A port of the node leads to the pod, because a pod with hostNetwork expects its ports on the
    // node.
    let at_node = node_address(&ip);
    wait_until("the node's port answers", LIMIT, async || {
        http_response(&at_node, 8080).ok().filter(|page| page.ends_with("served\n"))
    })
    .await;

    // Both containers have the same namespaces, and these are not the node's.
    let cell_namespaces =
        lines(&kubelet.exec_sync(&main, &["sh", "-c", PRINT_NAMESPACES]).await.unwrap().stdout);
    let there =
        lines(&kubelet.exec_sync(&other, &["sh", "-c", PRINT_NAMESPACES]).await.unwrap().stdout);
    assert_eq!((cell_namespaces.len(), &cell_namespaces), (4, &there));
    for (cell_namespace, node_namespace) in cell_namespaces.iter().zip(node_namespaces()) {
        assert_ne!(*cell_namespace, node_namespace);
    }
    // Processes of the cell are visible. Processes of the node, such as this test, are not.
    let seen =
        kubelet.exec_sync(&main, &["sh", "-c", "cat /proc/[0-9]*/comm"]).await.unwrap().stdout;
    assert!(
        seen.lines().any(|name| name == "containerd") && seen.lines().any(|name| name == "httpd"),
        "{seen}"
    );
    let this_process = fs::read_to_string("/proc/self/comm").unwrap();
    assert!(!seen.lines().any(|name| name == this_process.trim() || name == "kiyot"), "{seen}");
    // The shared memory is the cell's, not the node's.
    let mark = format!("kiyot-test-{}", kiyot.pid());
    kubelet.exec_sync(&main, &["touch", &format!("/dev/shm/{mark}")]).await.unwrap();
    assert_eq!(
        kubelet.exec_sync(&other, &["ls", &format!("/dev/shm/{mark}")]).await.unwrap().code,
        0,
        "containers with hostIPC share /dev/shm"
    );
    assert!(!std::path::Path::new("/dev/shm").join(&mark).exists());
    // As with hostNetwork on a node, the host name is the node's and the hosts file is the
    // kubelet's.
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    assert_eq!(kubelet.exec_sync(&main, &["hostname"]).await.unwrap().stdout.trim(), name);
    assert!(
        kubelet
            .exec_sync(&main, &["cat", "/etc/hosts"])
            .await
            .unwrap()
            .stdout
            .contains("Kubernetes-managed hosts file")
    );
    assert!(
        kiyot.log().contains(
            "asks for the node's processes (hostPID), and gets the processes of its cell"
        )
    );

    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    drop(kiyot);
    assert_nothing_left(node);
}

/// Verifies R2.
#[tokio::test]
async fn host_access_that_a_cell_can_not_contain_is_refused_with_the_reason() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options_with_own_namespaces()).await;
    let mut kubelet = kiyot.kubelet().await;
    // The warnings are logged at the start, before a pod uses the policy.
    for key in ["privileged", "host_users"] {
        assert!(
            kiyot.log().contains(&format!("policy.{key} is \"cell\", but cells of the provider"))
                || kiyot.log().contains(&format!("policy.{key} is \\\"cell"))
        );
    }
    let mut mighty = pod("mighty", WAIT);
    mighty.containers[0].privileged = true;
    let config = kubelet.prepare(&mighty);
    let status = kubelet.run_sandbox(&config, "").await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(
        status.message().contains("root on the node") && status.message().contains("netns"),
        "{status:?}"
    );
    kubelet.forget(&mighty);

    let mapped = pod("mapped", WAIT);
    let mut config = kubelet.prepare(&mapped);
    let mapping = cri::IdMapping { host_id: 100_000, container_id: 0, length: 65536 };
    let options = config
        .linux
        .as_mut()
        .unwrap()
        .security_context
        .as_mut()
        .unwrap()
        .namespace_options
        .as_mut()
        .unwrap();
    options.userns_options = Some(cri::UserNamespace {
        mode: NamespaceMode::Pod.into(),
        uids: vec![mapping],
        gids: vec![mapping],
    });
    let status = kubelet.run_sandbox(&config, "").await.unwrap_err();
    assert!(
        status.code() == Code::InvalidArgument
            && status.message().contains("hostUsers: false")
            && status.message().contains("netns"),
        "{status:?}"
    );
    kubelet.forget(&mapped);
    assert_eq!(kiyot.cells(), Vec::<String>::new(), "no cell was launched");

    // A container that sees the cell's processes must not reach their open files, because these are
    // files of the node.
    let mut nosy = pod("nosy", WAIT);
    nosy.host_pid = true;
    let running = kubelet.run_pod(&nosy).await.unwrap();
    let status = kubelet
        .create_container_with(&running, &Container::script("reaching", WAIT), 0, |config| {
            let context = config.linux.as_mut().unwrap().security_context.as_mut().unwrap();
            context.capabilities = Some(cri::Capability {
                add_capabilities: vec!["SYS_PTRACE".to_owned()],
                ..Default::default()
            });
        })
        .await
        .unwrap_err();
    assert!(
        status.message().contains("SYS_PTRACE") && status.message().contains("hostPID"),
        "{status:?}"
    );
    // A root user without privileges can't reach the open files either.
    let main = &running.container("main").id;
    let output = kubelet
        .exec_sync(main, &["sh", "-c", "id -u; ls /proc/1/root/; cat /proc/1/environ"])
        .await
        .unwrap();
    assert!(output.stdout == "0\n" && output.code != 0, "{output:?}");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
