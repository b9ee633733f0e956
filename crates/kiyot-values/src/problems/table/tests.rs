use serde_json::json;

use super::*;

/// Reads a table. Returns the result and the problems.
fn read<T>(at: &str, fields: Value, read: impl FnOnce(Table<'_>) -> T) -> (T, Vec<String>) {
    let report = Report::default();
    let Value::Object(fields) = fields else { panic!("no table: {fields}") };
    let result = read(Table::new(at, fields, &report));
    let problems = report.finish("test", ()).err().map_or(Vec::new(), |problems| problems.list);
    (result, problems.iter().map(ToString::to_string).collect())
}

#[test]
fn keys_are_taken_one_by_one() {
    let fields = json!({ "a": 1, "none": null, "wrong": 300 });
    let (values, problems) = read("top", fields, |mut table| {
        let mut values = [7_u8; 4];
        for (key, value) in ["a", "absent", "none", "wrong"].into_iter().zip(&mut values) {
            table.set(key, value, |it| it.number(0..=255));
        }
        table.report().add(Problem::new("top", "is wrong"));
        table.finish();
        values
    });
    assert_eq!(values, [1, 7, 7, 7], "an absent or wrong value changes nothing");
    let wrong = "top.wrong = 300: is invalid; allowed: a whole number from 0 to 255";
    assert_eq!(problems, [wrong, "top: is wrong"]);
}

#[test]
fn absent_required_key_is_reported_with_its_path() {
    for (at, path) in [("", "a"), ("top.of", "top.of.a")] {
        let (value, problems) = read(at, json!({ "a": null }), |mut table| {
            assert_eq!((table.at(), table.path_of("a")), (at, path.to_owned()));
            table.need("a", "a number").map(|_| ())
        });
        assert_eq!(
            (value, problems),
            (None, vec![format!("{path}: is missing; allowed: a number")])
        );
        let (found, problems) = read(at, json!({ "a": 1 }), |mut table| {
            table.need("a", "a number").map(|field| field.at().to_owned())
        });
        assert_eq!((found.as_deref(), problems), (Some(path), vec![]));
    }
}

#[test]
fn unknown_key_is_reported_with_similar_or_all_keys() {
    let (_, problems) = read("", json!({ "sise": 1, "qqq": 2 }), |mut table| {
        for key in ["size", "name"] {
            assert!(table.take(key).is_none());
        }
        table.finish();
    });
    assert_eq!(
        problems,
        [
            "qqq: is an unknown key; allowed: size, name",
            "sise: is an unknown key; did you mean: size"
        ]
    );
}

#[test]
fn most_similar_keys_are_proposed() {
    let known = ["sized", "size", "sizes", "sizing", "name"];
    assert_eq!(likely("size", &known), ["size", "sized", "sizes"]);
    let long = |length| "s".repeat(length);
    let known: [&str; 1] = [Box::leak(long(128).into_boxed_str())];
    assert_eq!(likely(&long(128), &known), known);
    assert!(likely(&long(129), &known).is_empty(), "a long key is not compared");
}
