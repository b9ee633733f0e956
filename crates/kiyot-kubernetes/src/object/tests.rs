//! Tests of the objects.

use super::*;

const CREATED: i64 = 1_795_661_275_000_000_000;
const SECOND: i64 = 1_000_000_000;

fn shown() -> ShownCell {
    let cell = admin::Cell {
        id: "cell-abcdefghijkl".to_owned(),
        backend: "milpa".to_owned(),
        node: "ip-10-0-31-99.ec2.internal".to_owned(),
        phase: admin::CellPhase::CellBound.into(),
        provider: "ec2".to_owned(),
        instance: "i-0123456789abcdef0".to_owned(),
        offering: Some(admin::Offering {
            instance_type: "c5.large".to_owned(),
            zone: "us-east-1a".to_owned(),
            spot: true,
            price_micros: 31_200,
            ..admin::Offering::default()
        }),
        addresses: vec!["10.0.31.7".to_owned(), "fd00::7".to_owned()],
        created_unix_nanos: CREATED,
        timeline: Some(admin::Timeline {
            launched: CREATED + SECOND,
            enrolled: CREATED + 32 * SECOND + SECOND / 2,
            bound: CREATED + 33 * SECOND,
            ..admin::Timeline::default()
        }),
        pod_namespace: "default".to_owned(),
        pod_name: "web".to_owned(),
        pod_uid: "uid".to_owned(),
        cost_micros: 1_234_567,
        ..admin::Cell::default()
    };
    let labels = BTreeMap::from([("app".to_owned(), "web".to_owned())]);
    ShownCell { cell, labels }
}

fn owner() -> OwnerReference {
    OwnerReference::node("ip-10-0-31-99.ec2.internal", "uid of the node".to_owned())
}

/// Verifies K2.
#[test]
fn object_of_a_cell_has_columns_steps_and_conditions() {
    let cell = render(&shown(), &owner());
    assert_eq!(cell.metadata.name, "cell-abcdefghijkl.ip-10-0-31-99.ec2.internal");
    assert_eq!(cell.metadata.owner_references, [owner()]);
    assert_eq!(cell.spec.node_name, "ip-10-0-31-99.ec2.internal");
    assert_eq!(cell.metadata.labels["app"], "web");
    let Status { provider, launch_type, instance_type, ip, price_per_hour, .. } = &cell.status;
    assert_eq!(
        [provider, launch_type, instance_type, ip, price_per_hour],
        ["ec2", "Spot", "c5.large", "10.0.31.7", "0.0312"]
    );
    assert_eq!((cell.status.boot_seconds.as_str(), cell.status.ips.len()), ("31.5", 2));
    assert_eq!(cell.status.accrued_cost, "1.234567");
    assert_eq!(cell.status.timeline.first_container, None);
    let conditions: Vec<_> = cell
        .status
        .conditions
        .iter()
        .map(|own| (own.r#type.as_str(), own.status.as_str(), own.last_transition_time.as_str()))
        .collect();
    assert_eq!(
        conditions,
        [
            ("Launched", "True", "2026-11-26T02:47:56Z"),
            ("Enrolled", "True", "2026-11-26T02:48:27Z"),
            ("PodBound", "True", "2026-11-26T02:48:28Z"),
            ("Lost", "False", "2026-11-26T02:47:55Z"),
        ]
    );
}

/// Verifies K2.
#[test]
fn condition_lost_has_the_time_and_reason_of_the_cell() {
    let mut shown = shown();
    shown.cell.lost_unix_nanos = CREATED + 725 * SECOND;
    shown.cell.reason = "its agent has been silent for 91 s".to_owned();
    let lost = render(&shown, &owner()).status.conditions.pop();
    let expected = Condition {
        r#type: "Lost".to_owned(),
        status: "True".to_owned(),
        last_transition_time: "2026-11-26T03:00:00Z".to_owned(),
        reason: "AgentSilent".to_owned(),
        message: "its agent has been silent for 91 s".to_owned(),
    };
    assert_eq!(lost, Some(expected));
}

/// Verifies K2.
#[test]
fn transition_time_of_a_condition_changes_only_with_its_status() {
    let mut shown = shown();
    shown.cell.timeline = None;
    let before = render(&shown, &owner()).status;
    // A pod that takes a warm cell creates the cell anew.
    shown.cell.created_unix_nanos += 3600 * SECOND;
    shown.cell.lost_unix_nanos = CREATED + 725 * SECOND;
    let mut after = render(&shown, &owner()).status;
    keep_transitions(&before, &mut after);
    assert_eq!(after.conditions[..3], before.conditions[..3]);
    assert_eq!(after.conditions[3].last_transition_time, "2026-11-26T03:00:00Z");
    shown.cell.lost_unix_nanos += SECOND;
    let mut later = render(&shown, &owner()).status;
    keep_transitions(&after, &mut later);
    assert_eq!(later.conditions, after.conditions);
}

#[test]
fn reason_of_an_offering_counts_failed_launches() {
    for (start_failures, expected) in [
        (0, "the only candidate"),
        (1, "the only candidate after a failed launch"),
        (2, "the only candidate after 2 failed launches"),
    ] {
        let offering_reason = "the only candidate".to_owned();
        let cell = admin::Cell { offering_reason, start_failures, ..admin::Cell::default() };
        assert_eq!(reason(&cell), expected);
    }
}

#[test]
fn texts_of_providers_and_agents_are_bounded() {
    let mut shown = shown();
    shown.cell.error = "x".repeat(100_000);
    shown.cell.instance = "i".repeat(100_000);
    shown.cell.addresses = vec!["10.0.0.1".to_owned(); 1000];
    let text = serde_json::to_string(&render(&shown, &owner())).unwrap();
    assert!(text.len() < 8192, "{}", text.len());
}
