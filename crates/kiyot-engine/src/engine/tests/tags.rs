//! Tags of launches and of warm cells.

use crate::{
    engine::tests::{
        pools::{launches, pool, taking, warm},
        *,
    },
    provider::owner,
};

fn labelled(spec: OrderSpec, labels: &[(&str, &str)]) -> OrderSpec {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    with(spec, |wanted| wanted.labels = labels.collect())
}

/// Returns the tags of the only attachment.
fn tags_of_attachment(effects: &Effects) -> BTreeMap<String, String> {
    let mut attached = effects.iter().filter_map(|(_, effect)| match effect {
        Effect::Attach(_, attachment) => Some(attachment.tags.clone()),
        _ => None,
    });
    let tags = attached.next().unwrap();
    assert_eq!(attached.next(), None);
    tags
}

fn tags_of_launch(effects: &Effects) -> BTreeMap<String, String> {
    let mut launches = effects.iter().filter_map(|(_, effect)| match effect {
        Effect::Launch(launch) => Some(launch.spec.tags.clone()),
        _ => None,
    });
    launches.next().unwrap()
}

fn reports(effects: &Effects) -> Vec<String> {
    let reports = effects.iter().filter_map(|(_, effect)| match effect {
        Effect::Log(Notice::LabelsLeftOut { pod, left_out }) => Some(format!("{pod}: {left_out}")),
        _ => None,
    });
    reports.collect()
}

fn with_rules(capabilities: Capabilities, rules: TagRules) -> Engine {
    with_config(capabilities, EngineConfig { tag_rules: rules, ..config() })
}

fn with_config(capabilities: Capabilities, config: EngineConfig) -> Engine {
    let mut engine = Engine::new(config, only(capabilities), Box::new(Counting::default()));
    engine.handle(
        Event::Listed { provider: ONLY, began: Duration::ZERO, instances: Vec::new() },
        at(0),
    );
    engine
}

fn only_app() -> TagRules {
    TagRules {
        configured: [("team".to_owned(), "shop".to_owned())].into(),
        labels: vec!["app".into()],
    }
}

/// Verifies P16.
#[test]
fn recorded_launch_has_the_tags_of_the_rules() {
    let mut engine = with_rules(capabilities::CLOUD, only_app());
    let labels = [("app", "web"), ("secret", "x"), ("team", "other")];
    let (_, effects) = engine.order(labelled(spec("pod"), &labels), at(1));
    let tags = tags_of_launch(&effects);
    assert_eq!((tags["app"].as_str(), tags["team"].as_str()), ("web", "shop"));
    assert_eq!((tags[owner::POD_UID].as_str(), tags.get("secret")), ("pod", None));
    let cell = launches(&effects).remove(0);
    let recorded = engine.cells[&cell].stored().launch.unwrap().tags;
    assert_eq!(recorded.into_iter().collect::<BTreeMap<_, _>>(), tags);
    assert_eq!(reports(&effects), Vec::<String>::new());
}

/// Verifies P22.
#[test]
fn pod_that_takes_a_warm_cell_changes_the_tags_of_its_instance() {
    for capabilities in [capabilities::CLOUD, capabilities::LOCAL] {
        let mut engine = with_rules(capabilities, only_app());
        let effects = engine.set_pools(vec![pool("small", 1)], at(1));
        let launched = tags_of_launch(&effects);
        assert_eq!(launched["team"], "shop");
        warm(&mut engine, &launches(&effects)[0], 5);
        let labels = [("app", "web"), ("secret", "x")];
        let (_, effects) = engine.order(labelled(taking("pod"), &labels), at(10));
        let expected: BTreeMap<String, String> = if capabilities.has_tags {
            [
                (owner::NAME, "default/pod"),
                (owner::NAMESPACE, "default"),
                (owner::POD, "pod"),
                (owner::POD_UID, "pod"),
                ("app", "web"),
            ]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into()
        } else {
            BTreeMap::new()
        };
        assert_eq!(tags_of_attachment(&effects), expected);
    }
}

/// Verifies P22.
#[test]
fn pod_that_takes_a_warm_cell_of_a_previous_daemon_sets_all_tags() {
    let record = store::Cell {
        pool: "small".into(),
        offering: Some(launch::stored_candidate(&candidate("a"))),
        ..stored(CellPhase::Idle)
    };
    let cell = CellId::parse(&record.id).unwrap();
    let journal = Journal { cells: vec![(cell.to_string(), record)], ..Journal::default() };
    let seams = Box::new(Counting::default());
    let (mut engine, ..) =
        Engine::recover(config(), only(capabilities::CLOUD), seams, journal, at(1));
    engine.set_pools(vec![pool("small", 1)], at(1));
    engine.handle(Event::Connected(cell), at(2));
    let tags = tags_of_attachment(&engine.order(taking("pod"), at(3)).1);
    assert_eq!((tags[owner::NAME].as_str(), tags[owner::POD_UID].as_str()), ("default/pod", "pod"));
}

#[test]
fn cell_launched_for_its_pod_gets_no_further_tags() {
    let mut engine = engine(capabilities::CLOUD);
    let (_, effects) = engine.order(labelled(spec("pod"), &[("app", "web")]), at(1));
    let effects = warm(&mut engine, &launches(&effects)[0], 5);
    assert_eq!(tags_of_attachment(&effects), BTreeMap::new());
}

#[test]
fn tags_of_a_pod_that_abandoned_its_cell_become_empty() {
    // The pool launches no cell beside the pod's cell.
    let limits = Limits { boots: Some(1), ..config().limits };
    let mut engine = with_config(capabilities::CLOUD, EngineConfig { limits, ..config() });
    let first = labelled(spec("first"), &[("app", "web"), ("run", "once")]);
    let (_, effects) = engine.order(OrderSpec { is_joined: false, ..first }, at(1));
    let cell = launches(&effects).remove(0);
    engine.set_pools(vec![pool("small", 1)], at(2));
    let effects = warm(&mut engine, &cell, 5);
    assert_eq!(launches(&effects), []);
    let (_, effects) = engine.order(labelled(taking("second"), &[("app", "api")]), at(10));
    let tags = tags_of_attachment(&effects);
    assert_eq!((tags["app"].as_str(), tags["run"].as_str()), ("api", ""));
    assert_eq!(tags[owner::POD], "second");
}

#[test]
fn unusable_labels_are_reported_once_for_each_pod() {
    let all = TagRules { labels: vec!["*".into()], ..TagRules::default() };
    let mut engine = with_rules(capabilities::CLOUD, all);
    let odd = |pod: &str| labelled(spec(pod), &[("aws:x", "1"), ("app", "web")]);
    let (_, effects) = engine.order(odd("pod"), at(1));
    assert_eq!(reports(&effects), ["default/pod: aws:x (reserved key)"]);
    // Another launch of the pod.
    let cell = launches(&effects).remove(0);
    let refusal = ProviderError::without_cause(ErrorClass::Transient, "launch");
    let mut effects = engine.handle(Event::Launched(cell, Err(refusal)), at(2));
    for second in 3..60 {
        effects.extend(engine.handle(Event::Tick, at(second)));
    }
    assert_eq!(reports(&effects), Vec::<String>::new());
    let (_, effects) = engine.order(odd("other"), at(61));
    assert_eq!(reports(&effects).len(), 1);
    // A provider without tags has nothing to report.
    let mut engine = super::engine(capabilities::LOCAL);
    let (_, effects) = engine.order(odd("pod"), at(1));
    assert_eq!((launches(&effects).len(), reports(&effects).len()), (1, 0));
}
