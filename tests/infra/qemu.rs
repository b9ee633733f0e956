//! The qemu provider with real virtual machines. Their guest is a shell that the gateway commands.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, SocketAddr},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
};

use kiyot_config::AcceleratorChoice;
use kiyot_engine::{
    id::{CellId, SandboxId},
    placement::{LaunchRefusal, Market, Offering, Size},
    provider::{
        Attachment, ErrorClass, Instance, InstanceState, LaunchSpec, PodNetwork, Provider,
        Termination,
    },
};
use kiyot_local::{PauseImage, qemu::Qemu};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::AsyncWriteExt;

use super::bench::{self, Bench, launch_spec, run, wait_for};

mod frames;
pub(crate) mod guest;
mod limits;
mod monitor;
mod takeover;

use frames::{Identity, Receiver};
use guest::Guest;

/// The size of a guest.
const SIZE: Size = Size { cpus: 1, memory_mib: 256 };

/// A provider of virtual machines with unique names.
struct Vms {
    bench: Bench,
    provider: Qemu,
    gateway: tokio::net::UnixListener,
}

impl Vms {
    fn new() -> Self {
        let mut bench = Bench::new();
        bench.configure_cni("");
        use_machines(&mut bench);
        let gateway =
            tokio::net::UnixListener::bind(bench.config.state_dir.join("gateway.sock")).unwrap();
        let provider = Qemu::new(&bench.config, PauseImage::new(None));
        Self { bench, provider, gateway }
    }

    fn spec(&self, size: Size) -> LaunchSpec {
        launch_spec(CellId::mint().unwrap(), vec![offering(size)])
    }

    async fn launch(&self) -> (LaunchSpec, Instance, Guest) {
        let spec = self.spec(SIZE);
        let instance = self.provider.launch(&spec, "token").await.unwrap();
        let guest = Guest::accept(&self.gateway, || self.console(&instance)).await;
        (spec, instance, guest)
    }

    fn console(&self, instance: &Instance) -> String {
        let path = self.bench.instance_dir(&instance.id).join("console.log");
        fs::read_to_string(path).unwrap_or_default()
    }

    fn attachment(&self, instance: &Instance) -> Attachment {
        attachment(&self.bench, instance)
    }

    async fn state(&self, instance: &Instance) -> InstanceState {
        self.provider.describe(&instance.id).await.unwrap().state
    }

    /// Ends an instance, the last of the fixture.
    async fn end(&self, instance: &Instance) {
        self.end_beside_others(instance).await;
        self.bench.assert_clean(&instance.id);
    }

    async fn end_beside_others(&self, instance: &Instance) {
        let mut outcomes = self.provider.terminate(std::slice::from_ref(&instance.id)).await;
        assert_eq!(outcomes.remove(&instance.id).unwrap().unwrap(), Termination::Confirmed);
        assert_eq!(self.bench.resources_of(&instance.id), Vec::<String>::new());
    }

    /// Returns the PID of an instance's QEMU.
    fn qemu(&self, instance: &Instance) -> i32 {
        let launcher = self.bench.launcher(&instance.id);
        let children = format!("/proc/{launcher}/task/{launcher}/children");
        fs::read_to_string(children).unwrap().trim().parse().unwrap()
    }
}

/// Gives a fixture's configuration machines whose guest is a shell.
pub(crate) fn use_machines(bench: &mut Bench) {
    let image = bench.path().join("image");
    guest::make_image(&image);
    use_image(bench, image);
    bench.config.qemu.cell_binary =
        Some(Path::new(env!("CARGO_BIN_EXE_kiyot")).with_file_name("kiyot-cell"));
}

/// Gives a fixture's configuration a stub in place of machines.
pub(crate) fn use_stub(bench: &mut Bench) {
    let image = bench.path().join("image");
    fs::create_dir(&image).unwrap();
    for file in ["kernel", "initramfs", "root.squashfs"] {
        fs::write(image.join(file), "").unwrap();
    }
    guest::list(&image);
    use_image(bench, image);
}

/// Gives a fixture's configuration machines of an image. The program of its netns cells launches
/// them.
pub(crate) fn use_image(bench: &mut Bench, image: PathBuf) {
    let config = &mut bench.config;
    config.qemu.network = config.netns.network.clone();
    config.qemu.cell_binary = config.netns.cell_binary.clone();
    config.qemu.accel = AcceleratorChoice::Tcg;
    config.qemu.image_dir = image;
    config.qemu.disk_size = 64 << 20;
}

fn offering(size: Size) -> Offering {
    Offering { instance_type: size.to_string(), zone: "node".into(), market: Market::OnDemand }
}

fn attachment(bench: &Bench, instance: &Instance) -> Attachment {
    Attachment {
        pod_name: "a-pod".into(),
        pod_namespace: "a-namespace".into(),
        pod_uid: format!("{}-{}", bench.name, instance.cell),
        sandbox: SandboxId::mint().unwrap().to_string(),
        ..Attachment::default()
    }
}

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

/// Gives the guest the network of its pod, as an agent does.
async fn configure(guest: &mut Guest, network: &PodNetwork) {
    let mut lines = vec![format!("ip link set eth0 address {}", network.mac)];
    lines.push(format!("ip link set eth0 mtu {} up", network.mtu));
    lines.extend(network.addresses.iter().map(|own| format!("ip address add {own} dev eth0")));
    for route in &network.routes {
        let via = route.gateway.map(|gateway| format!(" via {gateway}")).unwrap_or_default();
        // Replaces the kernel's own route.
        lines.push(format!("ip route replace {}{via} dev eth0", route.destination));
    }
    guest.succeeds(&lines.join(" && ")).await;
}

/// Verifies N24, N25.
#[tokio::test]
async fn guest_sends_only_as_its_own_pod() {
    let vms = Vms::new();
    let (_, instance, mut guest) = vms.launch().await;
    // Before Bind it has the link alone.
    guest.succeeds("ip link set eth0 up && ip address add 169.254.88.2/16 dev eth0").await;
    guest.fails("arping -c 1 -w 2 -I eth0 169.254.77.1").await;
    guest.succeeds("ip address flush dev eth0 && ip link set eth0 down").await;
    let to = vms.attachment(&instance);
    let attached = vms.provider.attach(&instance.id, &to).await.unwrap();
    let network = attached.network.clone().unwrap();
    assert_eq!(vms.provider.attach(&instance.id, &to).await.unwrap(), attached, "again");
    configure(&mut guest, &network).await;
    let [IpAddr::V4(own)] = attached.addresses[..] else { panic!("{attached:?}") };
    let bridge = network.routes.iter().find_map(|route| route.gateway).unwrap();

    guest.succeeds(&format!("ping -c 1 -W 10 {bridge}")).await;
    run("busybox", &["ping", "-c", "1", "-W", "10", &own.to_string()]);
    guest.succeeds(&format!("arping -c 1 -w 10 -I eth0 {bridge}")).await;

    // Larger transfers use the checksums and segments of the virtual device.
    guest.succeeds("(while :; do nc -l -p 8080 -e /bin/cat; done) > /dev/null 2>&1 &").await;
    let echoed = echo(SocketAddr::from((own, 8080))).await;
    assert_eq!(echoed, ECHOED_BYTES);

    // Another address of the pod's network, with packets and in ARP.
    let [a, b, c, _] = own.octets();
    let other = format!("{a}.{b}.{c}.77");
    guest.succeeds(&format!("ip address add {other}/24 dev eth0")).await;
    guest.fails(&format!("ping -c 1 -W 2 -I {other} {bridge}")).await;
    guest.runs(&format!("arping -c 2 -w 3 -U -I eth0 -s {other} {other}")).await;
    guest.fails(&format!("arping -c 1 -w 2 -I eth0 -s {other} {bridge}")).await;
    assert!(!run("ip", &["neighbour"]).contains(&other), "{}", run("ip", &["neighbour"]));
    guest.succeeds(&format!("ip address del {other}/24 dev eth0")).await;

    // Another hardware address.
    guest.succeeds("ip link set eth0 address 02:00:5e:00:53:99").await;
    // The test sets the peer's address, because a query for it is refused too.
    let peer = run("ip", &["-br", "link", "show", "dev", &vms.bench.cni_bridge()]);
    let peer = peer.split_whitespace().nth(2).unwrap().to_owned();
    guest.succeeds(&format!("arp -s {bridge} {peer}")).await;
    guest.fails(&format!("ping -c 1 -W 2 {bridge}")).await;
    let learnt = run("bridge", &["fdb", "show", "br", &vms.bench.cni_bridge()]);
    assert!(!learnt.contains("02:00:5e:00:53:99"), "{learnt}");
    guest.succeeds(&format!("arp -d {bridge} && ip address flush dev eth0")).await;
    configure(&mut guest, &network).await;
    guest.succeeds(&format!("ping -c 1 -W 10 {bridge}")).await;

    // The link leads only to the relay, by each device.
    guest.fails("ping -c 1 -W 2 169.254.77.1").await;
    guest.fails("nc -w 2 169.254.77.1 7701 < /dev/null").await;
    guest.succeeds(&format!("ip route add {bridge}/32 via 169.254.77.1 dev eth1")).await;
    guest.fails(&format!("ping -c 1 -W 2 {bridge}")).await;

    // A pod that cuts its network keeps the link.
    guest.succeeds("ip link set eth0 down").await;
    assert_eq!(vms.state(&instance).await, InstanceState::Running);
    guest.succeeds("true").await;
    vms.end(&instance).await;
}

/// The test sends the frames of the guest, over a device in place of the machine's device.
/// Verifies N24.
#[tokio::test]
async fn frames_by_which_a_guest_is_another_do_not_leave_its_cell() {
    let mut bench = Bench::new();
    bench.configure_dual_stack_cni();
    use_stub(&mut bench);
    let provider = Qemu::new(&bench.config, PauseImage::new(None));
    let spec = launch_spec(CellId::mint().unwrap(), vec![offering(SIZE)]);
    let instance = provider.launch(&spec, "token").await.unwrap();
    let namespace = format!("kiyot-{}", instance.cell);
    let ip = |arguments: &[&str]| run("ip", &[&["-n", &namespace], arguments].concat());
    wait_for("the stub has made its device", async || {
        let arguments = ["-n", &namespace, "link", "show", "tap-pod"];
        Command::new("ip").args(arguments).output().unwrap().status.success()
    })
    .await;
    ip(&["link", "set", "tap-pod", "name", "tap-unused"]);
    ip(&["link", "add", "tap-pod", "type", "veth", "peer", "name", "guest"]);
    ip(&["link", "set", "guest", "up"]);
    let attached = provider.attach(&instance.id, &attachment(&bench, &instance)).await.unwrap();
    let v4 = attached.addresses.iter().find_map(|address| match address {
        IpAddr::V4(address) => Some(*address),
        IpAddr::V6(_) => None,
    });
    let v6 = attached.addresses.iter().find_map(|address| match address {
        IpAddr::V4(_) => None,
        IpAddr::V6(address) => Some(*address),
    });
    let mac = attached.network.as_ref().unwrap().mac.0;
    let identity = Identity { mac, v4: v4.unwrap(), v6: v6.unwrap() };

    let (own, forged) = (identity.own(), identity.forged());
    let names = |frames: &[(&'static str, _)]| -> BTreeSet<_> {
        frames.iter().map(|(name, _)| (*name).to_owned()).collect()
    };
    let all: Vec<_> = forged.iter().chain(&own).map(frames::named).collect();
    let send = || {
        let sender = ["netns", "exec", &namespace, "python3", "-c", frames::SENDER, "guest"];
        let arguments = sender.into_iter().chain(all.iter().map(String::as_str));
        run("ip", &arguments.collect::<Vec<_>>());
    };
    let receiver = Receiver::start(names(&own));
    send();
    assert_eq!(receiver.names(), names(&own));

    // Without the rules each forged frame arrives.
    let rule = "filter add dev tap-pod parent ffff: protocol all prio 9 u32 match u8 0 0 action \
                mirred egress redirect dev eth0";
    let arguments = ["-n", &namespace].into_iter().chain(rule.split(' '));
    run("tc", &arguments.collect::<Vec<_>>());
    let everything: BTreeSet<_> = &names(&own) | &names(&forged);
    let receiver = Receiver::start(everything.clone());
    send();
    assert_eq!(receiver.names(), everything);

    let mut outcomes = provider.terminate(std::slice::from_ref(&instance.id)).await;
    assert_eq!(outcomes.remove(&instance.id).unwrap().unwrap(), Termination::Confirmed);
    bench.assert_clean(&instance.id);
}

/// The size of a transfer of many segments.
const ECHOED_BYTES: u64 = 1 << 20;

/// Sends bytes to a port of the guest that echoes them. Returns the number of echoed bytes.
async fn echo(to: SocketAddr) -> u64 {
    let connection = kiyot_testkit::wait_until("the guest listens", bench::LIMIT, async || {
        tokio::net::TcpStream::connect(to).await.ok()
    })
    .await;
    let (mut from, mut to) = connection.into_split();
    let sending = async move {
        to.write_all(&vec![7; usize::try_from(ECHOED_BYTES).unwrap()]).await.unwrap();
        to.shutdown().await.unwrap();
    };
    let mut sink = tokio::io::sink();
    let receiving = tokio::io::copy(&mut from, &mut sink);
    let (_, received) =
        tokio::time::timeout(bench::LIMIT, async { tokio::join!(sending, receiving) })
            .await
            .unwrap();
    received.unwrap()
}

/// Verifies N26.
#[tokio::test]
async fn machine_is_adopted_and_ends_with_its_launcher() {
    let mut vms = Vms::new();
    let (spec, instance, mut guest) = vms.launch().await;
    let (launcher, qemu) = (vms.bench.launcher(&instance.id), vms.qemu(&instance));

    // QEMU has another user, no privileges, and a root without the state of other cells.
    let status = fs::read_to_string(format!("/proc/{qemu}/status")).unwrap();
    let user = vms.bench.config.qemu.first_user;
    assert_eq!(fs::metadata(format!("/proc/{qemu}")).unwrap().uid(), user);
    for line in ["NoNewPrivs:\t1", "Seccomp:\t2", "CapEff:\t0000000000000000"] {
        assert!(status.contains(line), "{status}");
    }
    let root = format!("/proc/{qemu}/root");
    assert!(!Path::new(&format!("{root}{}", vms.bench.config.state_dir.display())).exists());

    // The boot data is read by the guest, and neither on disk nor in the command line.
    let boot_data =
        guest.succeeds("cat /sys/firmware/qemu_fw_cfg/by_name/opt/org.kiyot/cell.json/raw").await;
    assert!(boot_data.contains("\"secret\""), "{boot_data}");
    assert!(boot_data.contains("169.254.77.1:7700"), "{boot_data}");
    assert!(!vms.bench.instance_dir(&instance.id).join("cell.json").exists());
    let line = fs::read(format!("/proc/{qemu}/cmdline")).unwrap();
    assert!(!String::from_utf8_lossy(&line).contains("\"secret\""));
    guest.succeeds("mkdir /disk && mount -t ext4 /dev/vdb /disk && echo x > /disk/x").await;

    // Another daemon finds it.
    vms.provider = Qemu::new(&vms.bench.config, PauseImage::new(None));
    assert_eq!(vms.state(&instance).await, InstanceState::Running);
    let again = vms.provider.launch(&spec, "token").await.unwrap();
    assert_eq!(
        (again.id, again.offering),
        (instance.id.clone(), spec.candidates[0].offering.clone())
    );
    assert_eq!(vms.bench.launcher(&instance.id), launcher, "the machine was not launched again");
    guest.succeeds("true").await;

    kill(launcher);
    wait_for("QEMU ends with its launcher", async || {
        !Path::new(&format!("/proc/{qemu}/exe")).exists()
    })
    .await;
    // Its last thread may exit later.
    wait_for("the launcher has ended", async || {
        vms.state(&instance).await == InstanceState::Stopped
    })
    .await;
    vms.end(&instance).await;
}

#[tokio::test]
async fn machine_whose_qemu_is_killed_is_stopped() {
    let vms = Vms::new();
    let instance = vms.provider.launch(&vms.spec(SIZE), "token").await.unwrap();
    let qemu = wait_for_qemu(&vms, &instance).await;
    kill(qemu);
    wait_for("the launcher ends with QEMU", async || {
        vms.state(&instance).await == InstanceState::Stopped
    })
    .await;
    let listed = vms.provider.list_owned().await.unwrap();
    assert_eq!((listed.len(), listed[0].state), (1, InstanceState::Stopped));
    vms.end(&instance).await;
}

async fn wait_for_qemu(vms: &Vms, instance: &Instance) -> i32 {
    kiyot_testkit::wait_until("QEMU runs", bench::LIMIT, async || {
        let launcher = vms.bench.launcher(&instance.id);
        let children = format!("/proc/{launcher}/task/{launcher}/children");
        let pid: i32 = fs::read_to_string(children).ok()?.trim().parse().ok()?;
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        name.starts_with("qemu").then_some(pid)
    })
    .await
}

/// Verifies N27.
#[tokio::test]
async fn launch_over_the_nodes_memory_is_refused_and_leaves_nothing() {
    let vms = Vms::new();
    let size = Size { cpus: 1, memory_mib: 64 << 20 };
    let spec = vms.spec(size);
    let error = vms.provider.launch(&spec, "token").await.unwrap_err();
    let refused = LaunchRefusal::Offerings(vec![offering(size)]);
    assert_eq!((error.class, &error.refusal), (ErrorClass::Capacity, &Some(refused)));
    assert!(error.doing.contains(spec.cell.as_str()), "{}", error.doing);
    assert_eq!(vms.provider.list_owned().await.unwrap(), []);
    assert_eq!(vms.bench.resources(), Vec::<String>::new());
}

#[tokio::test]
async fn check_names_what_is_missing() {
    let mut vms = Vms::new();
    vms.provider.check().await.unwrap();
    fs::remove_file(vms.bench.config.qemu.image_dir.join("root.squashfs")).unwrap();
    let error = vms.provider.check().await.unwrap_err();
    let source = error.source.as_ref().unwrap().to_string();
    assert!(source.contains("root.squashfs"), "{error}: {source}");
    vms.bench.config.qemu.program = "/no/such/qemu".into();
    let error = Qemu::new(&vms.bench.config, PauseImage::new(None)).check().await.unwrap_err();
    assert!(error.doing.contains("/no/such/qemu"), "{}", error.doing);
}

/// Verifies N28.
#[tokio::test]
async fn probe_of_the_accelerator_ends_in_time_and_leaves_no_process() {
    let vms = Vms::new();
    let dir = vms.bench.path().join("probe");
    fs::create_dir(&dir).unwrap();
    let image = &vms.bench.config.qemu.image_dir;
    let machine = |accelerator: &str| {
        serde_json::json!({
            "program": "/usr/bin/qemu-system-x86_64",
            "accelerator": accelerator,
            "kernel": image.join("kernel"),
            "command_line": "console=ttyS0 earlyprintk=ttyS0 panic=-1",
            "cpus": 1,
            "memory_mib": 256,
            "user": 65521,
            "group": 65521,
        })
    };
    let probe = |accelerator: &str| {
        fs::write(dir.join("vm.json"), machine(accelerator).to_string()).unwrap();
        let program = vms.bench.config.qemu.cell_binary.as_ref().unwrap();
        let status = Command::new(program).arg("probe-vm").arg("--dir").arg(&dir).status().unwrap();
        status.code().unwrap()
    };
    // Translation runs everywhere, but on a busy node not always within the probe's limit. KVM runs
    // if the node has it.
    wait_for("a kernel prints in time", async || probe("tcg") == 0).await;
    assert!([0, 3].contains(&probe("kvm")));
    let running = run("ps", &["-e", "-o", "args"]);
    assert!(!running.contains(&format!("run-vm --dir {}", dir.display())), "{running}");
}

/// Shell scripts in place of QEMU, with the exit status of their probe: 0 if a kernel printed.
const PLAYED_QEMU: [(&str, i32); 7] = [
    ("echo '[    0.000000] Linux version 6.1.0'; exec sleep 7654", 0),
    ("printf 'SeaBIOS (ver'; printf 'sion 1.16)\\r\\nLinux ver'; printf 'sion 6.1'; exit 1", 0),
    ("exec sleep 7654", 3),
    ("exit 0", 3),
    ("echo 'qemu-system-x86_64: failed to initialize kvm: Permission denied' >&2; exit 1", 3),
    ("echo 'SeaBIOS (version 1.16)'; exec sleep 7654", 3),
    ("exec yes 'No bootable device.'", 3),
];

/// Verifies N28.
#[test]
fn probe_accepts_only_a_qemu_that_boots_a_kernel() {
    let bench = Bench::new();
    let program = Path::new(env!("CARGO_BIN_EXE_kiyot")).with_file_name("kiyot-cell");
    let results = PLAYED_QEMU.map(|(script, _)| {
        let dir = tempfile::tempdir_in(bench.path()).unwrap();
        let played = dir.path().join("played");
        let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" > \"$0\" && chmod 755 \"$0\"";
        run("sh", &["-c", write, &played.display().to_string(), script]);
        // The kernel is a file that the jail shows.
        let machine = serde_json::json!({
            "program": "/image/kernel",
            "accelerator": "tcg",
            "kernel": played,
            "command_line": "",
            "cpus": 1,
            "memory_mib": 256,
            "user": 65521,
            "group": 65521,
        });
        fs::write(dir.path().join("vm.json"), machine.to_string()).unwrap();
        let mut probe = Command::new(&program);
        let status = probe.arg("probe-vm").arg("--dir").arg(dir.path()).status().unwrap();
        (script, status.code().unwrap())
    });
    assert_eq!(results, PLAYED_QEMU);
    let running = run("ps", &["-e", "-o", "args"]);
    assert!(!running.contains("sleep 7654") && !running.contains("No bootable"), "{running}");
}
