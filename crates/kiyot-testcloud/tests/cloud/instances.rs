//! Instances as namespaces: boot, metadata, network, ends.

use std::{collections::BTreeMap, net::TcpListener, thread};

use base64::{Engine, engine::general_purpose::STANDARD};
use kiyot_testcloud::{Cloud, State};
use kiyot_testkit::{LIMIT, Leftovers, wait_until};

use crate::network::admit;

/// Launches an instance with a script as user-data, in the subnet with this number.
async fn launch(cloud: &Cloud, subnet: usize, behaviour: &str, script: &str) -> String {
    launch_with(cloud, subnet, script, &[("InstanceInitiatedShutdownBehavior", behaviour)]).await
}

/// Launches an instance with more parameters.
pub(crate) async fn launch_with(
    cloud: &Cloud,
    subnet: usize,
    script: &str,
    more: &[(&str, &str)],
) -> String {
    let setup = cloud.setup();
    let user_data = STANDARD.encode(format!("#!/bin/sh\n{script}\n"));
    let interface = [
        ("NetworkInterface.1.DeviceIndex", "0"),
        ("NetworkInterface.1.SubnetId", setup.subnets[subnet].id.as_str()),
        ("NetworkInterface.1.SecurityGroupId.1", &setup.security_group),
    ];
    let parameters = [
        ("ImageId", setup.image.as_str()),
        ("InstanceType", "t3.nano"),
        ("MinCount", "1"),
        ("MaxCount", "1"),
        ("MetadataOptions.HttpTokens", "required"),
        ("UserData", &user_data),
    ];
    let mut all = BTreeMap::from(parameters);
    all.extend(interface);
    all.extend(more.iter().copied());
    let parameters: Vec<_> = all.into_iter().collect();
    let reply = cloud.call("RunInstances", &parameters).await.unwrap();
    let root = reply.root();
    let ids = root.all("instanceId");
    ids.first().unwrap_or_else(|| panic!("{}", reply.body)).text.clone()
}

async fn wait_for_state(cloud: &Cloud, id: &str, state: State) {
    wait_until(format!("{id} is {state:?}"), LIMIT, async || {
        (cloud.instance(id).unwrap().state == state).then_some(())
    })
    .await;
}

/// Waits until the console contains a text, and returns the console.
pub(crate) async fn wait_for_console(cloud: &Cloud, id: &str, text: &str) -> String {
    let shown = format!("the console of {id} contains {text:?}");
    wait_until(shown, LIMIT, async || {
        let console = cloud.console(id);
        console.contains(text).then_some(console)
    })
    .await
}

async fn change(cloud: &Cloud, action: &str, id: &str) {
    let reply = cloud.call(action, &[("InstanceId.1", id)]).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
}

/// Lists processes, mounts, links and cgroups that contain one of these words or an instance's id.
fn leftovers(instance: &str, words: &[&str]) -> Leftovers {
    let link = &instance[2..14];
    let words: Vec<_> =
        [instance, link].iter().chain(words).map(|word| (*word).to_owned()).collect();
    Leftovers::of_host().about(&words)
}

#[tokio::test]
async fn user_data_runs_once_and_its_console_is_shown() {
    let cloud = Cloud::start_with_instances().await;
    let script = "echo user-data as $(id -u) on $(hostname); touch /var/own /etc/own /tmp/own";
    let id = launch(&cloud, 0, "terminate", script).await;
    wait_for_state(&cloud, &id, State::Running).await;
    wait_for_console(&cloud, &id, "user-data ended with status 0").await;
    let latest = [("InstanceId", id.as_str()), ("Latest", "true")];
    let reply = cloud.call("GetConsoleOutput", &latest).await.unwrap();
    let output = STANDARD.decode(reply.root().at("output")).unwrap();
    let output = String::from_utf8(output).unwrap();
    let address = cloud.instance(&id).unwrap().address.replace('.', "-");
    assert!(output.contains(&format!("user-data as 0 on ip-{address}")), "{output}");
    for path in ["/var/own", "/etc/own", "/tmp/own"] {
        assert!(!std::path::Path::new(path).exists(), "{path} is on this host");
    }
}

#[tokio::test]
async fn metadata_needs_a_token_and_identifies_the_instance() {
    let cloud = Cloud::start_with_instances().await;
    let script = r#"
        base=http://169.254.169.254/latest
        code() { curl -s -o /dev/null -w '%{http_code}' "$@"; }
        echo "without=$(code $base/meta-data/instance-id)"
        echo "bad-ttl=$(code -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 0' $base/api/token)"
        token=$(curl -s -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' $base/api/token)
        get() { curl -s -H "X-aws-ec2-metadata-token: $token" "$base/$1"; }
        echo "id=$(get meta-data/instance-id) address=$(get meta-data/local-ipv4)"
        echo "zone=$(get meta-data/placement/availability-zone) type=$(get meta-data/instance-type)"
        echo "wrong=$(code -H 'X-aws-ec2-metadata-token: x' $base/meta-data/instance-id)"
        echo "data=$(get user-data | head -n 1)"
        echo done"#;
    let id = launch(&cloud, 1, "terminate", script).await;
    let console = wait_for_console(&cloud, &id, "done\n").await;
    let address = cloud.instance(&id).unwrap().address;
    for line in [
        "without=401",
        "bad-ttl=400",
        &format!("id={id} address={address}"),
        "zone=us-east-1b type=t3.nano",
        "wrong=401",
        "data=#!/bin/sh",
    ] {
        assert!(console.contains(line), "{line}: {console}");
    }
}

#[tokio::test]
async fn instances_and_host_reach_each_other() {
    let cloud = Cloud::start_with_instances().await;
    let host = cloud.host().unwrap().clone();
    let group = cloud.setup().security_group.clone();
    admit(&cloud, ("IpPermissions.1.Groups.1.GroupId", &group), "tcp", "7000").await;
    // The node's security group admits cells to this port.
    let port = 7700;
    let listener = TcpListener::bind((host.address.as_str(), port)).unwrap();
    let accepted = thread::spawn(move || listener.accept().unwrap().1.ip().to_string());
    let serving = "while :; do echo from-$(hostname) | busybox nc -l -p 7000; done";
    let server = launch(&cloud, 0, "terminate", serving).await;
    let address = cloud.instance(&server).unwrap().address;
    let asking = format!(
        "busybox nc {} {port} < /dev/null\n\
         until busybox nc {address} 7000 < /dev/null | grep from-; do sleep 0.1; done",
        host.address
    );
    let client = launch(&cloud, 2, "terminate", &asking).await;
    let wanted = format!("from-ip-{}", address.replace('.', "-"));
    wait_for_console(&cloud, &client, &wanted).await;
    assert_eq!(accepted.join().unwrap(), cloud.instance(&client).unwrap().address);
    wait_until("this host reaches the instance", LIMIT, async || {
        kiyot_testkit::output("busybox", &["nc", &address, "7000"])
            .ok()
            .filter(|text| text.contains(&wanted))
    })
    .await;
}

#[tokio::test]
async fn terminated_instance_leaves_nothing() {
    let cloud = Cloud::start_with_instances().await;
    let id = launch(&cloud, 0, "terminate", "setsid sleep 98765 & setsid sleep 98765; wait").await;
    wait_until("the user-data runs", LIMIT, async || {
        (kiyot_testkit::processes(&["sleep", "98765"]).len() >= 2).then_some(())
    })
    .await;
    change(&cloud, "TerminateInstances", &id).await;
    wait_for_state(&cloud, &id, State::Terminated).await;
    let left = leftovers(&id, &["98765"]);
    assert!(left.is_empty(), "{left}");
    let second = launch(&cloud, 0, "terminate", "sleep 98765").await;
    wait_for_state(&cloud, &second, State::Running).await;
    let name = cloud.name();
    assert!(
        !leftovers(&second, &[]).is_empty()
            && !leftovers("i-0123456789abcdef0", &[&name]).is_empty()
    );
    drop(cloud);
    let left = leftovers(&second, &["98765", &name]);
    assert!(left.is_empty(), "{left}");
}

#[tokio::test]
async fn power_off_from_within_ends_or_stops_by_the_shutdown_behaviour() {
    let cloud = Cloud::start_with_instances().await;
    let ended = launch(&cloud, 0, "terminate", "poweroff").await;
    let stopped = launch(&cloud, 0, "stop", "systemctl poweroff").await;
    wait_for_state(&cloud, &ended, State::Terminated).await;
    wait_for_state(&cloud, &stopped, State::Stopped).await;
    let reason = cloud.instance(&ended).unwrap().reason.0;
    assert_eq!(reason, "Client.InstanceInitiatedShutdown");
    let shown = cloud.call("DescribeInstances", &[("InstanceId.1", &ended)]).await.unwrap();
    assert_eq!(shown.root().all("instanceState")[0].at("name"), "terminated");
}

#[tokio::test]
async fn restarted_instance_keeps_its_root_and_enabled_units() {
    let cloud = Cloud::start_with_instances().await;
    let script = r"
        echo kept > /root/file
        printf '[Service]\nExecStart=/bin/sh -c \047echo unit sees $(cat /root/file); sleep 9999\047\n\
Restart=always\n[Install]\nWantedBy=multi-user.target\n' > /etc/systemd/system/own.service
        systemctl daemon-reload
        systemctl enable --now own
        echo first boot";
    let id = launch(&cloud, 0, "terminate", script).await;
    wait_for_console(&cloud, &id, "unit sees kept").await;
    wait_for_console(&cloud, &id, "first boot").await;
    change(&cloud, "StopInstances", &id).await;
    wait_for_state(&cloud, &id, State::Stopped).await;
    let before = cloud.console(&id);
    change(&cloud, "StartInstances", &id).await;
    let twice = wait_until("the unit runs again", LIMIT, async || {
        let console = cloud.console(&id);
        (console.matches("unit sees kept").count() > before.matches("unit sees kept").count())
            .then_some(console)
    })
    .await;
    assert_eq!(twice.matches("first boot").count(), 1, "{twice}");
    wait_for_state(&cloud, &id, State::Running).await;
    change(&cloud, "TerminateInstances", &id).await;
    wait_for_state(&cloud, &id, State::Terminated).await;
}

#[tokio::test]
async fn failed_service_is_restarted() {
    let cloud = Cloud::start_with_instances().await;
    let script = r"
        printf '[Service]\nExecStart=/bin/sh -c \047echo run; exit 1\047\nRestart=on-failure\n' \
            > /etc/systemd/system/own.service
        systemctl start own";
    let id = launch(&cloud, 0, "terminate", script).await;
    wait_for_console(&cloud, &id, "run\nrun\nrun\n").await;
}

#[tokio::test]
async fn containerd_of_an_instance_answers() {
    let cloud = Cloud::start_with_instances().await;
    let script = "containerd > /var/log/containerd.log 2>&1 &\n\
                  until ctr version; do sleep 0.1; done\n\
                  ctr plugins list | grep overlayfs; echo asked";
    let id = launch(&cloud, 0, "terminate", script).await;
    let console = wait_for_console(&cloud, &id, "asked\n").await;
    let overlay = console.lines().find(|line| line.contains("overlayfs")).unwrap_or_default();
    assert!(overlay.ends_with("ok") || overlay.contains(" ok"), "{console}");
}
