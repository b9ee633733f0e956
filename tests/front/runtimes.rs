//! Several container runtimes: owners of ids, and changes of rules.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use kiyot::{
    backends::Method,
    proxy::methods::{Route, route},
};
use kiyot_config::{Routing, Rule, Server};
use kiyot_proto::cri;
use prost::Message;
use tonic::Code;

use crate::{
    caller::frame,
    fake_runtime::{FakeRuntime, read_all},
    server::{Setup, TestServer},
};

/// A runtime with ids of its own, which counts its calls.
struct Runtime {
    _fake: FakeRuntime,
    asked: Arc<Mutex<HashMap<String, usize>>>,
}

impl Runtime {
    /// Starts a runtime. New ids begin with the name. A list has the ids of `has` that begin with
    /// the id of the filter.
    fn listen(server: &TestServer, name: &'static str, has: &'static [&'static str]) -> Self {
        let asked: Arc<Mutex<HashMap<String, usize>>> = Arc::default();
        let (count, made) = (asked.clone(), Arc::new(AtomicUsize::new(0)));
        let fake = FakeRuntime::listen(&server.runtime(name), move |mut call| {
            let (count, made) = (count.clone(), made.clone());
            async move {
                let method = call.head.uri.path().rsplit('/').next().unwrap().to_owned();
                *count.lock().unwrap().entry(method.clone()).or_default() += 1;
                let body = read_all(&mut call.body).await.unwrap();
                let message = body.get(5..).unwrap_or_default();
                let answer = match method.as_str() {
                    "RunPodSandbox" | "CreateContainer" => {
                        let pod_sandbox_id =
                            format!("{name}-new-{}", made.fetch_add(1, Ordering::SeqCst));
                        cri::RunPodSandboxResponse { pod_sandbox_id }.encode_to_vec()
                    }
                    // Containers have their id, and the id of the filter, in the same fields as
                    // sandboxes.
                    "ListPodSandbox" | "ListContainers" => {
                        let id = cri::ListPodSandboxRequest::decode(message)
                            .unwrap()
                            .filter
                            .unwrap_or_default()
                            .id;
                        let items = has.iter().filter(|one| one.starts_with(&id));
                        let items = items
                            .map(|id| cri::PodSandbox { id: id.to_string(), ..Default::default() })
                            .collect();
                        cri::ListPodSandboxResponse { items }.encode_to_vec()
                    }
                    _ => format!("{name}: {method}").into_bytes(),
                };
                call.answer(&answer).await;
            }
        });
        Self { _fake: fake, asked }
    }

    fn asked(&self, method: Method) -> usize {
        self.asked.lock().unwrap().get(method.name()).copied().unwrap_or_default()
    }
}

fn id(id: &str) -> Vec<u8> {
    cri::StopPodSandboxRequest { pod_sandbox_id: id.into() }.encode_to_vec()
}

fn run(namespace: &str, uid: &str, label: Option<&str>) -> Vec<u8> {
    let metadata = Some(cri::PodSandboxMetadata {
        namespace: namespace.into(),
        uid: uid.into(),
        ..Default::default()
    });
    let labels = label.map(|label| (label.to_owned(), String::new())).into_iter().collect();
    let config = cri::PodSandboxConfig { metadata, labels, ..Default::default() };
    cri::RunPodSandboxRequest { config: Some(config), ..Default::default() }.encode_to_vec()
}

fn to_second(namespace: &str) -> Routing {
    let rule = Rule {
        name: "second".into(),
        namespace: vec![namespace.into()],
        backend: "second".into(),
        ..Rule::default()
    };
    Routing { default: "containerd".into(), rules: vec![rule] }
}

fn server() -> TestServer {
    Setup { runtimes: &["containerd", "second"], routing: to_second("far"), ..Setup::default() }
        .start()
}

#[tokio::test(flavor = "multi_thread")]
async fn id_belongs_to_the_runtime_that_made_it() {
    let server = server();
    let (first, second) =
        (Runtime::listen(&server, "containerd", &[]), Runtime::listen(&server, "second", &[]));
    let caller = server.caller().await;
    let sandbox =
        |answer: &[u8]| cri::RunPodSandboxResponse::decode(answer).unwrap().pod_sandbox_id;
    let far = sandbox(caller.call(Method::RunPodSandbox, &run("far", "u1", None)).await.ok());
    let near = sandbox(caller.call(Method::RunPodSandbox, &run("near", "u2", None)).await.ok());
    assert_eq!((far.as_str(), near.as_str()), ("second-new-0", "containerd-new-0"));
    let container = sandbox(caller.call(Method::CreateContainer, &id(&far)).await.ok());
    assert_eq!(container, "second-new-1");
    assert_eq!(
        caller.call(Method::StopContainer, &id(&container)).await.ok(),
        b"second: StopContainer"
    );
    assert_eq!(
        caller.call(Method::StopPodSandbox, &id(&near)).await.ok(),
        b"containerd: StopPodSandbox"
    );
    let pull = |uid: &str| {
        let metadata = Some(cri::PodSandboxMetadata { uid: uid.into(), ..Default::default() });
        let sandbox_config = Some(cri::PodSandboxConfig { metadata, ..Default::default() });
        cri::PullImageRequest { sandbox_config, ..Default::default() }.encode_to_vec()
    };
    assert_eq!(caller.call(Method::PullImage, &pull("u1")).await.ok(), b"second: PullImage");
    for uid in ["u2", "unknown"] {
        assert_eq!(caller.call(Method::PullImage, &pull(uid)).await.ok(), b"containerd: PullImage");
    }
    // All ids were learned, so that no lookup took place.
    assert_eq!(
        first.asked(Method::ListPodSandbox)
            + second.asked(Method::ListPodSandbox)
            + second.asked(Method::ListContainers),
        0
    );
}

/// Verifies R5.
#[tokio::test(flavor = "multi_thread")]
async fn unknown_id_is_looked_up_once() {
    let server = server();
    let first = Runtime::listen(&server, "containerd", &["aa11", "bb11"]);
    let second = Runtime::listen(&server, "second", &["aa22", "cc22", "cc23"]);
    let caller = server.caller().await;
    for _ in 0..3 {
        assert_eq!(
            caller.call(Method::ContainerStatus, &id("cc22")).await.ok(),
            b"second: ContainerStatus"
        );
        assert_eq!(
            caller.call(Method::PodSandboxStatus, &id("bb11")).await.ok(),
            b"containerd: PodSandboxStatus"
        );
    }
    assert_eq!((second.asked(Method::ListContainers), first.asked(Method::ListPodSandbox)), (1, 1));
    // A prefix is looked up each time. A prefix of several ids is refused, and an unknown id goes
    // to the node.
    assert_eq!(
        caller.call(Method::PodSandboxStatus, &id("cc")).await.ok(),
        b"second: PodSandboxStatus"
    );
    let both = caller.call(Method::PodSandboxStatus, &id("aa")).await;
    assert_eq!(both.code(), Code::InvalidArgument as i32);
    assert_eq!(
        caller.call(Method::PodSandboxStatus, &id("dd")).await.ok(),
        b"containerd: PodSandboxStatus"
    );
    // All ids of a list are learned.
    caller.call(Method::ListPodSandbox, b"").await.ok();
    let before = second.asked(Method::ListPodSandbox);
    assert_eq!(
        caller.call(Method::StopPodSandbox, &id("cc23")).await.ok(),
        b"second: StopPodSandbox"
    );
    assert_eq!(second.asked(Method::ListPodSandbox), before);
}

/// Verifies R5.
#[tokio::test(flavor = "multi_thread")]
async fn id_that_a_dead_runtime_may_have_is_unavailable() {
    let server = server();
    let _first = Runtime::listen(&server, "containerd", &["aa11"]);
    let caller = server.caller().await;
    let unknown = caller.call(Method::StopContainer, &id("bb22")).await;
    assert_eq!(unknown.code(), Code::Unavailable as i32);
    assert!(unknown.message().contains("second.sock"), "{}", unknown.message());
    assert_eq!(
        caller.call(Method::StopContainer, &id("aa11")).await.ok(),
        b"containerd: StopContainer"
    );
    assert_eq!(
        caller.call(Method::RunPodSandbox, &run("far", "u1", None)).await.code(),
        Code::Unavailable as i32
    );
    let filter = cri::PodSandboxFilter { id: "aa11".into(), ..Default::default() };
    let list = cri::ListPodSandboxRequest { filter: Some(filter) }.encode_to_vec();
    let answer = caller.call(Method::ListPodSandbox, &list).await;
    assert_eq!(
        cri::ListPodSandboxResponse::decode(answer.ok()).unwrap().items.len(),
        1,
        "only its owner is called"
    );
}

/// Verifies R8.
#[tokio::test(flavor = "multi_thread")]
async fn node_backend_answers_for_the_node() {
    let server =
        Setup { runtimes: &["containerd", "second"], node: "second", ..Setup::default() }.start();
    let (first, _second) =
        (Runtime::listen(&server, "containerd", &[]), Runtime::listen(&server, "second", &[]));
    let caller = server.caller().await;
    let of_node = |method: &Method| {
        matches!(
            route(*method),
            Route::Node | Route::Status | Route::PullImage | Route::ImageStatus
        )
    };
    for &method in Method::ALL.iter().filter(|method| of_node(method)) {
        let answer = caller.call(method, b"").await;
        assert!(
            answer.ok().starts_with(format!("second: {method}").as_bytes()),
            "{method}: {answer:?}"
        );
    }
    assert_eq!(
        caller.raw("/runtime.v1.RuntimeService/NotYetKnown", &[], frame(b"")).await.unwrap().ok(),
        b"second: NotYetKnown"
    );
    // An unknown id and an empty id go to the node.
    for unknown in ["dd", ""] {
        assert_eq!(
            caller.call(Method::StopPodSandbox, &id(unknown)).await.ok(),
            b"second: StopPodSandbox"
        );
    }
    // Pods that policy leaves to the node go there; rules decide for others.
    let asks = |label| {
        let asking = cri::RunPodSandboxRequest {
            runtime_handler: "kiyot".into(),
            ..cri::RunPodSandboxRequest::decode(&*run("a", "u", label)).unwrap()
        };
        asking.encode_to_vec()
    };
    let made = |answer: &[u8]| cri::RunPodSandboxResponse::decode(answer).unwrap().pod_sandbox_id;
    assert_eq!(
        made(caller.call(Method::RunPodSandbox, &asks(Some("stays"))).await.ok()),
        "second-new-0"
    );
    assert_eq!(
        made(caller.call(Method::RunPodSandbox, &run("a", "u", None)).await.ok()),
        "containerd-new-0"
    );
    assert_eq!(
        first.asked.lock().unwrap().keys().map(String::as_str).collect::<BTreeSet<_>>(),
        ["ListPodSandbox", "RunPodSandbox"].into()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_that_a_backend_leaves_to_the_node_runs_there() {
    let rule = Rule {
        name: "all".into(),
        namespace: vec!["*".into()],
        backend: "cells".into(),
        ..Rule::default()
    };
    let server = Setup {
        routing: Routing { default: "containerd".into(), rules: vec![rule] },
        ..Setup::default()
    }
    .start();
    let _runtime = FakeRuntime::named(&server.containerd());
    let caller = server.caller().await;
    assert_eq!(
        caller.call(Method::RunPodSandbox, &run("a", "u", None)).await.ok(),
        b"cells: RunPodSandbox"
    );
    assert_eq!(
        caller.call(Method::RunPodSandbox, &run("a", "u", Some("stays"))).await.ok(),
        b"answer to RunPodSandbox"
    );
}

/// Verifies R6.
#[tokio::test(flavor = "multi_thread")]
async fn pod_left_to_the_node_loses_a_handler_that_the_node_lacks() {
    for names in [&["containerd"][..], &["containerd", "second"]] {
        let server = Setup { runtimes: names, ..Setup::default() }.start();
        // Each runtime answers with its request.
        let _runtimes: Vec<_> = names
            .iter()
            .map(|name| {
                FakeRuntime::listen(&server.runtime(name), |mut call| async move {
                    let body = read_all(&mut call.body).await.unwrap();
                    call.answer(&body[5..]).await;
                })
            })
            .collect();
        let caller = server.caller().await;
        let asked = async |handler: &str, label| {
            let received = cri::RunPodSandboxRequest {
                runtime_handler: handler.into(),
                ..cri::RunPodSandboxRequest::decode(&*run("a", "u", label)).unwrap()
            };
            cri::RunPodSandboxRequest::decode(
                caller.call(Method::RunPodSandbox, &received.encode_to_vec()).await.ok(),
            )
        };
        let left = asked("kiyot", Some("stays")).await.unwrap();
        assert_eq!(
            left,
            cri::RunPodSandboxRequest::decode(&*run("a", "u", Some("stays"))).unwrap(),
            "only the handler is changed"
        );
        assert_eq!(asked("runc", Some("stays")).await.unwrap().runtime_handler, "runc");
    }
}

/// Verifies R4.
#[tokio::test(flavor = "multi_thread")]
async fn new_rules_and_limits_apply_to_the_next_call_of_a_connection() {
    let server = server();
    let (_first, _second) =
        (Runtime::listen(&server, "containerd", &[]), Runtime::listen(&server, "second", &[]));
    let caller = server.caller().await;
    let made = async |namespace: &str| {
        let request = run(namespace, "u", None);
        let answer = caller.call(Method::RunPodSandbox, &request).await;
        cri::RunPodSandboxResponse::decode(answer.ok()).unwrap().pod_sandbox_id
    };
    assert!(
        made("far").await.starts_with("second") && made("near").await.starts_with("containerd")
    );
    server.running.settings.replace(&Server::default(), to_second("near"));
    assert!(
        made("near").await.starts_with("second") && made("far").await.starts_with("containerd")
    );
    // The hanging calls reach the limit.
    let config = Server { max_concurrent_calls: 1, ..Server::default() };
    let hang = id("milpa-hang");
    let hanging = caller.call(Method::StopPodSandbox, &hang);
    let rest = async {
        crate::caller::soon(async {
            while server.cells.hanging.load(Ordering::SeqCst) == 0 {
                tokio::task::yield_now().await;
            }
        })
        .await;
        server.running.settings.replace(&config, to_second("near"));
        assert_eq!(caller.call(Method::Version, b"").await.code(), Code::ResourceExhausted as i32);
    };
    tokio::select! {
        _ = hanging => panic!("it hangs"),
        () = rest => {}
    }
}

/// Verifies R4.
#[tokio::test(flavor = "multi_thread")]
async fn raised_call_limit_applies_to_an_open_connection_at_its_limit() {
    let server = Setup { max_calls: 2, ..Setup::default() }.start();
    let caller = server.caller().await;
    let (other, hang) = (id("milpa1"), id("milpa-hang"));
    // After its response the caller knows the limit.
    assert_eq!(caller.call(Method::StopPodSandbox, &other).await.ok(), b"cells: StopPodSandbox");
    let first = caller.call(Method::StopPodSandbox, &hang);
    let rest = async {
        {
            let cancelled = caller.call(Method::StopPodSandbox, &hang);
            let both_hang = crate::caller::soon(async {
                while server.cells.hanging.load(Ordering::SeqCst) < 2 {
                    tokio::task::yield_now().await;
                }
            });
            tokio::select! {
                _ = cancelled => panic!("it hangs"),
                _ = both_hang => {}
            }
            let config = Server { max_concurrent_calls: 3, ..Server::default() };
            server.running.settings.replace(&config, to_second("near"));
        }
        let last = async {
            let answer = crate::caller::soon(caller.call(Method::StopPodSandbox, &other)).await;
            assert_eq!(answer.ok(), b"cells: StopPodSandbox");
        };
        tokio::select! {
            biased;
            _ = caller.call(Method::StopPodSandbox, &hang) => panic!("it hangs"),
            () = last => {}
        }
    };
    tokio::select! {
        biased;
        _ = first => panic!("it hangs"),
        () = rest => {}
    }
}
