use super::*;
use crate::{BackendConfig, Config, MilpaBackend, ProviderKind, parse};

const HEAD: &str = "[backends.containerd]\ntype = \"cri\"\n[backends.milpa]\n\
                    type = \"milpa\"\nprovider = \"ec2\"\ncluster = \"test\"\n\
                    [backends.milpa.gateway]\nlisten = \"10.0.0.5:7700\"\n\
                    [backends.milpa.ec2]\n";
const LEAST: &str = "region = \"us-east-1\"\nsubnets = [\"subnet-1\"]\n\
                     security_groups = [\"sg-1\"]\nimage = { id = \"ami-1\" }\n";

fn parsed(keys: &str) -> Result<Config, Vec<String>> {
    parse("test.toml", &format!("{HEAD}{keys}"), [])
        .map_err(|problems| problems.list.iter().map(ToString::to_string).collect())
}

fn milpa(keys: &str) -> MilpaBackend {
    let config = parsed(keys).unwrap();
    let Some(BackendConfig::Milpa(milpa)) = config.backends.get("milpa") else {
        panic!("no milpa in {config:?}")
    };
    (**milpa).clone()
}

#[test]
fn minimal_configuration_has_the_defaults_of_instances() {
    let milpa = milpa(LEAST);
    assert_eq!(milpa.providers, [ProviderKind::Ec2]);
    assert_eq!(milpa.launch_timeout.as_secs(), 600);
    assert!(milpa.token_ttl >= milpa.launch_timeout);
    let expected = Ec2 {
        region: "us-east-1".into(),
        subnets: vec!["subnet-1".into()],
        security_groups: vec!["sg-1".into()],
        image: Some(ImageFilter::Id("ami-1".into())),
        ..Ec2::default()
    };
    assert_eq!(milpa.ec2, expected);
}

#[test]
fn every_key_is_read() {
    let keys = "region = \"eu-west-1\"\nsubnets = [\"subnet-a\", \"subnet-b\"]\n\
                security_groups = [\"sg-a\", \"sg-b\"]\nmax_security_groups = 8\n\
                image = { owner = \"self\", name = \"cell-*\" }\nimage_has_agent = true\n\
                memory_overhead = \"300Mi\"\ninstance_profile = \"cells\"\nkey_name = \"ops\"\n\
                volume_size = \"20Gi\"\n\
                volume_type = \"gp3\"\nvolume_iops = 10000\nvolume_throughput = 2000\n\
                volume_initialization_rate = 300\nkms_key_id = \"alias/cells\"\n\
                public_address = true\n\
                endpoint_url = \"http://127.0.0.1:5000\"\nprices = \"built-in\"\n\
                pricing_endpoint_url = \"http://127.0.0.1:5001\"\nlisting_period = \"1m\"\n\
                cluster_networks = [\"10.96.0.0/12\"]\n\
                cloud_routes = [\"10.8.0.0/16\"]\n\
                label_tags = [\"app\", \"app.kubernetes.io/*\"]\n\
                [backends.milpa.ec2.tags]\nteam = \"web\"\n";
    let ec2 = milpa(keys).ec2;
    let expected = Ec2 {
        region: "eu-west-1".into(),
        subnets: vec!["subnet-a".into(), "subnet-b".into()],
        security_groups: vec!["sg-a".into(), "sg-b".into()],
        max_security_groups: 8,
        image: Some(ImageFilter::Named { owner: "self".into(), name: "cell-*".into() }),
        image_has_agent: true,
        memory_overhead: Some(300 << 20),
        instance_profile: Some("cells".into()),
        key_name: Some("ops".into()),
        volume_size: 20 << 30,
        volume_type: VolumeType::Gp3,
        volume_performance: VolumePerformance {
            iops: Some(10_000),
            throughput: Some(2000),
            initialization_rate: Some(300),
        },
        kms_key_id: Some("alias/cells".into()),
        public_address: true,
        tags: [("team".to_owned(), "web".to_owned())].into(),
        cluster_networks: vec!["10.96.0.0/12".parse().unwrap()],
        cloud_routes: vec!["10.8.0.0/16".parse().unwrap()],
        label_tags: vec!["app".into(), "app.kubernetes.io/*".into()],
        listing_period: Duration::from_secs(60),
        endpoint_url: Some("http://127.0.0.1:5000".into()),
        prices: PriceSource::BuiltIn,
        pricing_endpoint_url: Some("http://127.0.0.1:5001".into()),
    };
    assert_eq!(ec2, expected);
}

#[test]
fn kms_key_is_an_id_an_alias_or_an_arn() {
    let id = "1234abcd-12ab-34cd-56ef-1234567890ab";
    let arn = "arn:aws-us-gov:kms:us-gov-west-1:123456789012:";
    let of_regions = "mrk-1234abcd12ab34cd56ef1234567890ab";
    for key in [id, of_regions, "alias/aws/ebs"] {
        assert!(is_kms_key(key), "{key}");
        let path = if key.starts_with("alias/") { "" } else { "key/" };
        assert!(is_kms_key(&format!("{arn}{path}{key}")), "{key}");
    }
    let bare = format!("{arn}{id}");
    for key in ["", "alias/", "alias/a b", "1234abcd", "arn:aws:kms:us-east-1:1:x/y", &bare] {
        assert!(!is_kms_key(key), "{key}");
    }
}

#[test]
fn several_subnets_with_cluster_networks_are_a_warning() {
    assert_eq!(milpa(LEAST).ec2.warning(), None);
    let several = LEAST.replace("[\"subnet-1\"]", "[\"subnet-1\", \"subnet-2\"]");
    assert_eq!(milpa(&several).ec2.warning(), None);
    let both = format!("{several}cluster_networks = [\"10.96.0.0/12\"]\n");
    assert!(
        milpa(&both)
            .ec2
            .warning()
            .unwrap()
            .starts_with("ec2.subnets: only the node's subnet, one of 2,")
    );
}

#[test]
fn cloud_route_outside_the_configured_networks_is_refused() {
    let networks =
        |list: &[&str]| -> Vec<Cidr> { list.iter().map(|text| text.parse().unwrap()).collect() };
    let none = milpa(LEAST).ec2;
    let error = none.check_cloud_routes(&networks(&["10.8.0.0/16"])).unwrap_err().to_string();
    assert!(error.ends_with("ec2.cloud_routes (empty)"), "{error}");
    let some = milpa(&format!("{LEAST}cloud_routes = [\"10.8.0.0/16\"]\n")).ec2;
    for allowed in ["10.8.0.0/16", "10.8.3.0/24"] {
        assert_eq!(some.check_cloud_routes(&networks(&[allowed])), Ok(()), "{allowed}");
    }
    for refused in ["10.9.0.0/16", "10.0.0.0/8", "0.0.0.0/0", "::/0"] {
        let error = some.check_cloud_routes(&networks(&["10.8.1.0/24", refused]));
        let error = error.unwrap_err().to_string();
        assert!(error.contains(&format!("cloud-route = {refused}: is not allowed")), "{error}");
        assert!(error.ends_with("(10.8.0.0/16)"), "{error}");
    }
}

/// Verifies V77.
#[test]
fn security_group_limit_counts_configured_and_pod_groups() {
    let groups = |number: usize| -> Vec<String> {
        (1..=number).map(|number| format!("sg-{number}")).collect()
    };
    // LEAST has sg-1, which counts once.
    let five = milpa(LEAST).ec2;
    assert_eq!(five.security_groups_with(&[]), Ok(groups(1)));
    assert_eq!(five.security_groups_with(&groups(5)), Ok(groups(5)));
    let error = five.security_groups_with(&groups(6)).unwrap_err().to_string();
    assert_eq!(
        error,
        "pod.elotl.co/security-groups: makes 6 security groups with ec2.security_groups; allowed: \
         5 (ec2.max_security_groups)"
    );
    let raised = milpa(&format!("{LEAST}max_security_groups = 16\n")).ec2;
    assert_eq!(raised.security_groups_with(&groups(16)), Ok(groups(16)));
    let six = LEAST.replace("[\"sg-1\"]", &format!("{:?}", groups(6)));
    assert!(parsed(&six).unwrap_err()[0].contains("is one of 6; allowed: 5"));
    assert_eq!(milpa(&format!("{six}max_security_groups = 6\n")).ec2.max_security_groups, 6);
}

#[test]
fn missing_keys_are_named_together() {
    let found = parsed("").unwrap_err();
    for key in ["region", "security_groups", "image"] {
        let problem = format!("backends.milpa.ec2.{key}: is missing");
        assert!(found.iter().any(|found| found.starts_with(&problem)), "{key}: {found:#?}");
    }
    assert_eq!(found.len(), 3);
}

/// Verifies V78.
#[test]
fn subnets_are_required_if_the_node_address_is_unknown() {
    let least = LEAST.replace("subnets = [\"subnet-1\"]\n", "");
    assert_eq!(milpa(&least).ec2.subnets, Vec::<String>::new());
    let listen = "listen = \"10.0.0.5:7700\"";
    for gateway in [
        "listen = \"[2001:db8::5]:7700\"",
        "listen = \"10.0.0.5:7700\"\nadvertise = \"192.0.2.1:443\"",
    ] {
        let text = HEAD.replace(listen, gateway);
        let problems = parse("test.toml", &format!("{text}{least}"), []).unwrap_err();
        let problems = problems.to_string();
        let problem = "backends.milpa.ec2.subnets: is missing; the provider \"ec2\" needs ids";
        assert!(problems.contains(problem), "{problems}");
    }
}

#[test]
fn cluster_is_needed_to_find_instances() {
    let text = format!("{HEAD}{LEAST}").replace("cluster = \"test\"\n", "");
    let problems = parse("test.toml", &text, []).unwrap_err().to_string();
    assert!(problems.starts_with("test.toml: backends.milpa.cluster: is missing"), "{problems}");
}

#[test]
fn wrong_values_are_problems_by_key_and_value() {
    let six = "security_groups = [\"sg-1\", \"sg-2\", \"sg-3\", \"sg-4\", \"sg-5\", \"sg-6\"]";
    for (from, to, problem) in [
        ("us-east-1", "us east", "region = \"us east\": is invalid"),
        ("subnet-1", "vpc-1", "subnets[0] = \"vpc-1\": is invalid; allowed: the id of a"),
        ("[\"subnet-1\"]", "[\"subnet-1\", \"subnet-1\"]", "subnets[1] = \"subnet-1\""),
        ("security_groups = [\"sg-1\"]", six, "security_groups[0] = \"sg-1\": is one of 6"),
        ("id = \"ami-1\"", "name = \"x\"", "image: is incomplete"),
        ("id = \"ami-1\"", "id = \"x\"", "image.id = \"x\": is invalid"),
    ] {
        let found = parsed(&LEAST.replace(from, to)).unwrap_err();
        let problem = format!("backends.milpa.ec2.{problem}");
        assert!(found.iter().any(|found| found.starts_with(&problem)), "{problem}: {found:#?}");
    }
    for (key, problem) in [
        ("volume_size = \"1Mi\"", "volume_size = \"1Mi\": is invalid; allowed: a number of"),
        ("volume_type = \"io2\"", "volume_type = \"io2\": is invalid; allowed: \"gp3\", \"gp2\""),
        (
            "volume_iops = 80001",
            "volume_iops = 80001: is invalid; allowed: a whole number from 3000",
        ),
        (
            "volume_iops = 5001",
            "volume_iops = 5001: is more than volume_size allows; allowed: 5000",
        ),
        (
            "volume_throughput = 124",
            "volume_throughput = 124: is invalid; allowed: a whole number from 125 to 2000",
        ),
        (
            "volume_throughput = 751",
            "volume_throughput = 751: is more than volume_iops allows; allowed: 750",
        ),
        (
            "volume_type = \"gp2\"\nvolume_iops = 3000",
            "volume_iops = 3000: needs volume_type \"gp3\"",
        ),
        (
            "volume_initialization_rate = 99",
            "volume_initialization_rate = 99: is invalid; allowed: a whole number from 100",
        ),
        ("kms_key_id = \"cells\"", "kms_key_id = \"cells\": is invalid; allowed: the id, the"),
        (
            "cluster_networks = [\"10.96.0.1/12\"]",
            "cluster_networks[0] = \"10.96.0.1/12\": is invalid; allowed: a network such as",
        ),
        (
            "cloud_routes = [\"0.0.0.0/0\"]",
            "cloud_routes[0] = \"0.0.0.0/0\": is invalid; allowed: an IPv4 network of at least",
        ),
        (
            "cloud_routes = [\"fd00::/16\"]",
            "cloud_routes[0] = \"fd00::/16\": is invalid; allowed: an IPv4 network",
        ),
        (
            "cluster_networks = [\"10.96.0.0/12\"]\ncloud_routes = [\"10.0.0.0/8\"]",
            "cloud_routes[0] = \"10.0.0.0/8\": overlaps 10.96.0.0/12 of cluster_networks",
        ),
        (
            "max_security_groups = 0",
            "max_security_groups = 0: is invalid; allowed: a whole number from 1",
        ),
        (
            "max_security_groups = 17",
            "max_security_groups = 17: is invalid; allowed: a whole number from 1",
        ),
        (
            "memory_overhead = \"15Mi\"",
            "memory_overhead = \"15Mi\": is invalid; allowed: a number of bytes, from 16Mi to \
             64Gi",
        ),
        ("memory_overhead = \"65Gi\"", "memory_overhead = \"65Gi\": is invalid"),
        ("endpoint_url = \"ftp://x\"", "endpoint_url = \"ftp://x\": is invalid"),
        ("endpoint_url = \"https://\"", "endpoint_url = \"https://\": is invalid"),
        ("endpoint_url = \"https://a b\"", "endpoint_url = \"https://a b\": is invalid"),
        ("endpoint_url = \"https://me@x\"", "endpoint_url = \"https://me@x\": is invalid"),
        ("pricing_endpoint_url = \"x\"", "pricing_endpoint_url = \"x\": is invalid"),
        ("prices = \"dear\"", "prices = \"dear\": is invalid"),
        ("tags = { \"AWS:x\" = \"y\" }", "tags.AWS:x = \"y\": has a key that is not allowed"),
        (
            "label_tags = [\"app\", \"a b\"]",
            "label_tags[1] = \"a b\": is invalid; allowed: the key",
        ),
        ("tags = { Name = \"y\" }", "tags.Name = \"y\": has a key that is not allowed"),
    ] {
        let found = parsed(&format!("{LEAST}{key}\n")).unwrap_err();
        let problem = format!("backends.milpa.ec2.{problem}");
        assert!(found.len() == 1 && found[0].starts_with(&problem), "{problem}: {found:#?}");
    }
}
