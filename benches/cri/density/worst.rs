//! The daemon's peak memory while the work that takes the most memory runs concurrently. The unit's
//! `MemoryMax` is twice the sum of both parts (docs/operate.md).

use std::{fs, path::Path, time::Duration};

use kiyot_testkit::{Container, Kiyot, Kubelet, Node, Pod, image::ImageSpec};
use tokio::time::sleep;

use super::Memory;
use crate::cri::{beside::Beside, concurrent::each};

/// Time for which plans and bundles are made.
const MEASURED_TIME: Duration = Duration::from_secs(60);
/// Bytes of a manifest, a little less than the admin API takes.
const MANIFEST_BYTES: usize = (1 << 20) - 4096;
/// Operators with a support bundle each.
const BUNDLES: usize = 4;
/// Image copies: as many as run concurrently, and others that wait.
const COPIES: usize = 6;
const LAYER_BYTES: usize = 192 << 20;

/// Returns the peak in MiB while loops make plans and support bundles.
pub(super) async fn of_operators(kiyot: &Kiyot<'_>, program: &Path) -> f64 {
    let dir = tempfile::tempdir().unwrap();
    let plans = manifests().into_iter().enumerate().map(|(at, text)| {
        let path = dir.path().join(format!("{at}.json"));
        fs::write(&path, text).unwrap();
        format!("milpactl plan -f {} > /dev/null 2>&1", path.display())
    });
    let plans = plans.collect::<Vec<_>>().join("; ");
    let plans = format!("while :; do {plans}; done");
    let bundles = "while :; do milpactl dump all > /dev/null; done";
    forget_peak(kiyot);
    let beside =
        Beside::start(&[&[plans.as_str(); 2][..], &[bundles; BUNDLES]].concat(), kiyot, program);
    sleep(MEASURED_TIME).await;
    drop(beside);
    Memory::of(0, kiyot.pid()).peak
}

/// Prints the memory in MiB before, and the peak while pods start in cells. Each pod has a large
/// image of its own, and the cells lack the node's layers.
pub(crate) async fn of_copies(node: &Node, kiyot: &Kiyot<'_>, kubelet: &Kubelet) {
    let name = |at: usize| format!("kiyot.test/large-{at}:1");
    for at in 0..COPIES {
        let large =
            (0..LAYER_BYTES).map(|byte| (byte.wrapping_mul(31) >> 7) as u8 ^ at as u8).collect();
        let upper = vec![("large".to_owned(), 0o644, large)];
        node.image(&name(at), &ImageSpec { upper, ..ImageSpec::script("sleep 100000") }).await;
    }
    forget_peak(kiyot);
    let before = Memory::of(0, kiyot.pid()).resident;
    let pod = |at| {
        let container = Container::of_image("main", &name(at));
        Pod::new(&format!("large-{at}")).in_cell().container(container)
    };
    let pods = each(kubelet, (0..COPIES).map(pod), COPIES, |mut kubelet, pod| async move {
        kubelet.run_pod(&pod).await.expect("a pod runs")
    })
    .await;
    let peak = Memory::of(0, kiyot.pid()).peak;
    println!("\nWith {COPIES} image copies at once: {before:.1} MiB before, {peak:.1} at most");
    each(kubelet, pods, COPIES, |mut kubelet, pod| async move {
        kubelet.stop_and_remove(&pod).await.expect("a pod ends");
    })
    .await;
}

/// Manifests whose plans take the most memory, by the test of promise M12.
fn manifests() -> [String; 3] {
    let pod = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"p""#;
    let filled = |before: String, item: &dyn Fn(usize) -> String, after: &str| {
        let mut text = before;
        for at in 0.. {
            let item = item(at);
            if text.len() + item.len() + after.len() > MANIFEST_BYTES {
                break;
            }
            text += &item;
        }
        text.trim_end_matches(',').to_owned() + after
    };
    let containers = r#""spec":{"containers":[{"name":"c","image":"i"}]"#;
    [
        filled(format!("{pod}}},{containers}"), &|at| format!(",\"k{at}\":0"), "}}"),
        filled(
            format!(r#"{pod},"labels":{{"#),
            &|at| format!("\"k{at}\":\"\","),
            &format!("}}}},{containers}}}}}"),
        ),
        filled(
            format!(r#"{pod}}},"spec":{{"containers":["#),
            &|at| format!(r#"{{"name":"c{at}","image":"i"}},"#),
            "]}}",
        ),
    ]
}

/// Resets the daemon's peak memory in the kernel.
fn forget_peak(kiyot: &Kiyot<'_>) {
    fs::write(format!("/proc/{}/clear_refs", kiyot.pid()), "5").unwrap();
}
