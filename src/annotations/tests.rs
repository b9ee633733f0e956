use std::{collections::BTreeMap, time::Duration};

use kiyot_config::{ProviderKind, Rule};
use kiyot_engine::request::{
    Architecture, GpuRequest, HealthyTimeout, InstanceType, Isolation, LaunchType, RuleProviders,
    keys::TARGET_RUNTIME,
};
use kiyot_values::price::Price;
use proptest::{
    prelude::*,
    sample::{select, subsequence},
};

use super::*;

fn annotations(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn request(pairs: &[(&str, &str)]) -> Result<CellRequest, Problems> {
    parse(&annotations(pairs))
}

#[test]
fn pod_without_annotations_gets_the_defaults() {
    assert_eq!(request(&[]), Ok(CellRequest::default()));
    assert_eq!(
        request(&[(TARGET_RUNTIME, "kiyot"), ("example.org/other", "")]),
        Ok(CellRequest::default())
    );
}

/// Verifies A1, A4.
#[test]
fn every_annotation_is_read() {
    let read = request(&[
        (LAUNCH_TYPE, "sPoT"),
        (INSTANCE_TYPE, "p3.2xlarge"),
        (CPU, "1500m"),
        (MEMORY, "4Gi"),
        (GPU, "2 nvidia"),
        (ARCHITECTURE, "arm64"),
        (MAX_PRICE, "0.0416"),
        (SUSTAINED_CPU, "true"),
        (VOLUME_SIZE, "10.5Gi"),
        (PRIVATE_IP_ONLY, "true"),
        (SECURITY_GROUPS, "sg-1, sg-2,sg-3"),
        (INSTANCE_PROFILE, "arn:aws:iam::123456789012:instance-profile/team/worker"),
        (HEALTHY_TIMEOUT, "90"),
        (CLOUD_ROUTE, "172.16.0.0/12\t10.1.0.0/16\nfd00::/8"),
        (PROVIDER, "ec2"),
        (ISOLATION, "machine"),
        (START_WITHIN, "2m"),
    ]);
    let expected = CellRequest {
        launch_type: LaunchType::Spot,
        instance_type: Some(InstanceType::Exact("p3.2xlarge".into())),
        milli_cpus: Some(1500),
        memory_bytes: Some(4 << 30),
        gpu: Some(GpuRequest { count: 2, name: Some("nvidia".into()) }),
        architecture: Some(Architecture::Arm64),
        max_price: Some(Price::from_micros(41_600)),
        sustained_cpu: true,
        volume_size_gib: Some(11),
        private_ip_only: true,
        security_groups: ["sg-1", "sg-2", "sg-3"].map(str::to_owned).into(),
        instance_profile: Some("arn:aws:iam::123456789012:instance-profile/team/worker".into()),
        healthy_timeout: Some(HealthyTimeout::After(Duration::from_secs(90))),
        cloud_routes: ["172.16.0.0/12", "10.1.0.0/16", "fd00::/8"]
            .map(|route| route.parse().unwrap())
            .into(),
        provider: Some(ProviderKind::Ec2),
        isolation: Some(Isolation::Machine),
        start_within: Some(Duration::from_secs(120)),
        rule: None,
    };
    assert_eq!(read, Ok(expected));
}

/// Verifies A1.
#[test]
fn special_values_are_read() {
    let one = |key, value| request(&[(key, value)]).unwrap();
    assert_eq!(one(INSTANCE_TYPE, "c5*").instance_type, Some(InstanceType::Glob("c5*".into())));
    assert_eq!(one(HEALTHY_TIMEOUT, "0").healthy_timeout, Some(HealthyTimeout::Never));
    let shortest = one(HEALTHY_TIMEOUT, "1").healthy_timeout;
    assert_eq!(shortest, Some(HealthyTimeout::After(Duration::from_secs(5))));
    assert_eq!(one(SPOT_INSTANCE, "true").launch_type, LaunchType::Spot);
    assert_eq!(one(SPOT_INSTANCE, "false").launch_type, LaunchType::OnDemand);
    assert_eq!(one(LAUNCH_TYPE, "on-demand").launch_type, LaunchType::OnDemand);
    assert_eq!(
        request(&[(LAUNCH_TYPE, "Spot"), (SPOT_INSTANCE, "true")]).unwrap().launch_type,
        LaunchType::Spot
    );
}

/// Verifies A4.
#[test]
fn values_that_choose_an_instance_are_read() {
    let one = |key, value| request(&[(key, value)]).unwrap();
    for (value, launch_type) in [
        ("spot-preferred", LaunchType::SpotPreferred),
        ("Spot-Preferred", LaunchType::SpotPreferred),
        ("SPOT", LaunchType::Spot),
        ("On-demand", LaunchType::OnDemand),
    ] {
        assert_eq!(one(LAUNCH_TYPE, value).launch_type, launch_type, "{value}");
    }
    for (value, milli_cpus) in
        [("2", 2000), ("0.5", 500), ("1.0001", 1001), ("1n", 1), ("10k", 10_000_000)]
    {
        assert_eq!(one(CPU, value).milli_cpus, Some(milli_cpus), "{value}");
    }
    for (value, bytes) in
        [("1", 1), ("0.5", 1), ("512Mi", 512 << 20), ("1G", 1_000_000_000), ("64Ti", 64 << 40)]
    {
        assert_eq!(one(MEMORY, value).memory_bytes, Some(bytes), "{value}");
    }
    for (value, architecture) in [
        ("amd64", Architecture::Amd64),
        ("x86_64", Architecture::Amd64),
        ("arm64", Architecture::Arm64),
        ("aarch64", Architecture::Arm64),
    ] {
        assert_eq!(one(ARCHITECTURE, value).architecture, Some(architecture), "{value}");
        assert!(["amd64", "arm64"].contains(&&*architecture.to_string()));
    }
    assert_eq!(one(GPU, "0").gpu, Some(GpuRequest { count: 0, name: None }));
    assert_eq!(one(MAX_PRICE, "1").max_price, Some(Price::from_micros(1_000_000)));
    assert!(!one(SUSTAINED_CPU, "false").sustained_cpu);
}

/// Verifies A2, A5.
#[test]
fn invalid_value_is_reported_with_key_and_allowed_values() {
    let seventeen = "a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q";
    let bad = [
        (LAUNCH_TYPE, "cheap", "allowed: Spot, On-Demand or Spot-Preferred"),
        (LAUNCH_TYPE, "SpotPreferred", "allowed: Spot"),
        (SPOT_INSTANCE, "yes", "allowed: \"true\" or \"false\""),
        (INSTANCE_TYPE, "", "is empty; allowed: an instance type such as p3.2xlarge"),
        (INSTANCE_TYPE, " \t ", "is empty; allowed: an instance type"),
        (INSTANCE_TYPE, "c5 large", "is a list; allowed: an instance type"),
        (INSTANCE_TYPE, "c5*,m5*", "is a list; allowed: an instance type"),
        (INSTANCE_TYPE, " c5*", "is invalid; allowed: an instance type"),
        (INSTANCE_TYPE, "c5[ab]", "is invalid; allowed: an instance type"),
        (CPU, "0", "allowed: a quantity of CPUs such as 500m or 2, more than 0 and at most 10000"),
        (CPU, "-1", "more than 0"),
        (CPU, "10001", "at most 10000"),
        (CPU, "two", "a quantity of CPUs"),
        (MEMORY, "0", "allowed: a quantity of bytes such as 512Mi or 4Gi, more than 0"),
        (MEMORY, "65Ti", "at most 64Ti"),
        (MEMORY, "4GB", "a quantity of bytes"),
        (GPU, "65", "allowed: 0 to 64 GPUs, with a manufacturer or name, such as 1"),
        (GPU, "nvidia", "\"2 nvidia\""),
        (ARCHITECTURE, "x86", "allowed: amd64 (or x86_64), arm64 (or aarch64)"),
        (MAX_PRICE, "$1", "allowed: dollars an hour such as 0.0416"),
        (MAX_PRICE, "-1", "allowed: dollars an hour"),
        (SUSTAINED_CPU, "always", "allowed: \"true\" or \"false\""),
        (VOLUME_SIZE, "0", "allowed: a quantity of bytes such as 20Gi"),
        (VOLUME_SIZE, "-1Gi", "allowed: a quantity"),
        (VOLUME_SIZE, "65Ti", "at most 65536Gi"),
        (PRIVATE_IP_ONLY, "", "allowed: \"true\""),
        (SECURITY_GROUPS, seventeen, "1 to 16 different security groups"),
        (SECURITY_GROUPS, "sg-1,", "1 to 16"),
        (SECURITY_GROUPS, "sg-1,sg-1", "different"),
        (INSTANCE_PROFILE, "worker", "the ARN of an instance profile"),
        (INSTANCE_PROFILE, "arn:aws:iam::123:instance-profile/x", "ARN"),
        (INSTANCE_PROFILE, "arn:aws:iam::123456789012:role/x", "ARN"),
        (HEALTHY_TIMEOUT, "90s", "whole seconds from 0 (never) to 604800"),
        (HEALTHY_TIMEOUT, "-1", "whole seconds"),
        (CLOUD_ROUTE, "", "1 to 5 networks"),
        (CLOUD_ROUTE, "10.0.0.1/8", "without host bits"),
        (PROVIDER, "EC2", "allowed: \"netns\", \"qemu\", \"ec2\""),
        (START_WITHIN, "10", "from \"1s\" to \"1h\", such as \"10s\""),
        (START_WITHIN, "+10s", "from \"1s\" to \"1h\""),
        (START_WITHIN, "0s", "from \"1s\" to \"1h\""),
        (START_WITHIN, "61m", "from \"1s\" to \"1h\""),
        (START_WITHIN, "18446744073709551615h", "from \"1s\" to \"1h\""),
        (ISOLATION, "node", "allowed: \"machine\", \"instance\""),
    ];
    for (key, value, allowed) in bad {
        let problems = request(&[(key, value)]).unwrap_err();
        let text = problems.to_string();
        assert!(
            text.contains(key) && text.contains(&format!("{value:?}")) && text.contains(allowed),
            "{text}"
        );
        assert_eq!(problems.list.len(), 1, "{text}");
    }
}

/// Verifies A7.
#[test]
fn contradicting_launch_types_are_refused() {
    for (kind, spot, said) in [
        ("On-Demand", "true", "says Spot where pod.elotl.co/launch-type says On-Demand"),
        ("Spot", "false", "says On-Demand where pod.elotl.co/launch-type says Spot"),
        ("spot-preferred", "true", "says Spot where pod.elotl.co/launch-type says Spot-Preferred"),
        (
            "Spot-Preferred",
            "0",
            "says On-Demand where pod.elotl.co/launch-type says Spot-Preferred",
        ),
    ] {
        let problems = request(&[(LAUNCH_TYPE, kind), (SPOT_INSTANCE, spot)]).unwrap_err();
        let text = problems.to_string();
        assert!(text.contains(SPOT_INSTANCE) && text.contains(said), "{text}");
        assert_eq!(problems.list.len(), 1, "{text}");
    }
    for (kind, spot) in [("Spot", "true"), ("on-demand", "false")] {
        assert!(request(&[(LAUNCH_TYPE, kind), (SPOT_INSTANCE, spot)]).is_ok());
    }
}

/// Verifies A2.
#[test]
fn all_invalid_values_are_reported_at_once() {
    let problems = request(&KEYS.map(|key| (key, "?!"))).unwrap_err();
    assert_eq!(problems.list.iter().map(|problem| problem.at.as_str()).collect::<Vec<_>>(), KEYS);
}

/// Verifies A6.
#[test]
fn misspelt_key_is_refused_with_the_known_one() {
    let problems = request(&[("pod.elotl.co/launch-typ", "Spot"), (CPU, "none")]).unwrap_err();
    let texts: Vec<String> = problems.list.iter().map(ToString::to_string).collect();
    assert_eq!(
        texts[1],
        "pod.elotl.co/launch-typ: is unknown; did you mean pod.elotl.co/launch-type?"
    );
    assert!(texts[0].starts_with("pod.elotl.co/cpu = \"none\""), "{texts:?}");
    let text = request(&[("pod.elotl.co/cpu\n", "1")]).unwrap_err().to_string();
    assert!(text.contains("pod.elotl.co/cpu\\n: is unknown"), "{text}");
}

/// Verifies A6.
#[test]
fn reported_misspelt_keys_are_bounded() {
    let many: BTreeMap<String, String> = (b'a'..=b'z')
        .flat_map(|one| (b'a'..=b'z').map(move |other| (char::from(one), char::from(other))))
        .map(|(one, other)| (format!("{LAUNCH_TYPE}{one}{other}"), String::new()))
        .collect();
    let problems = parse(&many).unwrap_err();
    assert_eq!(problems.list.len(), MAX_REPORTED_KEYS);
    assert_eq!(problems.list[0].at, format!("{LAUNCH_TYPE}aa"));
}

#[test]
fn unknown_keys_are_listed_without_misspelt_and_foreign_ones() {
    let unknown = annotations(&[
        ("pod.elotl.co/zone", "a"),
        ("pod.elotl.co/foo", ""),
        ("pod.elotl.co/launch-typ", "Spot"),
        (LAUNCH_TYPE, "Spot"),
        ("example.org/x", ""),
    ]);
    assert_eq!(unknown_keys(&unknown), ["pod.elotl.co/foo", "pod.elotl.co/zone"]);
    let known = annotations(&[("pod.elotl.co/foo", ""), ("example.org/x", "")]);
    assert_eq!(parse(&known), Ok(CellRequest::default()));
}

proptest! {
    /// Verifies P18.
    #[test]
    fn identity_covers_every_known_key_and_no_other(
        key in select(&KEYS[..]),
        one in "[a-z0-9]{1,8}",
        other in "[a-z0-9]{1,8}",
    ) {
        let identity_of = |pairs: &[(&str, &str)]| identity(&annotations(pairs), None);
        prop_assert_ne!(identity_of(&[]), identity_of(&[(key, &one)]));
        prop_assert_eq!(
            identity_of(&[(key, &one)]) == identity_of(&[(key, &other)]),
            one == other
        );
        let more = [(key, &*one), ("pod.elotl.co/foo", &*other), (TARGET_RUNTIME, "kiyot")];
        prop_assert_eq!(identity_of(&[(key, &one)]), identity_of(&more));
    }

    /// Verifies A37.
    #[test]
    fn identity_covers_the_providers_of_a_rule_and_not_its_name(
        one in subsequence(PROVIDERS, 0..=3),
        other in subsequence(PROVIDERS, 0..=3),
    ) {
        let of = |name: &str, providers: &[(&str, ProviderKind)]| {
            let providers = providers.iter().map(|it| it.1).collect();
            let name = name.to_owned();
            let rule = RuleProviders::of(&Rule { name, providers, ..Rule::default() });
            identity(&annotations(&[]), rule.as_ref())
        };
        let turned: Vec<_> = one.iter().rev().copied().collect();
        prop_assert_eq!(of("a", &one), of("b", &turned));
        prop_assert_eq!(of("a", &one) == of("a", &other), one == other);
        prop_assert_eq!(of("a", &[]), identity(&annotations(&[]), None));
    }

    #[test]
    fn arbitrary_annotation_is_read_or_reported(
        index in 0..KEYS.len(),
        value in "(\\PC{0,60}|[a-z0-9.:/, *-]{0,60})",
    ) {
        let key = KEYS[index];
        if let Err(problems) = request(&[(key, &value)]) {
            prop_assert_eq!(&problems.list[0].at, key);
        }
    }
}
