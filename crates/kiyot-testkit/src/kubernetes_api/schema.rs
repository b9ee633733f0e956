//! Validation and pruning by a structural schema, with the keywords that the tests' definitions
//! use.

use serde_json::Value;

/// Removes fields that are absent from a schema.
pub(super) fn prune(value: &mut Value, schema: &Value) {
    match value {
        Value::Object(fields) => {
            if let Some(known) = schema["properties"].as_object() {
                fields.retain(|key, _| known.contains_key(key));
                for (key, value) in fields {
                    prune(value, &known[key]);
                }
            } else if schema["additionalProperties"].is_null() {
                fields.clear();
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| prune(item, &schema["items"])),
        _ => {}
    }
}

/// Adds the rules that a value breaks to `found`.
pub(super) fn faults(value: &Value, schema: &Value, at: &str, found: &mut Vec<String>) {
    let mut fault = |text: String| found.push(format!("{at}: {text}"));
    let is_typed = match schema["type"].as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("integer") => value.is_i64(),
        Some("number") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        _ => true,
    };
    if !is_typed {
        return fault(format!("Invalid value: {value}: must be of type {}", schema["type"]));
    }
    if let (Some(text), Some(most)) = (value.as_str(), schema["maxLength"].as_u64())
        && text.chars().count() as u64 > most
    {
        fault(format!("Too long: may not be more than {most} bytes"));
    }
    if let (Some(text), Some(least)) = (value.as_str(), schema["minLength"].as_u64())
        && (text.chars().count() as u64) < least
    {
        fault(format!("Invalid value: should be at least {least} chars long"));
    }
    if let Some(allowed) = schema["enum"].as_array()
        && !allowed.contains(value)
    {
        fault(format!("Unsupported value: {value}: supported values: {allowed:?}"));
    }
    if schema["format"] == "date-time" && !value.as_str().is_some_and(is_date_time) {
        fault(format!("Invalid value: {value}: must be of type date-time"));
    }
    for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if value.get(name).is_none() {
            found.push(format!("{at}.{name}: Required value"));
        }
    }
    if let Some(fields) = value.as_object() {
        for (key, value) in fields {
            if let Some(schema) = schema["properties"].get(key) {
                faults(value, schema, &format!("{at}.{key}"), found);
            }
        }
    }
    for (index, item) in value.as_array().into_iter().flatten().enumerate() {
        faults(item, &schema["items"], &format!("{at}[{index}]"), found);
    }
}

/// Returns whether a text is a time of RFC 3339 in UTC.
fn is_date_time(text: &str) -> bool {
    let Some((date, time)) = text.strip_suffix('Z').and_then(|text| text.split_once('T')) else {
        return false;
    };
    let is_of = |text: &str, lengths: &[usize], separator| {
        let parts: Vec<&str> = text.split(separator).collect();
        let fits = |(part, length): (&&str, &usize)| {
            part.len() == *length && part.bytes().all(|byte| byte.is_ascii_digit())
        };
        parts.len() == lengths.len() && parts.iter().zip(lengths).all(fits)
    };
    let (seconds, fraction) = time.split_once('.').unwrap_or((time, "0"));
    is_of(date, &[4, 2, 2], '-')
        && is_of(seconds, &[2, 2, 2], ':')
        && (1..=9).contains(&fraction.len())
        && fraction.bytes().all(|byte| byte.is_ascii_digit())
}
