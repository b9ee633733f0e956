//! Several container runtimes: whose an id is, and rules that change.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use kiyot::{
    backends::Method,
    config::{Routing, Rule, Server},
    proxy::methods::{Route, route},
};
use kiyot_proto::cri;
use prost::Message;
use tonic::Code;

use crate::{
    caller::frame,
    door::{Door, Setup},
    played::{Played, read_all},
};

/// A runtime with ids of its own, that counts what it is asked.
struct Runtime {
    _played: Played,
    asked: Arc<Mutex<HashMap<String, usize>>>,
}

impl Runtime {
    /// Each new id begins with the name; a list has the ids of `has`, and with a filter those that
    /// begin so.
    fn listen(door: &Door, name: &'static str, has: &'static [&'static str]) -> Self {
        let asked: Arc<Mutex<HashMap<String, usize>>> = Arc::default();
        let (count, made) = (asked.clone(), Arc::new(AtomicUsize::new(0)));
        let played = Played::listen(&door.runtime(name), move |mut call| {
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
                    // Lists of containers have their ids, and the id of the filter, where those of
                    // sandboxes have them.
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
        Self { _played: played, asked }
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

fn door() -> Door {
    Setup { runtimes: &["containerd", "second"], routing: to_second("far"), ..Setup::default() }
        .open()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_is_its_makers() {
    let door = door();
    let (first, second) =
        (Runtime::listen(&door, "containerd", &[]), Runtime::listen(&door, "second", &[]));
    let caller = door.caller().await;
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
    // All of it was learned: nobody was asked whose an id is.
    assert_eq!(
        first.asked(Method::ListPodSandbox)
            + second.asked(Method::ListPodSandbox)
            + second.asked(Method::ListContainers),
        0
    );
}

/// Verifies R5.
#[tokio::test(flavor = "multi_thread")]
async fn an_id_of_before_is_asked_for_once() {
    let door = door();
    let first = Runtime::listen(&door, "containerd", &["aa11", "bb11"]);
    let second = Runtime::listen(&door, "second", &["aa22", "cc22", "cc23"]);
    let caller = door.caller().await;
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
    // A prefix is asked for each time; one that several have is refused, and what nobody has is the
    // node's to answer.
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
    // A whole list teaches all ids in it.
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
async fn what_may_be_a_dead_runtimes_is_unavailable() {
    let door = door();
    let _first = Runtime::listen(&door, "containerd", &["aa11"]);
    let caller = door.caller().await;
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
        "its owner alone is asked"
    );
}

/// Verifies R8.
#[tokio::test(flavor = "multi_thread")]
async fn the_node_is_answered_for_by_the_runtime_that_is_named() {
    let door =
        Setup { runtimes: &["containerd", "second"], node: "second", ..Setup::default() }.open();
    let (first, _second) =
        (Runtime::listen(&door, "containerd", &[]), Runtime::listen(&door, "second", &[]));
    let caller = door.caller().await;
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
    // An id of nobody, and none at all, are for the node to complain about.
    for unknown in ["dd", ""] {
        assert_eq!(
            caller.call(Method::StopPodSandbox, &id(unknown)).await.ok(),
            b"second: StopPodSandbox"
        );
    }
    // What a policy leaves to the node goes there; where other pods go is the rules' alone.
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
async fn a_pod_may_be_left_to_the_node() {
    let rule = Rule {
        name: "all".into(),
        namespace: vec!["*".into()],
        backend: "cells".into(),
        ..Rule::default()
    };
    let door = Setup {
        routing: Routing { default: "containerd".into(), rules: vec![rule] },
        ..Setup::default()
    }
    .open();
    let _runtime = Played::named(&door.containerd());
    let caller = door.caller().await;
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
async fn a_pod_that_is_left_to_the_node_gets_a_handler_that_the_node_has() {
    for names in [&["containerd"][..], &["containerd", "second"]] {
        let door = Setup { runtimes: names, ..Setup::default() }.open();
        // Each answers with what it was asked.
        let _runtimes: Vec<_> = names
            .iter()
            .map(|name| {
                Played::listen(&door.runtime(name), |mut call| async move {
                    let body = read_all(&mut call.body).await.unwrap();
                    call.answer(&body[5..]).await;
                })
            })
            .collect();
        let caller = door.caller().await;
        let asked = async |handler: &str, label| {
            let told = cri::RunPodSandboxRequest {
                runtime_handler: handler.into(),
                ..cri::RunPodSandboxRequest::decode(&*run("a", "u", label)).unwrap()
            };
            cri::RunPodSandboxRequest::decode(
                caller.call(Method::RunPodSandbox, &told.encode_to_vec()).await.ok(),
            )
        };
        let left = asked("kiyot", Some("stays")).await.unwrap();
        assert_eq!(
            left,
            cri::RunPodSandboxRequest::decode(&*run("a", "u", Some("stays"))).unwrap(),
            "but for its handler as it came"
        );
        assert_eq!(asked("runc", Some("stays")).await.unwrap().runtime_handler, "runc");
    }
}

/// Verifies R4.
#[tokio::test(flavor = "multi_thread")]
async fn new_rules_and_limits_hold_for_the_next_call_of_an_open_connection() {
    let door = door();
    let (_first, _second) =
        (Runtime::listen(&door, "containerd", &[]), Runtime::listen(&door, "second", &[]));
    let caller = door.caller().await;
    let made = async |namespace: &str| {
        let request = run(namespace, "u", None);
        let answer = caller.call(Method::RunPodSandbox, &request).await;
        cri::RunPodSandboxResponse::decode(answer.ok()).unwrap().pod_sandbox_id
    };
    assert!(
        made("far").await.starts_with("second") && made("near").await.starts_with("containerd")
    );
    door.bound.settings.replace(&Server::default(), to_second("near"));
    assert!(
        made("near").await.starts_with("second") && made("far").await.starts_with("containerd")
    );
    // No call may be open but those that hang already.
    let server = Server { max_concurrent_calls: 1, ..Server::default() };
    let hang = id("milpa-hang");
    let hanging = caller.call(Method::StopPodSandbox, &hang);
    let rest = async {
        crate::caller::soon(async {
            while door.cells.hanging.load(Ordering::SeqCst) == 0 {
                tokio::task::yield_now().await;
            }
        })
        .await;
        door.bound.settings.replace(&server, to_second("near"));
        assert_eq!(caller.call(Method::Version, b"").await.code(), Code::ResourceExhausted as i32);
    };
    tokio::select! {
        _ = hanging => panic!("it hangs"),
        () = rest => {}
    }
}
