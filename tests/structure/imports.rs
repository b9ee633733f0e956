//! Imports run one way.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use crate::{source, tree};

/// A part, and the parts that it may name besides itself and its submodules. A path belongs to the
/// longest part with which it begins.
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
            "backends::milpa::policy",
            "explain",
            "annotations",
            "recent_log",
            "workload",
        ]],
    },
    Part {
        path: "app",
        may: &[
            &["proxy", "backends", "backends::cri", "backends::milpa", "backends::milpa::cri"],
            RESOURCES,
            CELLS,
            RECORDS,
            &["admin", "backends::milpa::inventory", "metrics"],
            &["kubernetes", "recent_log"],
        ],
    },
    Part {
        path: "kubernetes",
        may: &[&["backends::milpa", "backends::milpa::inventory"], &["metrics"]],
    },
    Part {
        path: "explain",
        may: &[
            &["proxy", "backends", "backends::milpa", "backends::milpa::policy"],
            &["annotations"],
        ],
    },
    Part {
        path: "admin",
        may: &[
            &["backends", "backends::milpa", "backends::milpa::inventory"],
            &["explain", "blocking", "recent_log"],
            &["unix_channel", "unix_listener"],
        ],
    },
    Part { path: "proxy", may: &[&["backends", "backends::cri", "metrics"], &["unix_listener"]] },
    Part { path: "backends", may: &[&["backends::cri"]] },
    Part { path: "backends::cri", may: &[&["backends"]] },
    Part {
        path: "backends::milpa",
        may: &[
            &["backends", "backends::milpa::cri", "backends::milpa::policy"],
            &["backends::milpa::inventory"],
            &["backends::milpa::send_rate", "backends::milpa::former_pods"],
            RESOURCES,
            CELLS,
            RECORDS,
            &["annotations", "metrics"],
        ],
    },
    Part {
        path: "backends::milpa::inventory",
        may: &[
            &["backends", "backends::milpa::pods"],
            &["backends::milpa::cri"],
            CELLS,
            RECORDS,
            &["annotations"],
        ],
    },
    Part {
        path: "backends::milpa::former_pods",
        may: &[
            &["backends", "backends::milpa::cells", "backends::milpa::cri"],
            RECORDS,
            &["blocking"],
        ],
    },
    Part {
        path: "backends::milpa::cri",
        may: &[
            &["backends", "backends::milpa::sync", "backends::milpa::policy"],
            POD_MODEL,
            RESOURCES,
            CELLS,
            RECORDS,
            LEAVES,
            &["annotations"],
        ],
    },
    Part { path: "backends::milpa::sync", may: &[POD_MODEL, RESOURCES, CELLS, RECORDS, LEAVES] },
    Part {
        path: "backends::milpa::policy",
        may: &[&["backends::milpa::resolver", "backends::milpa::providers"], &["annotations"]],
    },
    Part {
        path: "backends::milpa::cell_client",
        may: &[&["backends::milpa::pods"], FAILURES, CELLS],
    },
    Part { path: "backends::milpa::pods", may: &[&["backends::milpa::clock"]] },
    Part {
        path: "backends::milpa::images",
        may: &[
            CELL_CLIENT,
            FAILURES,
            CELLS,
            RECORDS,
            &["backends::milpa::send_rate", "blocking", "metrics", "unix_channel"],
        ],
    },
    Part {
        path: "backends::milpa::volumes",
        may: &[CELL_CLIENT, FAILURES, CELLS, RECORDS, &["metrics"]],
    },
    Part {
        path: "backends::milpa::logs",
        may: &[CELL_CLIENT, FAILURES, CELLS, RECORDS, WAITING, &["blocking", "metrics"]],
    },
    Part { path: "backends::milpa::streaming", may: &[CELL_CLIENT, FAILURES, CELLS, RECORDS] },
    Part { path: "backends::milpa::resolver", may: &[CELL_CLIENT, FAILURES, CELLS] },
    Part {
        path: "backends::milpa::cells",
        may: &[
            &["backends::milpa::gateway", "backends::milpa::providers"],
            &["annotations", "backends::milpa::clock"],
            RECORDS,
            WAITING,
            &["metrics"],
        ],
    },
    Part {
        path: "backends::milpa::gateway",
        may: &[RECORDS, &["backends::milpa::send_rate", "metrics"]],
    },
    Part { path: "backends::milpa::providers", may: &[] },
    Part { path: "backends::milpa::send_rate", may: &[] },
    Part { path: "backends::milpa::store", may: &[] },
    Part { path: "backends::milpa::clock", may: &[] },
    Part { path: "backends::milpa::failure", may: &[] },
    Part { path: "backends::milpa::mailbox", may: &[] },
    Part { path: "backends::milpa::tasks", may: &[] },
    Part { path: "annotations", may: &[] },
    Part { path: "blocking", may: &[] },
    Part { path: "metrics", may: &[] },
    Part { path: "recent_log", may: &[] },
    Part { path: "unix_channel", may: &[] },
    Part { path: "unix_listener", may: &[] },
    Part { path: "workload", may: &[&["annotations"]] },
];

/// Parts of a pod's cell that the CRI service manages.
const RESOURCES: &[&str] = &[
    "backends::milpa::images",
    "backends::milpa::volumes",
    "backends::milpa::logs",
    "backends::milpa::streaming",
    "backends::milpa::resolver",
];
/// Calls to a cell.
const CELL_CLIENT: &[&str] = &["backends::milpa::cell_client"];
/// The read model of pods, and the calls that keep it current.
const POD_MODEL: &[&str] = &["backends::milpa::pods", "backends::milpa::cell_client"];
/// Parts that make cells and connect to them.
const CELLS: &[&str] =
    &["backends::milpa::cells", "backends::milpa::gateway", "backends::milpa::providers"];
/// Queues and watches of tasks.
const WAITING: &[&str] = &["backends::milpa::mailbox"];
/// Records and their ids.
const RECORDS: &[&str] = &["backends::milpa::store"];
/// Typed failures of parts below CRI.
const FAILURES: &[&str] = &["backends::milpa::failure"];
/// Helpers without imports.
const LEAVES: &[&str] =
    &["backends::milpa::clock", "backends::milpa::failure", "backends::milpa::tasks"];

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
fn part_imports_only_parts_below_it() {
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
            // The root consists of parts.
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
fn every_module_belongs_to_a_part() {
    let unknown: Vec<_> = tree::files("src", ".rs")
        .into_iter()
        .filter(|file| {
            part_of(&source::module_of(file)).path.is_empty() && !file.ends_with("lib.rs")
        })
        .collect();
    assert!(
        unknown.is_empty(),
        "modules without a part in tests/structure/imports.rs: {unknown:?}"
    );
}

/// Verifies T1.
#[test]
fn modules_of_a_folder_name_each_other_one_way() {
    // The parts of their worlds name each other.
    const WORLDS: [&str; 2] = ["crates/kiyot-sim", "crates/kiyot-testcloud"];
    let libraries = tree::files("crates", "lib.rs");
    let roots = libraries.iter().filter_map(|library| library.ancestors().nth(2));
    for root in
        roots.chain([Path::new("")]).filter(|root| !WORLDS.iter().any(|it| root.ends_with(it)))
    {
        // The modules of its folder that each module names.
        let mut named = BTreeMap::<Vec<String>, BTreeSet<Vec<String>>>::new();
        for file in tree::files(root.join("src").to_str().unwrap(), ".rs") {
            let module = source::module_of(file.strip_prefix(root).unwrap());
            if module.iter().any(|name| name == "tests") {
                continue;
            }
            for depth in 1..=module.len() {
                named.entry(module[..depth].to_vec()).or_default();
            }
            for path in source::paths_in(&source::code_of(&tree::text(&file)), &module) {
                let same = module.iter().zip(&path).take_while(|(own, other)| own == other).count();
                if same < module.len().min(path.len()) {
                    let others = named.entry(module[..=same].to_vec()).or_default();
                    others.insert(path[..=same].to_vec());
                }
            }
        }
        // Removes modules that name no other module.
        while let Some(name) = named
            .iter()
            .find(|(_, others)| !others.iter().any(|other| named.contains_key(other)))
            .map(|(name, _)| name.clone())
        {
            named.remove(&name);
        }
        assert!(
            named.is_empty(),
            "{root:?}: modules in a circle, and those that name them: {named:#?}"
        );
    }
}

/// The other parts return failures, which `cri/status_code.rs` turns into statuses.
#[test]
fn grpc_status_is_named_only_by_cri_and_grpc_peers() {
    const MAY: [&str; 4] = ["cri", "cell_client", "gateway", "failure"];
    for file in tree::files("src/backends/milpa", ".rs") {
        let module = source::module_of(&file);
        if MAY.contains(&&*module[2]) || module.iter().any(|name| name == "tests") {
            continue;
        }
        let code = source::code_of(&tree::text(&file));
        let names = |name: &str| code.iter().any(|word| word == name);
        assert!(!(names("tonic") && names("Status")), "{} names tonic::Status", file.display());
    }
}

#[test]
fn modules_are_not_named_mod_rs() {
    for folder in ["src", "crates"] {
        let found = tree::files(folder, "mod.rs")
            .into_iter()
            .filter(|file| file.ends_with("mod.rs"))
            .collect::<Vec<_>>();
        assert!(found.is_empty(), "{found:?}");
    }
}

/// Verifies O8.
#[test]
fn counters_of_calls_have_no_lock() {
    const LOCKS: [&str; 8] =
        ["Mutex", "RwLock", "RefCell", "OnceLock", "LazyLock", "Condvar", "Barrier", "mpsc"];
    let code = source::code_of(&tree::text("src/metrics/cri_calls.rs"));
    let found: Vec<_> = code.iter().filter(|word| LOCKS.contains(&word.as_str())).collect();
    assert_eq!(found, Vec::<&String>::new());
    assert!(code.iter().any(|word| word == "AtomicU64"), "{code:?}");
}
