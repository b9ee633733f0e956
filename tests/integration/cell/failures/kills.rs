//! Kills of the daemon at random moments of a pod's life.

use std::{
    future::Future,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use kiyot_testkit::{
    Kiyot, Kubelet, LIMIT, Leftovers, Node, Pod, RunningContainer, RunningPod, SeededRng, cri,
    wait_until,
};
use tonic::Status;

use crate::cell::{assert_nothing_left, options, pod};

/// The total number of kills, spread over the stages. The environment variable `KILLS` overrides
/// it.
const KILLS: usize = 6;
/// The maximal delay of the kill after the start of each stage, in microseconds.
const MAX_DELAY_MICROS: [u64; 6] = [1_500_000, 500_000, 200_000, 100_000, 300_000, 50_000];
/// The first log line of the pod's container.
const FIRST_LINE: &str = "line 1";

/// The ids that the kubelet has received, and the stage that it has reached.
#[derive(Default)]
struct Progress {
    sandbox: Option<String>,
    container: Option<String>,
    stage: usize,
}

/// The first stage in which the pod is being stopped.
const STOPPING_STAGE: usize = 4;
/// The first stage in which the pod is being removed.
const REMOVING_STAGE: usize = 5;

/// Drives a pod through its life as a kubelet does, until a call fails.
async fn run_lifecycle(
    mut kubelet: Kubelet,
    spec: Pod,
    progress: Arc<Mutex<Progress>>,
) -> Result<(), Status> {
    let config = kubelet.prepare(&spec);
    let sandbox = kubelet.run_sandbox(&config, "").await?;
    let report = |stage, container: Option<&str>| {
        *progress.lock().unwrap() = Progress {
            sandbox: Some(sandbox.clone()),
            container: container.map(str::to_owned),
            stage,
        };
    };
    report(1, None);
    let running = kubelet.running(&spec, config, sandbox.clone());
    let container = kubelet.create_container(&running, &spec.containers[0], 0).await?.id;
    report(2, Some(&container));
    kubelet.start_container(&container).await?;
    report(3, Some(&container));
    kubelet.exec_sync(&container, &["true"]).await?;
    report(STOPPING_STAGE, Some(&container));
    kubelet.stop_container(&container, 1).await?;
    kubelet
        .runtime
        .stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() })
        .await?;
    report(REMOVING_STAGE, Some(&container));
    kubelet
        .runtime
        .remove_container(cri::RemoveContainerRequest { container_id: container.clone() })
        .await?;
    kubelet
        .runtime
        .remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id: sandbox.clone() })
        .await?;
    Ok(())
}

/// Starts a pod that may exist in part, as the kubelet's next sync does.
pub(crate) async fn bring_up(kubelet: &mut Kubelet, spec: &Pod) -> Result<RunningPod, Status> {
    let config = kubelet.prepare(spec);
    let sandbox = kubelet.run_sandbox(&config, "").await?;
    let mut running = kubelet.running(spec, config, sandbox.clone());
    let listed = kubelet.containers().await?;
    let of_pod = || listed.iter().filter(|container| container.pod_sandbox_id == sandbox);
    let there =
        of_pod().find(|container| container.state() == cri::ContainerState::ContainerRunning);
    // The kubelet creates the next attempt for a container that reads CREATED or EXITED.
    let attempt = of_pod()
        .filter_map(|container| container.metadata.as_ref())
        .map(|metadata| metadata.attempt + 1)
        .max()
        .unwrap_or(0);
    let container = match there {
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
            let created = kubelet.create_container(&running, &spec.containers[0], attempt).await?;
            kubelet.start_container(&created.id).await?;
            created
        }
    };
    running.containers.insert("main".to_owned(), container);
    Ok(running)
}

/// Repeats an operation until it succeeds, as a kubelet does.
pub(crate) async fn retry<T, F: Future<Output = Result<T, Status>>>(
    what: &str,
    mut attempt: impl FnMut() -> F,
) -> T {
    let mut last = String::new();
    let begun = std::time::Instant::now();
    while begun.elapsed() < LIMIT {
        match attempt().await {
            Ok(done) => return done,
            Err(status) => last = status.to_string(),
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    panic!("{what}: not within {LIMIT:?}: {last}");
}

/// Stops and removes all listed sandboxes of a pod.
pub(crate) async fn remove_all(kubelet: Kubelet, uid: String) -> Result<(), Status> {
    let mut kubelet = kubelet;
    let listed = kubelet.sandboxes().await?;
    for sandbox in listed
        .into_iter()
        .filter(|sandbox| sandbox.metadata.as_ref().is_some_and(|metadata| metadata.uid == uid))
    {
        kubelet
            .runtime
            .stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: sandbox.id.clone() })
            .await?;
        kubelet
            .runtime
            .remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id: sandbox.id })
            .await?;
    }
    Ok(())
}

/// Verifies X1.
#[tokio::test]
async fn daemon_killed_at_any_moment_leaves_nothing_half_made() {
    let kills = std::env::var("KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(KILLS);
    let mut moments = SeededRng::new();
    let node = if kills > KILLS { Node::start_for_long().await } else { Node::start().await };
    let mut kiyot = Kiyot::start(&node, options()).await;
    for kill in 0..kills {
        let spec = pod(
            &format!("life-{kill}"),
            &format!("trap 'exit 0' TERM; echo {FIRST_LINE}; while :; do sleep 0.1; done"),
        );
        let progress = Arc::new(Mutex::new(Progress::default()));
        let stage = kill % MAX_DELAY_MICROS.len();
        let after = Duration::from_micros(moments.next(MAX_DELAY_MICROS[stage]));
        let lifecycle =
            tokio::spawn(run_lifecycle(kiyot.kubelet().await, spec.clone(), Arc::clone(&progress)));
        while !lifecycle.is_finished() && progress.lock().unwrap().stage < stage {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // The moment of the kill is the subject of the test: this is not a wait for a condition.
        tokio::time::sleep(after).await;
        let mut cells = kiyot.cells();
        kiyot.kill9();
        let outcome = lifecycle.await.unwrap();
        let progress = Arc::into_inner(progress).unwrap().into_inner().unwrap();
        eprintln!(
            "life {kill}: killed {after:?} after stage {stage} began, in stage {}; \
            sandbox {:?}, container {:?}: {:?}",
            progress.stage,
            progress.sandbox,
            progress.container,
            outcome.as_ref().map_err(Status::message)
        );
        kiyot.start_again().await;
        cells.extend(kiyot.cells());

        let mut kubelet = kiyot.kubelet().await;
        let (sandboxes, containers) =
            (kubelet.sandboxes().await.unwrap(), kubelet.containers().await.unwrap());
        if progress.stage < REMOVING_STAGE {
            assert!(
                progress.sandbox.iter().all(|id| sandboxes.iter().any(|sandbox| sandbox.id == *id)),
                "a reported sandbox is listed"
            );
            assert!(
                progress
                    .container
                    .iter()
                    .all(|id| containers.iter().any(|container| container.id == *id)),
                "a reported container is listed"
            );
        }
        if progress.stage < STOPPING_STAGE {
            if let Some(id) = &progress.sandbox {
                assert!(
                    crate::cell::is_ready(&mut kubelet, id).await,
                    "a running container keeps running"
                );
            }
            let running = retry("the pod is running", || {
                let (mut kubelet, spec) = (kubelet.clone(), spec.clone());
                async move { bring_up(&mut kubelet, &spec).await }
            })
            .await;
            assert_eq!(kiyot.cells().len(), 1, "a pod has a single cell");
            assert!(
                progress.sandbox.iter().all(|id| *id == running.sandbox),
                "a pod has a single sandbox"
            );
            let main = running.container("main").clone();
            kubelet.logged(&main, FIRST_LINE).await;
            assert_eq!(kubelet.log_lines(&main).len(), 1);
            let output = retry("exec succeeds", || {
                let (mut kubelet, id) = (kubelet.clone(), main.id.clone());
                async move { kubelet.exec_sync(&id, &["echo", "here"]).await }
            })
            .await;
            assert_eq!(output.stdout, "here\n");
        }
        retry("the pod is removed", || remove_all(kubelet.clone(), spec.uid.clone())).await;
        cells.extend(kiyot.cells());
        wait_until("no cell is left", LIMIT, async || kiyot.cells().is_empty().then_some(())).await;
        kubelet.forget(&spec);
        let mut words = cells;
        words.push(spec.uid.clone());
        let left = Leftovers::of_host().about(&words);
        assert!(left.is_empty(), "left after kill {kill}:\n{left}");
        assert_eq!(node.addresses(), Vec::<String>::new(), "all addresses are released");
        assert!(
            kubelet.sandboxes().await.unwrap().is_empty()
                && kubelet.containers().await.unwrap().is_empty()
        );
    }
    drop(kiyot);
    assert_nothing_left(node);
}
