//! Cost of many cells: the lists that a kubelet requests each second, and the daemon's memory. The
//! cells are recorded, enrolled and connected like any cell, but no pod runs in them: their program
//! creates a file in a spool directory and waits, and other processes ([`agents`]) connect for
//! them.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use kiyot_testcloud::Cloud;
use kiyot_testkit::{Container, Kiyot, KiyotOptions, Kubelet, Node, Pod, command, cri};
use rustix::process::{Resource, Rlimit};
use tokio::{task::JoinSet, time::sleep};

use super::{
    calls,
    client::{Call, Client},
};

pub(crate) mod agents;
mod idle;
mod instances;
pub(crate) mod worst;

use agents::Agents;
use instances::Instances;

/// Pods that are started concurrently, as a busy kubelet does.
const CONCURRENT_STARTS: usize = 8;
/// Containers of each pod.
const CONTAINERS_PER_POD: usize = 3;
/// Longer than the idle timeout of bulk connections, and than the time after which a silent
/// connection is cut.
const SETTLE_TIME: Duration = Duration::from_secs(45);
/// Open files of the daemon: sockets and logs.
const MAX_OPEN_FILES: u64 = 1 << 16;
/// Address of the gateway for agents of instances.
const GATEWAY: &str = "127.0.0.1:7700";
/// The name of the daemon of this part, which shares no state with the other parts.
const NAME: &str = "density";

/// Starts this many cells, measures `times` lists, and prints tables.
pub(crate) async fn measure(node: &Node, world: World, cells: usize, times: usize) {
    let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
    let files = Some(maximum.map_or(MAX_OPEN_FILES, |maximum| maximum.min(MAX_OPEN_FILES)));
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: files, maximum }).unwrap();
    // A build that was measured before may have left its cells: the daemon would end them all.
    let _absent = fs::remove_dir_all(node.directory().join(NAME));
    let options = KiyotOptions {
        name: NAME,
        log: "warn".to_owned(),
        milpa: format!(
            "{}max_cells = {}\nlaunch_timeout = \"10m\"",
            world.options.milpa,
            cells + CONCURRENT_STARTS
        ),
        ..world.options.clone()
    };
    let kiyot = Kiyot::start(node, options).await;
    let of_daemon = world.boot_data.clone().unwrap_or_else(|| kiyot.state().join("cells"));
    let half = cells.div_ceil(2);
    let (frozen, _others) = (
        Agents::start(&world.spool, &of_daemon, half),
        Agents::start(&world.spool, &of_daemon, cells - half),
    );
    let mut memory = vec![Memory::of(0, kiyot.pid())];
    let mut at_rest = idle::rows(0, kiyot.pid()).await;
    let begun = Instant::now();
    let mut launched = 0;
    for up_to in [cells / 4, cells] {
        launch(&kiyot, launched, up_to).await;
        launched = up_to;
        let at_end = Memory::of(launched, kiyot.pid());
        eprintln!("{launched} cells after {:.0} s", begun.elapsed().as_secs_f64());
        sleep(SETTLE_TIME).await;
        memory.extend([at_end, Memory::of(launched, kiyot.pid())]);
        at_rest.extend(idle::rows(launched, kiyot.pid()).await);
    }
    let mut kubelet = kiyot.kubelet().await;
    assert_lists_complete(&mut kubelet, cells).await;
    println!("\n| cells | list | callers | p50 ms | p99 ms | max ms |");
    println!("| --- | --- | --- | --- | --- | --- |");
    lists(&kiyot.socket(), "connected", times).await;
    frozen.freeze();
    lists(&kiyot.socket(), "half frozen, just now", times).await;
    sleep(SETTLE_TIME).await;
    assert_lists_complete(&mut kubelet, cells).await;
    lists(&kiyot.socket(), "half unreachable", times).await;
    memory.push(Memory::of(launched, kiyot.pid()));
    let worst = worst::of_operators(&kiyot, &world.options.binary).await;
    frozen.thaw();
    println!("\n| cells | threads | % of a processor at rest | wake-ups a second |");
    println!("| --- | --- | --- | --- |");
    at_rest.iter().for_each(|row| println!("{row}"));
    println!("\n| cells | resident MiB | of it anonymous | most ever | open files | threads |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for memory in memory {
        println!(
            "| {} | {:.1} | {:.1} | {:.1} | {} | {} |",
            memory.cells,
            memory.resident,
            memory.anonymous,
            memory.peak,
            memory.files,
            memory.threads
        );
    }
    println!(
        "\nAt most, with half of the cells unreachable, plans and support bundles: {worst:.1} MiB"
    );
}

/// Cells without programs, and the files by which their agents find them.
#[derive(Debug)]
pub(crate) struct World {
    options: KiyotOptions,
    /// Directory with a file for each cell whose agent has to be started.
    spool: PathBuf,
    /// Directory with a directory for each cell's boot data; `None` for the daemon's own directory.
    boot_data: Option<PathBuf>,
    /// The instances. The agents get their user data.
    _instances: Option<Instances>,
}

impl World {
    /// Replaces the program of netns cells, and their CNI plugin.
    pub(crate) fn of_netns(node: &Node, program: &Path) -> Self {
        let dir = directory(node);
        let (spool, network, never) = (dir.join("spool"), dir.join("network"), dir.join("never"));
        for dir in [&spool, &network.join("net.d"), &network.join("bin")] {
            fs::create_dir_all(dir).unwrap();
        }
        command::run("mkfifo", &[&never.display().to_string()]);
        // The arguments are `launch --dir D --netns N --cgroup C`. The pipe never gets a writer.
        let cell = dir.join("cell");
        script(
            &cell,
            &format!(
                ": > \"{}/${{3##*/}}\"\nread -r line < {}\n",
                spool.display(),
                never.display()
            ),
        );
        let address = "10.201.'$(($$ / 256 % 256))'.'$(($$ % 256))'/16";
        let answer =
            format!(r#"{{"cniVersion":"0.4.0","ips":[{{"version":"4","address":"{address}"}}]}}"#);
        script(
            &network.join("bin/fake"),
            &format!("[ \"$CNI_COMMAND\" != ADD ] || echo '{answer}'\n"),
        );
        fs::write(
            network.join("net.d/10-fake.conf"),
            r#"{"cniVersion":"0.4.0","name":"fake","type":"fake"}"#,
        )
        .unwrap();
        let options = KiyotOptions {
            of_provider: format!("cell_binary = \"{}\"", cell.display()),
            network: Some(network),
            ..KiyotOptions::new(program)
        };
        Self { options, spool, boot_data: None, _instances: None }
    }

    /// Uses instances of a cloud that boot nothing. Their agents have the address of this host,
    /// like agents behind a forwarder.
    pub(crate) async fn of_ec2(node: &Node, program: &Path) -> Self {
        let dir = directory(node);
        let (spool, boot_data) = (dir.join("spool"), dir.join("boot"));
        for dir in [&spool, &boot_data] {
            fs::create_dir_all(dir).unwrap();
        }
        let cloud = Cloud::start().await;
        let gateway = format!("listen = \"{GATEWAY}\"\nadvertise = \"{GATEWAY}\"");
        let mut options = cloud.daemon_options_with(program, &gateway);
        options.of_provider.push_str("image_has_agent = true\n");
        let instances = Instances::start(cloud, spool.clone(), boot_data.clone());
        Self { options, spool, boot_data: Some(boot_data), _instances: Some(instances) }
    }
}

/// Returns an empty directory for the files of this part.
fn directory(node: &Node) -> PathBuf {
    let dir = node.directory().join("density-setup");
    // A build that was measured before may have left the directory.
    let _absent = fs::remove_dir_all(&dir);
    dir
}

fn script(path: &Path, text: &str) {
    fs::write(path, format!("#!/bin/sh\n{text}")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Starts pods as a kubelet does, several concurrently.
async fn launch(kiyot: &Kiyot<'_>, from: usize, to: usize) {
    let mut tasks = JoinSet::new();
    for first in from..(from + CONCURRENT_STARTS).min(to) {
        let mut kubelet = kiyot.kubelet().await;
        tasks.spawn(async move {
            for at in (first..to).step_by(CONCURRENT_STARTS) {
                let containers = (0..CONTAINERS_PER_POD)
                    .map(|at| Container::script(&format!("container-{at}"), "sleep 100000"));
                let pod =
                    containers.fold(Pod::new(&format!("density-{at}")).in_cell(), Pod::container);
                Box::pin(kubelet.run_pod(&pod))
                    .await
                    .unwrap_or_else(|status| panic!("pod {at}: {status}"));
            }
        });
    }
    tasks.join_all().await;
}

/// Asserts that the lists contain all cells, ready, and all containers, running.
async fn assert_lists_complete(kubelet: &mut Kubelet, cells: usize) {
    let sandboxes = kubelet.sandboxes().await.unwrap();
    assert_eq!(
        sandboxes
            .iter()
            .filter(|sandbox| sandbox.state() == cri::PodSandboxState::SandboxReady)
            .count(),
        cells,
        "sandboxes in the list"
    );
    let containers = kubelet.containers().await.unwrap();
    let running = containers
        .iter()
        .filter(|container| container.state() == cri::ContainerState::ContainerRunning)
        .count();
    assert_eq!(running, cells * CONTAINERS_PER_POD, "containers in the list");
}

async fn lists(socket: &Path, how: &str, times: usize) {
    let methods = [
        Call::new("ListPodSandbox", &cri::ListPodSandboxRequest::default()),
        Call::new("ListContainers", &cri::ListContainersRequest::default()),
    ];
    for method in &methods {
        for callers in calls::CALLERS {
            let client = Client::connect(socket).await.unwrap();
            let mut each =
                calls::callers_at_once(&client, method, callers, times.div_ceil(callers), "kiyot")
                    .await;
            each.sort_unstable();
            let quantile = |part: f64| calls::quantile(&each, part) / 1e3;
            println!(
                "| {how} | {} | {callers} | {:.2} | {:.2} | {:.2} |",
                method.name,
                quantile(0.5),
                quantile(0.99),
                quantile(1.0)
            );
        }
    }
}

/// Resources of the daemon as the kernel counts them; memory in MiB.
#[derive(Debug)]
struct Memory {
    cells: usize,
    resident: f64,
    anonymous: f64,
    peak: f64,
    files: usize,
    threads: String,
}

impl Memory {
    fn of(cells: usize, pid: u32) -> Self {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = |name: &str| {
            status
                .lines()
                .find_map(|line| line.strip_prefix(name)?.split_whitespace().next())
                .unwrap_or_default()
        };
        let mib = |name| line(name).parse::<f64>().unwrap_or(f64::NAN) / 1024.0;
        let files = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
        Self {
            cells,
            resident: mib("VmRSS:"),
            anonymous: mib("RssAnon:"),
            peak: mib("VmHWM:"),
            files,
            threads: line("Threads:").to_owned(),
        }
    }
}
