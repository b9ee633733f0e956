//! Seeds of the targets: a few valid inputs of each.

use std::collections::HashMap;

use kiyot_proto::{cell, cri};
use prost::Message;

/// Returns the seeds of a target; empty for an unknown target.
pub fn of(target: &str) -> Vec<Vec<u8>> {
    match target {
        "peek" => vec![
            pod("web", &[]).encode_to_vec(),
            pod("x", &[("a", "1"), ("kubernetes.io/target-runtime", "kiyot")]).encode_to_vec(),
            b"\x0a\x08\x35\x06\x0a\x01a\x12\x011".to_vec(),
        ],
        "merge" => merge(),
        "frame" => {
            let sandbox = cri::PodSandbox { id: "s1".into(), ..Default::default() };
            let list = cri::ListPodSandboxResponse { items: vec![sandbox] };
            let run = cri::RunPodSandboxResponse { pod_sandbox_id: "s2".into() };
            vec![
                framed(&list),
                framed(&run),
                b"10S".to_vec(),
                b"999999999n".to_vec(),
                run.encode_to_vec(),
                list.encode_to_vec(),
            ]
        }
        // A request, SETTINGS, and a response in HEADERS, DATA and HEADERS; then a request that
        // waits for windows.
        "runtime" => {
            vec![
            b"\x01\x08\x0b\x00\x00\x06\x00\x03\x00\x00\x00\x02\x08\x0a\x04\x01\x01\x88\x06\x09\x00\
              \x01\x04abcd\x06\x0a\x05\x01\x0e\x00\x0bgrpc-status\x010\x06\x02".to_vec(),
            b"\x00\xff\x04\x08\xf8\xf8\x0c\x00\x00\x04\x00\x00\xff\xff\x0c\x00\x01\x04\x00\x00\xff\
              \xff\xf8\xf8\x05\xf8\x0e\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00\x00".to_vec(),
        ]
        }
        // SETTINGS, a request in HEADERS and DATA that is read and answered, and its end. Then a
        // request without a window, a cancelled request, and a graceful shutdown.
        "kubelet" => {
            vec![
            b"\x0b\x00\x00\x06\x00\x04\x00\x01\x00\x00\x0a\x04\x01\x03\x83\x86\x84\x09\x01\x01\
              \x04abcd\x04\x01\x02\x03\x06\xf8\xf8\x0c\x00\x01\x04\x00\x00\xff\xff\x08".to_vec(),
            b"\x0a\x04\x01\x0b\x83\x86\x84\x0f\x0d\x010\x00\x01a\x00\x0a\x05\x03\x03\x83\x86\x84\
              \x01\x02\x11\x12\x00\x0e\x00\x03\x04\x00\x00\x00\x08\x16\x0f\x01\x06\x08lastcall\x03\
              \x06\xf8\x48\x0a\x05\x05\x03\x83\x86\x84".to_vec(),
            // Frames of a skipped stream are refused.
            b"\x0b\x00\x00\x06\x00\x04\x00\x01\x00\x00\x0a\x04\x81\x03\x83\x86\x84\x09\x01\x01\
              \x04abcd".to_vec(),
        ]
        }
        "head" => texts(&[
            "POST /token HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc",
            "GET /t?x=1 HTTP/1.1\r\nUpgrade: SPDY/3.1\r\nConnection: Upgrade\r\n\r\n",
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n\u{1}\u{2}",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nx: y\r\n\
             \r\nmore",
            "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone",
            "HTTP/1.0 500 x\r\n\r\nuntil the end",
            "http://127.0.0.1:34567/exec/abc?x=y",
            "http://h:1/\u{e4}",
        ]),
        // An accepted stream, data and its end, a ping, a reset and the end of the connection.
        "spdy" => vec![
            b"\x80\x03\0\x02\0\0\0\x04\0\0\0\x01\0\0\0\x01\0\0\0\x05hello\0\0\0\x01\x01\0\0\0"
                .to_vec(),
            b"\x80\x03\0\x06\0\0\0\x04\0\0\0\x02\x80\x03\0\x03\0\0\0\x08\0\0\0\x03\0\0\0\x05\
              \x80\x03\0\x04\0\0\0\0\x80\x03\0\x07\0\0\0\0"
                .to_vec(),
            b"\x80\x02\0\x02\0\0\0\x04\0\0\0\x01".to_vec(),
        ],
        "config" => vec![
            include_bytes!("../../config/kiyot.toml").to_vec(),
            include_bytes!("../../examples/opt-in.toml").to_vec(),
            include_bytes!("../../examples/opt-out.toml").to_vec(),
        ],
        "manifest" => {
            vec![
                include_bytes!("../../examples/pod-in-a-cell.yaml").to_vec(),
                include_bytes!("../../examples/pod-on-the-node.yaml").to_vec(),
                include_bytes!("../../crates/kiyot-manifest/src/samples/cronjob.yaml").to_vec(),
                include_bytes!("../../crates/kiyot-manifest/src/samples/deployment.yaml").to_vec(),
                include_bytes!("../../crates/kiyot-manifest/src/samples/every-field.yaml").to_vec(),
                include_bytes!("../../crates/kiyot-manifest/src/samples/gpu-job.yaml").to_vec(),
                include_bytes!("../../crates/kiyot-manifest/src/samples/list.json").to_vec(),
                include_bytes!("../../crates/kiyot-manifest/src/samples/statefulset.yaml").to_vec(),
            ]
        }
        "annotations" => texts(&[
            "kubernetes.io/target-runtime=kiyot\n",
            "pod.elotl.co/launch-type=spot\npod.elotl.co/instance-type=c5.large\n\
             pod.elotl.co/volume-size=10Gi\n",
            "pod.elotl.co/launch-type=Spot-Preferred\npod.elotl.co/instance-type=*a?*\n\
             pod.elotl.co/cpu=1500m\npod.elotl.co/memory=4Gi\npod.elotl.co/gpu=2 nvidia\n\
             pod.elotl.co/architecture=x86_64\npod.elotl.co/max-price=0.0416\n\
             pod.elotl.co/sustained-cpu=true\n",
            "pod.elotl.co/lunch-type=Spot\npods.elotl.co/cpu=1\npod.elotl.co/zone=a\n",
        ]),
        "catalogue" => texts(&[
            "instance_type,vcpus,memory_mib,architectures,burstable,baseline_vcpus,gpus,\
             gpu_manufacturer,usage_classes,on_demand_usd_per_hour,zones,spot_usd_per_hour\n\
             a.large,2,8192,x86_64|arm64,True,0.6,0,,on-demand|spot,0.0752,a|b,0.03\n\
             b.metal,96,393216,x86_64,,,8,NVIDIA,spot,4.6,,\n",
            "instance_type,vcpus,memory_mib,architectures\n\"a\",1,512,arm64\nb,0,1,x\na,2\n",
        ]),
        "product" => {
            let attributes = "\"instanceType\":\"t3.nano\",\"regionCode\":\"us-east-1\",\
                              \"operatingSystem\":\"Linux\",\"tenancy\":\"Shared\",\
                              \"preInstalledSw\":\"NA\",\"capacitystatus\":\"Used\"";
            let dimension = "{\"unit\":\"Hrs\",\"pricePerUnit\":{\"USD\":\"0.0052000000\"}}";
            let product = |terms: &str| {
                format!("{{\"product\":{{\"attributes\":{{{attributes}}}}},\"terms\":{terms}}}")
            };
            let term = format!("{{\"A\":{{\"priceDimensions\":{{\"B\":{dimension}}}}}}}");
            texts(&[
                &product(&format!("{{\"OnDemand\":{term},\"Reserved\":{{}}}}")),
                &product(&format!("{{\"OnDemand\":{{}},\"Reserved\":{term}}}")),
                &product("{\"OnDemand\":[]}"),
            ])
        }
        "workload" => texts(&[
            "arrival_s,cpu,memory,duration_s,launch_type,namespace\n\
             0.5,500m,1Gi,60,Spot,web\n7,,,0,,\n",
            "duration_s,arrival_s\n-1,2\n1,2678401\n\"1\n",
        ]),
        "events" => vec![told().iter().flat_map(Message::encode_length_delimited_to_vec).collect()],
        "answers" => answers(),
        "log" => log(),
        "netns" => netns(),
        "volumes" => volumes(),
        "files" => files(),
        _ => Vec::new(),
    }
}

fn texts(texts: &[&str]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

fn pod(name: &str, annotations: &[(&str, &str)]) -> cri::RunPodSandboxRequest {
    let pairs: HashMap<String, String> =
        annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let metadata = Some(cri::PodSandboxMetadata {
        name: name.into(),
        uid: "u".into(),
        namespace: "shop".into(),
        attempt: 1,
    });
    let config = cri::PodSandboxConfig {
        metadata,
        labels: pairs.clone(),
        annotations: pairs,
        ..Default::default()
    };
    cri::RunPodSandboxRequest { config: Some(config), runtime_handler: "kiyot".into() }
}

/// Frames a gRPC message.
fn framed(message: &impl Message) -> Vec<u8> {
    let message = message.encode_to_vec();
    let mut out = vec![0];
    out.extend((message.len() as u32).to_be_bytes());
    out.extend(message);
    out
}

fn merge() -> Vec<Vec<u8>> {
    let list = |id: &str| cri::ListContainersResponse {
        containers: vec![cri::Container { id: id.into(), ..Default::default() }],
    };
    let handlers = cri::StatusResponse {
        runtime_handlers: vec![cri::RuntimeHandler { name: "runc".into(), ..Default::default() }],
        ..Default::default()
    };
    vec![
        [
            framed(&list("one")),
            b"|||".to_vec(),
            framed(&list("two")),
            b"|||".to_vec(),
            list("ours").encode_to_vec(),
        ]
        .concat(),
        [framed(&handlers), b"|||".to_vec()].concat(),
        [framed(&cri::StatusResponse::default()), b"|||".to_vec(), vec![0, 0, 0]].concat(),
    ]
}

fn status(id: &str, state: cri::ContainerState) -> cri::ContainerStatus {
    cri::ContainerStatus {
        id: id.into(),
        state: state.into(),
        started_at: 5,
        finished_at: 9,
        exit_code: 3,
        reason: "Error".into(),
        ..Default::default()
    }
}

fn usage(id: &str) -> cri::ContainerStats {
    cri::ContainerStats {
        attributes: Some(cri::ContainerAttributes { id: id.into(), ..Default::default() }),
        memory: Some(cri::MemoryUsage {
            working_set_bytes: Some(cri::UInt64Value { value: 42 }),
            ..Default::default()
        }),
        writable_layer: Some(cri::FilesystemUsage {
            fs_id: Some(cri::FilesystemIdentifier::default()),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn metrics() -> cell::Metrics {
    let labels = vec![cell::Label { key: "interface".into(), value: "eth0".into() }];
    let sample =
        cell::Sample { name: "container_network_receive_packets_total".into(), value: 3, labels };
    let of_container = cell::ContainerSamples {
        container: "a".into(),
        timestamp: 5,
        samples: vec![cell::Sample { name: "container_sockets".into(), ..Default::default() }],
    };
    cell::Metrics { pod: vec![sample], timestamp: 4, containers: vec![of_container] }
}

/// Returns an agent's reports of a container, from start to end.
fn told() -> Vec<cell::Event> {
    let container = |state| cell::event::Event::Container(status("a", state));
    let containers = vec![
        status("a", cri::ContainerState::ContainerCreated),
        status("b", cri::ContainerState::ContainerRunning),
    ];
    let events = [
        cell::event::Event::Snapshot(cell::Snapshot { containers, ..Default::default() }),
        container(cri::ContainerState::ContainerRunning),
        cell::event::Event::Heartbeat(cell::Heartbeat {
            containers: vec![usage("a"), usage("b")],
            sandbox: Some(cri::PodSandboxStats::default()),
            metrics: Some(metrics()),
            ..Default::default()
        }),
        container(cri::ContainerState::ContainerExited),
        cell::event::Event::ContainerGone("b".into()),
        cell::event::Event::Log(cell::LogGrown { path: "logs/c/0.log".into(), size: 7 }),
        cell::event::Event::SandboxGone("s".into()),
    ];
    events.into_iter().map(|event| cell::Event { event: Some(event) }).collect()
}

fn answers() -> Vec<Vec<u8>> {
    let create = |of: u8, id: &str| {
        let answer = cri::CreateContainerResponse { container_id: id.into() };
        [vec![of], answer.encode_length_delimited_to_vec()].concat()
    };
    let say = |of: u8| {
        told()
            .iter()
            .flat_map(|event| [vec![4 | of], event.encode_length_delimited_to_vec()].concat())
            .collect::<Vec<u8>>()
    };
    vec![
        [create(0, "a"), create(0, "b"), create(1, "c"), say(0), say(1)].concat(),
        // A name of the other cell, and a malformed name.
        [create(0, "a"), create(1, "a"), say(0), vec![2 | 1 << 3], say(0), create(0, ""), say(1)]
            .concat(),
        // A container is removed and created again, while the other cell reports on it.
        [create(0, "a"), say(1), say(0), vec![2], create(0, "a"), say(0)].concat(),
    ]
}

fn log() -> Vec<Vec<u8>> {
    // CRI log format: time, stream, whole (F) or partial (P) line, content.
    let line = |stream: &str, tag: &str, text: &str| {
        let line = format!("2026-01-02T03:04:05.678901234Z {stream} {tag} {text}");
        [vec![0, line.len() as u8], line.into_bytes()].concat()
    };
    let lines = [
        line("stdout", "F", "one"),
        line("stderr", "P", "half of "),
        line("stderr", "F", "a line"),
    ]
    .concat();
    vec![
        [vec![7], lines.clone(), vec![2, 3], lines.clone(), vec![3, 2]].concat(),
        [vec![1], lines.clone(), vec![3, 4, 3], lines.clone()].concat(),
        [vec![40], lines.clone(), vec![6, 0, 2, 6, 2, 3], lines.clone(), vec![6, 3, 2, 6, 4, 5, 2]]
            .concat(),
        // A read ends within a line, the rest of the line arrives, and the kubelet rotates.
        [
            vec![9],
            vec![1, 3],
            b"one".to_vec(),
            vec![0, 3],
            b"two".to_vec(),
            vec![1, 5],
            b"three".to_vec(),
            vec![5, 0, 4],
            b"four".to_vec(),
            vec![3, 2],
        ]
        .concat(),
        // The daemon is killed within a line, and the kubelet rotates at once.
        [vec![1], vec![0, 3], b"one".to_vec(), vec![0, 3], b"two".to_vec(), vec![3, 4, 3, 2]]
            .concat(),
        [
            vec![9],
            vec![1, 4],
            b"part".to_vec(),
            vec![3, 4],
            lines,
            vec![7, 255, 255, 255, 255, 255, 255, 255, 255, 2],
        ]
        .concat(),
    ]
}

fn netns() -> Vec<Vec<u8>> {
    texts(&[
        r#"{"cniVersion":"1.0.0","name":"list","plugins":[{"type":"bridge","ipam":{"type":"host-local","mtu":1500.5}},{"type":"portmap","capabilities":{"portMappings":true}}]}"#,
        r#"{"cniVersion":"0.3.1","name":"single","type":"ptp"}"#,
        r#"{"cniVersion":"1.0.0","interfaces":[{"name":"cni0"},{"name":"eth0","sandbox":"/run/netns/x"}],"ips":[{"interface":1,"address":"fd00::5/64"},{"interface":1,"address":"10.1.0.5/24"}]}"#,
        r#"{"cniVersion":"1.0.0","code":7,"msg":"no","details":"none left"}"#,
        r#"{"token_sha256":"t","boot_id":"b","launcher":{"pid":7,"start":9},"cgroups":["/a"],"attachment":{"pod_name":"p","pod_namespace":"n","pod_uid":"u","sandbox":"s","ports":[]}}"#,
        r#"{"pod_name":"p","pod_namespace":"n","pod_uid":"u","sandbox":"s","way":{"bridge":{"device":"kiyot0","network":"10.200.0.0","prefix":24,"addresses":"/a"}},"ports":[{"protocol":"tcp","host_ip":null,"host_port":80,"container_port":8080}],"addresses":["10.200.0.2"]}"#,
        r#"{"pod_name":"p","pod_namespace":"n","pod_uid":"u","sandbox":"s","way":{"cni":{"name":"n","version":"1.0.0","plugins":[{"type":"ptp"}],"bin_dirs":["/b"],"result":{"ips":[]}}},"addresses":null}"#,
        r#"{"bootstrap":{"cell":"cell-aaaaaaaaaaaa","gateway":{"unix":"/g.sock"},"ca_sha256":"00","token":"open-sesame","orphan_timeout_secs":900},"containerd":"containerd","runc":"runc","pause_image":"pause"}"#,
        "36 35 98:0 / /sys/fs/cgroup rw,noatime master:1 - cgroup2 cgroup2 rw,nsdelegate\n\
         0::/a/0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef/b\n",
        "{}",
        r#"{"ips":[{"address":"10.1.0.5/33"},{"address":"10.1.0.6/24"},{"address":"10.1.0.7/+8"}]}"#,
        "/mnt1\0/mnt 2\\x\0/\u{e4}\n#\0/",
    ])
}

/// Entry of a volume's tree.
fn entry(kind: u8, dir: u8, name: &str, content: &str) -> Vec<u8> {
    [&[kind, dir], name.as_bytes(), &[0, content.len() as u8], content.as_bytes()].concat()
}

/// Returns a volume as the kubelet writes it.
fn atomic(version: &str, keys: &[&str]) -> Vec<u8> {
    let mut out = vec![0];
    out.extend(entry(2, 0, version, ""));
    out.extend(entry(3, 0, "..data", version));
    for key in keys {
        out.extend(entry(64, 1, key, "value"));
        out.extend(entry(3, 0, key, &format!("..data/{key}")));
    }
    out.extend([0xff, 0]);
    out
}

fn volumes() -> Vec<Vec<u8>> {
    let plain = [
        vec![64],
        entry(2, 0, "a", ""),
        entry(0, 1, "b", "x"),
        entry(4, 0, "long", "many parts"),
        entry(3, 0, "l", "a/b"),
        vec![0xff, 0],
    ]
    .concat();
    let listing = br#"{"entries":{"a":"d","a/b":"f","..data":"l","x":"a"}}"#.to_vec();
    vec![
        [
            vec![3],
            atomic("..1", &["key", "old"]),
            atomic("..2", &["key", "new"]),
            atomic("..3", &[]),
            listing.clone(),
        ]
        .concat(),
        [vec![9], plain.clone(), atomic("..1", &["a", "l"]), plain, listing].concat(),
        b"a b/c\td".to_vec(),
        b"40 22 8:1 /pods/u/volumes/p/v/x /pods/u/volume-subpaths/v/app/0 rw\n22 1 8:1 / / rw"
            .to_vec(),
    ]
}

fn files() -> Vec<Vec<u8>> {
    use cell::file_change::Change;
    let change =
        |path: &str, change| cell::FileChange { root: 0, path: path.into(), change: Some(change) };
    let write = |content: &'static [u8], more| {
        Change::WriteFile(cell::WriteFile {
            mode: 0o644,
            content: content.into(),
            more,
            ..Default::default()
        })
    };
    let make = || Change::MakeDir(cell::MakeDir { mode: 0o755, ..Default::default() });
    let all = [
        change("v/..1", make()),
        change("v/..1/key", write(b"one", false)),
        change("v/..data_tmp", Change::Symlink("..1".into())),
        change("v/..data_tmp", Change::RenameTo("v/..data".into())),
        change("v/long", write(b"ab", true)),
        change("v/long", Change::Append("cd".into())),
        change("v/long", Change::Append("".into())),
        change("out/x", write(b"no", false)),
        change("v/..1", Change::Remove(true)),
        change("..", make()),
    ];
    let changes: Vec<u8> = all.iter().flat_map(Message::encode_length_delimited_to_vec).collect();
    let plain = [
        vec![64],
        entry(2, 0, "a", ""),
        entry(0, 1, "b", "x"),
        entry(4, 0, "long", "many parts"),
        entry(3, 0, "l", "a/b"),
        vec![0xff, 0],
    ]
    .concat();
    vec![
        [vec![0], changes].concat(),
        [vec![1], atomic("..1", &["key", "old"]), atomic("..2", &["key", "new"])].concat(),
        [vec![1], plain, atomic("..2", &["a"])].concat(),
    ]
}
