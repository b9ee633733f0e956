//! Imports run one way.

use crate::{source, tree};

/// A part, and the parts that it may name beside itself and what is beneath it. A path belongs to
/// the longest part that it begins with.
struct Part {
    path: &'static str,
    may: &'static [&'static [&'static str]],
}

const PARTS: &[Part] = &[
    Part { path: "", may: &[] },
    Part { path: "main", may: &[&["cli"]] },
    Part {
        path: "cli",
        may: &[&[
            "app",
            "proxy",
            "backends",
            "backends::milpa",
            "backends::milpa::verbs",
            "manifest",
            "annotations",
            "config",
            "problems",
        ]],
    },
    Part {
        path: "app",
        may: &[
            &["proxy", "backends", "backends::cri", "backends::milpa"],
            ACTING,
            CELLS,
            KEEPING,
            &["config", "problems"],
        ],
    },
    Part { path: "proxy", may: &[&["backends", "backends::cri", "config"]] },
    Part { path: "backends", may: &[&["backends::cri", "config"]] },
    Part { path: "backends::cri", may: &[&["backends", "config"]] },
    Part {
        path: "backends::milpa",
        may: &[&["backends"], ACTING, CELLS, KEEPING, &["annotations", "config"]],
    },
    Part {
        path: "backends::milpa::verbs",
        may: &[&["backends"], ACTING, CELLS, KEEPING, &["annotations", "config", "problems"]],
    },
    Part { path: "backends::milpa::images", may: &[CELLS, KEEPING, &["config"]] },
    Part { path: "backends::milpa::volumes", may: &[CELLS, KEEPING, &["config"]] },
    Part { path: "backends::milpa::logs", may: &[CELLS, KEEPING, WAITING, &["config"]] },
    Part { path: "backends::milpa::streaming", may: &[CELLS, KEEPING, &["config"]] },
    Part { path: "backends::milpa::resolver", may: &[CELLS, &["backends::milpa::id", "config"]] },
    Part {
        path: "backends::milpa::cells",
        may: &[
            &["backends::milpa::gateway", "backends::milpa::providers"],
            KEEPING,
            WAITING,
            &["config"],
        ],
    },
    Part { path: "backends::milpa::gateway", may: &[KEEPING, &["config"]] },
    Part { path: "backends::milpa::providers", may: &[&["backends::milpa::id", "config"]] },
    Part { path: "backends::milpa::store", may: &[&["backends::milpa::id"]] },
    Part { path: "backends::milpa::id", may: &[] },
    Part { path: "backends::milpa::latest", may: &[] },
    Part { path: "backends::milpa::mailbox", may: &[] },
    Part { path: "manifest", may: &[&["annotations", "problems"]] },
    Part { path: "annotations", may: &[&["config", "problems"]] },
    Part { path: "config", may: &[&["problems"]] },
    Part { path: "problems", may: &[] },
];

/// What answers CRI for a pod in a cell.
const ACTING: &[&str] = &[
    "backends::milpa::verbs",
    "backends::milpa::images",
    "backends::milpa::volumes",
    "backends::milpa::logs",
    "backends::milpa::streaming",
    "backends::milpa::resolver",
];
/// What makes cells and speaks with them.
const CELLS: &[&str] =
    &["backends::milpa::cells", "backends::milpa::gateway", "backends::milpa::providers"];
/// What tasks wait for.
const WAITING: &[&str] = &["backends::milpa::latest", "backends::milpa::mailbox"];
/// What remembers.
const KEEPING: &[&str] = &["backends::milpa::store", "backends::milpa::id"];

fn part_of(path: &[String]) -> &'static Part {
    let begins = |part: &&Part| {
        part.path
            .split("::")
            .filter(|name| !name.is_empty())
            .enumerate()
            .all(|(index, name)| path.get(index).is_some_and(|own| own == name))
    };
    PARTS.iter().filter(begins).max_by_key(|part| part.path.len()).unwrap()
}

/// Verifies T1.
#[test]
fn no_part_names_one_above_it() {
    let mut wrong = Vec::new();
    for file in tree::files("src", ".rs") {
        let module = source::module_of(&file);
        // Tests may look at everything.
        if module.last().is_some_and(|name| name == "tests") {
            continue;
        }
        let from = part_of(&module);
        for path in source::paths_in(&source::code_of(&tree::text(&file)), &module) {
            let to = part_of(&path);
            // The root has nothing but parts.
            if to.path != from.path && !from.may.concat().contains(&to.path) && !to.path.is_empty()
            {
                wrong.push(format!(
                    "{} names {} ({:?} may name {:?})",
                    file.display(),
                    path.join("::"),
                    from.path,
                    from.may.concat()
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "imports that are not allowed:\n{}", wrong.join("\n"));
}

#[test]
fn every_module_is_a_part_or_of_one() {
    let unknown: Vec<_> = tree::files("src", ".rs")
        .into_iter()
        .filter(|file| {
            part_of(&source::module_of(file)).path.is_empty() && !file.ends_with("lib.rs")
        })
        .collect();
    assert!(
        unknown.is_empty(),
        "these are of no part that tests/structure/imports.rs knows: {unknown:?}"
    );
}

#[test]
fn only_the_provider_of_a_cloud_names_its_library() {
    for file in tree::files("src", ".rs")
        .into_iter()
        .filter(|file| !file.starts_with("src/backends/milpa/providers/ec2"))
    {
        assert!(
            !source::code_of(&tree::text(&file)).iter().any(|word| word.contains("aws_")),
            "{} names a library of AWS",
            file.display()
        );
    }
}

#[test]
fn no_module_is_a_mod_rs() {
    for folder in ["src", "crates"] {
        let found = tree::files(folder, "mod.rs")
            .into_iter()
            .filter(|file| file.ends_with("mod.rs"))
            .collect::<Vec<_>>();
        assert!(found.is_empty(), "{found:?}");
    }
}
