//! Expressions of the dashboard and of the alert rules, against the metrics of the code.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::metrics;

const DASHBOARD: &str = "deploy/grafana/kiyot.json";
const RULES: &str = "deploy/prometheus/kiyot-rules.yaml";
/// Labels that Prometheus adds to each sample.
const TARGET_LABELS: [&str; 2] = ["instance", "job"];
/// Words of PromQL and of Grafana's queries that are not metrics.
const WORDS: [&str; 14] = [
    "sum",
    "count",
    "rate",
    "increase",
    "changes",
    "histogram_quantile",
    "label_values",
    "by",
    "on",
    "and",
    "or",
    "unless",
    "Inf",
    "NaN",
];

fn text(file: &str) -> String {
    std::fs::read_to_string(file).unwrap()
}

type Labels = BTreeSet<String>;

/// Returns the labels of each sample that exists.
fn known() -> BTreeMap<String, Labels> {
    let names = |labels: Vec<&str>| labels.into_iter().map(str::to_owned).collect::<Labels>();
    let own = metrics::ALL.iter().flat_map(|metric| metric.samples());
    // Prometheus's own.
    own.chain([("up".to_owned(), vec![])]).map(|(name, labels)| (name, names(labels))).collect()
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Word(String),
    Text(String),
    Sign(char),
}

/// Splits an expression into tokens, without numbers, ranges and variables.
fn tokens(expression: &str) -> Vec<Token> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | ':');
    let (mut tokens, mut rest) = (Vec::new(), expression);
    while let Some(first) = rest.chars().next() {
        let end = match first {
            '"' => rest[1..].find('"').map_or(rest.len(), |end| end + 2),
            '[' => rest.find(']').map_or(rest.len(), |end| end + 1),
            '$' => rest[1..].find(|c| !is_word(c)).map_or(rest.len(), |end| end + 1),
            c if is_word(c) => {
                let of_number = c.is_ascii_digit();
                rest.find(|c| !(is_word(c) || (of_number && c == '.'))).unwrap_or(rest.len())
            }
            c => c.len_utf8(),
        };
        let (token, after) = rest.split_at(end);
        match first {
            '"' => tokens.push(Token::Text(token.trim_matches('"').to_owned())),
            c if is_word(c) && !c.is_ascii_digit() => tokens.push(Token::Word(token.to_owned())),
            c if c.is_whitespace() || is_word(c) || matches!(c, '[' | '$') => {}
            c => tokens.push(Token::Sign(c)),
        }
        rest = after;
    }
    tokens
}

/// Returns the position after the group of brackets that opens at `begin`, nested groups included.
fn end_of_group(tokens: &[Token], begin: usize) -> usize {
    let mut depth = 0_usize;
    for (index, token) in tokens.iter().enumerate().skip(begin) {
        match token {
            Token::Sign('(' | '{') => depth += 1,
            Token::Sign(')' | '}') => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return index + 1;
        }
    }
    tokens.len()
}

fn words(tokens: &[Token]) -> impl Iterator<Item = &str> {
    tokens.iter().filter_map(|token| match token {
        Token::Word(word) => Some(word.as_str()),
        _ => None,
    })
}

/// Metrics with the labels of their selectors.
type Selectors = Vec<(String, Labels)>;
/// Labels of groupings, with the metrics to which they apply. Without metrics they apply to all.
type Groupings = Vec<(Labels, Vec<String>)>;

/// Returns the metrics and the groupings of an expression.
fn parse(tokens: &[Token]) -> (Selectors, Groupings) {
    let (mut metrics, mut groupings, mut at) = (Vec::new(), Vec::new(), 0);
    let owned = |tokens: &[Token]| words(tokens).map(str::to_owned).collect::<Labels>();
    while at < tokens.len() {
        let next = at + 1;
        let Token::Word(word) = &tokens[at] else {
            at = next;
            continue;
        };
        at = match word.as_str() {
            "by" => {
                let end = end_of_group(tokens, next);
                let argument = &tokens[end..end_of_group(tokens, end)];
                let of = parse(argument).0.into_iter().map(|(name, _)| name).collect();
                groupings.push((owned(&tokens[next..end]), of));
                end
            }
            "on" => {
                let end = end_of_group(tokens, next);
                groupings.push((owned(&tokens[next..end]), Vec::new()));
                end
            }
            "label_values" => {
                // label_values(metric, label)
                let end = end_of_group(tokens, next);
                if let [metric, label] = words(&tokens[next..end]).collect::<Vec<_>>()[..] {
                    metrics.push((metric.to_owned(), Labels::from([label.to_owned()])));
                }
                end
            }
            word if WORDS.contains(&word) => next,
            metric if tokens.get(next) == Some(&Token::Sign('{')) => {
                let end = end_of_group(tokens, next);
                metrics.push((metric.to_owned(), owned(&tokens[next..end])));
                end
            }
            metric => {
                metrics.push((metric.to_owned(), Labels::new()));
                next
            }
        };
    }
    (metrics, groupings)
}

/// Returns the values of a label that are listed one by one; `None` for other labels.
fn listed_values(metric: &str, label: &str) -> Option<BTreeSet<&'static str>> {
    let has_metric = |it: &&&metrics::Definition| it.samples().any(|(name, _)| name == metric);
    let values = metrics::ALL.iter().find(has_metric)?.labels.iter().find(|it| it.name == label)?;
    let is_list = values.values.starts_with('`');
    is_list.then(|| values.values.split('`').skip(1).step_by(2).collect())
}

/// Returns the faults of an expression that compares a label with a value that the label never has.
fn absent_values(tokens: &[Token]) -> Vec<String> {
    let (mut absent, mut metric, mut label) = (Vec::new(), "", "");
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Token::Word(word) if tokens.get(at + 1) == Some(&Token::Sign('{')) => metric = word,
            Token::Word(word) => label = word,
            Token::Text(text) => {
                let Some(listed) = listed_values(metric, label) else { continue };
                let is_plain =
                    |value: &&str| value.chars().all(|c| c.is_alphanumeric() || "_-".contains(c));
                let values = text.split('|').filter(is_plain);
                let unlisted = values.filter(|value| !listed.contains(value));
                absent.extend(unlisted.map(|value| format!("{metric} has no {label} {value}")));
            }
            Token::Sign(_) => {}
        }
    }
    absent
}

/// Returns the labels of a text such as `{{ $labels.method }}` or `{{method}}`.
fn shown_labels(text: &str) -> Vec<&str> {
    let shown = text.split("{{").skip(1).filter_map(|part| part.split("}}").next());
    shown
        .map(|name| name.trim().trim_start_matches("$labels."))
        .filter(|name| *name != "$value")
        .collect()
}

/// Returns what is wrong with an expression, and with the labels that texts beside it show.
fn faults(expression: &str, texts: &[&str]) -> Vec<String> {
    let known = known();
    let is_target = |label: &str| TARGET_LABELS.contains(&label);
    let tokens = tokens(expression);
    let (metrics, groupings) = parse(&tokens);
    let mut faults = absent_values(&tokens);
    let mut check = |metric: &str, label: &str| match known.get(metric) {
        Some(labels) if labels.contains(label) || is_target(label) => {}
        Some(_) => faults.push(format!("{metric} has no label {label}")),
        None => faults.push(format!("{metric} does not exist")),
    };
    for (metric, labels) in &metrics {
        // All samples have this label: only the metric is checked.
        check(metric, "instance");
        labels.iter().for_each(|label| check(metric, label));
    }
    for (labels, of) in &groupings {
        let all = || metrics.iter().map(|(name, _)| name).collect::<Vec<_>>();
        let of = if of.is_empty() { all() } else { of.iter().collect() };
        for (label, metric) in
            labels.iter().flat_map(|label| of.iter().map(move |metric| (label, metric)))
        {
            check(metric, label);
        }
    }
    if metrics.is_empty() {
        faults.push("no metric".to_owned());
    }
    for label in texts.iter().flat_map(|text| shown_labels(text)) {
        // A grouped expression has only the labels of its groupings.
        let is_kept = groupings.is_empty()
            && metrics
                .iter()
                .any(|(name, _)| known.get(name).is_some_and(|labels| labels.contains(label)))
            || groupings.is_empty() && is_target(label)
            || groupings.iter().any(|(labels, _)| labels.contains(label));
        if !is_kept {
            faults.push(format!("the label {label}, which is shown, is not in the result"));
        }
    }
    faults
}

/// Returns the expressions of a document, each with the texts beside it.
fn expressions<'a>(value: &'a Value, found: &mut Vec<(&'a str, Vec<&'a str>)>) {
    match value {
        Value::Object(fields) => {
            let texts = |value: &'a Value| match value {
                Value::Object(fields) => fields.values().filter_map(Value::as_str).collect(),
                Value::String(text) => vec![text.as_str()],
                _ => vec![],
            };
            if let Some(expression) = value["expr"].as_str() {
                let beside = ["legendFormat", "annotations"].map(|name| texts(&value[name]));
                found.push((expression, beside.concat()));
            }
            if let Some(query) = value["query"].as_str().filter(|query| query.contains('(')) {
                found.push((query, vec![]));
            }
            fields.values().for_each(|field| expressions(field, found));
        }
        Value::Array(items) => items.iter().for_each(|item| expressions(item, found)),
        _ => {}
    }
}

/// Verifies O6.
#[test]
fn expressions_of_dashboard_and_alerts_name_metrics_of_the_code() {
    let dashboard: Value = serde_json::from_str(&text(DASHBOARD)).unwrap();
    let rules: Value = serde_saphyr::from_str(&text(RULES)).unwrap();
    let (mut wrong, mut used) = (Vec::new(), BTreeSet::new());
    for (file, document, least) in [(DASHBOARD, &dashboard, 25), (RULES, &rules, 10)] {
        let mut found = Vec::new();
        expressions(document, &mut found);
        assert!(found.len() >= least, "{file}: only {} expressions are found", found.len());
        for (expression, texts) in found {
            used.extend(parse(&tokens(expression)).0.into_iter().map(|(name, _)| name));
            let faults = faults(expression, &texts);
            wrong.extend(faults.into_iter().map(|fault| format!("{file}: {expression}: {fault}")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for metric in metrics::ALL {
        let is_used = metric.samples().any(|(name, _)| used.contains(&name));
        assert!(is_used, "{} is neither on the dashboard nor in an alert", metric.name);
    }
}

#[test]
fn expression_check_finds_unknown_metrics_and_labels() {
    for (expression, texts, expected) in [
        ("kiyot_cells > 0.5", &["{{state}}", "{{ $labels.instance }} {{ $value }}"][..], ""),
        ("sum by (state, job) (kiyot_cells{state=~\"idle|b.*\", job!=\"kiyot_x\"}) + $x", &[], ""),
        ("kiyot_cells{state=~\"idle|ended\"}", &[], "kiyot_cells has no state ended"),
        ("rate(kiyot_cells_total[5m])", &[], "kiyot_cells_total does not exist"),
        ("kiyot_cells{market=\"spot\"}", &[], "kiyot_cells has no label market"),
        ("sum by (le) (kiyot_cells)", &[], "kiyot_cells has no label le"),
        ("kiyot_cells / on (state) kiyot_boots", &[], "kiyot_boots has no label state"),
        ("label_values(kiyot_boots, zone)", &[], "kiyot_boots has no label zone"),
        ("sum by (state) (kiyot_cells)", &["{{job}}"], "the label job, which is shown"),
        ("kiyot_cells", &["{{zone}}"], "the label zone, which is shown"),
        ("kiyot_cri_call_duration_seconds", &[], "does not exist"),
        ("1 > 0", &[], "no metric"),
    ] {
        let found = faults(expression, texts).join("\n");
        let is_expected =
            if expected.is_empty() { found.is_empty() } else { found.contains(expected) };
        assert!(is_expected, "{expression}: {found:?}, not {expected:?}");
    }
}
