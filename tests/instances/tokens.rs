//! The one-time token of a launch in the hands of its pod.

use std::{fs, thread};

use base64::{Engine, engine::general_purpose::STANDARD};
use kiyot_link::bootstrap::{Bootstrap, CellFile};
use kiyot_testcloud::Instance;
use rcgen::KeyPair;
use tonic::Code;

use super::{WAIT, World, are_unharmed, enrolment::enrol, pod};

/// Returns the boot data in the user data of an instance.
fn boot_data(instance: &Instance) -> Bootstrap {
    let script = String::from_utf8(STANDARD.decode(&instance.user_data).unwrap()).unwrap();
    let json = script.lines().find(|line| line.starts_with("{\"bootstrap\"")).unwrap();
    serde_json::from_str::<CellFile>(json).unwrap().bootstrap
}

/// Enrols with a token and a new key from the network of an instance, which is that of its pod.
fn enrol_from(instance: &Instance) -> Code {
    let namespace = fs::File::open(format!("/run/netns/{}", instance.id)).unwrap();
    let boot_data = boot_data(instance);
    let enrolling = thread::spawn(move || {
        // Changes the namespace of this thread only.
        nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let key = KeyPair::generate().unwrap();
        runtime.block_on(enrol(&boot_data, &boot_data.cell, &boot_data.token, &key))
    });
    enrolling.join().unwrap()
}

/// Verifies V61.
#[tokio::test]
async fn token_that_the_pod_shows_again_is_an_alarm_and_leaves_the_pod_untouched() {
    let world = World::start().await;
    let (kiyot, mut kubelet) = world.daemon(world.options()).await;
    let running = kubelet.run_pod(&pod("curious", WAIT)).await.unwrap();
    let code = enrol_from(&world.instance_of("curious"));
    assert_eq!(code, Code::PermissionDenied);
    let alarm = "spent token presented with a second key";
    assert_eq!(kiyot.log().matches(alarm).count(), 1, "{}", kiyot.log());
    are_unharmed(&mut kubelet, &[&running]).await;
    world.ends(&mut kubelet, &[&running]).await;
}
