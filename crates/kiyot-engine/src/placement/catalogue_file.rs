//! Catalogues in files: comma-separated values with a header.
//!
//! docs/annotations.md describes the columns. A broken row is set aside and the other rows are
//! used, so that a single row can't leave a node without cells.

use std::{collections::HashMap, num::NonZeroU64};

use kiyot_values::{
    csv_rows::{CsvRows, WrongRow},
    decimal::{self, Rounding},
    price::Price,
};

use crate::{
    placement::{
        Accuracy, Catalogue, Gpus, InstanceType, Market,
        catalogue::{Entry, Offer},
    },
    request::Architecture,
};

/// Bounds the number of rows: EC2 has some 1,250 instance types.
const MAX_ROWS: usize = 20_000;
/// Bounds a text in a row, in bytes.
const MAX_TEXT_BYTES: usize = 64;
/// Bounds the zones of an instance type.
const MAX_ZONES: usize = 32;
/// Bounds the vCPUs of an instance type.
const MAX_CPUS: u64 = 100_000;
/// Bounds the memory of an instance type, in MiB: 64 PiB.
const MAX_MEMORY_MIB: u64 = 1 << 36;
/// Bounds the GPUs of an instance type.
const MAX_GPUS: u32 = 1024;

/// The instance types of EC2's region us-east-1 with the prices of 2026-07-20.
const EC2_US_EAST_1: &str = include_str!("../../../../config/ec2-us-east-1.csv");

/// The region of the built-in catalogue.
const BUILT_IN_REGION: &str = "us-east-1";

/// A parsed catalogue, with the rows that were set aside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CatalogueFile {
    /// The catalogue of the usable rows. Not empty.
    pub catalogue: Catalogue,
    /// The unusable rows.
    pub set_aside: Vec<WrongRow>,
}

/// An unusable file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CatalogueError {
    /// The file is too large.
    #[error("the file has {0} bytes; allowed: {max}", max = CatalogueFile::MAX_BYTES)]
    TooLarge(usize),
    /// The file has too many rows.
    #[error("the file has more than {MAX_ROWS} rows")]
    TooManyRows,
    /// The header lacks a column.
    #[error("the header has no column {0}")]
    NoColumn(&'static str),
    /// No row can be used.
    #[error("the file has no instance type that can be used{}", first(.0))]
    Empty(Option<WrongRow>),
}

fn first(row: &Option<WrongRow>) -> String {
    row.as_ref().map(|row| format!("; {row}")).unwrap_or_default()
}

/// The columns that a file must have.
const REQUIRED: [&str; 4] = ["instance_type", "vcpus", "memory_mib", "architectures"];

/// A row with access to its columns by name.
struct Row<'a> {
    columns: &'a HashMap<String, usize>,
    values: &'a csv::StringRecord,
}

impl CatalogueFile {
    /// Bounds the size of a file.
    pub const MAX_BYTES: usize = 16 * 1024 * 1024;

    /// Returns the catalogue that is built into the program.
    pub fn built_in() -> Self {
        // A test parses it, so that the default is never used.
        Self::parse(EC2_US_EAST_1.as_bytes())
            .unwrap_or_else(|_| Self { catalogue: Catalogue::default(), set_aside: Vec::new() })
    }

    /// Returns the built-in catalogue for a region. The prices of another region are estimates.
    pub fn built_in_for(region: &str) -> Catalogue {
        let built_in = Self::built_in().catalogue;
        if region == BUILT_IN_REGION { built_in } else { built_in.with_estimates() }
    }

    /// Parses a file. Broken rows are set aside.
    pub fn parse(text: &[u8]) -> Result<Self, CatalogueError> {
        if text.len() > Self::MAX_BYTES {
            return Err(CatalogueError::TooLarge(text.len()));
        }
        let mut rows = CsvRows::new(text);
        let header = rows.header();
        let columns: HashMap<String, usize> =
            header.iter().enumerate().map(|(index, name)| (name.to_owned(), index)).collect();
        if let Some(missing) = REQUIRED.into_iter().find(|name| !columns.contains_key(*name)) {
            return Err(CatalogueError::NoColumn(missing));
        }
        let (mut entries, mut set_aside) = (Vec::new(), Vec::new());
        let mut lines: HashMap<String, u64> = HashMap::new();
        let entries_read = rows.read(|line, values| {
            let entry = Row { columns: &columns, values }.entry()?;
            if let Some(first) = lines.get(&entry.instance_type.name) {
                return Err(format!("repeats line {first}"));
            }
            lines.insert(entry.instance_type.name.clone(), line);
            Ok(entry)
        });
        for (index, entry) in entries_read.enumerate() {
            if index >= MAX_ROWS {
                return Err(CatalogueError::TooManyRows);
            }
            match entry {
                Ok(entry) => entries.push(entry),
                Err(row) => set_aside.push(row),
            }
        }
        if entries.is_empty() {
            return Err(CatalogueError::Empty(set_aside.into_iter().next()));
        }
        Ok(Self { catalogue: Catalogue::new(entries), set_aside })
    }
}

impl<'a> Row<'a> {
    fn entry(&self) -> Result<Entry, String> {
        let instance_type = InstanceType {
            name: self.name()?,
            milli_cpus: self.number("vcpus", MAX_CPUS)?.get() * 1000,
            memory_mib: self.number("memory_mib", MAX_MEMORY_MIB)?.get(),
            architectures: self.architectures()?,
            baseline_milli_cpus: self.baseline()?,
            gpus: self.gpus()?,
            is_bare_metal: self.flag("bare_metal", false)?,
            is_nitro: self.text("hypervisor") != Some("xen"),
            is_current: self.flag("current_generation", true)?,
        };
        Ok(Entry::new(instance_type, self.offers()?))
    }

    /// Returns the text of a column; `None` if it is empty or absent.
    fn text(&self, column: &str) -> Option<&'a str> {
        let index = self.columns.get(column)?;
        self.values.get(*index).filter(|text| !text.is_empty())
    }

    fn name(&self) -> Result<String, String> {
        let name = self.text("instance_type").unwrap_or_default();
        let fits = |c: char| c.is_ascii_alphanumeric() || ['.', '-', '_'].contains(&c);
        if (1..=MAX_TEXT_BYTES).contains(&name.len()) && name.chars().all(fits) {
            return Ok(name.to_owned());
        }
        Err(wrong("instance_type", name, "letters, digits, dots, dashes and underscores"))
    }

    fn number(&self, column: &str, limit: u64) -> Result<NonZeroU64, String> {
        let text = self.text(column).unwrap_or_default();
        let number = text.parse().ok().filter(|number: &NonZeroU64| number.get() <= limit);
        number.ok_or_else(|| wrong(column, text, &format!("a whole number from 1 to {limit}")))
    }

    fn flag(&self, column: &str, default: bool) -> Result<bool, String> {
        match self.text(column).map(str::to_ascii_lowercase).as_deref() {
            None => Ok(default),
            Some("true") => Ok(true),
            Some("false") => Ok(false),
            Some(other) => Err(wrong(column, other, "True or False")),
        }
    }

    fn architectures(&self) -> Result<Vec<Architecture>, String> {
        let text = self.text("architectures").unwrap_or_default();
        // Cells have no other architectures, such as i386.
        let mut known: Vec<Architecture> =
            text.split('|').filter_map(Architecture::named).collect();
        known.dedup();
        if known.is_empty() {
            return Err(wrong("architectures", text, "x86_64, arm64, or both with | between"));
        }
        Ok(known)
    }

    fn baseline(&self) -> Result<Option<u64>, String> {
        if !self.flag("burstable", false)? {
            return Ok(None);
        }
        let text = self.text("baseline_vcpus").unwrap_or_default();
        let milli = decimal::parse(text, 1000, Rounding::Down)
            .and_then(|milli| u64::try_from(milli).ok())
            .filter(|milli| *milli <= MAX_CPUS * 1000);
        let allowed = "the vCPUs that a burstable type has all the time, such as 0.4";
        milli.map(Some).ok_or_else(|| wrong("baseline_vcpus", text, allowed))
    }

    fn gpus(&self) -> Result<Option<Gpus>, String> {
        let text = self.text("gpus").unwrap_or("0");
        let count = text.parse().ok().filter(|count| *count <= MAX_GPUS);
        let allowed = format!("a whole number from 0 to {MAX_GPUS}");
        let count = count.ok_or_else(|| wrong("gpus", text, &allowed))?;
        let name = |column| match self.text(column) {
            Some(text) if text.len() > MAX_TEXT_BYTES => {
                Err(wrong(column, text, &format!("{MAX_TEXT_BYTES} bytes")))
            }
            text => Ok(text.map(str::to_owned)),
        };
        let (manufacturer, name) = (name("gpu_manufacturer")?, name("gpu_name")?);
        Ok((count > 0).then_some(Gpus { count, manufacturer, name }))
    }

    fn price(&self, column: &str) -> Result<Option<Price>, String> {
        let Some(text) = self.text(column) else { return Ok(None) };
        text.parse().map(Some).map_err(|error| format!("{column} = {text:?} {error}"))
    }

    fn zones(&self) -> Result<Vec<String>, String> {
        let Some(text) = self.text("zones") else { return Ok(vec![String::new()]) };
        let zones: Vec<String> =
            text.split('|').take(MAX_ZONES + 1).map(|zone| zone.trim().to_owned()).collect();
        let fit = zones.iter().all(|zone| (1..=MAX_TEXT_BYTES).contains(&zone.len()));
        if fit && zones.len() <= MAX_ZONES {
            return Ok(zones);
        }
        Err(wrong("zones", text, &format!("at most {MAX_ZONES} names with | between")))
    }

    fn offers(&self) -> Result<Vec<Offer>, String> {
        let classes = self.text("usage_classes").unwrap_or("on-demand");
        let has = |class| classes.split('|').any(|own| own == class);
        let on_demand = self.price("on_demand_usd_per_hour")?;
        let spot = self.price("spot_usd_per_hour")?;
        let mut offers = Vec::new();
        for zone in self.zones()? {
            let mut offer = |market, price: Option<Price>, accuracy| {
                let zone = zone.clone();
                offers.extend(price.map(|price| Offer { zone, market, price, accuracy }));
            };
            if has("on-demand") {
                offer(Market::OnDemand, on_demand, Accuracy::Exact);
            }
            if has("spot") {
                // EC2 never asks more for spot than for on-demand.
                let accuracy = spot.map_or(Accuracy::AtMost, |_| Accuracy::Exact);
                offer(Market::Spot, spot.or(on_demand), accuracy);
            }
        }
        Ok(offers)
    }
}

fn wrong(column: &str, value: &str, allowed: &str) -> String {
    let shown: String = value.chars().take(MAX_TEXT_BYTES).collect();
    format!("{column} = {shown:?}; allowed: {allowed}")
}
