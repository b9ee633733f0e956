//! Manifests of the size of an admin request that repeat an input per item.

use std::iter::once;

use super::*;

/// Bytes of a manifest that the admin API takes.
const BYTES: usize = 1 << 20;
/// Bounds the memory of parsing and explaining it: a table of one value takes some 400 bytes.
const MAX_PEAK_BYTES: u64 = 64 << 20;
/// Bounds the text of the result.
const MAX_RESULT_BYTES: usize = 3 << 19;
const POD: &str = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"p"}"#;

/// Returns a text with as many items as fit.
fn filled(before: &str, item: impl Fn(usize) -> String, after: &str) -> String {
    let mut text = before.to_owned();
    for index in 0.. {
        let item = item(index);
        if text.len() + item.len() + after.len() > BYTES {
            break;
        }
        text += &item;
    }
    text.truncate(text.trim_end_matches(',').len());
    text + after
}

fn in_spec(before: &str, item: impl Fn(usize) -> String, after: &str) -> String {
    let containers = r#""containers":[{"name":"c","image":"i"}]"#;
    filled(&format!("{POD},\"spec\":{{{containers}{before}"), item, &format!("{after}}}}}"))
}

/// Returns manifests with a name for each.
fn manifests() -> Vec<(&'static str, Vec<File>)> {
    let file = |name: &str, text: &str| File { name: name.to_owned(), text: text.to_owned() };
    let of_two = |name: String, text: &str| vec![file(&name, text), file("b", "{}")];
    let empty = "{}".repeat(16 * 1024);
    let path = |bytes: usize| "/".repeat(bytes);
    let mounting = |path: &str, containers: usize| {
        let head = format!(
            "{POD},\"spec\":{{\"volumes\":[{{\"name\":\"v\",\"hostPath\":\
             {{\"path\":\"{path}\"}}}}],\"containers\":["
        );
        let mount = r#"{"name":"v","mountPath":"/a"}"#;
        let mounts = vec![mount; 1024.min(15_000 / containers)].join(",");
        let container =
            |index| format!(r#"{{"name":"c{index}","image":"i","volumeMounts":[{mounts}]}},"#);
        filled(&head, container, "]}}")
    };
    let image = r#","volumes":[{"name":"v","image":{"reference":""#;
    let single = [
        (
            "items of a list",
            filled(r#"{"apiVersion":"v1","kind":"List","items":["#, |_| "0,".to_owned(), "]}"),
        ),
        ("tables in a document", filled("[", |_| "{\"a\":0},".to_owned(), "]")),
        ("empty documents", filled("", |_| "{}".to_owned(), "")),
        (
            "empty lists",
            filled("", |_| r#"{"apiVersion":"v1","kind":"List","items":[]}"#.to_owned(), ""),
        ),
        ("unknown keys", in_spec("", |index| format!(",\"k{index}\":0"), "")),
        ("a long unknown key", in_spec(",\"", |_| "containers".to_owned(), "\":0")),
        (
            "keys of labels",
            filled(
                r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"p","labels":{"#,
                |index| format!("\"k{index}\":0,"),
                r#"}},"spec":{"containers":[]}}"#,
            ),
        ),
        (
            "unknown annotations",
            filled(
                r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"p","annotations":{
               "kubernetes.io/target-runtime":"kiyot","#,
                |index| format!("\"pod.elotl.co/unknown{index:04}{}\":\"\",", "k".repeat(90)),
                r#""x":""}},"spec":{"containers":[{"name":"c","image":"i"}]}}"#,
            ),
        ),
        (
            "containers",
            filled(
                &format!("{POD},\"spec\":{{\"containers\":["),
                |index| format!(r#"{{"name":"c{index}","image":"i"}},"#),
                "]}}",
            ),
        ),
        (
            "empty variables of containers",
            filled(
                &format!("{POD},\"spec\":{{\"containers\":["),
                |_| format!("{{\"env\":[{}]}},", vec!["{}"; 1000].join(",")),
                "]}}",
            ),
        ),
        (
            "unknown keys of pods",
            filled(
                "",
                |_| {
                    let keys: String = (0..100).map(|key| format!(",\"{key}\":0")).collect();
                    let container = format!("{{\"name\":\"c\",\"image\":\"i\"{keys}}}");
                    format!("{POD},\"spec\":{{\"containers\":[{container}]}}}}")
                },
                "",
            ),
        ),
        ("empty volumes", in_spec(",\"volumes\":[", |_| "{},".to_owned(), "]")),
        (
            "values of aliases",
            filled("a: &a [", |_| "0,".to_owned().repeat(1000), "]\nb: [*a,*a,*a,*a]\n"),
        ),
        ("mounts of a long path", mounting(&path(BYTES / 2), 1)),
        ("mounts of the longest path", mounting(&path(4096), 100)),
        ("a long image of a volume", in_spec(image, |_| "i".to_owned(), r#""}}]"#)),
        (
            "references without an end",
            filled(
                &format!(
                    "{POD},\"spec\":{{\"containers\":[{{\"name\":\"c\",\"image\":\"i\",\"args\":[\""
                ),
                |_| "$(".to_owned(),
                r#""]}]}}"#,
            ),
        ),
        ("long names of documents that are skipped", {
            let long = "n".repeat(BYTES / 16);
            filled(
                &format!(
                    "{POD},\"spec\":{{\"containers\":[{{\"name\":\"c\",\"image\":\"i\"}}]}}}}"
                ),
                |_| {
                    format!(
                        r#"{{"apiVersion":"v1","kind":"{long}","metadata":{{"name":"{long}"}}}}"#
                    )
                },
                "",
            )
        }),
        (
            "documents that are skipped",
            filled(
                &format!(
                    "{POD},\"spec\":{{\"containers\":[{{\"name\":\"c\",\"image\":\"i\"}}]}}}}"
                ),
                |_| format!(r#"{{"apiVersion":"v1","kind":"{}"}}"#, "K".repeat(90)),
                "",
            ),
        ),
    ];
    let several = [
        ("a name of 64 KiB", of_two("n".repeat(64 * 1024), &empty)),
        ("the longest name", of_two("n".repeat(4096), &empty)),
        ("many files", (0..=1000).map(|index| file(&index.to_string(), "{}")).collect()),
        ("many files with long names", {
            (0..250).map(|index| file(&format!("{index}{}", "n".repeat(4000)), "{}")).collect()
        }),
    ];
    let single = single.into_iter().map(|(name, text)| (name, vec![file("a", &text)]));
    single.chain(several).collect()
}

/// Verifies M12.
#[test]
fn manifest_that_repeats_an_input_takes_bounded_memory_and_text() {
    let config = config::parse("config", OPT_OUT, []).unwrap();
    for (name, files) in manifests() {
        let mut text = String::new();
        let measured = allocation_counter::measure(|| {
            text = match manifest::parse_files(&files) {
                Ok(manifest) => explain(&config, &manifest, Prices::BuiltIn).to_string(),
                Err(problems) => problems.to_string(),
            };
        });
        let (peak, kib) = (measured.bytes_max, text.len() >> 10);
        eprintln!("{name}: {} MiB, {kib} KiB of text", peak >> 20);
        assert!(peak <= MAX_PEAK_BYTES, "{name}: {peak} bytes");
        assert!(text.len() <= MAX_RESULT_BYTES, "{name}: {kib} KiB of text");
    }
}

/// Verifies M12.
#[test]
fn report_counts_what_it_does_not_list() {
    let empty = |count: usize| vec![File { name: "a".into(), text: "{}".repeat(count) }];
    let problems = |count| manifest::parse_files(&empty(count)).unwrap_err();
    let all = problems(100);
    assert_eq!((all.list.len(), all.more), (100, 0));
    let some = problems(10_000);
    assert_eq!((some.list.len(), some.more), (100, 9_900));
    let text = some.to_string();
    assert!(text.starts_with("a: 10000 problems\n"), "{text}");
    assert!(text.ends_with("\n  and 9900 more"), "{text}");
    let short = some.within(1024);
    assert!(short.len() <= 1024 && short.starts_with("a: 10000 problems\n"), "{short}");
    assert!(short.contains("document 1.kind: is missing"), "{short}");
    // All excess documents are a single problem.
    assert_eq!(problems(20_000).list.len() + problems(20_000).more, 10_001);
}

/// Verifies M12.
#[test]
fn long_name_or_many_files_are_refused_with_the_limit() {
    let file = |name: String| File { name, text: String::new() };
    let refused = |files: &[File]| manifest::parse_files(files).unwrap_err().to_string();
    let named = refused(&[file("n".repeat(4097))]);
    assert!(named.ends_with("n: -f: has a file name of 4097 bytes; allowed: 4096"), "{named}");
    assert!(named.len() < 1024, "{named}");
    let many: Vec<File> = (0..1001).map(|index| file(index.to_string())).collect();
    assert_eq!(refused(&many), "1001 files: -f: names 1001 files; allowed: 1000");
}

/// Verifies M12.
#[test]
fn pods_after_a_long_explanation_are_counted_with_the_refused() {
    let config = config::parse("config", OPT_OUT, []).unwrap();
    let annotation = "pod.elotl.co/unknown";
    let keys = (0..300).map(|index| format!("{annotation}{index}: x")).collect::<Vec<_>>();
    let pod = |name: &str, more: &str| {
        format!(
            "kind: Pod\napiVersion: v1\nmetadata:\n  name: {name}\n  annotations: {{{}{more}}}\n\
             spec: {{containers: [{{name: c, image: i}}]}}\n---\n",
            keys.join(", ")
        )
    };
    let mut text: String = (0..40).map(|index| pod(&format!("p{index}"), "")).collect();
    text += &pod("refused", ", pod.elotl.co/cpu: none");
    let file = File { name: "a".into(), text };
    let manifest = manifest::parse_files(&[file]).unwrap();
    let explained = explain(&config, &manifest, Prices::BuiltIn);
    let first = &explained.pods[0];
    assert!(!first.is_refused && first.facts.last().unwrap().starts_with("and "), "{first:?}");
    let last = explained.pods.last().unwrap();
    let more = 41 - (explained.pods.len() - 1);
    assert_eq!(last.heading, format!("{more} more pods"));
    assert!(last.is_refused && last.facts[1] == "1 of them would be refused", "{last:?}");
}

/// Verifies M12.
#[test]
fn explanation_ends_once_the_caller_has_left() {
    let config = config::parse("config", OPT_OUT, []).unwrap();
    let pods = once("kind: List\napiVersion: v1\nitems:\n".to_owned())
        .chain((0..10).map(|index| {
        format!(
            "- kind: Pod\n  apiVersion: v1\n  metadata: {{name: p{index}}}\n  spec: {{containers: \
             [{{name: c, image: i}}]}}\n"
        )
    }));
    let file = File { name: "a".into(), text: pods.collect() };
    let manifest = manifest::parse_files(&[file]).unwrap();
    let left = std::cell::Cell::new(3);
    let is_wanted = || left.replace(left.get() - 1) > 0;
    let explained = explain_while(is_wanted, &config, &manifest, Prices::BuiltIn);
    assert_eq!(explained.pods.len(), 3);
}
