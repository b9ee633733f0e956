//! Warm pools: cells that are launched before a pod needs them.

use std::{fmt, time::Duration};

use kiyot_values::problems::{Field, Problem, Table};

use super::{ProviderKind, milpa::PROVIDERS, read};

/// Highest count of a pool: the limit of cells.
const MAX_COUNT: usize = 10_000;
/// Longest name of an instance type, in bytes.
const MAX_NAME_BYTES: usize = 255;
/// Highest size of a cell: more than any instance type has.
const MAX_MILLI_CPUS: u64 = 10_000_000;
const MIN_MEMORY_BYTES: u64 = 1 << 20;
const MAX_MEMORY_BYTES: u64 = 64 << 40;
/// Age at which an idle cell is replaced.
const TTL: Duration = Duration::from_secs(3600);
/// Range of that age.
const MIN_TTL: Duration = Duration::from_secs(60);
const MAX_TTL: Duration = Duration::from_secs(7 * 24 * 3600);

/// Warm pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WarmPool {
    /// Instance type or size of its cells.
    pub kind: WarmKind,
    /// Market of its cells.
    pub launch_type: WarmLaunchType,
    /// Provider of its cells; `None` for the first.
    pub provider: Option<ProviderKind>,
    /// Cells that wait, idle or booting.
    pub count: usize,
    /// Age at which an idle cell is replaced.
    pub ttl: Duration,
}

/// Instance type or size of the cells of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WarmKind {
    /// The default size of pods.
    Default,
    /// This instance type.
    Offering(String),
    /// Room for a pod of this size.
    Size {
        /// Thousandths of a CPU.
        milli_cpus: u64,
        /// Memory in bytes.
        memory: u64,
    },
}

/// Market of the cells of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WarmLaunchType {
    /// On-demand.
    #[default]
    OnDemand,
    /// Spot.
    Spot,
    /// Spot where there is capacity, otherwise on-demand.
    SpotPreferred,
}

impl Default for WarmPool {
    fn default() -> Self {
        Self {
            kind: WarmKind::Default,
            launch_type: WarmLaunchType::default(),
            provider: None,
            count: 0,
            ttl: TTL,
        }
    }
}

/// Displays the identity by which records of cells name the pool.
impl fmt::Display for WarmPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            WarmKind::Default => f.write_str("default size")?,
            WarmKind::Offering(offering) => f.write_str(offering)?,
            WarmKind::Size { milli_cpus, memory } => {
                write!(f, "{milli_cpus}m CPU and {memory} bytes")?;
            }
        }
        f.write_str(match self.launch_type {
            WarmLaunchType::OnDemand => ", On-Demand",
            WarmLaunchType::Spot => ", Spot",
            WarmLaunchType::SpotPreferred => ", Spot-Preferred",
        })?;
        match self.provider {
            Some(provider) => write!(f, ", of {}", provider.name()),
            None => Ok(()),
        }
    }
}

impl WarmPool {
    pub(super) fn read(mut table: Table<'_>) -> Self {
        let mut pool = Self::default();
        let offering = table.take("offering").and_then(offering);
        let size = table.take("size").and_then(|field| field.table()).map(size);
        if offering.is_some() && size.is_some() {
            let rule = "excludes offering; allowed: one of the two";
            table.report().add(Problem::new(table.path_of("size"), rule));
        }
        pool.kind = offering.map(WarmKind::Offering).or(size).unwrap_or(WarmKind::Default);
        let allowed = format!("a whole number from 0 to {MAX_COUNT}");
        if let Some(count) = table.need("count", &allowed) {
            pool.count = count.number(0..=MAX_COUNT).unwrap_or_default();
        }
        table.set("launch_type", &mut pool.launch_type, |field| {
            field.choice(&[
                ("On-Demand", WarmLaunchType::OnDemand),
                ("Spot", WarmLaunchType::Spot),
                ("Spot-Preferred", WarmLaunchType::SpotPreferred),
            ])
        });
        table.set("provider", &mut pool.provider, |field| field.choice(PROVIDERS).map(Some));
        table.set("ttl", &mut pool.ttl, |field| read::duration(field, MIN_TTL..=MAX_TTL));
        table.finish();
        pool
    }
}

fn offering(field: Field<'_>) -> Option<String> {
    field.read("an instance type such as \"t3.small\"", |text| {
        let is_allowed =
            |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
        let fits = (1..=MAX_NAME_BYTES).contains(&text.len()) && text.bytes().all(is_allowed);
        fits.then(|| text.to_owned())
    })
}

fn size(mut table: Table<'_>) -> WarmKind {
    let cpu = table.need("cpu", "CPUs, such as \"500m\" or \"2\"");
    let milli_cpus = cpu.and_then(|field| {
        field.read("CPUs from \"1m\" to \"10000\", such as \"500m\" or \"2\"", milli_cpus)
    });
    let allowed = "such as \"512Mi\" or \"4Gi\", from 1Mi to 64Ti";
    let memory = table.need("memory", allowed);
    let memory = memory
        .and_then(|field| read::bytes_in(field, allowed, MIN_MEMORY_BYTES..=MAX_MEMORY_BYTES));
    table.finish();
    // An absent value is already a problem of the configuration.
    WarmKind::Size {
        milli_cpus: milli_cpus.unwrap_or_default(),
        memory: memory.unwrap_or_default(),
    }
}

fn milli_cpus(text: &str) -> Option<u64> {
    let (number, unit) = text.strip_suffix('m').map_or((text, 1000), |number| (number, 1));
    let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
    let milli = number.parse::<u64>().ok().filter(|_| is_number)?.checked_mul(unit)?;
    (1..=MAX_MILLI_CPUS).contains(&milli).then_some(milli)
}
