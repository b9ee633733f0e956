//! SPECIFICATION.md: every promise has a test.
//!
//! A promise is an item `- **ID** Text — `path/to/file.rs::name_of_a_test``, on as many lines as it
//! needs, with one or more tests, with commas between.

use std::collections::BTreeSet;

use crate::tree;

struct Promise {
    id: String,
    tests: Vec<String>,
}

fn promises(text: &str) -> Vec<Promise> {
    let mut items: Vec<String> = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        if line.starts_with("- **") {
            items.push(line.to_owned());
            inside = true;
        } else if inside && line.starts_with("  ") {
            let item = items.last_mut().unwrap();
            *item = format!("{item} {}", line.trim());
        } else {
            inside = false;
        }
    }
    items.iter().map(|item| promise(item)).collect()
}

fn promise(item: &str) -> Promise {
    let (id, rest) = item
        .strip_prefix("- **")
        .and_then(|rest| rest.split_once("** "))
        .unwrap_or_else(|| panic!("no `- **ID** ` at the begin of: {item}"));
    let (_, tests) =
        rest.rsplit_once(" — ").unwrap_or_else(|| panic!("no ` — ` before the tests of: {item}"));
    let test = |part: &str| {
        let part = part.trim();
        part.strip_prefix('`')
            .and_then(|part| part.strip_suffix('`'))
            .unwrap_or_else(|| panic!("{part} is no test in backticks, in: {item}"))
            .to_owned()
    };
    Promise { id: id.to_owned(), tests: tests.split(',').map(test).collect() }
}

/// Says what is wrong with a reference to a test.
fn fault(test: &str) -> Option<String> {
    let Some((file, name)) = test.rsplit_once("::").filter(|(file, _)| file.ends_with(".rs"))
    else {
        return Some(format!("{test} is not path/to/file.rs::name"));
    };
    if !tree::root().join(file).is_file() {
        return Some(format!("{file} is not there"));
    }
    let source = tree::text(file);
    let Some(at) = source.find(&format!("fn {name}(")) else {
        return Some(format!("{file} has no function {name}"));
    };
    // The attributes stand between the last blank line, brace or semicolon and the function.
    let before = &source[..at];
    let start =
        before.rfind("\n\n").into_iter().chain(before.rfind("{\n")).max().unwrap_or_default();
    let attributes = &before[start..];
    let is_test = attributes.contains("#[test]") || attributes.contains("#[tokio::test");
    (!is_test).then(|| format!("{name} of {file} is no test"))
}

#[test]
fn every_promise_has_a_test_that_exists() {
    let promises = promises(&tree::text("SPECIFICATION.md"));
    assert!(!promises.is_empty(), "SPECIFICATION.md has no promise");
    let mut ids = BTreeSet::new();
    let mut faults = Vec::new();
    for promise in promises {
        faults.extend(
            promise
                .tests
                .iter()
                .filter_map(|test| fault(test))
                .map(|fault| format!("{}: {fault}", promise.id)),
        );
        if !ids.insert(promise.id.clone()) {
            faults.push(format!("{}: another promise has this id", promise.id));
        }
    }
    assert!(faults.is_empty(), "SPECIFICATION.md:\n{}", faults.join("\n"));
}

#[test]
fn references_are_checked() {
    let own = "tests/structure/specification.rs";
    assert_eq!(fault(&format!("{own}::references_are_checked")), None);
    for wrong in [
        format!("{own}::fault"),
        format!("{own}::nothing"),
        "tests/structure/nothing.rs::x".to_owned(),
        "references_are_checked".to_owned(),
    ] {
        assert!(fault(&wrong).is_some(), "{wrong}");
    }
    let read = promises(
        "# T\n\n- **A1** One\n  two — `a.rs::b`,\n  `c.rs::d`\n\ntext\n- **A2** x — `e.rs::f`\n",
    );
    assert_eq!(
        read.iter().map(|promise| (promise.id.as_str(), promise.tests.len())).collect::<Vec<_>>(),
        [("A1", 2), ("A2", 1)]
    );
}
