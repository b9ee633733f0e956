//! Several containers of a pod in a cell: shared and separate resources, and the hooks and probes
//! of the kubelet.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
};

use kiyot_testkit::{Container, Kiyot, LIMIT, Node, Pod, cri, wait_until};

use crate::cell::{
    WAIT, address,
    lifecycle::endings::{Ending, wait_for_cell_log},
    options, pod, remove_and_assert_clean,
};

/// Returns a web server that responds with its name.
fn server(name: &str, port: u16) -> Container {
    Container::script(
        name,
        &format!("mkdir -p /www; echo {name} > /www/index.html; exec httpd -f -p {port} -h /www"),
    )
}

/// Verifies U10.
#[tokio::test]
async fn containers_share_network_and_ipc_and_nothing_else() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("several")
        .in_cell()
        .container(server("first", 8080))
        .container(Container::script("second", WAIT));
    let mut running = kubelet.run_pod(&spec).await.unwrap();
    let (first, second) =
        (running.container("first").id.clone(), running.container("second").id.clone());
    // A debug container without a target shares the same resources.
    let debugger =
        kubelet.create_container(&running, &Container::script("debugger", WAIT), 0).await.unwrap();
    kubelet.start_container(&debugger.id).await.unwrap();

    for other in [&second, &debugger.id] {
        wait_until("the first container answers on the loopback", LIMIT, async || {
            let output = kubelet
                .exec_sync(other, &["wget", "-q", "-O", "-", "http://127.0.0.1:8080/"])
                .await
                .unwrap();
            (output.stdout == "first\n").then_some(())
        })
        .await;
        let listed = kubelet.exec_sync(other, &["ps", "-o", "args"]).await.unwrap().stdout;
        assert!(
            !listed.contains("httpd"),
            "the first container's processes are not visible:\n{listed}"
        );
    }
    kubelet
        .exec_sync(&first, &["sh", "-c", "echo shared > /dev/shm/memory; echo own > /tmp/disk"])
        .await
        .unwrap();
    assert_eq!(
        kubelet.exec_sync(&second, &["cat", "/dev/shm/memory"]).await.unwrap().stdout,
        "shared\n"
    );
    assert_ne!(kubelet.exec_sync(&second, &["cat", "/tmp/disk"]).await.unwrap().code, 0);
    let mut namespaces = Vec::new();
    for container in [&first, &second] {
        let links = [
            "readlink",
            "/proc/self/ns/net",
            "/proc/self/ns/ipc",
            "/proc/self/ns/uts",
            "/proc/self/ns/pid",
            "/proc/self/ns/mnt",
        ];
        let output = kubelet
            .exec_sync(
                container,
                &[
                    "sh",
                    "-c",
                    &links[1..].iter().map(|link| format!("readlink {link};")).collect::<String>(),
                ],
            )
            .await
            .unwrap();
        namespaces.push(output.stdout.lines().map(str::to_owned).collect::<Vec<_>>());
    }
    let same: Vec<_> =
        namespaces[0].iter().zip(&namespaces[1]).map(|(one, other)| one == other).collect();
    assert_eq!(same[..2], [true, true], "network and IPC: {namespaces:?}");
    assert_eq!(same[3..], [false, false], "processes and mounts: {namespaces:?}");
    running.containers.insert("debugger".to_owned(), debugger);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies U11.
#[tokio::test]
async fn restartable_init_container_is_restarted_beside_the_others() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    // An init container with restartPolicy Always is a sidecar: it is started first, as init
    // containers are, but its end is not awaited.
    let mut running = kubelet
        .run_pod(&Pod::new("accompanied").in_cell().container(server("sidecar", 8080)))
        .await
        .unwrap();
    let ask = "until wget -q -O - http://127.0.0.1:8080/; do sleep 0.1; done";
    for (name, script) in [("init", ask.to_owned()), ("app", format!("{ask}; echo ready; {WAIT}"))]
    {
        let created =
            kubelet.create_container(&running, &Container::script(name, &script), 0).await.unwrap();
        kubelet.start_container(&created.id).await.unwrap();
        if name == "init" {
            assert_eq!(kubelet.exited(&created.id).await.exit_code, 0);
        } else {
            kubelet.logged(&created, "ready").await;
        }
        running.containers.insert(name.to_owned(), created);
    }
    let (sidecar, app) =
        (running.container("sidecar").id.clone(), running.container("app").id.clone());
    kubelet.stop_container(&sidecar, 0).await.unwrap();
    assert_eq!(kubelet.exited(&sidecar).await.exit_code, 137);
    let again = kubelet.create_container(&running, &server("sidecar", 8080), 1).await.unwrap();
    kubelet.start_container(&again.id).await.unwrap();
    wait_until("the new attempt serves", LIMIT, async || {
        let output = kubelet
            .exec_sync(&app, &["wget", "-q", "-O", "-", "http://127.0.0.1:8080/"])
            .await
            .unwrap();
        (output.stdout == "sidecar\n").then_some(())
    })
    .await;
    let status = kubelet.container_status(&app).await.unwrap();
    assert_eq!(
        (status.state(), status.metadata.unwrap().attempt),
        (cri::ContainerState::ContainerRunning, 0)
    );
    let status = kubelet.container_status(&again.id).await.unwrap();
    assert_eq!(
        (
            status.annotations["io.kubernetes.container.restartCount"].as_str(),
            status.metadata.unwrap().attempt
        ),
        ("1", 1)
    );
    running.containers.insert("sidecar again".to_owned(), again);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies U12.
#[tokio::test]
async fn probes_and_hooks_reach_a_container() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let ending = Ending::new();
    let script = format!(
        "trap 'cat /tmp/hooks; {}; exit 0' TERM; mkdir -p /www; echo alive > /www/healthz; \
        httpd -p 8080 -h /www; while :; do sleep 0.1; done",
        ending.script()
    );
    let running = kubelet.run_pod(&pod("probed", &script)).await.unwrap();
    let main = running.container("main").clone();
    // postStart hook
    assert_eq!(
        kubelet.exec_sync(&main.id, &["sh", "-c", "echo begun > /tmp/hooks"]).await.unwrap().code,
        0
    );
    // Exec probe: the exit code is the result.
    assert_eq!(kubelet.exec_sync(&main.id, &["test", "-e", "/tmp/hooks"]).await.unwrap().code, 0);
    assert_eq!(
        kubelet.exec_sync(&main.id, &["sh", "-c", "echo unwell; exit 7"]).await.unwrap().code,
        7
    );
    // TCP and HTTP probes from the node to the pod's address.
    let address_and_port = format!("{}:8080", address(&mut kubelet, &running.sandbox).await);
    let mut stream =
        wait_until("the port is open", LIMIT, async || TcpStream::connect(&address_and_port).ok())
            .await;
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(b"GET /healthz HTTP/1.0\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    assert!(
        page.starts_with("HTTP/1.") && page.contains(" 200 ") && page.ends_with("alive\n"),
        "{page}"
    );
    // A connection to a port without a listener is refused at once, instead of timing out.
    let closed = address_and_port.replace(":8080", ":8081");
    assert_eq!(
        TcpStream::connect(closed).unwrap_err().kind(),
        std::io::ErrorKind::ConnectionRefused
    );
    // preStop hook, which runs before the signal.
    assert_eq!(
        kubelet.exec_sync(&main.id, &["sh", "-c", "echo ending >> /tmp/hooks"]).await.unwrap().code,
        0
    );
    let ends = async {
        wait_for_cell_log(&kiyot, &main, "ending").await;
        ending.release().await;
    };
    let (stopped, ()) = tokio::join!(
        kubelet.stop_container(&main.id, i64::try_from(LIMIT.as_secs()).unwrap()),
        ends
    );
    stopped.unwrap();
    let status = kubelet.exited(&main.id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (0, "Completed"));
    let lines: Vec<_> = kubelet.log_lines(&main).into_iter().map(|line| line.text).collect();
    assert_eq!(lines, ["begun", "ending"]);
    assert_ne!(
        kubelet.exec_sync(&main.id, &["true"]).await.map_or(1, |output| output.code),
        0,
        "exec in an exited container fails"
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies U13.
#[tokio::test]
async fn pod_resolves_its_name_by_the_kubelets_hosts_file() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = pod("named", WAIT);
    let mut config = kubelet.prepare(&spec);
    // With a subdomain and hostAliases, the kubelet writes both into the file when it knows the
    // address.
    config.hostname = "web-0".to_owned();
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let ip = address(&mut kubelet, &sandbox).await;
    let hosts = format!(
        "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n\
         {ip}\tweb-0.web.default.svc.cluster.local\tweb-0\n10.1.2.3\talias.test\n"
    );
    fs::write(kubelet.pod_directory(&spec.uid).join("etc-hosts"), &hosts).unwrap();
    let mut running = kubelet.running(&spec, config, sandbox);
    let created = kubelet.create_container(&running, &spec.containers[0], 0).await.unwrap();
    kubelet.start_container(&created.id).await.unwrap();
    let output = kubelet
        .exec_sync(&created.id, &["sh", "-c", "hostname; hostname -f; hostname -i; cat /etc/hosts"])
        .await
        .unwrap();
    assert_eq!(
        output.stdout,
        format!("web-0\nweb-0.web.default.svc.cluster.local\n{ip}\n{hosts}"),
        "{output:?}"
    );
    running.containers.insert("main".to_owned(), created);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies U13.
#[tokio::test]
async fn containers_of_a_pod_share_a_writable_hosts_file() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut spec = pod("hosts", WAIT);
    spec.containers.push(Container { name: "sidecar".to_owned(), ..spec.containers[0].clone() });
    let config = kubelet.prepare(&spec);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let file = kubelet.pod_directory(&spec.uid).join("etc-hosts");
    let mut running = kubelet.running(&spec, config, sandbox);
    let mut ids = Vec::new();
    for container in &spec.containers {
        // The kubelet writes the file again for each container.
        fs::write(&file, format!("127.0.0.1\tlocalhost {}\n", container.name)).unwrap();
        let created = kubelet.create_container(&running, container, 0).await.unwrap();
        kubelet.start_container(&created.id).await.unwrap();
        ids.push(created.id.clone());
        running.containers.insert(container.name.clone(), created);
    }
    let write = "echo 192.0.2.1 added.example >> /etc/hosts";
    let written = kubelet.exec_sync(&ids[1], &["sh", "-c", write]).await.unwrap();
    assert_eq!(written.code, 0, "{written:?}");
    for id in &ids {
        let output = kubelet.exec_sync(id, &["cat", "/etc/hosts"]).await.unwrap();
        assert_eq!(output.stdout, "127.0.0.1\tlocalhost sidecar\n192.0.2.1 added.example\n");
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
