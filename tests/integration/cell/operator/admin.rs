//! The admin API of a daemon with cells.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write,
    path::Path,
};

use futures::StreamExt;
use hyper_util::rt::TokioIo;
use kiyot_proto::admin::{self, admin_client::AdminClient};
use kiyot_testkit::{Container, Kiyot, KiyotOptions, LIMIT, Node, Pod, wait_until};
use tokio::{net::UnixStream, process::Command};
use tonic::{
    Code,
    transport::{Channel, Endpoint, Uri},
};
use tower::service_fn;

use crate::cell::{
    isolation::secrets::files_with, isolation::strangers::as_shipped, options, pod,
    registry::registries::with_mirrors, remove_and_assert_clean,
};

/// Returns a client of a daemon's admin API.
pub(crate) async fn admin(kiyot: &Kiyot<'_>) -> AdminClient<Channel> {
    AdminClient::new(channel(kiyot).await)
}

/// Returns a connection to a daemon's admin socket.
pub(crate) async fn channel(kiyot: &Kiyot<'_>) -> Channel {
    let socket = kiyot.socket().with_file_name("admin.sock");
    let connector = service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    endpoint.connect_with_connector(connector).await.unwrap()
}

/// Collects the entries of a stream of lists.
async fn all<P, I>(
    stream: tonic::Response<tonic::Streaming<P>>,
    items: impl Fn(P) -> Vec<I>,
) -> Vec<I> {
    let parts: Vec<_> = stream.into_inner().collect().await;
    parts.into_iter().flat_map(|part| items(part.unwrap())).collect()
}

pub(crate) async fn pods(client: &mut AdminClient<Channel>) -> Vec<admin::Pod> {
    let request = admin::ListPodsRequest::default();
    all(client.list_pods(request).await.unwrap(), |part| part.pods).await
}

pub(crate) async fn cells(client: &mut AdminClient<Channel>) -> Vec<admin::Cell> {
    let request = admin::ListCellsRequest::default();
    all(client.list_cells(request).await.unwrap(), |part| part.cells).await
}

pub(crate) async fn events(client: &mut AdminClient<Channel>) -> Vec<admin::Event> {
    let request = admin::ListEventsRequest::default();
    all(client.list_events(request).await.unwrap(), |part| part.events).await
}

pub(crate) fn log_of(pod: &str) -> admin::ReadLogRequest {
    admin::ReadLogRequest { pod: pod.to_owned(), ..Default::default() }
}

/// Returns the standard output and the standard error in a log.
pub(crate) async fn log(
    client: &mut AdminClient<Channel>,
    request: admin::ReadLogRequest,
) -> (String, String) {
    let parts = client.read_log(request).await.unwrap();
    let parts = all(parts, |part| vec![part]).await;
    let text = |bytes: Vec<&[u8]>| String::from_utf8(bytes.concat()).unwrap();
    (
        text(parts.iter().map(|part| &*part.stdout).collect()),
        text(parts.iter().map(|part| &*part.stderr).collect()),
    )
}

/// Verifies O20, O21.
#[tokio::test]
async fn operator_sees_a_pod_with_its_cell_events_and_log() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let script =
        "echo one; echo two >&2; echo three; trap 'exit 0' TERM; while :; do sleep 0.2; done";
    let wanted = Pod::new("seen")
        .in_cell()
        .label("app", "web")
        .annotation("example.com/note", "private")
        .container(Container::script("main", script).env("WORD", "sesame"));
    let running = kubelet.run_pod(&wanted).await.unwrap();
    // The order of the two streams is not defined, so each line is awaited.
    for line in ["two", "three"] {
        kubelet.logged(running.container("main"), line).await;
    }

    let mut client = admin(&kiyot).await;
    let version = client.version(admin::VersionRequest {}).await.unwrap().into_inner();
    assert_eq!(version.version, env!("CARGO_PKG_VERSION"));

    let listed = pods(&mut client).await;
    let [seen] = &*listed else { panic!("{listed:?}") };
    assert_eq!((seen.name.as_str(), seen.phase()), ("seen", admin::PodPhase::Running));
    assert_eq!(seen.labels.get("app").map(String::as_str), Some("web"));
    assert!(seen.other_annotations.contains(&"example.com/note".to_owned()), "{seen:?}");
    assert!(!seen.annotations.contains_key("example.com/note"), "{seen:?}");
    assert_eq!(seen.addresses.len(), 1);
    let [unit] = &*seen.units else { panic!("{:?}", seen.units) };
    assert_eq!((unit.name.as_str(), unit.state()), ("main", admin::UnitState::UnitRunning));
    assert!(unit.env.contains(&"WORD".to_owned()), "{unit:?}");
    assert!(unit.started_unix_nanos >= unit.created_unix_nanos, "{unit:?}");

    let listed = cells(&mut client).await;
    let [cell] = &*listed else { panic!("{listed:?}") };
    assert_eq!(
        (&cell.id, cell.phase(), cell.connected),
        (&seen.cell, admin::CellPhase::CellBound, true)
    );
    assert_eq!((cell.pod_name.as_str(), &cell.pod_uid), ("seen", &seen.uid));
    let timeline = cell.timeline.unwrap();
    assert!(timeline.launched > 0 && timeline.launched <= timeline.enrolled, "{timeline:?}");
    assert!(timeline.booted > 0 && timeline.booted <= timeline.enrolled, "{timeline:?}");
    assert!(timeline.enrolled <= timeline.bound && timeline.first_container > 0, "{timeline:?}");

    let happened: Vec<_> = events(&mut client).await;
    let of_cell = happened.iter().filter(|event| event.name == cell.id);
    let of_cell: Vec<_> = of_cell.map(|event| event.status.as_str()).collect();
    for status in ["Launching", "Launched", "Connected", "Bound", "Started"] {
        assert!(of_cell.contains(&status), "{status} is not in {of_cell:?}");
    }

    let whole = log(&mut client, log_of("seen")).await;
    assert_eq!(whole, ("one\nthree\n".to_owned(), "two\n".to_owned()));
    let last = admin::ReadLogRequest { lines: Some(1), ..log_of("seen") };
    let (stdout, stderr) = log(&mut client, last).await;
    assert_eq!((stdout + &stderr).lines().count(), 1);
    let refused = client.read_log(log_of("unseen")).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound, "{refused:?}");
    let unit = admin::ReadLogRequest { unit: "side".to_owned(), ..log_of("seen") };
    let refused = client.read_log(unit).await.unwrap_err();
    assert!(refused.message().contains("allowed: main"), "{refused:?}");

    let request = admin::ExecRequest {
        pod: "seen".to_owned(),
        command: vec!["true".to_owned()],
        ..Default::default()
    };
    let url = client.exec(request).await.unwrap().into_inner().url;
    assert!(url.starts_with("http://127.0.0.1:"), "{url}");

    let backends = client.list_backends(admin::ListBackendsRequest {}).await.unwrap().into_inner();
    let counted: BTreeMap<_, _> =
        backends.backends.iter().map(|backend| (backend.name.as_str(), backend.cells)).collect();
    assert_eq!(counted, BTreeMap::from([("containerd", 0), ("milpa", 1)]));

    // A follower gets the rest of the log and then the end of the stream.
    let following = admin::ReadLogRequest { follow: true, ..log_of("seen") };
    let mut follower = client.clone();
    let followed = tokio::spawn(async move { log(&mut follower, following).await });
    kubelet.stop_pod(&running).await.unwrap();
    assert_eq!(followed.await.unwrap(), whole);
    let ended = pods(&mut client).await;
    assert_eq!(ended[0].phase(), admin::PodPhase::Succeeded, "{ended:?}");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
    assert_eq!((pods(&mut client).await, cells(&mut client).await), (Vec::new(), Vec::new()));
}

/// Verifies O22.
#[tokio::test]
async fn cordon_outlives_the_daemon_and_ended_cell_fails_its_pod() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let running = kubelet.run_pod(&pod("first", "sleep 1000")).await.unwrap();
    let mut client = admin(&kiyot).await;
    let answer = client.cordon(admin::CordonRequest {}).await.unwrap().into_inner();
    assert_eq!(answer.cells, 1);
    kiyot.kill9();
    kiyot.start_again().await;

    let mut kubelet = kiyot.kubelet().await;
    let refused = kubelet.run_pod(&pod("second", "sleep 1000")).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().contains("milpactl uncordon"), "{refused:?}");
    let mut client = admin(&kiyot).await;
    let cell = cells(&mut client).await.pop().unwrap().id;
    client.end_cell(admin::EndCellRequest { cell: cell.clone() }).await.unwrap();
    wait_until("the pod has failed", LIMIT, async || {
        let listed = pods(&mut client).await;
        (listed.first()?.phase() == admin::PodPhase::Failed).then_some(())
    })
    .await;
    let missing = client.end_cell(admin::EndCellRequest { cell }).await.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound, "{missing:?}");

    client.uncordon(admin::UncordonRequest {}).await.unwrap();
    let second = kubelet.run_pod(&pod("third", "sleep 1000")).await.unwrap();
    kubelet.stop_and_remove(&second).await.unwrap();
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Returns the first bytes of each private key in files beneath a directory, as hexadecimal digits
/// and as Rust prints bytes.
fn private_keys(dir: &Path) -> Vec<String> {
    // An `ECPrivateKey` of RFC 5915 begins with version 1 and an octet string of 32 bytes.
    const BEGIN: [u8; 5] = [0x02, 0x01, 0x01, 0x04, 0x20];
    let mut found = BTreeSet::new();
    for file in files_with(dir, &BEGIN) {
        let content = fs::read(file).unwrap();
        let all = content.windows(BEGIN.len() + 8).filter(|part| part.starts_with(&BEGIN));
        for key in all.map(|part| &part[BEGIN.len()..]) {
            found.insert(key.iter().map(|byte| format!("{byte:02x}")).collect());
            found.insert(key.iter().map(u8::to_string).collect::<Vec<_>>().join(", "));
        }
    }
    found.into_iter().collect()
}

/// Returns the enrolment tokens in files beneath a directory.
fn tokens(dir: &Path) -> Vec<String> {
    const BEGIN: &[u8] = b"\"token\":";
    let mut found = BTreeSet::new();
    for file in files_with(dir, BEGIN) {
        let content = fs::read(file).unwrap();
        let all = content.windows(BEGIN.len()).enumerate().filter(|(_, part)| *part == BEGIN);
        for (at, _) in all {
            let rest = content[at + BEGIN.len()..].trim_ascii_start().iter().skip(1);
            let token: Vec<u8> = rest.copied().take_while(|byte| *byte != b'"').collect();
            // Shorter fields of this name belong to other programs.
            found.extend(String::from_utf8(token).ok().filter(|token| token.len() >= 32));
        }
    }
    found.into_iter().collect()
}

/// Verifies O23.
#[tokio::test]
async fn support_bundle_has_no_secret() {
    let node = Node::start().await;
    let kubeconfig = node.directory().join("kubeconfig");
    let user = "{name: u, user: {token: hush-kube-5, client-key-data: aHVzaC1rZXktNg==}}";
    let clusters = "[{name: c, cluster: {server: \"https://127.0.0.1:1\"}}]";
    let contexts = "[{name: x, context: {cluster: c, user: u}}]";
    let text = format!(
        "{{kind: Config, apiVersion: v1, current-context: x, clusters: {clusters}, \
         contexts: {contexts}, users: [{user}]}}"
    );
    fs::write(&kubeconfig, text).unwrap();
    let sections = format!("[kubernetes]\nkubeconfig = \"{}\"\n", kubeconfig.display());
    let registry = node.registries().join("registry.example");
    fs::create_dir_all(&registry).unwrap();
    let server = "http://violet:hush-server-12@127.0.0.1:1";
    let hosts = format!(
        "server = {server:?}\n\n[host.{server:?}]\ncapabilities = [\"pull\", \"resolve\"]\n\
         [host.{server:?}.header]\nauthorization = \"Basic hush-header-13\"\n"
    );
    fs::write(registry.join("hosts.toml"), hosts).unwrap();
    let kiyot = Kiyot::start(&node, KiyotOptions { sections, ..with_mirrors(&node) }).await;
    let mut kubelet = kiyot.kubelet().await;
    let planted = [
        "hush-env-1",
        "hush-annotation-2",
        "hush-argument-3",
        "hush-password-4",
        "hush-kube-5",
        "aHVzaC1rZXktNg",
        "arn:aws:iam::123456789012:instance-profile/hush-7",
        "hush-exec-8",
        "hush-identity-9",
        "hush-registry-10",
        "hush-console-11",
        "hush-server-12",
        "hush-header-13",
        "hush-refused-14",
        "hush-planned-15",
    ];
    let wanted = Pod::new("secretive")
        .in_cell()
        .annotation("example.com/body", planted[1])
        .annotation("pod.elotl.co/instance-profile", planted[6])
        .container(
            Container::script("main", &format!("true {}; sleep 1000", planted[2]))
                .env("PASSWORD", planted[0]),
        );
    let running = kubelet.run_pod(&wanted).await.unwrap();
    kubelet.exec_sync(&running.container("main").id, &["true", planted[7]]).await.unwrap();
    let auths = [
        kiyot_testkit::cri::AuthConfig {
            username: "someone".to_owned(),
            password: planted[3].to_owned(),
            ..Default::default()
        },
        kiyot_testkit::cri::AuthConfig {
            identity_token: planted[8].to_owned(),
            ..Default::default()
        },
        kiyot_testkit::cri::AuthConfig {
            registry_token: planted[9].to_owned(),
            ..Default::default()
        },
    ];
    // No registry listens at this address.
    let absent = "127.0.0.1:1/absent:1";
    for auth in auths {
        kubelet.pull(&wanted, &running.config, absent, Some(auth)).await.unwrap_err();
    }
    kubelet.pull(&wanted, &running.config, "registry.example/absent:1", None).await.unwrap_err();
    let refused = pod("refused", "true").annotation("pod.elotl.co/volume-size", planted[13]);
    let error = kubelet.run_pod(&refused).await.unwrap_err();
    assert!(error.message().contains(planted[13]), "the error has the planted value: {error:?}");
    kubelet.forget(&refused);
    let keys = private_keys(&kiyot.state());
    assert!(!keys.is_empty(), "the records have the key of the authority");
    let tokens = tokens(&kiyot.state());
    assert!(!tokens.is_empty(), "the records have the token of the cell");
    let cell = kiyot.cells().remove(0);
    let console = kiyot.state().join("cells").join(&cell).join("console.log");
    let mut console = fs::OpenOptions::new().append(true).open(console).unwrap();
    writeln!(console, "{}", planted[10]).unwrap();

    let mut client = admin(&kiyot).await;
    assert!(log(&mut client, log_of(&cell)).await.0.contains(planted[10]));
    let planned = format!(
        "{{kind: Pod, apiVersion: v1, metadata: {{name: p, \
         annotations: {{kubernetes.io/target-runtime: kiyot, pod.elotl.co/volume-size: {}}}}}, \
         spec: {{containers: [{{name: c, image: i}}]}}}}",
        planted[14]
    );
    let file = admin::ManifestFile { name: "pods.yaml".to_owned(), text: planned };
    let planned = client.plan(admin::PlanRequest { files: vec![file] }).await.unwrap().into_inner();
    assert!(planned.pods[0].refused, "{planned:?}");
    assert!(planned.pods[0].facts.concat().contains(planted[14]), "the plan has the planted value");
    let parts = client.dump(admin::DumpRequest {}).await.unwrap();
    let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut current = String::new();
    for part in all(parts, |part| vec![part]).await {
        if !part.file.is_empty() {
            current.clone_from(&part.file);
        }
        files.entry(current.clone()).or_default().extend_from_slice(&part.content);
    }
    let text = |file: &str| String::from_utf8_lossy(&files[file]).into_owned();
    for shown in ["secretive", "PASSWORD", "example.com/body"] {
        assert!(text("pods.txt").contains(shown), "{shown}: {}", text("pods.txt"));
    }
    let version = text("version.txt");
    let cells = kiyot.cells();
    let asked = kiyot_testkit::cri::VersionRequest::default();
    let runtime = kubelet.runtime.version(asked).await.unwrap().into_inner();
    for part in [
        "kernel: Linux version".to_owned(),
        format!("runtime containerd: \"containerd\" {:?}, CRI \"v1\"\n", runtime.runtime_version),
        format!("agent of {}: \"kiyot-cell/{}\"\n", cells[0], env!("CARGO_PKG_VERSION")),
    ] {
        assert!(version.contains(&part), "{part} is not in {version}");
    }
    assert!(text("config.txt").contains("state_dir"));
    assert!(text("log.txt").contains("daemon starting"));
    assert!(text("cells.txt").contains("CellBound"), "{}", text("cells.txt"));
    assert!(text("provider.txt").contains("Running"), "{}", text("provider.txt"));
    for record in [format!("milpa cells {cell} "), "milpa node ".to_owned()] {
        assert!(text("records.txt").contains(&record), "{record}: {}", text("records.txt"));
    }
    let secrets: Vec<String> =
        planted.iter().map(|&planted| planted.to_owned()).chain(keys).chain(tokens).collect();
    // The bundle has only the end of the log: the whole log is checked too.
    files.insert("the daemon's log".to_owned(), kiyot.log().into_bytes());
    let found: Vec<_> = files
        .iter()
        .flat_map(|(file, content)| {
            let content = String::from_utf8_lossy(content).into_owned();
            let has = move |secret: &&String| content.contains(secret.as_str());
            secrets.iter().filter(has).map(move |secret| (file, secret))
        })
        .collect();
    assert_eq!(found, []);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Runs milpactl as a user. Returns its output and exit code.
pub(crate) async fn milpactl(
    kiyot: &Kiyot<'_>,
    user: Option<(u32, u32)>,
    line: &str,
) -> (String, i32) {
    let program = Path::new(env!("CARGO_BIN_EXE_kiyot")).with_file_name("milpactl");
    assert!(program.exists(), "{} is missing: cargo build --workspace --bins", program.display());
    let mut command = Command::new(program);
    command.arg("--socket").arg(kiyot.socket().with_file_name("admin.sock"));
    command.args(line.split(' '));
    if let Some((user, group)) = user {
        command.uid(user).gid(group);
    }
    let output = command.output().await.unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8(text).unwrap();
    println!("$ milpactl {line}\n{text}");
    (text, output.status.code().unwrap())
}

/// Verifies O20, O24, O34.
#[tokio::test]
async fn milpactl_shows_the_pods_of_a_daemon_by_the_rights_of_its_user() {
    let node = Node::start().await;
    let with_group =
        KiyotOptions { sections: "[admin]\ngroup = \"daemon\"\n".to_owned(), ..options() };
    let kiyot = Kiyot::start(&node, with_group).await;
    let directory = as_shipped(&kiyot);
    let mut kubelet = kiyot.kubelet().await;
    let script = "echo ready; while :; do sleep 1; done";
    let wanted =
        Pod::new("web").in_cell().label("app", "web").container(Container::script("main", script));
    let running = kubelet.run_pod(&wanted).await.unwrap();
    kubelet.logged(running.container("main"), "ready").await;

    for line in ["version", "get pods", "get pod web -oyaml", "get cells -o wide", "get backends"] {
        assert_eq!(milpactl(&kiyot, None, line).await.1, 0, "{line}");
    }
    for line in ["get events", "get metrics", "get usage", "get offerings", "pool", "top"] {
        assert_eq!(milpactl(&kiyot, None, line).await.1, 0, "{line}");
    }
    // `make` gives the build its commit; other builds may not know it.
    let daemon = Command::new(env!("CARGO_BIN_EXE_kiyot")).arg("version").output().await.unwrap();
    let daemon = String::from_utf8(daemon.stdout).unwrap();
    let commit = daemon.split(", ").find_map(|part| part.strip_prefix("commit ")).unwrap();
    let commit = if commit == "unknown" { "" } else { commit };
    let (text, _) = milpactl(&kiyot, None, "version").await;
    assert!(text.ends_with(&format!("\"GitCommit\": \"{commit}\"}}\n")), "{text}: {daemon}");
    let (text, code) = milpactl(&kiyot, None, "get offerings").await;
    assert!(code == 0 && text.contains("netns") && text.contains("any"), "{text}");
    let (text, code) = milpactl(&kiyot, None, "describe pod web").await;
    assert!(code == 0 && text.contains("first container") && text.contains("Bound"), "{text}");
    let console = text.split_once("Console ends:\n").unwrap().1;
    let lines = console.lines().take_while(|line| *line != "Events:").count();
    assert!((1..=10).contains(&lines), "{text}");
    assert_eq!(milpactl(&kiyot, None, "logs web --lines 1").await, ("ready\n".to_owned(), 0));
    assert_eq!(milpactl(&kiyot, None, "get pod wep").await.1, 66);

    let reader = Some((65_534, 1));
    let argument = "sleep 1; done";
    let (text, code) = milpactl(&kiyot, None, "get pod web -ojson").await;
    assert!(code == 0 && text.contains(argument), "{text}");
    let (text, code) = milpactl(&kiyot, reader, "get pod web -ojson").await;
    assert!(code == 0 && text.contains("\"main\"") && !text.contains(argument), "{text}");
    let (cell, _) = milpactl(&kiyot, None, "get cells -o name").await;
    // A line of `-o name` is accepted in place of an id.
    let (text, code) = milpactl(&kiyot, None, &format!("logs {}", cell.trim())).await;
    assert!(code == 0 && text.contains("agent started"), "{code}: {text}");
    let (text, code) = milpactl(&kiyot, None, &format!("logs -f {}", cell.trim())).await;
    assert_eq!(code, 64, "the console of a cell can't be followed: {text}");
    let (text, code) = milpactl(&kiyot, reader, "describe pod web").await;
    assert!(code == 0 && text.contains("Bound") && !text.contains("Console"), "{text}");
    assert_eq!(milpactl(&kiyot, reader, "get pods -o name").await, ("pod/default/web\n".into(), 0));
    let manifest = directory.join("planned.yaml");
    let wanted = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: planned\n  annotations:\n    \
                  kubernetes.io/target-runtime: kiyot\nspec:\n  containers:\n  - name: main\n    \
                  image: web\n";
    fs::write(&manifest, wanted).unwrap();
    let plan = format!("plan -f {}", manifest.display());
    let (text, code) = milpactl(&kiyot, reader, &plan).await;
    for part in ["Pod default/planned", "goes to milpa", "its instance: netns", "its backend: 1 of"]
    {
        assert!(code == 0 && text.contains(part), "{part} is not in {text}");
    }
    fs::write(&manifest, wanted.replace("spec:", "spoc:")).unwrap();
    let (text, code) = milpactl(&kiyot, reader, &plan).await;
    assert!(code == 64 && text.contains("document 1.spec: is missing"), "{code}: {text}");
    for line in ["logs web", "dump all", "cordon", "drain --end"] {
        let (text, code) = milpactl(&kiyot, reader, line).await;
        assert!(code == 77 && text.contains("is for root"), "{line}: {code} {text}");
    }
    assert_eq!(milpactl(&kiyot, Some((65_534, 65_534)), "get pods").await.1, 77);
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies O25.
#[tokio::test]
async fn connection_above_the_limit_is_refused_with_the_limit_until_another_ends() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut open = Vec::new();
    for _ in 0..64 {
        let mut client = admin(&kiyot).await;
        client.version(admin::VersionRequest {}).await.unwrap();
        open.push(client);
    }
    let refused = admin(&kiyot).await.version(admin::VersionRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused:?}");
    assert!(refused.message().contains("root has 64 connections; allowed: 64"), "{refused:?}");
    drop(open);
    wait_until("an ended connection has left its place", LIMIT, async || {
        admin(&kiyot).await.version(admin::VersionRequest {}).await.ok()
    })
    .await;
}
