//! An API that is down, or refuses the daemon, while pods run.

use kiyot_testcloud::{Outage, State};
use kiyot_testkit::{LIMIT, wait_until};

use super::{SHORT_LISTING_PERIOD, WAIT, World, are_unharmed, local_pod, pod, run_in_the_end};

/// Lists that fail in each part of an outage.
const FAILED_LISTS: usize = 3;

/// An outage of half an hour is stood for by what it changes: several lists fail, a launch and a
/// termination fail and are repeated, and the time for the launch passes.
///
/// Verifies V32, V33.
#[tokio::test]
async fn outage_in_mid_run_harms_no_running_pod() {
    let world = World::start().await;
    let mut options = world.options();
    options.milpa.push_str("launch_timeout = \"5s\"\n");
    options.of_provider.push_str(SHORT_LISTING_PERIOD);
    let (kiyot, mut kubelet) = world.daemon(options).await;
    let local = kubelet.run_pod(&local_pod()).await.unwrap();
    let kept = run_in_the_end(&mut kubelet, &pod("kept", WAIT)).await;
    let ended = run_in_the_end(&mut kubelet, &pod("ended", WAIT)).await;
    let instance = world.instance_of("ended").id;
    let new = pod("new", WAIT);
    world.faults().set_outage(Some(Outage::Refused));
    let mut other = kubelet.clone();
    let outage = async {
        kubelet.stop_and_remove(&ended).await.unwrap();
        for outage in [Outage::Refused, Outage::Unavailable] {
            world.faults().set_outage(Some(outage));
            let failed = || kiyot.log().matches("provider instances not listed").count();
            let before = failed();
            wait_until("lists fail", LIMIT, async || {
                (failed() >= before + FAILED_LISTS).then_some(())
            })
            .await;
            are_unharmed(&mut kubelet, &[&kept, &local]).await;
        }
    };
    let (refused, ()) = tokio::join!(other.run_pod(&new), outage);
    let error = refused.unwrap_err();
    assert!(error.message().contains("was not launched within 5 s: launch t"), "{error}");
    are_unharmed(&mut kubelet, &[&kept, &local]).await;
    world.faults().clear();
    world.reaches(&instance, State::Terminated).await;
    let new = run_in_the_end(&mut kubelet, &new).await;
    are_unharmed(&mut kubelet, &[&kept, &local, &new]).await;
    for running in [&kept, &local, &new] {
        kubelet.stop_and_remove(running).await.unwrap();
    }
    world.has_no_cells().await;
}
