//! Tables of objects as kubectl prints them, by the columns of their definition.

use serde_json::Value;

/// Returns the table of `kubectl get` or `kubectl get -o wide`. `now` decides on the age of all
/// objects.
///
/// # Panics
/// If a JSONPath of the definition is no chain of fields.
pub fn table<'o>(
    definition: &Value,
    objects: impl IntoIterator<Item = &'o Value>,
    is_wide: bool,
    age: &str,
) -> String {
    let columns = definition["spec"]["versions"][0]["additionalPrinterColumns"].as_array().unwrap();
    let shown = |column: &&Value| is_wide || column["priority"].as_u64().unwrap_or(0) == 0;
    let columns: Vec<&Value> = columns.iter().filter(shown).collect();
    let names = columns.iter().map(|column| column["name"].as_str().unwrap().to_uppercase());
    let mut rows: Vec<Vec<String>> =
        vec![std::iter::once("NAME".to_owned()).chain(names).collect()];
    for object in objects {
        let cell = |column: &&Value| {
            let path = column["jsonPath"].as_str().unwrap().strip_prefix('.').unwrap();
            let value = path.split('.').try_fold(object, |value, field| value.get(field));
            match (value, column["type"].as_str()) {
                (None | Some(Value::Null), _) => String::new(),
                (Some(_), Some("date")) => age.to_owned(),
                (Some(Value::String(text)), _) => text.clone(),
                (Some(value), _) => value.to_string(),
            }
        };
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        rows.push(std::iter::once(name).chain(columns.iter().map(cell)).collect());
    }
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let padded = row.iter().zip(&widths).map(|(text, width)| format!("{text:width$}   "));
        padded.collect::<String>().trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}
