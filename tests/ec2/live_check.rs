//! `kiyot check-config --live` over the test cloud.

use std::{process::Stdio, time::Duration};

use kiyot_testcloud::{Credentials, Outage};
use tokio::process::Command;

use crate::{permissions::actions_of, world::World};

/// Bounds a check, with the time of a slow machine: its calls end within 30 s.
const CHECK_TIMEOUT: Duration = Duration::from_secs(60);

/// The outcome of a check.
struct Checked {
    text: String,
    code: Option<i32>,
}

impl Checked {
    /// Returns the lines that begin with an outcome.
    fn lines(&self, outcome: &str) -> Vec<&str> {
        self.text.lines().filter(|line| line.starts_with(&format!("{outcome:<11}  "))).collect()
    }

    /// Returns the actions of the printed policy.
    fn missing(&self) -> Vec<String> {
        let start = self.text.find("\n{\n").unwrap_or_else(|| panic!("{}", self.text));
        let mut actions: Vec<String> = actions_of(&self.text[start..]).into_iter().collect();
        actions.sort();
        actions
    }
}

/// A configuration of a world. A change replaces a text of it.
fn configuration(world: &World, change: (&str, &str)) -> String {
    let setup = world.cloud.setup();
    let subnets: Vec<&str> = setup.subnets.iter().map(|subnet| subnet.id.as_str()).collect();
    let (from, to) = change;
    let endpoint = world.cloud.endpoint();
    let text = format!(
        "[backends.containerd]\ntype = \"cri\"\n[backends.milpa]\ntype = \"milpa\"\n\
         provider = \"ec2\"\ncluster = \"production\"\nnode = \"worker-1\"\n\
         [backends.milpa.gateway]\nlisten = \"10.77.0.5:7700\"\n[backends.milpa.ec2]\n\
         region = \"us-east-1\"\nsubnets = {subnets:?}\nsecurity_groups = [\"{}\"]\n\
         image = {{ id = \"{}\" }}\nendpoint_url = \"{endpoint}\"\n\
         pricing_endpoint_url = \"{endpoint}\"\n",
        setup.security_group, setup.image,
    );
    assert!(text.contains(from), "{from} is not in {text}");
    text.replacen(from, to, 1)
}

async fn check(world: &World, change: (&str, &str)) -> Checked {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), configuration(world, change)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kiyot"));
    command
        .args(["check-config", "--live", "--config"])
        .arg(file.path())
        .env("AWS_ACCESS_KEY_ID", "AKIATEST")
        .env("AWS_SECRET_ACCESS_KEY", "secret")
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let ended = tokio::time::timeout(CHECK_TIMEOUT, command.output()).await;
    let output = ended.unwrap().unwrap();
    let text =
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
    Checked { text, code: output.status.code() }
}

/// The action of the price list, which is not of EC2 and not indispensable.
const PRICES: &str = "GetProducts";

const UNCHANGED: (&str, &str) = ("", "");

/// Verifies V40.
#[tokio::test]
async fn right_configuration_passes_without_an_effect() {
    let world = World::new().await;
    // The calls that name an instance are tried on an instance of the node.
    let own = world.launch("token").await;
    world.cloud.clear_calls();
    let checked = check(&world, UNCHANGED).await;
    assert_eq!(checked.code, Some(0), "{}", checked.text);
    assert_eq!(checked.lines("ok").len(), 6 + 3 + 1 + 4 + 1, "{}", checked.text);
    assert_eq!(checked.text.matches(&format!("dry run on {}", own.id)).count(), 4);
    let calls = world.cloud.calls();
    for call in &calls {
        let is_dry = call.parameters.get("DryRun").is_some_and(|dry| dry == "true");
        let is_read = is_dry || call.action.starts_with("Describe") || call.action == PRICES;
        assert!(is_read, "{call:?}");
    }
    let dry: std::collections::BTreeSet<String> =
        calls.iter().map(|call| call.action.clone()).collect();
    let policy = crate::permissions::policy();
    assert_eq!(dry, actions_of(&policy), "the check proves the whole policy");
    assert_eq!(world.cloud.instances().len(), 1);
    assert!(!world.cloud.instance(&own.id.0).unwrap().state.is_ended());
}

/// Verifies V40.
#[tokio::test]
async fn node_without_instances_is_checked_with_an_id_that_does_not_exist() {
    let world = World::new().await;
    let checked = check(&world, UNCHANGED).await;
    assert_eq!(checked.code, Some(0), "{}", checked.text);
    assert_eq!(checked.text.matches("dry run on an id that does not exist").count(), 4);
    assert!(world.cloud.instances().is_empty());
}

/// Verifies V40, V78.
#[tokio::test]
async fn subnet_of_the_node_is_shown_without_configured_subnets() {
    let world = World::new().await;
    let node = world.running_node(0).await;
    let text = configuration(&world, UNCHANGED);
    let line = |begin: &str| text.lines().find(|line| line.starts_with(begin)).unwrap();
    // The region between both stays.
    let from = format!(
        "{}\n[backends.milpa.ec2]\n{}\n{}",
        line("listen"),
        line("region"),
        line("subnets")
    );
    let without = |address: &str| {
        format!("listen = \"{address}:7700\"\n[backends.milpa.ec2]\n{}", line("region"))
    };
    let address = node.addresses[0].to_string();
    let checked = check(&world, (&from, &without(&address))).await;
    let subnet = &world.cloud.setup().subnets[0].id;
    let expected = format!(
        "DescribeInstances (the node): {} with {address} is in {subnet}, where cells are launched",
        node.id
    );
    assert!(checked.text.contains(&expected), "{}", checked.text);
    assert_eq!(checked.code, Some(0), "{}", checked.text);
    assert_eq!(checked.lines("ok").len(), 6 + 2 + 2 + 4 + 1, "{}", checked.text);

    let checked = check(&world, (&from, &without("10.99.0.1"))).await;
    assert_eq!(checked.code, Some(1), "{}", checked.text);
    let failed = checked.lines("failed");
    assert!(failed[0].contains("has the node's address 10.99.0.1"), "{}", checked.text);
}

/// Verifies V40.
#[tokio::test]
async fn wrong_subnet_group_image_and_key_are_named() {
    let world = World::new().await;
    let setup = world.cloud.setup();
    let (subnet, group, image) =
        (setup.subnets[0].id.clone(), setup.security_group.clone(), setup.image.clone());
    let key = ("image =", "key_name = \"nobody-s\"\nimage =");
    for (change, name, code) in [
        ((subnet.as_str(), "subnet-0badbad"), "DescribeSubnets", "InvalidSubnetID.NotFound"),
        ((group.as_str(), "sg-0badbad"), "RunInstances", "InvalidGroup.NotFound"),
        ((image.as_str(), "ami-0badbad"), "DescribeImages", "InvalidAMIID.NotFound"),
        (key, "RunInstances", "InvalidKeyPair.NotFound"),
    ] {
        let checked = check(&world, change).await;
        assert_eq!(checked.code, Some(1), "{change:?}: {}", checked.text);
        let failed = checked.lines("failed");
        let is_named = |line: &&str| {
            line.contains(name) && (line.contains(code) || line.ends_with(": the same error"))
        };
        assert!(failed[0].contains(code), "{change:?}: {}", checked.text);
        assert!(failed.iter().all(is_named), "{change:?}: {}", checked.text);
        // Everything else is still checked.
        assert!(checked.text.contains("ok           DescribeInstances:"), "{}", checked.text);
        assert!(!checked.text.contains("\"Statement\""), "{}", checked.text);
    }
}

/// Verifies V41, V75.
#[tokio::test]
async fn each_denied_action_is_the_missing_part_of_the_policy() {
    let world = World::new().await;
    let faults = world.cloud.faults();
    for action in actions_of(&crate::permissions::policy()) {
        faults.set_denied(&action, true);
        let checked = check(&world, UNCHANGED).await;
        faults.clear();
        assert_eq!(checked.missing(), [action.as_str()], "{}", checked.text);
        if action == PRICES {
            assert_eq!(checked.code, Some(0), "{}", checked.text);
            let [warning] = checked.lines("warning")[..] else { panic!("{}", checked.text) };
            assert!(warning.contains("the built-in on-demand prices are used"), "{warning}");
            continue;
        }
        assert_eq!(checked.code, Some(1), "{action}: {}", checked.text);
        let failed = checked.lines("failed");
        let is_denial = |line: &&str| {
            line.contains("UnauthorizedOperation") || line.ends_with(": the same error")
        };
        assert!(failed[0].contains("UnauthorizedOperation"), "{action}: {}", checked.text);
        assert!(failed.iter().all(is_denial), "{action}: {}", checked.text);
        assert!(!checked.text.contains("AAAA"), "{}", checked.text);
    }
    faults.set_denied("*", true);
    let checked = check(&world, UNCHANGED).await;
    let all: Vec<String> = actions_of(&crate::permissions::policy()).into_iter().collect();
    assert_eq!(checked.missing(), all, "{}", checked.text);
}

/// Verifies V42.
#[tokio::test]
async fn api_that_is_down_or_refuses_the_credentials_is_a_single_failure() {
    let world = World::new().await;
    let faults = world.cloud.faults();
    for (credentials, code) in [
        (Credentials::Wrong, "AuthFailure"),
        (Credentials::Expired, "RequestExpired"),
        (Credentials::Unknown, "InvalidClientTokenId"),
    ] {
        faults.set_credentials(Some(credentials));
        let checked = check(&world, UNCHANGED).await;
        faults.clear();
        assert_eq!(checked.code, Some(1), "{}", checked.text);
        let [failed] = checked.lines("failed")[..] else { panic!("{}", checked.text) };
        assert!(failed.contains(code), "{failed}");
        assert!(checked.text.contains("EC2 refuses the credentials; not called: "));
    }
    for (outage, reason) in [
        (Outage::Unavailable, "Unavailable"),
        (Outage::InternalError, "InternalError"),
        (Outage::Reset, "not answered: "),
        (Outage::Hang, "not answered within 10 s"),
        (Outage::Refused, "not sent: "),
    ] {
        faults.set_outage(Some(outage));
        let checked = check(&world, UNCHANGED).await;
        assert_eq!(checked.code, Some(1), "{}", checked.text);
        let [failed] = checked.lines("failed")[..] else { panic!("{}", checked.text) };
        assert!(failed.contains(reason), "{outage:?}: {failed}");
        assert_eq!(checked.lines("not checked").len(), 1, "{}", checked.text);
        faults.set_outage(None);
    }
}

/// Verifies V44.
#[tokio::test]
async fn networks_that_cells_don_t_reach_are_warnings() {
    let world = World::new().await;
    let change = ("image =", "cluster_networks = [\"10.96.0.0/12\"]\nimage =");
    let checked = check(&world, change).await;
    assert_eq!(checked.code, Some(0), "{}", checked.text);
    let subnets = &world.cloud.setup().subnets;
    let others = format!("cells in {}, {} don't reach", subnets[1].id, subnets[2].id);
    assert!(checked.text.contains(&others), "{}", checked.text);
    assert!(checked.text.contains("note: backend milpa: ec2.subnets: only the node's subnet"));
    let checked = check(&world, ("10.77.0.5:7700", "192.168.7.5:7700")).await;
    assert_eq!(checked.code, Some(0), "{}", checked.text);
    let [warning] = checked.lines("warning")[..] else { panic!("{}", checked.text) };
    assert!(warning.contains("192.168.7.5 is in no network of the subnets"), "{warning}");
}

/// Verifies V40, V41.
#[tokio::test]
async fn calls_for_routes_are_tried_if_pods_may_have_routes() {
    let world = World::new().await;
    let change = ("image =", "cloud_routes = [\"10.8.0.0/16\"]\nimage =");
    let actions = ["CreateRoute", "DeleteRoute", "DescribeRouteTables", "ModifyInstanceAttribute"];
    // Without an instance of the node, and then with one.
    for has_instance in [false, true] {
        if has_instance {
            world.launch("token").await;
        }
        world.cloud.clear_calls();
        let checked = check(&world, change).await;
        assert_eq!(checked.code, Some(0), "{}", checked.text);
        for action in actions {
            let tried = |line: &&str| line.contains(&format!("  {action}"));
            assert_eq!(checked.lines("ok").into_iter().filter(tried).count(), 1, "{action}");
            assert_eq!(world.cloud.calls_of(action).len(), 1, "{action}: {}", checked.text);
            let call = world.cloud.calls_of(action).remove(0);
            let is_dry = call.parameters.get("DryRun").is_some_and(|dry| dry == "true");
            assert!(is_dry || action.starts_with("Describe"), "{call:?}");
        }
        for action in actions {
            world.cloud.faults().set_denied(action, true);
            let checked = check(&world, change).await;
            world.cloud.faults().clear();
            let missing = vec![action.to_owned()];
            assert_eq!((checked.code, checked.missing()), (Some(1), missing), "{}", checked.text);
        }
    }
    world.cloud.faults().set_denied("DescribeRouteTables", true);
    let checked = check(&world, change).await;
    assert!(checked.text.contains("\"Sid\": \"ReadRoutes\""), "{}", checked.text);
    assert!(checked.text.contains("it needs the route tables"), "{}", checked.text);
    // Neither call is tried if pods can't have routes.
    world.cloud.faults().clear();
    world.cloud.clear_calls();
    check(&world, UNCHANGED).await;
    for action in actions {
        assert!(world.cloud.calls_of(action).is_empty(), "{action}");
    }
}

/// Verifies V44.
#[tokio::test]
async fn source_destination_check_of_the_node_is_a_warning_with_cluster_networks() {
    let world = World::new().await;
    let node = world.running_node(0).await;
    let before = "10.77.0.5:7700\"\n[backends.milpa.ec2]\n";
    let address = node.addresses[0];
    let networks = "cluster_networks = [\"10.96.0.0/12\"]\n";
    let with_networks = format!("{address}:7700\"\n[backends.milpa.ec2]\n{networks}");
    let change = (before, with_networks.as_str());
    let checked = check(&world, change).await;
    assert_eq!(checked.code, Some(0), "{}", checked.text);
    let on = format!("the source/destination check of {} is on: cells don't reach", node.id);
    assert!(checked.lines("warning").iter().any(|line| line.contains(&on)), "{}", checked.text);
    let off = [("InstanceId", node.id.0.as_str()), ("SourceDestCheck.Value", "false")];
    let reply = world.cloud.call("ModifyInstanceAttribute", &off).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    let checked = check(&world, change).await;
    let off = format!("the source/destination check of {} is off", node.id);
    assert!(checked.lines("ok").iter().any(|line| line.contains(&off)), "{}", checked.text);
    // The instance of another address is unknown. Without cluster networks no call is made.
    let unknown = ("image =", "cluster_networks = [\"10.96.0.0/12\"]\nimage =");
    let checked = check(&world, unknown).await;
    let not_known = "the node's address 10.77.0.5: its source/destination check";
    let warned = checked.lines("warning").iter().any(|line| line.contains(not_known));
    assert!(warned, "{}", checked.text);
    assert!(!check(&world, UNCHANGED).await.text.contains("source/destination"));
}

/// Verifies V100.
#[tokio::test]
async fn metadata_service_that_is_open_to_the_nodes_pods_is_a_warning() {
    let world = World::new().await;
    let node = world.running_node(0).await;
    let listen = format!("{}:7700", node.addresses[0]);
    let shown = |state: &str| format!("the metadata service of {} is {state}", node.id);
    for (option, outcome, state) in [
        (None, "ok", "closed to its pods"),
        (
            Some(("HttpPutResponseHopLimit", "2")),
            "warning",
            "open to its pods, which get the node's role: the hop limit is 2",
        ),
        (
            Some(("HttpTokens", "optional")),
            "warning",
            "open to its pods, which get the node's role: version 1",
        ),
        (Some(("HttpEndpoint", "disabled")), "ok", "closed to its pods"),
    ] {
        if let Some(option) = option {
            let call = [("InstanceId", node.id.0.as_str()), option];
            let reply = world.cloud.call("ModifyInstanceMetadataOptions", &call).await.unwrap();
            assert_eq!(reply.status, 200, "{}", reply.body);
        }
        let checked = check(&world, ("10.77.0.5:7700", &listen)).await;
        assert_eq!(checked.code, Some(0), "{}", checked.text);
        let lines = checked.lines(outcome);
        assert!(lines.iter().any(|line| line.contains(&shown(state))), "{}", checked.text);
    }
}
