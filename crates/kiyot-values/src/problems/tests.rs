use proptest::prelude::*;

use super::*;

/// Text whose rest must not be rendered.
struct Endless;

impl fmt::Display for Endless {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        loop {
            f.write_str("é")?;
        }
    }
}

#[test]
fn beginning_of_a_value_is_rendered() {
    for (chars, shown_text) in [(0, "…"), (2, "éé…")] {
        assert_eq!(shown(chars, Endless), shown_text);
    }
    for (value, shown_text) in [("", ""), ("éé", "éé"), ("ééé", "éé…")] {
        assert_eq!(shown(2, value), shown_text);
    }
}

/// Verifies M12.
#[test]
fn texts_of_a_problem_are_shortened() {
    let long = "é".repeat(1 << 20);
    let problem = Problem::with_value(long.clone(), long.clone(), long);
    let problem = Problems::one("a", problem).list.remove(0);
    let chars = |text: &str| text.chars().count();
    assert_eq!(chars(&problem.at), SHOWN_PATH_CHARS + 1);
    assert_eq!(chars(problem.value.as_deref().unwrap()), SHOWN_VALUE_CHARS + 1);
    assert_eq!(chars(&problem.rule), SHOWN_RULE_CHARS + 1);
}

/// Verifies M12.
#[test]
fn list_of_long_problems_is_bounded_in_bytes() {
    let report = Report::default();
    let (at, value, rule) = ("at".repeat(250), "v".repeat(100), "r".repeat(424));
    for _ in 0..MAX_PROBLEMS {
        report.add(Problem::with_value(&*at, &value, &*rule));
    }
    let problems = report.finish("a", ()).unwrap_err();
    assert_eq!(problems.list.len(), 64, "problems of 1 KiB fill 64 KiB");
    assert_eq!(problems.list.len() + problems.more, MAX_PROBLEMS);
    assert!(problems.to_string().len() < MAX_LIST_BYTES + 2 * SHOWN_RULE_CHARS);
    let first = problems.clone().within(0);
    assert!(first.starts_with("a: 100 problems\n  - atat"), "{first}");
    assert!(first.ends_with("\n  and 99 more"), "{first}");
}

#[test]
fn report_counts_the_problems_beyond_its_list() {
    assert_eq!(Report::default().finish("a", 7), Ok(7));
    let report = Report::default();
    let problems = (0..MAX_PROBLEMS + 20).map(|_| Problem::new("at", "is wrong"));
    report.add_all(problems.collect::<Vec<_>>().into_iter());
    let whole = Report::default();
    (0..5).for_each(|_| whole.add(Problem::new("at", "is wrong")));
    whole.add_report(report);
    assert_eq!(whole.len(), MAX_PROBLEMS + 25);
    let problems = whole.finish("a", ()).unwrap_err();
    assert_eq!((problems.list.len(), problems.more), (MAX_PROBLEMS, 25));
}

/// Verifies M12.
#[test]
fn notes_are_dropped_before_problems() {
    let report = Report::default();
    ["one", "two"].into_iter().for_each(|at| report.add(Problem::new(at, "is wrong")));
    let problems = report.finish("a", ()).unwrap_err();
    let problems = problems.with_notes(vec!["first".into(), "second".into()]);
    let within = |bytes| problems.clone().within(bytes);
    let listed = "a: 2 problems\n  - one: is wrong\n  - two: is wrong";
    let whole = format!("{listed}\n  note: first\n  note: second");
    assert_eq!(within(whole.len()), whole);
    assert_eq!(within(whole.len() - 1), format!("{listed}\n  note: first"));
    assert_eq!(within(listed.len()), listed);
    assert_eq!(within(listed.len() - 1), "a: 2 problems\n  - one: is wrong\n  and 1 more");
}

proptest! {
    #[test]
    fn shortened_text_is_a_beginning_of_the_text(text in "\\PC{0,20}", chars in 0_usize..24) {
        let mut short = text.clone();
        shorten(&mut short, chars);
        prop_assert_eq!(&short, &shown(chars, &text));
        let begins = short.trim_end_matches('…');
        prop_assert!(text.starts_with(begins));
    }
}
