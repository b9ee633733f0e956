//! Figures of an instance: in environment variables, in files, and as the limit of updates.

use std::fs;

use kiyot_testkit::{ApiServer, Container, LIMIT, Pod, Source, cri, wait_until};
use serde_json::json;
use tonic::Code;

use super::{WAIT, World, pod, run};

/// Reads a file of the downward API in a loop, and keeps every content that it reads.
const READ: &str = "while :; do cat /about/cpus; echo; done >/tmp/read";

/// The test acts as the kubelet, which fills in 1000 CPUs of the node.
///
/// Verifies K19, K23.
#[tokio::test]
async fn variable_and_files_without_a_limit_have_the_figures_of_the_instance() {
    let world = World::start().await;
    let mut api = ApiServer::start(&[]).await;
    let about = |label: &str, cpus: &str| {
        Source::files(&[("cpus", cpus), ("deep/memory", "4096000"), ("label", label)])
    };
    let main = Container::script("main", &format!("{READ} & {WAIT}"))
        .env("CPUS", "1000")
        .mount("about", "/about");
    let spec = Pod::new("figures")
        .in_cell()
        .annotation("pod.elotl.co/instance-type", "t3.small")
        .volume("about", Source::DownwardApi(about("first", "1000")));
    let field = |name: &str, unit: &str| {
        let field = json!({ "containerName": "main", "resource": name, "divisor": unit });
        json!({ "path": "", "resourceFieldRef": field })
    };
    let (mut cpus, mut memory) = (field("limits.cpu", "1"), field("limits.memory", "1Mi"));
    (cpus["path"], memory["path"]) = (json!("cpus"), json!("deep/memory"));
    let env = json!([{ "name": "CPUS", "valueFrom": field("limits.cpu", "0") }]);
    api.put(
        "pods",
        json!({
            "metadata": { "name": spec.name, "namespace": spec.namespace, "uid": spec.uid },
            "spec": {
                "nodeName": "worker-1",
                "containers": [{ "name": "main", "env": env }],
                "volumes": [{ "name": "about", "downwardAPI": { "items": [cpus, memory] } }],
            },
        }),
    );
    let mut options = world.options();
    let access = api.kubeconfig();
    options.sections += &format!("[kubernetes]\nkubeconfig = \"{}\"\n", access.display());
    let (mut kiyot, mut kubelet) = world.daemon(options).await;

    let config = kubelet.prepare(&spec);
    let sandbox = kubelet.run_sandbox(&config, "").await.unwrap();
    let mut running = kubelet.running(&spec, config, sandbox);
    // A subPath, bound as by the kubelet.
    let directory = kubelet.pod_directory(&spec.uid);
    let part = directory.join("volume-subpaths/about/main/1");
    fs::create_dir_all(part.parent().unwrap()).unwrap();
    fs::write(&part, "").unwrap();
    let file = directory.join("volumes/kubernetes.io~downward-api/about/cpus");
    rustix::mount::mount_bind(file.canonicalize().unwrap(), &part).unwrap();
    let mut main = main;
    main.more_mounts.push(cri::Mount {
        container_path: "/cpus".to_owned(),
        host_path: part.display().to_string(),
        ..Default::default()
    });
    let made = kubelet.create_container(&running, &main, 0).await.unwrap();
    kubelet.start_container(&made.id).await.unwrap();
    let main = made.id.clone();
    running.containers.insert("main".to_owned(), made);

    let shown = "echo $(cat /about/cpus) $(cat /cpus) $CPUS";
    assert_eq!(run(&mut kubelet, &main, shown).await, "2 2 2\n");
    let memory: u64 = run(&mut kubelet, &main, "cat /about/deep/memory").await.parse().unwrap();
    assert!((1024..2048).contains(&memory), "{memory} MiB of 2 GiB");

    // The kubelet writes the volume again while the daemon is down, and afterwards. The API server
    // stays down.
    kiyot.kill9();
    api.stop().await;
    kubelet.update_volume(&spec, "about", &about("second", "1200"));
    kiyot.start_again().await;
    let mut kubelet = kiyot.kubelet().await;
    for label in ["second", "third"] {
        wait_until("the volume is updated", LIMIT, async || {
            let output = kubelet.exec_sync(&main, &["cat", "/about/label"]).await.ok()?;
            (output.stdout == label).then_some(())
        })
        .await;
        assert_eq!(run(&mut kubelet, &main, shown).await, "2 2 2\n");
        kubelet.update_volume(&spec, "about", &about("third", "1300"));
    }
    assert_eq!(run(&mut kubelet, &main, "grep . /tmp/read | sort -u").await, "2\n");
    rustix::mount::unmount(&part, rustix::mount::UnmountFlags::DETACH).unwrap();
    world.ends(&mut kubelet, &[&running]).await;
}

/// Verifies U29.
#[tokio::test]
async fn update_beyond_an_instance_is_refused_and_a_smaller_update_is_applied() {
    let world = World::start().await;
    let (_kiyot, mut kubelet) = world.daemon(world.options()).await;
    let mut spec = pod("growing", WAIT).annotation("pod.elotl.co/instance-type", "t3.small");
    spec.containers[0].resources.memory_limit_in_bytes = 256 << 20;
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").id.clone();
    let update = |memory_limit_in_bytes| cri::UpdateContainerResourcesRequest {
        container_id: main.clone(),
        linux: Some(cri::LinuxContainerResources { memory_limit_in_bytes, ..Default::default() }),
        ..Default::default()
    };
    let limit = "cat /sys/fs/cgroup/memory.max 2>/dev/null || \
                 cat /sys/fs/cgroup/memory/memory.limit_in_bytes";
    for (memory, is_within) in [(2_i64 << 30, false), (512 << 20, true)] {
        let before = run(&mut kubelet, &main, limit).await;
        let updated = kubelet.runtime.update_container_resources(update(memory)).await;
        let expected = if is_within { format!("{memory}\n") } else { before };
        assert_eq!(run(&mut kubelet, &main, limit).await, expected);
        if let Err(refused) = updated {
            assert!(!is_within, "{refused}");
            assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
            let text = "container \"main\": limits.memory of 2048 MiB is beyond its cell";
            assert!(refused.message().contains(text), "{refused}");
        } else {
            assert!(is_within);
        }
    }
    world.ends(&mut kubelet, &[&running]).await;
}
