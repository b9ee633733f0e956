//! Features of the cells' runtime, which the kubelet reads before a pod has its cell.

use kiyot_proto::cri;

use crate::kit::Fixture;

fn handler(name: &str, recursive_read_only_mounts: bool) -> cri::RuntimeHandler {
    let features =
        Some(cri::RuntimeHandlerFeatures { recursive_read_only_mounts, user_namespaces: true });
    cri::RuntimeHandler { name: name.to_owned(), features }
}

/// Verifies D43.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn features_are_those_of_the_last_cell_also_after_a_restart() {
    let mut kiyot = Fixture::start().await;
    let is_recursive = |kiyot: &Fixture| kiyot.daemon.cri.features().recursive_read_only_mounts;
    assert!(!is_recursive(&kiyot), "nothing is known before the first cell");
    let (no, yes) = (
        vec![handler("", false), handler("runc", true)],
        vec![handler("runc", false), handler("", true)],
    );
    // A runtime without this status changes nothing. An old runtime lists no handlers. Of several
    // handlers the default handler counts, because it runs all containers.
    for (n, (handlers, expected)) in [
        (None, false),
        (Some(vec![]), false),
        (Some(vec![handler("runc", true)]), false),
        (Some(no.clone()), false),
        (Some(yes.clone()), true),
        (None, true),
        (Some(no), false),
        (Some(yes), true),
        (Some(vec![]), false),
    ]
    .into_iter()
    .enumerate()
    {
        *kiyot.provider.handlers.lock().unwrap() = handlers;
        let sandbox = kiyot.run(&format!("pod-{n}")).await;
        assert_eq!(is_recursive(&kiyot), expected, "after pod {n}");
        kiyot.stop_sandbox(&sandbox).await;
        kiyot = kiyot.restart().await;
        assert_eq!(is_recursive(&kiyot), expected, "after pod {n} and a restart");
    }
}
