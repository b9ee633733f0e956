//! The one-time token of a launch in the hands of the launched pod.

use std::{collections::BTreeMap, fs, thread};

use base64::{Engine, engine::general_purpose::STANDARD};
use kiyot_link::bootstrap::{Bootstrap, CellFile};
use kiyot_testcloud::{Instance, State};
use kiyot_testkit::Source;
use rcgen::KeyPair;
use tonic::Code;

use super::{WAIT, World, are_unharmed, enrolment::enrol, pod, run, run_in_the_end};

/// Returns the user data of an instance.
fn user_data(instance: &Instance) -> String {
    String::from_utf8(STANDARD.decode(&instance.user_data).unwrap()).unwrap()
}

/// Returns the boot data in user data, as JSON.
fn boot_json(user_data: &str) -> &str {
    user_data.lines().find(|line| line.starts_with("{\"bootstrap\"")).unwrap()
}

/// Returns the boot data in the user data of an instance.
fn boot_data(instance: &Instance) -> Bootstrap {
    serde_json::from_str::<CellFile>(boot_json(&user_data(instance))).unwrap().bootstrap
}

/// Enrols with the token of an instance and a new key, from the network of the instance, which is
/// also the pod's.
fn enrol_from(instance: &Instance) -> Code {
    let namespace = fs::File::open(format!("/run/netns/{}", instance.id)).unwrap();
    let boot_data = boot_data(instance);
    let enrolling = thread::spawn(move || {
        // Only the namespace of this thread changes.
        nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let key = KeyPair::generate().unwrap();
        runtime.block_on(enrol(&boot_data, &boot_data.cell, &boot_data.token, &key))
    });
    enrolling.join().unwrap()
}

/// Launches an instance with the user data of another instance, which every reader of the user data
/// can do. Returns the id.
async fn launch_with_user_data(world: &World, of: &Instance) -> String {
    let mut launches = world.calls_of("RunInstances");
    launches.retain(|call| call.parameters.get("UserData") == Some(&of.user_data));
    let mut parameters = launches.remove(0).parameters;
    parameters.retain(|key, _| key != "ClientToken" && !key.starts_with("TagSpecification"));
    let parameters: Vec<_> =
        parameters.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    let reply = world.call("RunInstances", &parameters).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.root().all("instanceId")[0].text.clone()
}

/// Verifies V29.
#[tokio::test]
async fn agent_that_spends_the_token_on_another_instance_gets_no_pod() {
    let world = World::start().await;
    let (kiyot, mut kubelet) = world.daemon(world.options()).await;
    let spec = pod("wanted", WAIT);
    world.set_installing_for_ever(true);
    let (mut caller, wanted) = (kubelet.clone(), spec.clone());
    let calling = tokio::spawn(async move { caller.run_pod(&wanted).await });
    let robbed = world.first_runs_without_agent().await;
    let thief = launch_with_user_data(&world, &robbed).await;
    let thief = world.instance(&thief).unwrap();
    let error = calling.await.unwrap().unwrap_err();
    let expected =
        format!("dials from {}; allowed: an address of instance {}", thief.address, robbed.id);
    assert!(error.message().contains(&expected), "{error}");
    let log = kiyot.log();
    let is_alarm = |line: &&str| {
        line.contains("ERROR")
            && line.contains("agent is not on the cell's instance")
            && line.contains(&thief.address)
    };
    assert_eq!(log.lines().filter(is_alarm).count(), 1, "{log}");
    world.reaches(&robbed.id, State::Terminated).await;
    assert_eq!(world.instance(&thief.id).unwrap().state, State::Running);
    world.change("TerminateInstances", &thief.id).await;
    let running = run_in_the_end(&mut kubelet, &spec).await;
    world.ends(&mut kubelet, &[&running]).await;
}

/// Verifies V61.
#[tokio::test]
async fn token_presented_by_its_pod_is_an_alarm_and_leaves_the_pod_unharmed() {
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

/// Verifies V83.
#[tokio::test]
async fn launch_gives_ec2_no_secret_but_the_token() {
    const SECRETS: [&str; 5] =
        ["planted-credential", "planted-header", "planted-env", "planted-volume", "planted-body"];
    let [credential, header, env, volume, body] = SECRETS;
    let world = World::start().await;
    let mut options = world.options();
    options.environment.retain(|(name, _)| name != "AWS_SECRET_ACCESS_KEY");
    options.environment.push(("AWS_SECRET_ACCESS_KEY".to_owned(), credential.to_owned()));
    options.milpa += &format!("registry_config_dir = {:?}\n", world.node.registries());
    let registry = world.node.registries().join("registry.example");
    fs::create_dir_all(&registry).unwrap();
    let hosts =
        format!("[host.\"https://registry.example\".header]\nauthorization = \"{header}\"\n");
    fs::write(registry.join("hosts.toml"), hosts).unwrap();
    let (_kiyot, mut kubelet) = world.daemon(options).await;
    let mut spec = pod("discreet", WAIT)
        .annotation("example.com/note", body)
        .volume("key", Source::Secret([("key".to_owned(), volume.into())].into()));
    spec.containers[0] = spec.containers[0].clone().env("KEY", env).mount("key", "/key");
    let running = kubelet.run_pod(&spec).await.unwrap();
    let seen = run(&mut kubelet, &running.container("main").id, "echo $KEY $(cat /key/key)").await;
    assert_eq!(seen.trim(), format!("{env} {volume}"));

    let launches = world.calls_of("RunInstances");
    assert_eq!(launches.len(), 1);
    let user_data = user_data(&world.instance_of("discreet"));
    let given = format!("{:?}\n{user_data}", launches[0].parameters);
    for secret in SECRETS.iter().chain(&["PRIVATE KEY"]) {
        assert!(!given.contains(secret), "{secret}: {given}");
    }
    let json: BTreeMap<String, serde_json::Value> =
        serde_json::from_str(boot_json(&user_data)).unwrap();
    let bootstrap: Vec<_> = json["bootstrap"].as_object().unwrap().keys().collect();
    let expected = ["agent", "ca_sha256", "cell", "gateway", "orphan_timeout_secs", "token"];
    assert_eq!(bootstrap, expected);
    world.ends(&mut kubelet, &[&running]).await;
}
