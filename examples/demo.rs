//! `make demo`: runs the pods of examples/ on a private containerd behind kiyot, shows where each
//! runs, a line of its log and an ExecSync in it, then stops them and checks that nothing is left.
//! Prints a line for each step, with its duration. With PROVIDER=ec2 cells are instances of a test
//! cloud, whose tags, price and boot it prints too. `make demo-shell` (DEMO_SHELL set) runs a shell
//! with milpactl while the pods run.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed step ends the demo")]

use std::{fs, path::Path, time::Instant};

use kiyot_testcloud::Cloud;
use kiyot_testkit::{
    Kiyot, KiyotOptions, LIMIT, Node, Pod, Provider, image::ImageSpec, kubelet::pods_of, wait_until,
};

mod demo {
    pub(crate) mod instance;
    pub(crate) mod kubelet;
    pub(crate) mod shell;
}

use demo::kubelet::{DemoKubelet, DemoPod};

/// The image of the examples, built in place without a registry.
const IMAGE: &str = "docker.io/library/busybox:1.36";

/// Prints steps with the time since the previous step.
#[derive(Debug)]
struct Steps(Instant);

impl Steps {
    fn done(&mut self, what: &str) {
        println!("{:>7.2} s  {what}", self.0.elapsed().as_secs_f64());
        self.0 = Instant::now();
    }
}

#[tokio::main]
async fn main() {
    let mut steps = Steps(Instant::now());
    let pods = pods();
    steps.done(&format!("read {} pods from examples/", pods.len()));

    let shell = std::env::var_os("DEMO_SHELL").is_some();
    let node = if shell { Node::start_for_long().await } else { Node::start().await };
    steps.done("a private containerd runs");
    node.image(IMAGE, &ImageSpec { cmd: vec!["sh".to_owned()], ..ImageSpec::default() }).await;
    steps.done(&format!("the image {IMAGE} is built and imported"));

    let cloud = match Provider::of_environment() {
        Provider::Ec2 => Some(Cloud::start_with_instances().await),
        Provider::Netns | Provider::Qemu => None,
    };
    if let Some(cloud) = &cloud {
        steps.done(&format!("a test cloud runs, its API is {}", cloud.endpoint()));
    }
    let mut options = match &cloud {
        Some(cloud) => cloud.daemon_options(binary()),
        None => KiyotOptions::new(binary()),
    };
    if shell {
        options.metrics = Some(demo::shell::METRICS);
    }
    let has_pool = shell && cloud.is_none();
    if has_pool {
        options.sections = demo::shell::WARM_POOL.to_owned();
    }
    let kiyot = Kiyot::start(&node, options).await;
    steps.done("kiyot runs in front of it");
    if has_pool {
        let is_warm = async || kiyot.log().contains(demo::shell::IS_WARM).then_some(());
        wait_until("a cell is warm", LIMIT, is_warm).await;
        steps.done("a cell waits in the warm pool");
    }

    let mut kubelet = DemoKubelet::new(kiyot.kubelet().await);
    let mut running: Vec<DemoPod> = Vec::new();
    for pod in &pods {
        let started = Box::pin(kubelet.run(pod)).await;
        let place = match kubelet.cell(&started).await {
            Some(_) if cloud.is_some() => "on an instance".to_owned(),
            Some(account) => {
                format!("in the cell {}", account["cell"].as_str().unwrap_or_default())
            }
            None => "on the node".to_owned(),
        };
        steps.done(&format!(
            "{} runs {place}, IP {}, sandbox {:.12}",
            pod.name,
            started.address,
            started.sandbox()
        ));
        if let Some(cloud) = &cloud
            && let Some(cell) = kubelet.cell(&started).await
        {
            for line in demo::instance::lines(cloud, &cell).await {
                println!("{:>11}{line}", "");
            }
        }
        running.push(started);
    }
    for (pod, started) in pods.iter().zip(&running) {
        let line = kubelet.first_line(started).await;
        steps.done(&format!("{} logged: {line}", pod.name));
    }
    for (pod, started) in pods.iter().zip(&running) {
        let output = kubelet
            .exec(
                started,
                &[
                    "sh",
                    "-c",
                    "echo \"I am $(hostname), with $(ls /proc | grep -c '^[0-9]') processes \
                     on $(uname -a)\"",
                ],
            )
            .await;
        steps.done(&format!("ExecSync in {}: {}", pod.name, output.trim()));
    }
    if shell {
        let shell = demo::shell::run(&kiyot, &node);
        Box::pin(kubelet.with_static_pods(&node, shell)).await;
        steps.done("the shell has ended");
    }
    for (pod, started) in pods.iter().zip(&running) {
        kubelet.stop_and_remove(started).await;
        steps.done(&format!("{} is stopped and removed", pod.name));
    }
    // A cell of the warm pool ends with the node.
    wait_until("no cell is left", LIMIT, async || {
        let is_left = cloud.as_ref().is_some_and(|cloud| !cloud.running().is_empty());
        (!is_left && (has_pool || kiyot.cells().is_empty())).then_some(())
    })
    .await;
    if let Some(cloud) = &cloud {
        steps.done(&format!("no instance is left; calls: {}", demo::instance::calls(cloud)));
    }
    drop(kiyot);
    drop(cloud);
    let left = node.stop();
    assert!(left.is_empty(), "left on the host:\n{left}");
    steps.done(
        "kiyot and containerd are stopped; \
         no process, mount, link, rule, cgroup or file is left",
    );
}

/// Reads the pods of examples/, in the order of their files.
fn pods() -> Vec<Pod> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let mut files: Vec<_> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "yaml"));
    files.sort();
    files.iter().flat_map(|file| pods_of(&fs::read_to_string(file).unwrap())).collect()
}

/// Returns the daemon beside this demo, which is target/<profile>/examples/demo.
fn binary() -> std::path::PathBuf {
    let own = std::env::current_exe().unwrap();
    own.parent().and_then(Path::parent).unwrap().join("kiyot")
}
