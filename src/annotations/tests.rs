use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn annotations(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn request(pairs: &[(&str, &str)]) -> Result<CellRequest, Problems> {
    CellRequest::parse(&annotations(pairs))
}

#[test]
fn pod_without_annotations_gets_the_defaults() {
    assert_eq!(request(&[]), Ok(CellRequest::default()));
    assert_eq!(
        request(&[(TARGET_RUNTIME, "kiyot"), ("example.org/other", "")]),
        Ok(CellRequest::default())
    );
}

/// Verifies A1.
#[test]
fn every_annotation_is_read() {
    let read = request(&[
        (LAUNCH_TYPE, "sPoT"),
        (INSTANCE_TYPE, "p3.2xlarge"),
        (VOLUME_SIZE, "10.5Gi"),
        (PRIVATE_IP_ONLY, "true"),
        (SECURITY_GROUPS, "sg-1, sg-2,sg-3"),
        (INSTANCE_PROFILE, "arn:aws:iam::123456789012:instance-profile/team/worker"),
        (HEALTHY_TIMEOUT, "90"),
        (CLOUD_ROUTE, "172.16.0.0/12\t10.1.0.0/16\nfd00::/8"),
    ]);
    let expected = CellRequest {
        launch_type: LaunchType::Spot,
        instance_type: Some(InstanceType::Exact("p3.2xlarge".into())),
        volume_size_gib: Some(11),
        private_ip_only: true,
        security_groups: ["sg-1", "sg-2", "sg-3"].map(str::to_owned).into(),
        instance_profile: Some("arn:aws:iam::123456789012:instance-profile/team/worker".into()),
        healthy_timeout: Some(HealthyTimeout::After(Duration::from_secs(90))),
        cloud_routes: ["172.16.0.0/12", "10.1.0.0/16", "fd00::/8"]
            .map(|route| route.parse().unwrap())
            .into(),
    };
    assert_eq!(read, Ok(expected));
}

/// Verifies A1.
#[test]
fn special_values_are_read() {
    let one = |key, value| request(&[(key, value)]).unwrap();
    assert_eq!(one(INSTANCE_TYPE, "c5*").instance_type, Some(InstanceType::Glob("c5*".into())));
    assert_eq!(one(HEALTHY_TIMEOUT, "0").healthy_timeout, Some(HealthyTimeout::Never));
    assert_eq!(one(SPOT_INSTANCE, "true").launch_type, LaunchType::Spot);
    assert_eq!(one(SPOT_INSTANCE, "false").launch_type, LaunchType::OnDemand);
    assert_eq!(one(LAUNCH_TYPE, "on-demand").launch_type, LaunchType::OnDemand);
    assert_eq!(
        request(&[(LAUNCH_TYPE, "Spot"), (SPOT_INSTANCE, "true")]).unwrap().launch_type,
        LaunchType::Spot
    );
}

/// Verifies A2.
#[test]
fn invalid_value_is_reported_with_key_and_allowed_values() {
    let six = "a,b,c,d,e,f";
    let bad = [
        (LAUNCH_TYPE, "cheap", "allowed: Spot or On-Demand"),
        (SPOT_INSTANCE, "yes", "allowed: \"true\" or \"false\""),
        (INSTANCE_TYPE, "", "allowed: an instance type such as p3.2xlarge"),
        (INSTANCE_TYPE, "c5 large", "allowed: an instance type"),
        (VOLUME_SIZE, "0", "allowed: a quantity of bytes such as 20Gi"),
        (VOLUME_SIZE, "-1Gi", "allowed: a quantity"),
        (VOLUME_SIZE, "65Ti", "at most 65536Gi"),
        (PRIVATE_IP_ONLY, "", "allowed: \"true\""),
        (SECURITY_GROUPS, six, "1 to 5 different security groups"),
        (SECURITY_GROUPS, "sg-1,", "1 to 5"),
        (SECURITY_GROUPS, "sg-1,sg-1", "different"),
        (INSTANCE_PROFILE, "worker", "the ARN of an instance profile"),
        (INSTANCE_PROFILE, "arn:aws:iam::123:instance-profile/x", "ARN"),
        (INSTANCE_PROFILE, "arn:aws:iam::123456789012:role/x", "ARN"),
        (HEALTHY_TIMEOUT, "90s", "whole seconds from 0 (never) to 604800"),
        (HEALTHY_TIMEOUT, "-1", "whole seconds"),
        (CLOUD_ROUTE, "", "1 to 50 networks"),
        (CLOUD_ROUTE, "10.0.0.1/8", "without host bits"),
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
    let contradiction =
        request(&[(LAUNCH_TYPE, "On-Demand"), (SPOT_INSTANCE, "true")]).unwrap_err().to_string();
    assert!(
        contradiction.contains("says Spot where pod.elotl.co/launch-type says On-Demand"),
        "{contradiction}"
    );
}

/// Verifies A2.
#[test]
fn all_invalid_values_are_reported_at_once() {
    let problems = request(&KEYS.map(|key| (key, "?!"))).unwrap_err();
    assert_eq!(problems.list.iter().map(|problem| problem.at.as_str()).collect::<Vec<_>>(), KEYS);
}

#[test]
fn unknown_keys_are_reported() {
    let misspelt = annotations(&[
        ("pod.elotl.co/lunch-type", "Spot"),
        (LAUNCH_TYPE, "Spot"),
        ("example.org/x", ""),
    ]);
    assert_eq!(CellRequest::unknown_keys(&misspelt), ["pod.elotl.co/lunch-type"]);
}

proptest! {
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
