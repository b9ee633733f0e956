//! Modules and paths of Rust sources, for the check of imports.

use std::path::Path;

use crate::lexer::{self, Kind};

/// Returns the module path of a file of `src`: `["backends", "milpa"]` for `src/backends/milpa.rs`,
/// empty for the crate's root.
pub(crate) fn module_of(file: &Path) -> Vec<String> {
    let inner = file.strip_prefix("src").unwrap().with_extension("");
    let parts: Vec<String> = inner.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
    if parts == ["lib"] { Vec::new() } else { parts }
}

/// Returns a source without its unit tests, which stand at its end. A `mod tests;` does not begin
/// them.
pub(crate) fn without_tests(source: &str) -> &str {
    let end = source.find("#[cfg(test)]\nmod tests {").unwrap_or(source.len());
    &source[..end]
}

/// Returns the words, `::` and other signs of a source without its unit tests.
pub(crate) fn code_of(source: &str) -> Vec<String> {
    let mut code: Vec<String> = Vec::new();
    for token in lexer::tokens(without_tests(source)) {
        match token.kind {
            Kind::Word(word) => code.push(word),
            Kind::Sign(':') if code.last().is_some_and(|last| last == ":") => {
                code.pop();
                code.push("::".to_owned());
            }
            Kind::Sign(sign) => code.push(sign.to_string()),
            Kind::Doc(..) | Kind::Text(_) | Kind::RawText(_) => {}
        }
    }
    code
}

/// Returns the paths of the crate that a module names with `crate::`, `super::` and `self::`, in
/// imports (with braces expanded) and elsewhere. They are absolute.
pub(crate) fn paths_in(code: &[String], module: &[String]) -> Vec<Vec<String>> {
    let tokens: Vec<&str> = code.iter().map(String::as_str).collect();
    let mut paths = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let begins = at == 0 || tokens[at - 1] != "::";
        if begins
            && ["crate", "super", "self"].contains(&tokens[at])
            && tokens.get(at + 1) == Some(&"::")
        {
            at = expand(&tokens, at, &[], module, &mut paths);
        } else {
            at += 1;
        }
    }
    paths
}

/// Expands a tree of paths, adds its leaves, and returns the index behind it.
fn expand(
    tokens: &[&str],
    mut at: usize,
    before: &[&str],
    module: &[String],
    paths: &mut Vec<Vec<String>>,
) -> usize {
    let mut path = before.to_vec();
    loop {
        match tokens.get(at) {
            Some(&"{") => {
                at += 1;
                while at < tokens.len() && tokens[at] != "}" {
                    at = if tokens[at] == "," {
                        at + 1
                    } else {
                        expand(tokens, at, &path, module, paths)
                    };
                }
                return at + 1;
            }
            Some(word) if is_word(word) || *word == "*" => {
                path.push(word);
                at += 1;
            }
            // Generic arguments of an expression, or the end of the source.
            _ => {
                paths.extend(absolute(&path, module));
                return at + 1;
            }
        }
        if tokens.get(at) == Some(&"::") {
            at += 1;
            continue;
        }
        paths.extend(absolute(&path, module));
        // `x as y` is not a path.
        return if tokens.get(at) == Some(&"as") { at + 2 } else { at };
    }
}

/// Makes a path absolute.
fn absolute(path: &[&str], module: &[String]) -> Option<Vec<String>> {
    let mut parts = path.iter();
    let mut absolute = match *parts.next()? {
        "crate" => Vec::new(),
        "self" => module.to_vec(),
        "super" => module[..module.len().saturating_sub(1)].to_vec(),
        _ => return None,
    };
    for part in parts {
        match *part {
            "super" => drop(absolute.pop()),
            "self" | "*" => {}
            part => absolute.push(part.to_owned()),
        }
    }
    Some(absolute)
}

fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphanumeric() || c == '_')
}

#[test]
fn paths_are_found_wherever_they_stand() {
    let source = concat!(
        "//! crate::comment::x\nuse std::io;\nuse super::{a, b::{self, C}, super::d};\n",
        "use crate::{\n    e::*,\n    f as g,\n};\n",
        "fn x() { \"crate::text::y\"; crate::h::i::<u8>(); self::j::k(); $crate::l }\n",
        "#[cfg(test)]\nmod tests { use crate::m; }\n",
    );
    let module = ["one", "two"].map(str::to_owned);
    let found: Vec<String> =
        paths_in(&code_of(source), &module).iter().map(|path| path.join("::")).collect();
    assert_eq!(
        found,
        ["one::a", "one::b", "one::b::C", "d", "e", "f", "h::i", "one::two::j::k", "l"]
    );
}
