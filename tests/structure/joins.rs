//! Joins of paths: literals, constants and what `kiyot_linux::tree` has checked.

use crate::{
    lexer::{self, Kind, Token},
    source::without_tests,
    tree,
};

/// Folders of programs.
const FOLDERS: [&str; 2] = ["src", "crates"];
/// Parts of paths that are not checked: test tools, tests, programs of the build, and requests that
/// `explain` makes of manifests, whose paths nothing opens.
const SKIPPED: [&str; 6] = [
    "crates/kiyot-testkit/",
    "crates/kiyot-testcloud/",
    "/tests/",
    "/tests.rs",
    "/build.rs",
    "crates/kiyot-manifest/",
];
/// Methods that join a path to another.
const METHODS: [&str; 4] = ["join", "push", "set_file_name", "with_file_name"];
/// Names of variables on which `push` joins a path. On other variables it appends to a list.
const PATHS: [&str; 4] = ["dir", "directory", "path", "root"];
/// Functions that take a path. The path must not be joined by a formatted text.
const TAKERS: [[&str; 2]; 7] = [
    ["Path", "new"],
    ["PathBuf", "from"],
    ["File", "create"],
    ["File", "open"],
    ["fs", "create_dir_all"],
    ["fs", "read"],
    ["fs", "write"],
];

/// Joins of trusted values: file, argument and reason.
const TRUSTED: &[(&str, &str, &str)] = &[
    ("crates/kiyot-linux/src/tree/beneath.rs", "path . as_ref ( )", "the function itself"),
    (
        "crates/kiyot-linux/src/tree/beneath.rs",
        "name",
        "a name of the program's own, by its lifetime",
    ),
    ("crates/kiyot-linux/src/tree/beneath.rs", "& self . 0", "a `RelPath`, which is checked"),
    ("crates/kiyot-cell/src/init/root.rs", "program", "a name or path of the configuration"),
    ("crates/kiyot-cell/src/init/root.rs", "target", "a link on the way to a program of the node"),
    ("crates/kiyot-cell/src/init/root.rs", "relative", "a mount point, as the kernel reports it"),
    ("crates/kiyot-link/src/private_file.rs", "name", "the file's own name and an ending"),
    ("crates/milpactl/src/static_pods/directory.rs", "pod . name . file ( )", "a checked name"),
    ("crates/milpactl/src/static_pods/directory.rs", "pod . file ( )", "a checked name"),
    (
        "crates/milpactl/src/static_pods/directory.rs",
        "path",
        "the kubelet's directory, of its configuration",
    ),
    ("src/backends/milpa/gateway/peer.rs", "process", "the number of a process, or \"self\""),
    (
        "src/backends/milpa/images/registries/bundle.rs",
        "original",
        "a file of any path on the node",
    ),
    ("crates/kiyot-local/src/lib.rs", "program", "a name of the configuration"),
    ("crates/kiyot-local/src/cgroup.rs", "name ( cell )", "the id of a cell"),
    ("crates/kiyot-local/src/instance.rs", "cell . as_str ( )", "the id of a cell"),
    ("crates/kiyot-local/src/instance.rs", "self . netns_name ( )", "the id of a cell"),
    ("crates/kiyot-local/src/network/bridge.rs", "address . to_string ( )", "an address"),
    ("crates/kiyot-local/src/network/bridge.rs", "format ! ( {DRAFT}{cell} )", "an id"),
    (
        "src/backends/milpa/volumes/subpath.rs",
        "volume . strip_prefix ( & holder . point ) . ok ( ) ?",
        "compared, not opened",
    ),
    (
        "crates/kiyot-config/src/sockets.rs",
        "target",
        "a link on the way to a socket of the configuration",
    ),
    ("crates/kiyot-config/src/sockets.rs", "name", "the end of a path of the configuration"),
];

/// Returns the joined values of a source that are neither literals nor constants, with their lines.
fn joined(source: &str) -> Vec<(usize, String)> {
    let tokens = lexer::tokens(without_tests(source));
    let mut found = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let Kind::Word(method) = &token.kind else { continue };
        let Some(argument) = argument(&tokens[at + 1..]) else { continue };
        let before = |steps: usize| at.checked_sub(steps).map(|at| &tokens[at].kind);
        let word = |steps| match before(steps) {
            Some(Kind::Word(word)) => &**word,
            _ => "",
        };
        let is_method = before(1) == Some(&Kind::Sign('.')) && METHODS.contains(&&**method);
        let is_list = method == "push" && !PATHS.contains(&word(2));
        let is_fixed = matches!(argument, [Token { kind: Kind::Text(_) | Kind::RawText(_), .. }])
            || is_constant(argument);
        let is_taker = TAKERS.contains(&[word(3), method]);
        if is_method && !is_list && !is_fixed || is_taker && is_joined_text(argument) {
            found.push((token.line, text(argument)));
        }
    }
    found
}

/// Returns the only argument of a call whose parenthesis is the first token.
fn argument(tokens: &[Token]) -> Option<&[Token]> {
    if tokens.first()?.kind != Kind::Sign('(') {
        return None;
    }
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        match token.kind {
            Kind::Sign('(' | '[' | '{') => depth += 1,
            Kind::Sign(')' | ']' | '}') => depth -= 1,
            // A call with several arguments does not join paths. A closure's parameters stand in
            // bars.
            Kind::Sign(',') if depth == 1 => return None,
            _ => {}
        }
        if depth == 0 {
            return Some(&tokens[1..at]).filter(|argument| !argument.is_empty());
        }
    }
    None
}

/// Returns whether an argument is a constant, or an element of a constant.
fn is_constant(argument: &[Token]) -> bool {
    let is_plain =
        |token: &Token| matches!(token.kind, Kind::Word(_) | Kind::Sign('&' | ':' | '[' | ']'));
    let last = argument.iter().rev().find_map(|token| match &token.kind {
        Kind::Word(word) if !word.starts_with(|c: char| c.is_ascii_digit()) => Some(word),
        _ => None,
    });
    argument.iter().all(is_plain)
        && last.is_some_and(|word| word.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
}

/// Returns whether an argument is a formatted text with a value after a slash. Files of processes
/// and open files have numbers there.
fn is_joined_text(argument: &[Token]) -> bool {
    let is_format = argument.iter().any(|token| token.kind == Kind::Word("format".to_owned()));
    is_format
        && argument.iter().any(|token| match &token.kind {
            Kind::Text(text) => text.contains("/{") && !text.starts_with("/proc/"),
            _ => false,
        })
}

fn text(tokens: &[Token]) -> String {
    let words = tokens.iter().map(|token| match &token.kind {
        Kind::Word(text) | Kind::Text(text) | Kind::RawText(text) => text.clone(),
        Kind::Sign(sign) => sign.to_string(),
        Kind::Doc(..) => String::new(),
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Verifies X61.
#[test]
fn values_from_outside_are_joined_by_one_function() {
    let mut unused: Vec<_> = TRUSTED.to_vec();
    let mut wrong = Vec::new();
    for file in FOLDERS.into_iter().flat_map(|folder| tree::files(folder, ".rs")) {
        let name = file.to_str().unwrap();
        if SKIPPED.into_iter().any(|part| name.contains(part)) {
            continue;
        }
        for (line, value) in joined(&tree::text(&file)) {
            let is_trusted =
                |(own, trusted, _): &(&str, &str, &str)| *own == name && *trusted == value;
            if !TRUSTED.iter().any(is_trusted) {
                wrong.push(format!("{name}:{line}: {value}"));
            }
            unused.retain(|trusted| !is_trusted(trusted));
        }
    }
    assert!(
        wrong.is_empty(),
        "joins of values that kiyot_linux::tree::{{beneath, own}} or a `RelPath` has not checked:\n\
         {}",
        wrong.join("\n")
    );
    assert!(unused.is_empty(), "trusted joins that do not occur: {unused:?}");
}

#[test]
fn joins_of_values_are_found() {
    let source = concat!(
        "fn x() { a.join(\"b\").join(C).join(&Self::D).join(E[0]); f.join(\", \"); t.join();\n",
        "a.join(name);\na.join(&g.name).join(h(i));\nlist.push(j); dir.push(k);\n",
        "calls.join(&tasks, key); a.with_file_name(l); fs::read(format!(\"/proc/{pid}/m\"));\n",
        "PathBuf::from(format!(\"/n/{o}\")); Path::new(&format!(\"{p}\")); }\n",
        "#[cfg(test)]\nmod tests { fn y() { a.join(q); } }\n",
    );
    let found = joined(source);
    let lines: Vec<_> = found.iter().map(|(line, value)| (*line, value.as_str())).collect();
    assert_eq!(
        lines,
        [
            (2, "name"),
            (3, "& g . name"),
            (3, "h ( i )"),
            (4, "k"),
            (5, "l"),
            (6, "format ! ( /n/{o} )"),
        ]
    );
}
