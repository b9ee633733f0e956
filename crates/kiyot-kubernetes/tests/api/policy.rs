//! Admission policies, evaluated like the API server does.

use std::{cmp::Ordering, collections::HashMap, sync::Arc};

use cel::{
    Context, Env, ExecutionError, StructDef,
    common::{
        types::{CelBool, CelDouble, CelInt, CelList, CelString, STRING_TYPE},
        value::Val,
    },
    extensions,
    objects::Value as CelValue,
};
use kiyot_values::quantity::Quantity;
use serde_json::{Value, json};

/// Key of the node to which a service account's token is bound.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

/// A request that admission reviews.
#[derive(Debug, Clone)]
pub(crate) struct Review {
    pub(crate) user: Value,
    pub(crate) group: &'static str,
    pub(crate) operation: &'static str,
    pub(crate) resource: &'static str,
    pub(crate) old: Value,
    pub(crate) new: Value,
}

/// A case: a name, a review, and words of its denial. Without words, it is admitted.
pub(crate) type Row = (&'static str, Review, &'static str);

type Known = HashMap<String, CelValue>;

/// Returns the user of a token of the daemons' service account, bound to a node.
pub(crate) fn token(node: &str) -> Value {
    json!({ "username": "system:serviceaccount:kiyot:kiyot", "extra": { NODE_NAME: [node] } })
}

/// Returns the user of a kubelet.
pub(crate) fn kubelet(node: &str) -> Value {
    json!({ "username": format!("system:node:{node}"), "groups": ["system:nodes"] })
}

fn failed(function: &str, message: String) -> ExecutionError {
    ExecutionError::FunctionError { function: function.to_owned(), message }
}

/// Returns a quantity in thousandths, at most the largest integer.
fn quantity(text: &CelString<'_>) -> Result<CelInt, ExecutionError> {
    let (sign, number) = text.inner().strip_prefix('-').map_or((1, text.inner()), |it| (-1, it));
    let parsed = number
        .parse::<Quantity>()
        .map_err(|error| failed("quantity", format!("{:?} {error}", text.inner())))?;
    Ok(CelInt::from(sign * i64::try_from(parsed.milli()).unwrap_or(i64::MAX)))
}

fn is_integer(this: &CelInt) -> CelBool {
    CelBool::from(this.inner() % 1000 == 0)
}

#[allow(clippy::cast_precision_loss, reason = "as approximate as in Kubernetes")]
fn as_approximate_float(this: &CelInt) -> CelDouble {
    CelDouble::from(*this.inner() as f64 / 1000.0)
}

fn numbers(function: &str, list: &CelList<'_>) -> Result<Vec<f64>, ExecutionError> {
    let items = list.inner().iter().map(AsRef::<dyn Val + '_>::as_ref);
    let numbers: Option<Vec<f64>> =
        items.map(|item| item.downcast_ref::<CelDouble>().map(|it| *it.inner())).collect();
    numbers.ok_or_else(|| failed(function, "others than doubles are not played".to_owned()))
}

fn sum(list: &CelList<'_>) -> Result<CelDouble, ExecutionError> {
    Ok(CelDouble::from(numbers("sum", list)?.iter().sum::<f64>()))
}

fn max(list: &CelList<'_>) -> Result<CelDouble, ExecutionError> {
    let most = numbers("max", list)?.into_iter().reduce(f64::max);
    most.map(CelDouble::from).ok_or_else(|| failed("max", "called on empty list".to_owned()))
}

fn index_of(list: &CelList<'_>, item: &CelString<'_>) -> CelInt {
    let index = list.inner().iter().position(|other| item.equals(other.as_ref()));
    CelInt::from(index.map_or(-1, |index| i64::try_from(index).unwrap()))
}

fn compare_to(this: &CelInt, other: &CelInt) -> CelInt {
    CelInt::from(match this.inner().cmp(other.inner()) {
        Ordering::Less => -1,
        Ordering::Equal => 0,
        Ordering::Greater => 1,
    })
}

fn escape_key(key: &CelString<'_>) -> CelString<'static> {
    CelString::from(key.inner().replace('~', "~0").replace('/', "~1"))
}

/// Returns an environment with the used parts of the API server's CEL: strings, lists, quantities
/// and patches.
#[allow(elided_lifetimes_in_paths, reason = "the macros name types without them")]
fn env() -> Env {
    let mut env = Env::stdlib();
    env.add_extension(extensions::strings).unwrap();
    cel::add_overload!(env, fn quantity: (CelString) -> Result<CelInt>).unwrap();
    cel::add_member_overload!(env, fn compare_to: (CelInt, CelInt) -> CelInt).unwrap();
    cel::add_member_overload!(env, fn is_integer: (CelInt) -> CelBool).unwrap();
    cel::add_member_overload!(env, fn as_approximate_float: (CelInt) -> CelDouble).unwrap();
    cel::add_member_overload!(env, fn sum: (CelList) -> Result<CelDouble>).unwrap();
    cel::add_member_overload!(env, fn max: (CelList) -> Result<CelDouble>).unwrap();
    cel::add_member_overload!(env, fn index_of: (CelList, CelString) -> CelInt).unwrap();
    cel::add_overload!(env, fn escape_key: (CelString) -> CelString, name = "jsonpatch.escapeKey")
        .unwrap();
    let patch = ["op", "path", "value"]
        .into_iter()
        .fold(StructDef::new("JSONPatch".to_owned()), |patch, field| {
            patch.add_field(field.to_owned(), STRING_TYPE)
        });
    env.add_type(patch).unwrap();
    env
}

thread_local! {
    static ENV: Arc<Env> = Arc::new(env());
}

/// Evaluates an expression of CEL.
fn evaluate(expression: &str, known: &Known) -> Result<CelValue, String> {
    let env = ENV.with(Arc::clone);
    // The API server checks types: the elements of a list must have the same type.
    let mut lists = expression.split(" in [").skip(1).filter_map(|rest| rest.split(']').next());
    let is_mixed = |list: &str| list.contains(',') && !list.starts_with('\'');
    assert!(!lists.any(is_mixed), "list of more than constants: {expression}");
    let program = env.compile(expression).expect("the expression has no errors");
    let mut context = Context::with_env(env);
    for (name, value) in known {
        context.add_variable_from_value(name.clone(), value.clone());
    }
    program.execute(&context).map_err(|error| error.to_string())
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// Returns the items of a list; no items for other values.
pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// Returns whether the constraints of a policy match a review.
fn is_matched(constraints: &Value, review: &Review) -> bool {
    let constraints = constraints.as_object().unwrap();
    let is_known = |key: &String| ["objectSelector", "resourceRules"].contains(&key.as_str());
    assert!(constraints.keys().all(is_known), "others are not played: {constraints:?}");
    let has_labels = constraints.get("objectSelector").is_none_or(|selector| {
        assert!(selector.as_object().unwrap().keys().eq(["matchLabels"]), "{selector}");
        let labels = [&review.new, &review.old].map(|object| &object["metadata"]["labels"]);
        let wanted = selector["matchLabels"].as_object().unwrap();
        labels.iter().any(|labels| wanted.iter().all(|(key, value)| labels[key] == *value))
    });
    has_labels
        && list(&constraints["resourceRules"]).iter().any(|rule| {
            [
                ("apiGroups", review.group),
                ("apiVersions", "v1"),
                ("operations", review.operation),
                ("resources", review.resource),
            ]
            .iter()
            .all(|(key, value)| list(&rule[*key]).contains(&json!(value)))
        })
}

/// Returns the parts of a review that expressions can read.
fn parts(review: &Review) -> Known {
    let value = |value: &Value| cel::to_value(value).unwrap();
    let mut request = json!({ "userInfo": review.user, "operation": review.operation });
    if let Some((_, subresource)) = review.resource.split_once('/') {
        request["subResource"] = json!(subresource);
    }
    Known::from([
        ("request".to_owned(), value(&request)),
        ("object".to_owned(), value(&review.new)),
        ("oldObject".to_owned(), value(&review.old)),
    ])
}

/// Returns whether a policy applies to a review.
fn applies(policy: &Value, review: &Review) -> Result<bool, String> {
    let spec = &policy["spec"];
    if !is_matched(&spec["matchConstraints"], review) {
        return Ok(false);
    }
    let known = parts(review);
    for condition in list(&spec["matchConditions"]) {
        match evaluate(text(&condition["expression"]), &known)? {
            CelValue::Bool(true) => {}
            CelValue::Bool(false) => return Ok(false),
            other => return Err(format!("{other:?}")),
        }
    }
    Ok(true)
}

/// Returns the values that the expressions of a policy can read: the parts of a review, and the
/// policy's variables.
fn seen(policy: &Value, review: &Review) -> Known {
    let (spec, mut known) = (&policy["spec"], parts(review));
    let mut variables = Known::new();
    for variable in list(&spec["variables"]) {
        // An error in a variable counts for the expressions that use it.
        if let Ok(value) = evaluate(text(&variable["expression"]), &known) {
            variables.insert(text(&variable["name"]).to_owned(), value);
            known.insert("variables".to_owned(), CelValue::Map(variables.clone().into()));
        }
    }
    known
}

/// Returns the reason why a validating policy denies a review; `None` if it admits the review.
pub(crate) fn denied_by(policy: &Value, review: &Review) -> Option<String> {
    assert_eq!(policy["spec"]["failurePolicy"], "Fail", "an error denies");
    match applies(policy, review) {
        Ok(true) => {}
        Ok(false) => return None,
        Err(error) => return Some(error),
    }
    let known = seen(policy, review);
    list(&policy["spec"]["validations"]).iter().find_map(|validation| {
        match evaluate(text(&validation["expression"]), &known) {
            Ok(CelValue::Bool(true)) => return None,
            Ok(CelValue::Bool(false)) => {}
            other => return Some(format!("{other:?}")),
        }
        let message = &validation["messageExpression"];
        let made = (!message.is_null()).then(|| evaluate(text(message), &known));
        Some(match made {
            Some(Ok(CelValue::String(text))) => text.to_string(),
            Some(other) => panic!("{message}: {other:?}"),
            None => text(&validation["message"]).to_owned(),
        })
    })
}

/// Returns the message of the first rule on a definition's whole object that refuses an update.
pub(crate) fn refused_by(definition: &Value, old: &Value, new: &Value) -> Option<String> {
    let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let known = [("self", new), ("oldSelf", old)];
    let known = known.map(|(name, value)| (name.to_owned(), cel::to_value(value).unwrap()));
    let known = Known::from(known);
    list(&schema["x-kubernetes-validations"]).iter().find_map(|rule| {
        match evaluate(text(&rule["rule"]), &known) {
            Ok(CelValue::Bool(true)) => None,
            Ok(CelValue::Bool(false)) => Some(text(&rule["message"]).to_owned()),
            other => Some(format!("{other:?}")),
        }
    })
}

/// Returns the object of a review after a mutating policy, or the policy's error. Each mutation
/// reads the object as the earlier mutations left it.
pub(crate) fn mutated_by(policy: &Value, review: &Review) -> Result<Value, String> {
    let mut review = review.clone();
    if !applies(policy, &review)? {
        return Ok(review.new);
    }
    for mutation in list(&policy["spec"]["mutations"]) {
        assert_eq!(mutation["patchType"], "JSONPatch", "others are not played");
        // Here, a field of a struct has a single type.
        let expression =
            text(&mutation["jsonPatch"]["expression"]).replace("value: {}", "value: '{}'");
        let fields = format!("({expression}).map(patch, [patch.op, patch.path, patch.value])");
        for patch in values(evaluate(&fields, &seen(policy, &review))?) {
            let fields: Vec<String> = values(patch).into_iter().map(string).collect();
            let [op, path, value] = &fields[..] else { panic!("{fields:?}") };
            assert_eq!(op, "add", "others are not played");
            let value = if value == "{}" { json!({}) } else { json!(value) };
            let (parent, key) = path.rsplit_once('/').unwrap();
            let parent = review.new.pointer_mut(parent).and_then(Value::as_object_mut);
            let key = key.replace("~1", "/").replace("~0", "~");
            parent.ok_or(format!("{path} has no parent"))?.insert(key, value);
        }
    }
    Ok(review.new)
}

fn values(value: CelValue) -> Vec<CelValue> {
    let CelValue::List(values) = value else { panic!("{value:?}") };
    values.to_vec()
}

fn string(value: CelValue) -> String {
    let CelValue::String(text) = value else { panic!("{value:?}") };
    text.to_string()
}

/// Returns the validating policies of a file that a binding makes deny.
pub(crate) fn denying(file: &str) -> Vec<Value> {
    let denies = json!({ "validationActions": ["Deny"] });
    bound(file, "ValidatingAdmissionPolicy", &denies)
}

/// Returns the bound mutating policies of a file.
pub(crate) fn mutating(file: &str) -> Vec<Value> {
    bound(file, "MutatingAdmissionPolicy", &json!({}))
}

/// Returns the policy with this name.
pub(crate) fn named(policies: &[Value], name: &str) -> Value {
    policies.iter().find(|policy| policy["metadata"]["name"] == name).unwrap().clone()
}

/// Returns the policies of a kind that have a binding with these other fields.
fn bound(file: &str, kind: &str, fields: &Value) -> Vec<Value> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(file).unwrap();
    let of_kind = |kind: String| documents.iter().filter(move |own| own["kind"] == kind);
    let is_bound = |policy: &&Value| {
        let mut spec = fields.clone();
        spec["policyName"] = policy["metadata"]["name"].clone();
        // The binding has no selector, which would limit it to some objects.
        of_kind(format!("{kind}Binding")).any(|binding| binding["spec"] == spec)
    };
    of_kind(kind.to_owned()).filter(is_bound).cloned().collect()
}

/// Returns the reviews whose outcome differs from their row's.
pub(crate) fn wrong(policies: &[Value], rows: &[Row]) -> Vec<String> {
    let outcome = |review| policies.iter().find_map(|policy| denied_by(policy, review));
    let wrong = rows.iter().filter_map(|(name, review, words)| {
        let denial = outcome(review);
        let is_right = match &denial {
            Some(denial) => !words.is_empty() && denial.contains(words),
            None => words.is_empty(),
        };
        (!is_right).then(|| format!("{name}: {denial:?}, expected {words:?}"))
    });
    wrong.collect()
}

/// Asserts that each item of these parts of a policy denies a row that no other item denies.
pub(crate) fn assert_each_part_denies(policy: &Value, parts: &[&str], rows: &[Row]) {
    for part in parts {
        for number in 0..list(policy.pointer(part).unwrap()).len() {
            let mut without = policy.clone();
            without.pointer_mut(part).unwrap().as_array_mut().unwrap().remove(number);
            let wrong = wrong(&[without], rows);
            let admitted = wrong.iter().filter(|wrong| wrong.contains(": None, ")).count();
            assert!(admitted > 0, "{part}, {number}: nothing more is admitted");
        }
    }
}
