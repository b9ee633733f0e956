//! The index of SPECIFICATION.md: a promise is an item `- **ID** Text`, and a test names the
//! promises that it verifies by a doc line `/// Verifies ID, ID.`.

use std::collections::{BTreeMap, BTreeSet};

use crate::tree;

/// Prefix of the doc line that names promises.
const VERIFIES: &str = "/// Verifies ";

/// Returns the ids of all promises, in order.
fn promises(text: &str) -> Vec<String> {
    let items = text.lines().filter_map(|line| line.strip_prefix("- **"));
    items.filter_map(|rest| rest.split_once("** ")).map(|(id, _)| id.to_owned()).collect()
}

/// Returns whether a text begins with an id, unlike a sentence such as "Verifies that ...".
fn begins_with_id(text: &str) -> bool {
    let mut letters = text.chars();
    letters.next().is_some_and(|letter| letter.is_ascii_uppercase())
        && letters.next().is_some_and(|letter| letter.is_ascii_digit())
}

/// Returns the tests of a source by the ids that they verify, and the lines that are wrong.
fn index(file: &str, source: &str) -> (BTreeMap<String, Vec<String>>, Vec<String>) {
    let (mut tests, mut faults) = (BTreeMap::<String, Vec<String>>::new(), Vec::new());
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    for (number, line) in lines.iter().enumerate() {
        let Some(ids) = line.strip_prefix(VERIFIES).filter(|rest| begins_with_id(rest)) else {
            continue;
        };
        let at = format!("{file}:{}", number + 1);
        let Some(ids) = ids.strip_suffix('.') else {
            faults.push(format!("{at}: {line:?} does not end with a full stop"));
            continue;
        };
        let item: Vec<&str> =
            lines[number + 1..].iter().take_while(|line| line.starts_with("#[")).copied().collect();
        let function = lines.get(number + 1 + item.len()).copied().unwrap_or_default();
        let name = function.split_once("fn ").and_then(|(_, rest)| rest.split('(').next());
        let is_test =
            item.iter().any(|line| *line == "#[test]" || line.starts_with("#[tokio::test"));
        let Some(name) = name.filter(|_| is_test) else {
            faults.push(format!("{at}: {line:?} does not stand above the attributes of a test"));
            continue;
        };
        for id in ids.split(", ") {
            tests.entry(id.to_owned()).or_default().push(format!("{file}::{name}"));
        }
    }
    (tests, faults)
}

#[test]
fn promises_have_tests_and_tests_name_known_promises() {
    let promises = promises(&tree::text("SPECIFICATION.md"));
    let mut verified = BTreeMap::<String, Vec<String>>::new();
    let mut faults = Vec::new();
    for folder in ["src", "crates", "tests"] {
        for file in tree::files(folder, ".rs") {
            let (tests, wrong) = index(&file.display().to_string(), &tree::text(&file));
            faults.extend(wrong);
            for (id, tests) in tests {
                verified.entry(id).or_default().extend(tests);
            }
        }
    }
    let known: BTreeSet<&String> = promises.iter().collect();
    for (id, tests) in &verified {
        if !known.contains(id) {
            faults.push(format!("{tests:?} verify {id}, which SPECIFICATION.md does not have"));
        }
    }
    let mut ids = BTreeSet::new();
    for id in &promises {
        if !ids.insert(id) {
            faults.push(format!("{id}: another promise has this id"));
        }
        if !verified.contains_key(id) {
            faults.push(format!("{id}: no test verifies it"));
        }
    }
    assert!(!promises.is_empty(), "SPECIFICATION.md has no promise");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn index_maps_ids_to_tests_and_reports_malformed_lines() {
    let verifies = |ids: &str| format!("{VERIFIES}{ids}");
    let source = format!(
        "{}\n#[tokio::test(start_paused = true)]\nasync fn a() {{}}\n{}\n#[test]\nfn b() {{}}\n\
         {}\nfn c() {{}}\n{}\n#[test]\nfn d() {{}}\n{}\nfn e() {{}}\n",
        verifies("X1, X2."),
        verifies("X2."),
        verifies("X3."),
        verifies("X4"),
        verifies("that this is a sentence."),
    );
    let (tests, faults) = index("f.rs", &source);
    assert_eq!(tests["X1"], ["f.rs::a"]);
    assert_eq!(tests["X2"], ["f.rs::a", "f.rs::b"]);
    assert_eq!(tests.len(), 2);
    assert_eq!(faults.len(), 2, "{faults:?}");
    assert!(faults[0].starts_with("f.rs:7: ") && faults[1].starts_with("f.rs:9: "), "{faults:?}");
    assert_eq!(promises("- **A1** One\n  two\n\ntext\n- **A2** x\n"), ["A1", "A2"]);
}
