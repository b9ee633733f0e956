//! Random calls: concurrent, repeated and cancelled. A pod has at most one cell at a time, and
//! leaves nothing.

use std::time::{Duration, Instant};

use futures::future::join_all;
use kiyot::backends::Method;
use kiyot_proto::cri;
use prost::Message;
use tonic::Code;

use crate::kit::{Fixture, LIMIT};

/// Number of pods, which run one after the other. The number of a pod is its seed.
const PODS: u64 = 8;
/// Concurrent callers.
const CALLERS: u64 = 5;
/// Calls of each caller.
const CALLS: usize = 12;
/// Longest time before a cancelled call is cancelled, in milliseconds.
const MAX_PATIENCE_MS: usize = 20;

/// xorshift64.
struct Dice(u64);

impl Dice {
    fn of(life: u64, caller: u64) -> Self {
        Self((life * CALLERS + caller + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 11).unwrap() % most
    }

    fn one_of(&mut self, all: Vec<String>) -> Option<String> {
        if all.is_empty() { None } else { Some(all[self.below(all.len())].clone()) }
    }
}

/// Makes a random call for the current sandboxes and containers.
async fn call(kiyot: &Fixture, dice: &mut Dice) {
    let sandbox = dice.one_of(kiyot.sandboxes().into_iter().map(|sandbox| sandbox.id).collect());
    let container =
        dice.one_of(kiyot.containers().into_iter().map(|container| container.id).collect());
    let (method, request) = match (dice.below(10), sandbox, container) {
        (0, Some(pod_sandbox_id), _) => {
            (Method::StopPodSandbox, cri::StopPodSandboxRequest { pod_sandbox_id }.encode_to_vec())
        }
        (1, Some(pod_sandbox_id), _) => (
            Method::RemovePodSandbox,
            cri::RemovePodSandboxRequest { pod_sandbox_id }.encode_to_vec(),
        ),
        (2..=4, Some(sandbox), _) => {
            let mut request = kiyot.container_request(&sandbox, "main");
            let config = request.config.as_mut().unwrap();
            config.metadata.as_mut().unwrap().attempt = u32::from(dice.below(2) == 0);
            config.labels.insert("changed".to_owned(), dice.below(9).to_string());
            (Method::CreateContainer, request.encode_to_vec())
        }
        (5..=6, _, Some(container_id)) => {
            (Method::StartContainer, cri::StartContainerRequest { container_id }.encode_to_vec())
        }
        (7, _, Some(container_id)) => (
            Method::StopContainer,
            cri::StopContainerRequest { container_id, timeout: 1 }.encode_to_vec(),
        ),
        (8, _, Some(container_id)) => {
            (Method::RemoveContainer, cri::RemoveContainerRequest { container_id }.encode_to_vec())
        }
        _ => {
            let mut request = kiyot.sandbox_request("web");
            let config = request.config.as_mut().unwrap();
            config.labels.insert("changed".to_owned(), dice.below(9).to_string());
            config.annotations.insert("changed".to_owned(), dice.below(9).to_string());
            (Method::RunPodSandbox, request.encode_to_vec())
        }
    };
    let patience = if dice.below(3) == 0 {
        Duration::from_millis(u64::try_from(dice.below(MAX_PATIENCE_MS)).unwrap())
    } else {
        LIMIT
    };
    let begun = Instant::now();
    let outcome = kiyot.daemon.cri.call(method, request.into(), Some(begun + patience)).await;
    if let Err(status) = outcome {
        assert!(!status.message().contains("its task"), "{method}: {status}");
        assert!(
            status.code() != Code::DeadlineExceeded || begun.elapsed() >= patience,
            "{method}, which had {patience:?}: {status}"
        );
    }
    let running = kiyot
        .containers()
        .into_iter()
        .filter(|one| one.state() == cri::ContainerState::ContainerRunning)
        .count();
    assert!(running <= 1, "no two attempts of a container run");
}

/// Verifies P4, Y94.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_calls_leave_nothing() {
    let mut kiyot = Fixture::start().await;
    for life in 0..PODS {
        join_all((0..CALLERS).map(async |caller| {
            let mut dice = Dice::of(life, caller);
            for _ in 0..CALLS {
                call(&kiyot, &mut dice).await;
            }
        }))
        .await;
        // Cancelled calls may still run. This call joins them, or removes what they left.
        let request = kiyot.sandbox_request("web");
        let _ = kiyot.call::<cri::RunPodSandboxResponse>(Method::RunPodSandbox, request).await;
        for sandbox in kiyot.sandboxes() {
            let request = cri::RemovePodSandboxRequest { pod_sandbox_id: sandbox.id };
            kiyot
                .call::<cri::RemovePodSandboxResponse>(Method::RemovePodSandbox, request)
                .await
                .unwrap();
        }
        assert_eq!(
            (kiyot.sandboxes().len(), kiyot.containers().len(), kiyot.provider.running()),
            (0, 0, 0),
            "life {life}"
        );
        assert!(kiyot.provider.most() <= 1, "life {life}: two cells of one pod at a time");
        kiyot = kiyot.restart().await;
        assert_eq!(
            (kiyot.sandboxes().len(), kiyot.containers().len(), kiyot.provider.running()),
            (0, 0, 0),
            "life {life}, after a restart"
        );
    }
}
