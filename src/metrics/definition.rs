//! The form of a definition.

/// The definition of a metric.
#[derive(Debug, PartialEq, Eq)]
pub struct Definition {
    /// The name without the unit and the suffix of its kind.
    pub name: &'static str,
    /// The kind.
    pub kind: Kind,
    /// The unit, which is a part of the name: `seconds`, `bytes`, `dollars`; `None` for numbers.
    pub unit: Option<&'static str>,
    /// The meaning, a phrase without a full stop.
    pub help: &'static str,
    /// The labels.
    pub labels: &'static [Label],
}

/// The kind of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A sum that only grows while the daemon runs.
    Counter,
    /// A value at the time of the scrape.
    Gauge,
    /// Values counted by upper bounds.
    Histogram,
    /// A constant 1 whose labels have the information.
    Info,
}

/// A label.
#[derive(Debug, PartialEq, Eq)]
pub struct Label {
    /// The name.
    pub name: &'static str,
    /// The values, and their number if it is not obvious.
    pub values: &'static str,
}

impl Kind {
    /// Returns the name of the kind in OpenMetrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
            Self::Info => "info",
        }
    }

    /// Returns the suffixes of the samples.
    pub const fn suffixes(self) -> &'static [&'static str] {
        match self {
            Self::Counter => &["_total"],
            Self::Gauge => &[""],
            Self::Histogram => &["_bucket", "_sum", "_count"],
            Self::Info => &["_info"],
        }
    }
}

impl Definition {
    /// Returns the name with its unit, as in `# TYPE`.
    pub fn family(&self) -> String {
        match self.unit {
            Some(unit) => format!("{}_{unit}", self.name),
            None => self.name.to_owned(),
        }
    }

    /// Returns the names of the samples, as queries use them, with their labels.
    pub fn samples(&self) -> impl Iterator<Item = (String, Vec<&'static str>)> {
        let family = self.family();
        self.kind.suffixes().iter().map(move |suffix| {
            let bound = (*suffix == "_bucket").then_some("le");
            let labels = self.labels.iter().map(|label| label.name).chain(bound).collect();
            (format!("{family}{suffix}"), labels)
        })
    }
}
