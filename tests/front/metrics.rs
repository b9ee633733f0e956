//! Counters of calls.

use bytes::Bytes;
use h2::Reason;
use kiyot::{
    backends::Method,
    metrics::{CriCalls, FIRST_BACKEND},
};
use kiyot_proto::cri;
use kiyot_testkit::wait_until;
use prost::Message;
use tonic::Code;

use crate::{
    caller::{LONG, frame, soon},
    fake_cells::HANGS,
    fake_runtime::FakeRuntime,
    server::Setup,
};

fn id(id: &str) -> Vec<u8> {
    cri::StopPodSandboxRequest { pod_sandbox_id: id.into() }.encode_to_vec()
}

/// Verifies O5.
#[tokio::test(flavor = "multi_thread")]
async fn call_is_counted_by_method_backend_and_code_however_it_ends() {
    let server = Setup::default().start();
    let expect = async |labels: &[&str]| {
        let lines = labels.iter().map(|labels| format!("kiyot_cri_calls_total{{{labels}}} 1"));
        let open = "kiyot_cri_calls_open 0.0".to_owned();
        let expected: Vec<_> = lines.chain([open]).collect();
        // A call is counted when its response has ended. The caller may see the end before.
        wait_until("the calls are counted", LONG, async || {
            let page = server.calls.text();
            expected.iter().all(|line| page.lines().any(|found| found == line)).then_some(())
        })
        .await;
    };
    let caller = server.caller().await;
    let refused = caller.call(Method::Version, b"").await;
    assert_eq!(refused.code(), Code::Unavailable as i32);
    expect(&[r#"method="Version",backend="containerd",code="UNAVAILABLE""#]).await;

    let runtime = FakeRuntime::named(&server.containerd());
    for (method, message) in [
        (Method::Version, vec![]),
        (Method::StopContainer, id("0123")),
        (Method::StopContainer, id("milpa-0")),
        (Method::StopPodSandbox, id("milpa-error")),
        (Method::StreamContainers, vec![]),
        (Method::ListPodSandbox, vec![]),
    ] {
        caller.call(method, &message).await;
    }
    caller.raw("/runtime.v1.RuntimeService/Converse", &[], frame(b"")).await.unwrap();
    expect(&[
        r#"method="Version",backend="containerd",code="OK""#,
        r#"method="StopContainer",backend="containerd",code="OK""#,
        r#"method="StopContainer",backend="cells",code="OK""#,
        r#"method="StopPodSandbox",backend="cells",code="NOT_FOUND""#,
        r#"method="StreamContainers",backend="(kiyot)",code="UNIMPLEMENTED""#,
        r#"method="ListPodSandbox",backend="(all)",code="OK""#,
        r#"method="unknown",backend="containerd",code="OK""#,
    ])
    .await;

    // The caller leaves.
    let (response, mut stream) = caller.begin(Method::ExecSync.path(), &[]).await;
    stream.send_data(Bytes::from(frame(&id(HANGS))), true).unwrap();
    wait_until("the call is open", LONG, async || {
        let page = server.calls.text();
        page.lines().any(|line| line == "kiyot_cri_calls_open 1.0").then_some(())
    })
    .await;
    stream.send_reset(Reason::CANCEL);
    drop(response);
    expect(&[r#"method="ExecSync",backend="cells",code="CANCELLED""#]).await;

    // The runtime resets the stream, before a response and after a part of it.
    runtime.stop().await;
    let _resets = FakeRuntime::listen(&server.containerd(), |mut call| async move {
        if call.head.uri.path().ends_with("Version") {
            return call.respond.send_reset(Reason::INTERNAL_ERROR);
        }
        let mut stream = call.respond.send_response(http::Response::new(()), false).unwrap();
        stream.send_data(Bytes::from_static(&[0, 0, 0, 0, 9]), false).unwrap();
        stream.send_reset(Reason::INTERNAL_ERROR);
    });
    for method in [Method::Version, Method::RuntimeConfig] {
        let answer = soon(caller.raw(method.path(), &[], frame(b""))).await;
        assert!(answer.is_err(), "{method}: {answer:?}");
    }
    expect(&[
        r#"method="Version",backend="containerd",code="UNKNOWN""#,
        r#"method="RuntimeConfig",backend="containerd",code="UNKNOWN""#,
    ])
    .await;
}

/// Verifies O8.
#[test]
fn call_is_counted_without_an_allocation() {
    let calls = CriCalls::new(["Version"], ["containerd".to_owned()]);
    let allocations = |each: &mut dyn FnMut()| {
        allocation_counter::measure(|| (0..1000).for_each(|_| each())).count_total
    };
    let counted = allocations(&mut || {
        let mut record = calls.begin(Some(0));
        record.set_backend(FIRST_BACKEND);
        record.set_code(Some(0));
    });
    let boxed = allocations(&mut || drop(std::hint::black_box(Box::new(0_u8))));
    assert_eq!((counted, boxed), (0, 1000));
}
