//! Filters and ids of a pod in a cell, compared with an equal pod on the node.

use kiyot_testkit::{Container, Kiyot, Kubelet, Node, Pod, RunningPod, cri};

use crate::cell::{WAIT, options, remove_and_assert_clean};

/// Returns a pod with two containers. One of them exits.
fn spec(name: &str) -> Pod {
    Pod::new(name)
        .label("tier", "one")
        .label("empty", "")
        .container(Container::script("main", WAIT))
        .container(Container::script("done", "exit 3"))
}

/// A pod to which filters are applied.
struct Subject {
    pod: RunningPod,
    /// A well-formed id that no pod has.
    unknown: String,
}

impl Subject {
    async fn run(kubelet: &mut Kubelet, spec: &Pod) -> Self {
        let pod = kubelet.run_pod(spec).await.unwrap();
        kubelet.exited(&pod.container("done").id).await;
        let (head, last) = pod.sandbox.split_at(pod.sandbox.len() - 1);
        let unknown = format!("{head}{}", if last == "a" { "b" } else { "a" });
        Self { pod, unknown }
    }

    /// Returns the names of this pod's listed ids.
    ///
    /// # Panics
    /// For any other id.
    fn names(&self, ids: Vec<String>) -> Vec<String> {
        let name = |id: &String| match id {
            id if *id == self.pod.sandbox => "sandbox".to_owned(),
            id => self
                .pod
                .containers
                .iter()
                .find(|(_, container)| container.id == *id)
                .map_or_else(|| "foreign".to_owned(), |(name, _)| name.clone()),
        };
        let mut names: Vec<_> = ids.iter().map(name).collect();
        names.sort();
        names
    }

    /// Returns the result of each list filter, in a fixed order.
    async fn answers(&self, kubelet: &mut Kubelet) -> Vec<(String, Vec<String>)> {
        let id = &self.pod.sandbox;
        let uid = ("io.kubernetes.pod.uid".to_owned(), self.pod.spec.uid.clone());
        let labels = |more: &[(&str, &str)]| {
            let more = more.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
            [uid.clone()].into_iter().chain(more).collect::<std::collections::HashMap<_, _>>()
        };
        let mut answers = Vec::new();
        let ids = [
            ("", "no id"),
            (id, "the id"),
            (&id[..13], "a prefix"),
            (&self.unknown, "an unknown id"),
            (&id[..0], "an empty prefix"),
        ];
        let selectors: [&[(&str, &str)]; 6] = [
            &[],
            &[("tier", "one")],
            &[("tier", "two")],
            &[("tier", "one"), ("none", "")],
            &[("empty", "")],
            &[("tier", "")],
        ];
        for (id, id_kind) in ids {
            for state in [None, Some(0), Some(1)] {
                for selector in selectors {
                    let state_value = state.map(|state| cri::PodSandboxStateValue { state });
                    let filter = cri::PodSandboxFilter {
                        id: id.to_owned(),
                        state: state_value,
                        label_selector: labels(selector),
                    };
                    let request = cri::ListPodSandboxRequest { filter: Some(filter) };
                    let listed =
                        kubelet.runtime.list_pod_sandbox(request).await.unwrap().into_inner().items;
                    let names = self.names(listed.into_iter().map(|item| item.id).collect());
                    answers.push((
                        format!("sandboxes by {id_kind}, state {state:?}, labels {selector:?}"),
                        names,
                    ));
                }
            }
        }
        let main = &self.pod.container("main").id;
        let of_containers = [
            ("", "no id"),
            (main, "the id"),
            (&main[..13], "a prefix"),
            (&self.unknown, "an unknown id"),
            (id, "its sandbox's id"),
        ];
        let of_sandboxes = [
            ("", "any"),
            (id, "the"),
            (&id[..13], "a prefix of the"),
            (&self.unknown, "an unknown"),
            (main, "a container as"),
        ];
        for (id, id_kind) in of_containers {
            for (sandbox, sandbox_kind) in of_sandboxes {
                for state in [None, Some(0), Some(1), Some(2)] {
                    for selector in
                        [&[][..], &[("io.kubernetes.container.name", "done")], &[("tier", "one")]]
                    {
                        let filter = cri::ContainerFilter {
                            id: id.to_owned(),
                            state: state.map(|state| cri::ContainerStateValue { state }),
                            pod_sandbox_id: sandbox.to_owned(),
                            label_selector: labels(selector),
                        };
                        let request = cri::ListContainersRequest { filter: Some(filter) };
                        let listed = kubelet
                            .runtime
                            .list_containers(request)
                            .await
                            .unwrap()
                            .into_inner()
                            .containers;
                        let names = self.names(listed.into_iter().map(|item| item.id).collect());
                        answers.push((
                            format!(
                                "containers by {id_kind}, {sandbox_kind} sandbox, state \
                                {state:?}, labels {selector:?}"
                            ),
                            names,
                        ));
                    }
                }
            }
        }
        answers
    }

    /// Returns the result of each statistics filter. Exited containers are left out, because cells
    /// have no statistics of them.
    async fn usage(&self, kubelet: &mut Kubelet) -> Vec<(String, Vec<String>)> {
        let (pod, main, unknown) =
            (&self.pod.sandbox, &self.pod.container("main").id, &self.unknown);
        let labels = |more: &[(&str, &str)]| {
            let more = more.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
            [("io.kubernetes.pod.uid".to_owned(), self.pod.spec.uid.clone())]
                .into_iter()
                .chain(more)
                .collect::<std::collections::HashMap<_, _>>()
        };
        let mut answers = Vec::new();
        for (id, id_kind) in [
            ("", "no id"),
            (main, "the id"),
            (&main[..13], "a prefix"),
            (unknown, "an unknown id"),
            (pod, "its sandbox's id"),
        ] {
            for (sandbox, sandbox_kind) in [
                ("", "any"),
                (pod, "the"),
                (&pod[..13], "a prefix of the"),
                (unknown, "an unknown"),
                (main, "a container as"),
            ] {
                for selector in [
                    &[][..],
                    &[("io.kubernetes.container.name", "main")],
                    &[("io.kubernetes.container.name", "none")],
                    &[("tier", "one")],
                ] {
                    let filter = cri::ContainerStatsFilter {
                        id: id.to_owned(),
                        pod_sandbox_id: sandbox.to_owned(),
                        label_selector: labels(selector),
                    };
                    let request = cri::ListContainerStatsRequest { filter: Some(filter) };
                    let listed = kubelet
                        .runtime
                        .list_container_stats(request)
                        .await
                        .unwrap()
                        .into_inner()
                        .stats;
                    let mut names = self.names(
                        listed.into_iter().map(|item| item.attributes.unwrap().id).collect(),
                    );
                    names.retain(|name| name != "done");
                    answers.push((
                        format!(
                            "usage of containers by {id_kind}, {sandbox_kind} sandbox, labels \
                            {selector:?}"
                        ),
                        names,
                    ));
                }
            }
        }
        for (id, id_kind) in [
            ("", "no id"),
            (pod, "the id"),
            (&pod[..13], "a prefix"),
            (unknown, "an unknown id"),
            (main, "a container's id"),
        ] {
            for selector in
                [&[][..], &[("tier", "one")], &[("tier", "two")], &[("tier", "one"), ("empty", "")]]
            {
                let filter = cri::PodSandboxStatsFilter {
                    id: id.to_owned(),
                    label_selector: labels(selector),
                };
                let request = cri::ListPodSandboxStatsRequest { filter: Some(filter) };
                let listed = kubelet
                    .runtime
                    .list_pod_sandbox_stats(request)
                    .await
                    .unwrap()
                    .into_inner()
                    .stats;
                let names = self
                    .names(listed.into_iter().map(|item| item.attributes.unwrap().id).collect());
                answers
                    .push((format!("usage of sandboxes by {id_kind}, labels {selector:?}"), names));
            }
        }
        answers
    }

    /// Returns the results of calls with a prefix of an id and with an unknown id.
    async fn calls(&self, kubelet: &mut Kubelet) -> Vec<String> {
        let (sandbox, main, unknown) =
            (&self.pod.sandbox, &self.pod.container("main").id, &self.unknown);
        let mut outcomes = Vec::new();
        for id in [sandbox, &sandbox[..13], unknown, &unknown[..], main] {
            let status = kubelet.sandbox_status(id).await;
            outcomes.push(
                status
                    .map(|status| self.names(vec![status.id]).concat())
                    .unwrap_or_else(|status| format!("{:?}", status.code())),
            );
        }
        for id in [main, &main[..13], unknown, sandbox] {
            let status = kubelet.container_status(id).await;
            outcomes.push(
                status
                    .map(|status| self.names(vec![status.id]).concat())
                    .unwrap_or_else(|status| format!("{:?}", status.code())),
            );
            let executed = kubelet.exec_sync(id, &["echo", "here"]).await;
            outcomes.push(
                executed
                    .map(|output| output.stdout)
                    .unwrap_or_else(|status| format!("{:?}", status.code())),
            );
        }
        outcomes
    }
}

/// Verifies P9.
#[tokio::test]
async fn every_filter_and_part_of_an_id_is_answered_as_containerd_answers_it() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let local = Subject::run(&mut kubelet, &spec("local")).await;
    let remote = Subject::run(&mut kubelet, &spec("remote").in_cell()).await;
    assert!(remote.pod.sandbox.starts_with("milpa") && !local.pod.sandbox.starts_with("milpa"));
    let (on_node, in_cell) =
        (local.answers(&mut kubelet).await, remote.answers(&mut kubelet).await);
    for ((filter, on_node), (_, in_cell)) in on_node.iter().zip(&in_cell) {
        assert_eq!(in_cell, on_node, "{filter}");
    }
    // The filters are meaningful: some match and some do not.
    assert!(
        on_node.iter().any(|(_, names)| names.is_empty())
            && on_node.iter().any(|(_, names)| names.len() == 2)
    );
    assert_eq!(remote.calls(&mut kubelet).await, local.calls(&mut kubelet).await);
    let (on_node, in_cell) = (local.usage(&mut kubelet).await, remote.usage(&mut kubelet).await);
    for ((filter, on_node), (_, in_cell)) in on_node.iter().zip(&in_cell) {
        assert_eq!(in_cell, on_node, "{filter}");
    }
    assert!(
        on_node.iter().any(|(_, names)| names.is_empty())
            && on_node.iter().any(|(_, names)| names == &["main"])
    );
    // The same holds for a stopped pod.
    for subject in [&local, &remote] {
        kubelet.stop_pod(&subject.pod).await.unwrap();
    }
    assert_eq!(remote.answers(&mut kubelet).await, local.answers(&mut kubelet).await);
    kubelet.remove_pod(&local.pod).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &remote.pod).await;
}
