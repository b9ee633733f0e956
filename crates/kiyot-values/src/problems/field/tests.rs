use serde_json::json;

use super::*;

/// Reads the value of `key`. Returns the result and the problems.
fn read<T>(value: Value, read: impl FnOnce(Field<'_>) -> T) -> (T, Vec<String>) {
    let report = Report::default();
    let result = read(Field::new("key", value, &report));
    let problems = report.finish("test", ()).err().map_or(Vec::new(), |problems| problems.list);
    (result, problems.iter().map(ToString::to_string).collect())
}

fn refused<T>(result: T, problem: &str) -> (T, Vec<String>) {
    (result, vec![problem.to_owned()])
}

#[test]
fn value_has_its_type_or_is_refused() {
    assert_eq!(read(json!("a"), |it| it.text()), (Some("a".to_owned()), vec![]));
    assert_eq!(
        read(json!(1), |it| it.text()),
        refused(None, "key = 1: is invalid; allowed: a text in quotes")
    );
    assert_eq!(read(json!(false), |it| it.flag()), (Some(false), vec![]));
    assert_eq!(
        read(json!("true"), |it| it.flag()),
        refused(None, "key = \"true\": is invalid; allowed: true or false")
    );
    assert!(read(json!({ "a": 1 }), |it| it.table().is_some()).0);
    assert_eq!(
        read(json!([]), |it| it.table().is_some()),
        refused(false, "key = []: is invalid; allowed: a table")
    );
}

#[test]
fn number_is_in_its_range() {
    let number = |value| read(value, |it| it.number(2_u8..=5));
    for good in [2, 5] {
        assert_eq!(number(json!(good)), (Some(good), vec![]));
    }
    for bad in [json!(1), json!(6), json!(258), json!(-2), json!(2.0), json!("2")] {
        let problem = format!("key = {bad}: is invalid; allowed: a whole number from 2 to 5");
        assert_eq!(number(bad), refused(None, &problem));
    }
}

#[test]
fn text_is_read_by_a_parser_or_a_choice() {
    let parsed = |value| read(value, |it| it.parsed::<u8>("a byte"));
    assert_eq!(parsed(json!("7")), (Some(7), vec![]));
    for bad in [json!("256"), json!(7)] {
        let problem = format!("key = {bad}: is invalid; allowed: a byte");
        assert_eq!(parsed(bad), refused(None, &problem));
    }
    let try_read = |value| read(value, |it| it.try_read(|text| text.parse::<bool>()));
    assert_eq!(try_read(json!("true")), (Some(true), vec![]));
    let problem = "key = \"yes\": provided string was not `true` or `false`";
    assert_eq!(try_read(json!("yes")), refused(None, problem));
    let problem = "key = true: is invalid; allowed: a text in quotes";
    assert_eq!(try_read(json!(true)), refused(None, problem));
    let choice = |value| read(value, |it| it.choice(&[("one", 1), ("two", 2)]));
    assert_eq!(choice(json!("two")), (Some(2), vec![]));
    let problem = "key = \"three\": is invalid; allowed: \"one\", \"two\"";
    assert_eq!(choice(json!("three")), refused(None, problem));
}

#[test]
fn problems_do_not_show_secret_values() {
    let (_, problems) = read(json!(["secret", 1]), |it| it.secret().texts());
    assert_eq!(problems, ["key[1]: is invalid; allowed: a text in quotes"]);
    let (_, problems) = read(json!({ "a": 1 }), |it| it.secret().text_entries());
    assert_eq!(problems, ["key.a: is invalid; allowed: a text in quotes"]);
    let (_, problems) = read(json!({ "a": "secret" }), |it| it.secret().refuse("is wrong"));
    assert_eq!(problems, ["key: is wrong"]);
    let (_, problems) = read(json!({ "a": 1 }), |it| it.refuse("is wrong"));
    assert_eq!(problems, ["key = a table: is wrong"]);
}

#[test]
fn list_has_at_most_1024_items() {
    let texts = |count| read(json!(vec!["a"; count]), |it| it.texts());
    assert_eq!(texts(1024), (vec!["a".to_owned(); 1024], vec![]));
    assert_eq!(texts(1025), refused(vec![], "key: has 1025 items; allowed: 1024"));
    assert_eq!(
        read(json!("a"), |it| it.texts()),
        refused(vec![], "key = \"a\": is invalid; allowed: a list")
    );
}

#[test]
fn table_has_at_most_10000_entries() {
    let entries = |count: usize| {
        let fields: serde_json::Map<_, _> =
            (0..count).map(|key| (key.to_string(), json!("a"))).collect();
        let (entries, problems) = read(fields.into(), |it| it.text_entries());
        (entries.len(), problems)
    };
    assert_eq!(entries(10_000), (10_000, vec![]));
    assert_eq!(entries(10_001), refused(0, "key: has 10001 keys; allowed: 10000"));
    let text_entries = read(json!({ "a": "b" }), |it| it.text_entries());
    assert_eq!(text_entries, (BTreeMap::from([("a".to_owned(), "b".to_owned())]), vec![]));
    let (_, problems) = read(json!("a"), |it| it.text_entries());
    assert_eq!(problems, ["key = \"a\": is invalid; allowed: a table"]);
}
