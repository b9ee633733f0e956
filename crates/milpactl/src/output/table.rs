//! Tables whose first lines are written before the last items are known.

use std::io::{self, Write};

use super::{Colour, Columns, plain};

/// Spaces between columns, as kubectl has.
const GAP: usize = 3;
/// Bounds the width to which a column is aligned.
const MAX_WIDTH: usize = 64;

/// A table. The first rows decide the widths; a longer value of a later row moves the rest of its
/// line.
#[derive(Debug)]
pub(super) struct Table {
    columns: Columns,
    shown: usize,
    with_headers: bool,
    colour: Colour,
    /// The widths of the columns, once the first rows are known.
    widths: Option<Vec<usize>>,
}

impl Table {
    pub(super) fn new(columns: Columns, is_wide: bool, with_headers: bool, colour: Colour) -> Self {
        let shown = if is_wide { columns.names.len() } else { columns.usual };
        Self { columns, shown, with_headers, colour, widths: None }
    }

    /// Writes rows, after the names of the columns.
    pub(super) fn write(&mut self, rows: &[Vec<String>], to: &mut impl Write) -> io::Result<()> {
        let names: Vec<String> = self.columns.names.iter().map(|name| (*name).to_owned()).collect();
        let is_first = self.widths.is_none();
        let widths = match self.widths.take() {
            Some(widths) => widths,
            None => self.widths(&names, rows),
        };
        if is_first && self.with_headers {
            line(&names[..self.shown], &widths, None, to)?;
        }
        for row in rows {
            let row: Vec<String> = row.iter().take(self.shown).map(|value| plain(value)).collect();
            let status = self.columns.status.map(|column| (column, self.colour));
            line(&row, &widths, status, to)?;
        }
        self.widths = Some(widths);
        Ok(())
    }

    fn widths(&self, names: &[String], rows: &[Vec<String>]) -> Vec<usize> {
        let width = |column: usize| {
            let values = rows.iter().filter_map(|row| row.get(column)).chain(names.get(column));
            values.map(|value| value.chars().count()).max().unwrap_or_default().min(MAX_WIDTH)
        };
        (0..self.shown).map(width).collect()
    }
}

fn line(
    values: &[String],
    widths: &[usize],
    status: Option<(usize, Colour)>,
    to: &mut impl Write,
) -> io::Result<()> {
    let mut text = String::new();
    for (column, value) in values.iter().enumerate() {
        let is_last = column + 1 == values.len();
        let width = widths.get(column).copied().unwrap_or_default();
        let pad = if is_last { 0 } else { width.saturating_sub(value.chars().count()) + GAP };
        match status {
            Some((status, colour)) if status == column => text.push_str(&colour.state(value)),
            _ => text.push_str(value),
        }
        text.extend(std::iter::repeat_n(' ', pad));
    }
    writeln!(to, "{}", text.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: Columns =
        Columns { names: &["NAME", "STATUS", "NODE"], usual: 2, status: Some(1) };

    fn written(table: &mut Table, rows: &[[&str; 3]]) -> String {
        let rows: Vec<Vec<String>> =
            rows.iter().map(|row| row.iter().map(|value| (*value).to_owned()).collect()).collect();
        let mut text = Vec::new();
        table.write(&rows, &mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn columns_are_aligned_and_wide_columns_are_left_out() {
        let mut table = Table::new(COLUMNS, false, true, Colour::Off);
        let text = written(&mut table, &[["web", "Running", "n1"], ["longer", "Failed", "n1"]]);
        assert_eq!(text, "NAME     STATUS\nweb      Running\nlonger   Failed\n");
        assert_eq!(written(&mut table, &[["cart", "Waiting", ""]]), "cart     Waiting\n");
    }

    #[test]
    fn wide_table_has_all_columns_and_no_control_characters() {
        let mut table = Table::new(COLUMNS, true, false, Colour::Off);
        let text = written(&mut table, &[["a\u{1b}[2J", "Running", "n1"]]);
        assert_eq!(text, "a [2J   Running   n1\n");
    }

    #[test]
    fn table_without_rows_has_its_names() {
        let mut table = Table::new(COLUMNS, false, true, Colour::Off);
        assert_eq!(written(&mut table, &[]), "NAME   STATUS\n");
    }
}
