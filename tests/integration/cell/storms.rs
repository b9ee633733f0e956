//! Several pods live and die by their own schedules while everything beneath them is killed in
//! turn.

use std::{
    collections::{BTreeSet, HashMap},
    path::PathBuf,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use kiyot_testkit::{
    Kiyot, Kubelet, LIMIT, Leftovers, Node, Pod, RunningContainer, RunningPod, SeededRng, cri,
    wait_until,
};
use tonic::Status;

use super::{
    faults::processes,
    kills::{again, again_once, clear},
    leaves_nothing, options, pod,
};

/// How many pods there are.
const PODS: usize = 4;
/// How many times something is killed; `KILLS` in the environment says another number.
const STRIKES: usize = 12;
/// The longest time between two of them, in microseconds.
const CALM: u64 = 2_000_000;
/// What a pod's container does.
const SCRIPT: &str =
    "trap 'exit 0' TERM; i=0; while :; do i=$((i+1)); echo line $i; sleep 0.1; done";

/// Brings a pod up as a kubelet's next round does, whatever is left of it: what doesn't run is
/// stopped first, and the next attempt follows the last one.
async fn bring_up(mut kubelet: Kubelet, spec: Pod) -> Result<RunningPod, Status> {
    let of_pod: Vec<_> = kubelet
        .sandboxes()
        .await?
        .into_iter()
        .filter(|listed| listed.metadata.as_ref().is_some_and(|of| of.uid == spec.uid))
        .collect();
    let mut config = kubelet.prepare(&spec);
    let ready = of_pod.iter().find(|listed| listed.state() == cri::PodSandboxState::SandboxReady);
    let sandbox = match ready {
        Some(ready) => {
            config.metadata.clone_from(&ready.metadata);
            ready.id.clone()
        }
        None => {
            for old in &of_pod {
                kubelet
                    .runtime
                    .stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: old.id.clone() })
                    .await?;
            }
            let next = of_pod
                .iter()
                .filter_map(|old| old.metadata.as_ref())
                .map(|of| of.attempt + 1)
                .max()
                .unwrap_or(0);
            config.metadata.as_mut().unwrap().attempt = next;
            kubelet.run_sandbox(&config, "").await?
        }
    };
    let mut running = kubelet.running(&spec, config, sandbox.clone());
    let all: Vec<_> = kubelet.containers().await?;
    let of_pod: Vec<_> = all
        .iter()
        .filter(|one| {
            one.pod_sandbox_id == sandbox || of_pod.iter().any(|old| old.id == one.pod_sandbox_id)
        })
        .collect();
    let there = of_pod.iter().find(|one| {
        one.pod_sandbox_id == sandbox && one.state() == cri::ContainerState::ContainerRunning
    });
    let main = match there {
        Some(there) => {
            let log = PathBuf::from(kubelet.container_status(&there.id).await?.log_path);
            RunningContainer {
                id: there.id.clone(),
                log,
                termination: PathBuf::new(),
                config: cri::ContainerConfig::default(),
            }
        }
        None => {
            let attempt = of_pod
                .iter()
                .filter_map(|one| one.metadata.as_ref())
                .map(|of| of.attempt + 1)
                .max()
                .unwrap_or(0);
            let created = kubelet.create_container(&running, &spec.containers[0], attempt).await?;
            kubelet.start_container(&created.id).await?;
            created
        }
    };
    running.containers.insert("main".to_owned(), main);
    Ok(running)
}

/// No line is doubled. (Some may be missing: what a killed containerd has read and not written is
/// lost, as on any node.)
fn is_in_order(kubelet: &Kubelet, container: &RunningContainer) {
    let numbers: Vec<u64> = kubelet
        .log_lines(container)
        .iter()
        .map(|line| line.text.trim_start_matches("line ").parse().expect("a whole line"))
        .collect();
    assert!(
        numbers.windows(2).all(|pair| pair[0] < pair[1]),
        "{}: {numbers:?}",
        container.log.display()
    );
}

/// The lives of one pod, until it is over; then one more that must come to its end. Gives how many
/// there were.
async fn lead(
    mut kubelet: Kubelet,
    spec: Pod,
    mut moments: SeededRng,
    over: Arc<AtomicBool>,
) -> u32 {
    for life in 1.. {
        let last = over.load(Ordering::SeqCst);
        let running =
            again_once(&over, "the pod is brought up", || bring_up(kubelet.clone(), spec.clone()))
                .await;
        if last {
            let said = again("exec works", || {
                let (mut kubelet, spec) = (kubelet.clone(), spec.clone());
                async move {
                    let now = bring_up(kubelet.clone(), spec).await?;
                    kubelet.exec_sync(&now.container("main").id, &["echo", "here"]).await
                }
            })
            .await;
            assert_eq!(said.stdout, "here\n");
        } else {
            for _ in 0..moments.next(4) {
                let _ = kubelet.exec_sync(&running.container("main").id, &["true"]).await;
            }
        }
        is_in_order(&kubelet, running.container("main"));
        // Now and then it is only looked after, and goes on.
        if last || moments.next(3) > 0 {
            again_once(&over, "the pod is removed", || clear(kubelet.clone(), spec.uid.clone()))
                .await;
            kubelet.forget(&spec);
        }
        if last {
            return life;
        }
    }
    unreachable!("it returns");
}

/// Kills what is there of it: it may just be starting, or ending.
fn strike(words: &[&str]) {
    for pid in processes(words) {
        let _ = Command::new("kill").args(["-9", &pid]).status();
    }
}

/// No pod has two of anything.
async fn nothing_is_double(kubelet: &Kubelet) {
    let (sandboxes, containers) = again("lists are answered", || {
        let mut kubelet = kubelet.clone();
        // Containers first: one that is listed has a sandbox that is.
        async move {
            let containers = kubelet.containers().await?;
            Ok((kubelet.sandboxes().await?, containers))
        }
    })
    .await;
    let mut ready: HashMap<String, u32> = HashMap::new();
    for listed in
        sandboxes.iter().filter(|listed| listed.state() == cri::PodSandboxState::SandboxReady)
    {
        *ready.entry(listed.metadata.clone().unwrap_or_default().uid).or_default() += 1;
    }
    assert!(ready.values().all(|count| *count == 1), "no second sandbox for a pod: {sandboxes:?}");
    let mut runs: HashMap<&str, u32> = HashMap::new();
    for listed in
        containers.iter().filter(|listed| listed.state() == cri::ContainerState::ContainerRunning)
    {
        *runs.entry(&listed.pod_sandbox_id).or_default() += 1;
    }
    assert!(
        runs.values().all(|count| *count == 1),
        "no second container for a pod: {containers:?}"
    );
}

/// Verifies X13.
#[tokio::test]
async fn pods_on_their_own_schedules_outlive_a_storm_of_kills() {
    let strikes =
        std::env::var("KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(STRIKES);
    let mut moments = SeededRng::new();
    let node = if strikes > STRIKES { Node::start_for_long().await } else { Node::start().await };
    let mut kiyot = Kiyot::start(&node, options()).await;
    let kubelet = kiyot.kubelet().await;
    let over = Arc::new(AtomicBool::new(false));
    let specs: Vec<_> = (0..PODS).map(|number| pod(&format!("storm-{number}"), SCRIPT)).collect();
    let lives: Vec<_> = specs
        .iter()
        .map(|spec| {
            tokio::spawn(lead(
                kubelet.clone(),
                spec.clone(),
                SeededRng::of(moments.next(1 << 40)),
                Arc::clone(&over),
            ))
        })
        .collect();
    let mut words: BTreeSet<String> = specs.iter().map(|spec| spec.uid.clone()).collect();
    for number in 0..strikes {
        // Not to wait for something: the moment is what is tried.
        let (after, kind, which) =
            (Duration::from_micros(moments.next(CALM)), moments.next(7), moments.next(1 << 40));
        tokio::time::sleep(after).await;
        let cells = kiyot.cells();
        words.extend(cells.iter().cloned());
        let cell = (!cells.is_empty()).then(|| cells[which as usize % cells.len()].clone());
        let said = match (kind, &cell) {
            (0, Some(cell)) => {
                strike(&["kiyot-cell agent", cell]);
                format!("the agent of {cell}")
            }
            (1, Some(cell)) => {
                strike(&["containerd", "containerd.toml", cell]);
                format!("the containerd of {cell}")
            }
            (2, Some(cell)) => {
                strike(&["kiyot-cell launch", cell]);
                cell.clone()
            }
            (3, _) => {
                node.kill_containerd();
                node.start_containerd().await;
                "the node's containerd".to_owned()
            }
            _ => {
                kiyot.kill9();
                kiyot.start_again().await;
                "the daemon".to_owned()
            }
        };
        eprintln!("strike {number}, after {after:?}: {said}");
        assert!(kiyot.cells().len() <= PODS, "no second cell for a pod");
        nothing_is_double(&kubelet).await;
    }
    over.store(true, Ordering::SeqCst);
    for (life, spec) in lives.into_iter().zip(&specs) {
        eprintln!("{} lived {} times", spec.name, life.await.unwrap());
    }
    words.extend(kiyot.cells());
    wait_until("no cell is left", LIMIT, async || kiyot.cells().is_empty().then_some(())).await;
    let left = Leftovers::of_host().about(&words.into_iter().collect::<Vec<_>>());
    assert!(left.is_empty(), "left:\n{left}");
    assert_eq!(node.addresses(), Vec::<String>::new(), "all addresses are given back");
    let mut kubelet = kubelet;
    assert!(
        kubelet.sandboxes().await.unwrap().is_empty()
            && kubelet.containers().await.unwrap().is_empty()
    );
    drop(kiyot);
    leaves_nothing(node);
}
