//! Memory of a machine: of a container, of the guest, and of QEMU on the node.

use std::fs;

use kiyot_testkit::{
    Container, Kiyot, Kubelet, LIMIT, Node, Pod, RunningContainer, Source, cri, wait_until,
};

use super::{WAIT, console, options, pod, run};

/// The memory limit of a container, in bytes.
const LIMIT_BYTES: i64 = 32 << 20;
/// Script of a container that takes memory without end.
const GREEDY: &str = "echo begun; exec tail /dev/zero";

fn greedy(name: &str, limit: i64) -> Container {
    let mut container = Container::script(name, GREEDY);
    container.resources.memory_limit_in_bytes = limit;
    container
}

async fn end(kubelet: &mut Kubelet, container: &RunningContainer) -> (i32, String) {
    let status = kubelet.exited(&container.id).await;
    (status.exit_code, status.reason)
}

/// Returns a file of the memory controller of a cell's own cgroup.
fn memory_file(cell: &str, names: [&str; 2]) -> String {
    let [first, second] = names;
    let paths = [
        format!("/sys/fs/cgroup/memory/kiyot/{cell}/{first}"),
        format!("/sys/fs/cgroup/kiyot/{cell}/{second}"),
    ];
    let read = paths.iter().find_map(|path| fs::read_to_string(path).ok());
    read.unwrap_or_else(|| panic!("none of {paths:?}")).trim().to_owned()
}

/// Verifies V11, V13.
#[tokio::test]
#[ignore = "takes long without KVM; make test-vm"]
async fn shortage_of_memory_ends_the_container_that_takes_it() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;

    let local = Pod::new("local").container(greedy("limited", LIMIT_BYTES));
    let local = kubelet.run_pod(&local).await.unwrap();
    let expected = end(&mut kubelet, local.container("limited")).await;
    assert_eq!(expected, (137, "OOMKilled".to_owned()));
    kubelet.stop_and_remove(&local).await.unwrap();

    let spec = pod("hungry", &format!("echo up; {WAIT}"))
        .volume("one", Source::EmptyDir { memory: true })
        .volume("two", Source::EmptyDir { memory: true })
        .container(greedy("limited", LIMIT_BYTES))
        .container(greedy("greedy", 0))
        .container(
            Container::script("filler", &format!("echo up; {WAIT}"))
                .mount("one", "/one")
                .mount("two", "/two"),
        );
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").clone();
    let cell = kiyot.cells().remove(0);
    assert_eq!(end(&mut kubelet, running.container("limited")).await, expected);
    // The container takes more memory than the guest has.
    let (code, reason) = end(&mut kubelet, running.container("greedy")).await;
    assert_eq!(code, 137, "{reason}");
    assert_eq!(run(&mut kubelet, &main.id, "echo there").await, "there\n");

    // Files in memory belong to no process.
    let filler = running.container("filler").clone();
    let fill = "(head -c 600M /dev/zero > /one/file; head -c 600M /dev/zero > /two/file) 2>&1";
    let _ended_or_full = kubelet.exec_sync(&filler.id, &["sh", "-c", fill]).await;
    wait_until("the cell answers", LIMIT, async || {
        let container = kubelet.container_status(&filler.id).await.ok()?;
        let has_ended = container.state() == cri::ContainerState::ContainerExited;
        let answers = kubelet.exec_sync(&filler.id, &["echo", "there"]).await;
        (has_ended || answers.is_ok_and(|output| output.code == 0)).then_some(())
    })
    .await;
    let console = console(&kiyot, &cell);
    assert!(!console.contains("service exited"), "agent and containerd survive: {console}");

    // The guest has used all its memory, and QEMU stays below its limit on the node.
    let limit = memory_file(&cell, ["memory.limit_in_bytes", "memory.max"]);
    let peak = memory_file(&cell, ["memory.max_usage_in_bytes", "memory.peak"]);
    println!("limit {limit} peak {peak}");
    let [limit, peak] = [limit, peak].map(|text| text.parse::<u64>().unwrap());
    assert!(limit < 2 << 30 && peak < limit, "limit {limit}, peak {peak}");
    kubelet.stop_and_remove(&running).await.unwrap();
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}
