//! Texts that several annotations have: booleans and names.

use kiyot_values::problems::Field;

/// Longest name of an instance type or security group, in characters.
const NAME_CHARS: usize = 255;

/// Parses a boolean as Go's `strconv.ParseBool` does.
pub(super) fn boolean(field: Field<'_>) -> Option<bool> {
    field.read("\"true\" or \"false\"", |text| match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    })
}

/// Returns whether a text is a name of ASCII letters, digits and the characters of `more`.
pub(super) fn is_name(text: &str, more: &[char]) -> bool {
    (1..=NAME_CHARS).contains(&text.len())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(&c))
}
