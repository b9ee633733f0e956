//! The life of a pod on an instance.

use kiyot_testcloud::{Instance, State};
use kiyot_testkit::{Container, LIMIT, Source, cri, output, wait_until};

use super::{WAIT, World, pod, run};

/// Verifies V23.
#[tokio::test]
async fn pod_on_an_instance_behaves_as_on_the_node() {
    let world = World::start().await;
    let (mut kiyot, mut kubelet) = world.daemon(world.options()).await;
    let script = format!("echo hello from $(hostname); cat /settings/colour; {WAIT}");
    let mut spec = pod("first", &script)
        .volume("settings", Source::ConfigMap(Source::files(&[("colour", "blue\n")])));
    spec.containers[0] = spec.containers[0].clone().mount("settings", "/settings");
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "hello from first").await;
    kubelet.logged(&main, "blue").await;

    let status = kubelet.sandbox_status(&running.sandbox).await.unwrap();
    assert_eq!(status.state(), cri::PodSandboxState::SandboxReady);
    let ip = status.network.unwrap().ip;
    let cells = world.launched();
    assert_eq!(cells.len(), 1, "{cells:?}");
    assert_eq!(cells[0].address, ip);
    run(
        &mut kubelet,
        &main.id,
        "mkdir -p /tmp/www; echo served > /tmp/www/index.html; httpd -p 8080 -h /tmp/www",
    )
    .await;
    let url = format!("http://{ip}:8080/");
    let page = wait_until("the pod serves", LIMIT, async || {
        output("busybox", &["wget", "-q", "-O", "-", &url]).ok()
    })
    .await;
    assert_eq!(page.trim(), "served");
    // The user data sets a umask, with which only root could run a program in a container.
    assert_eq!(run(&mut kubelet, &main.id, "stat -c %a /").await.trim(), "755");

    kubelet.update_volume(&spec, "settings", &Source::files(&[("colour", "red")]));
    wait_until("the volume is updated", LIMIT, async || {
        let output = kubelet.exec_sync(&main.id, &["cat", "/settings/colour"]).await.ok()?;
        (output.stdout == "red").then_some(())
    })
    .await;

    kubelet.stop_and_remove(&running).await.unwrap();
    world.reaches(&cells[0].id, State::Terminated).await;
    assert!(kiyot.stop().await.success());
    drop(kiyot);
    let left = world.node.stop();
    assert!(left.is_empty(), "leftovers:\n{left}");
}

/// Returns the status with which the metadata service answers a process in the network of a pod.
/// The process needs no capability: its socket is bound to the device and so passes every route.
fn status_past_the_route(instance: &str) -> String {
    let powerless = ["setpriv", "--bounding-set=-all", "--reuid=65534", "--clear-groups"];
    let request =
        ["curl", "--silent", "--show-error", "--max-time", "10", "--interface", "if!eth0"];
    let status = ["--output", "/dev/null", "--write-out", "%{http_code}"];
    let url = ["http://169.254.169.254/latest/meta-data/"];
    let in_network = ["netns", "exec", instance];
    let command = [&in_network[..], &powerless, &request, &status, &url].concat();
    output("ip", &command).unwrap()
}

/// Returns the output of `ip` in the network of an instance; `None` if it fails.
fn ip_of(instance: &Instance, arguments: &[&str]) -> Option<String> {
    output("ip", &[&["-n", &instance.id], arguments].concat()).ok()
}

/// Returns the response of the metadata service to frames of a process in the network of a pod. The
/// process has no capability but `NET_RAW`.
async fn answer_to_frames(instance: &Instance) -> String {
    const REQUEST: &str = include_str!("raw_frames.py");
    let router = wait_until("the instance knows its router", LIMIT, async || {
        let default = ip_of(instance, &["route", "show", "default"])?;
        let address = default.split_whitespace().nth(2)?;
        let ping =
            ["netns", "exec", &instance.id, "busybox", "ping", "-c", "1", "-W", "1", address];
        let _ = output("ip", &ping);
        let known = ip_of(instance, &["neigh", "show", address])?;
        let mut words = known.split_whitespace().skip_while(|word| *word != "lladdr");
        words.nth(1).map(str::to_owned)
    })
    .await;
    let process = [
        "netns",
        "exec",
        &instance.id,
        "setpriv",
        "--bounding-set=-all,+net_raw",
        "--no-new-privs",
    ];
    let program = ["/usr/bin/python3", "-c", REQUEST, &instance.address, &router];
    output("ip", &[&process[..], &program].concat()).unwrap()
}

/// Verifies V22.
#[tokio::test]
async fn metadata_service_is_closed_to_a_pod_without_an_instance_profile() {
    let world = World::start().await;
    let (_kiyot, mut kubelet) = world.daemon(world.options()).await;
    // The service refuses a read without a token: an HTTP status proves that the pod reaches the
    // service.
    let script = "wget -S -O - http://169.254.169.254/latest/meta-data/ 2>&1; true";
    let closed = kubelet.run_pod(&pod("closed", WAIT)).await.unwrap();
    let read = run(&mut kubelet, &closed.container("main").id, script).await;
    assert!(read.contains("No route to host"), "{read}");
    assert_eq!(status_past_the_route(&world.instance_of("closed").id), "403");
    let profile = "arn:aws:iam::123456789012:instance-profile/reader";
    let open = pod("open", WAIT);
    let open = open.annotation("pod.elotl.co/instance-profile", profile);
    let open = kubelet.run_pod(&open).await.unwrap();
    let read = run(&mut kubelet, &open.container("main").id, script).await;
    assert!(read.contains("HTTP/1.1 401"), "{read}");
    assert_eq!(status_past_the_route(&world.instance_of("open").id), "401");
    world.ends(&mut kubelet, &[&closed, &open]).await;
}

/// Verifies V22, V101.
#[tokio::test]
async fn metadata_service_stays_closed_to_a_pod_with_power_over_its_network() {
    let world = World::start().await;
    let mut options = world.options();
    options.sections.push_str("[backends.milpa.policy]\nprivileged = \"cell\"\n");
    let (_kiyot, mut kubelet) = world.daemon(options).await;
    let running = kubelet.run_pod(&pod("powerful", WAIT)).await.unwrap();
    let powers = Container::script("powers", WAIT);
    let powers = kubelet.create_container_with(&running, &powers, 0, |config| {
        let context = config.linux.as_mut().unwrap().security_context.as_mut().unwrap();
        let added = &mut context.capabilities.get_or_insert_default().add_capabilities;
        added.extend(["NET_ADMIN", "NET_RAW"].map(str::to_owned));
    });
    let powers = powers.await.unwrap().id;
    kubelet.start_container(&powers).await.unwrap();
    let read = "wget -S -O - http://169.254.169.254/latest/meta-data/ 2>&1; true";
    let fenced = run(&mut kubelet, &powers, read).await;
    assert!(fenced.contains("No route to host"), "{fenced}");
    run(&mut kubelet, &powers, "ip route del unreachable 169.254.169.254").await;
    wait_until("the route is set again", LIMIT, async || {
        run(&mut kubelet, &powers, read).await.contains("No route to host").then_some(())
    })
    .await;
    // Past the route, the process reaches the service, which refuses to answer.
    let instance = world.instance_of("powerful").id;
    assert_eq!(status_past_the_route(&instance), "403");
    let mut privileged = pod("privileged", WAIT);
    privileged.containers[0].privileged = true;
    let privileged = kubelet.run_pod(&privileged).await.unwrap();
    // The pod keeps removing the route while it reads.
    let past = format!(
        "(while :; do ip route del unreachable 169.254.169.254; done) > /dev/null 2>&1 & \
         {read}; kill $!"
    );
    wait_until("the pod reaches the service, which refuses", LIMIT, async || {
        let passed = run(&mut kubelet, &privileged.container("main").id, &past).await;
        assert!(!passed.contains("HTTP/1.1 401"), "{passed}");
        passed.contains("HTTP/1.1 403").then_some(())
    })
    .await;
    world.ends(&mut kubelet, &[&running, &privileged]).await;
}

/// Verifies V22.
#[tokio::test]
async fn raw_frames_of_a_pod_get_no_token_from_the_metadata_service() {
    let world = World::start().await;
    let (_kiyot, mut kubelet) = world.daemon(world.options()).await;
    let running = kubelet.run_pod(&pod("raw", WAIT)).await.unwrap();
    let instance = world.instance_of("raw");
    let answer = answer_to_frames(&instance).await;
    // The frames reach the service, which refuses to give a token.
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    assert!(!answer.contains("token-"), "{answer}");
    // Pods with a profile are given a token for the same frames.
    let profile = "arn:aws:iam::123456789012:instance-profile/reader";
    let open = pod("open", WAIT).annotation("pod.elotl.co/instance-profile", profile);
    let open = kubelet.run_pod(&open).await.unwrap();
    let instance = world.instance_of("open");
    output("ip", &["-n", &instance.id, "route", "add", "unreachable", "169.254.169.254"]).unwrap();
    let answer = answer_to_frames(&instance).await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("token-"), "{answer}");
    world.ends(&mut kubelet, &[&running, &open]).await;
}

/// Verifies V22.
#[tokio::test]
async fn metadata_service_of_a_warm_cell_is_closed_when_a_pod_takes_it() {
    let world = World::start().await;
    let (_kiyot, mut kubelet, warm) = world.warm_daemon().await;
    assert_eq!(status_past_the_route(&warm.id), "401", "no pod can read it yet");
    let taken = kubelet.run_pod(&pod("taken", WAIT)).await.unwrap();
    // The tags of the pod follow later.
    let status = kubelet.sandbox_status(&taken.sandbox).await.unwrap();
    assert_eq!(status.network.unwrap().ip, warm.address);
    assert_eq!(status_past_the_route(&warm.id), "403");
    kubelet.stop_and_remove(&taken).await.unwrap();
    world.reaches(&warm.id, State::Terminated).await;
}

/// Verifies V24.
#[tokio::test]
async fn start_of_a_pod_makes_two_calls_and_its_status_makes_no_call() {
    let world = World::start().await;
    let (_kiyot, mut kubelet) = world.daemon(world.options()).await;
    // The first pod's launch reads subnets, images, types and prices.
    let first = kubelet.run_pod(&pod("first", WAIT)).await.unwrap();
    world.clear_calls();
    let second = kubelet.run_pod(&pod("second", WAIT)).await.unwrap();
    for _ in 0..20 {
        kubelet.sandbox_status(&second.sandbox).await.unwrap();
        kubelet.containers().await.unwrap();
        kubelet.exec_sync(&second.container("main").id, &["true"]).await.unwrap();
    }
    let calls: Vec<_> = world.calls().into_iter().map(|call| call.action).collect();
    // Not counted: lists of all cells have their own period, and the price list is read in the
    // background.
    let is_of_pod = |action: &&String| !["DescribeInstances", "GetProducts"].contains(&&***action);
    let of_pod: Vec<_> = calls.iter().filter(is_of_pod).collect();
    assert_eq!(of_pod, ["RunInstances", "ModifyInstanceMetadataOptions"], "{calls:?}");
    world.ends(&mut kubelet, &[&first, &second]).await;
}
