//! Output: tables, JSON, YAML and names.

use std::io::{self, IsTerminal, Write};

use clap::ValueEnum;
use serde_json::Value;

use crate::error::Error;

mod colour;
mod progress;
mod table;

pub(crate) use colour::Colour;
pub(crate) use progress::Progress;
use table::Table;

/// A format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Format {
    /// Columns.
    #[default]
    Table,
    /// More columns.
    Wide,
    /// A JSON object, or a list of them.
    Json,
    /// The same object as YAML.
    Yaml,
    /// Kind and name, a line each.
    Name,
}

/// An object of a list.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Item {
    /// The kind and the name, for `-o name`.
    pub(crate) name: String,
    /// The values of the columns.
    pub(crate) columns: Vec<String>,
    /// The object.
    pub(crate) object: Value,
}

/// The columns of a kind.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Columns {
    /// The names of all columns.
    pub(crate) names: &'static [&'static str],
    /// The number of columns of the table format, which come first.
    pub(crate) usual: usize,
    /// The column that gets a colour.
    pub(crate) status: Option<usize>,
}

/// Writes items as they come. Tables and names are written at once, objects at the end unless each
/// is a document of its own.
#[derive(Debug)]
pub(crate) struct Writer {
    format: Format,
    table: Table,
    objects: Vec<Value>,
    is_single: bool,
    /// The number of documents that were written; `None` for a list.
    documents: Option<u64>,
}

impl Writer {
    /// Returns a writer. `is_single` writes an object instead of a list of objects.
    pub(crate) fn new(
        format: Format,
        columns: Columns,
        with_headers: bool,
        is_single: bool,
    ) -> Self {
        let colour = Colour::of_environment(io::stdout().is_terminal());
        let table = Table::new(columns, format == Format::Wide, with_headers, colour);
        Self { format, table, objects: Vec::new(), is_single, documents: None }
    }

    /// Writes each object at once, as a document of its own.
    pub(crate) fn with_documents(self) -> Self {
        Self { documents: Some(0), ..self }
    }

    /// Writes items.
    pub(crate) fn add(&mut self, items: Vec<Item>, to: &mut impl Write) -> Result<(), Error> {
        match self.format {
            Format::Table | Format::Wide => {
                let rows: Vec<_> = items.into_iter().map(|item| item.columns).collect();
                self.table.write(&rows, to)?;
            }
            Format::Name => {
                for item in items {
                    writeln!(to, "{}", item.name)?;
                }
            }
            Format::Json | Format::Yaml => match &mut self.documents {
                Some(documents) => {
                    for item in items {
                        if self.format == Format::Yaml && *documents > 0 {
                            writeln!(to, "---")?;
                        }
                        *documents += 1;
                        write_object(self.format, &item.object, to)?;
                    }
                }
                None => self.objects.extend(items.into_iter().map(|item| item.object)),
            },
        }
        to.flush()?;
        Ok(())
    }

    /// Writes the rest.
    pub(crate) fn finish(self, to: &mut impl Write) -> Result<(), Error> {
        let Self { format, objects, is_single, .. } = self;
        let value = match (is_single, objects.len()) {
            (true, 1) => objects.into_iter().next().unwrap_or_default(),
            _ => serde_json::json!({ "kind": "List", "apiVersion": "v1", "items": objects }),
        };
        write_object(format, &value, to)?;
        to.flush()?;
        Ok(())
    }
}

/// Writes an object, in the formats that have objects.
fn write_object(format: Format, object: &Value, to: &mut impl Write) -> Result<(), Error> {
    match format {
        Format::Json => writeln!(to, "{object:#}")?,
        Format::Yaml => {
            let text = serde_saphyr::to_string(object);
            let text = text.map_err(|error| Error::Failed(format!("YAML: {error}")))?;
            writeln!(to, "{}", text.trim_end())?;
        }
        Format::Table | Format::Wide | Format::Name => {}
    }
    Ok(())
}

/// Returns a text without control characters, on one line.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|character| if character.is_control() { ' ' } else { character }).collect()
}
