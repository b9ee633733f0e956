//! The page of a scrape, in the text format of OpenMetrics.

use std::{fmt, sync::Arc};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text},
    metrics::MetricType,
    registry::{Registry, Unit},
};

use super::{Definition, Kind};

/// A part that writes metrics.
pub trait Source: fmt::Debug + Send + Sync + 'static {
    /// Writes the families with all samples. Each family belongs to one source.
    fn write(&self, page: &mut Page<'_>) -> fmt::Result;
}

/// All sources.
#[derive(Debug)]
pub struct Exposition(Registry);

/// A page to which a source writes.
#[derive(Debug)]
pub struct Page<'a> {
    encoder: DescriptorEncoder<'a>,
    /// The unit of the family that is written.
    unit: Option<Unit>,
}

/// A metric with its samples.
#[derive(Debug)]
pub struct Family<'a> {
    definition: &'static Definition,
    encoder: MetricEncoder<'a>,
}

/// A source as the library's collector.
#[derive(Debug)]
struct SourceCollector(Arc<dyn Source>);

impl Collector for SourceCollector {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.0.write(&mut Page { encoder, unit: None })
    }
}

impl Exposition {
    /// Makes a page of sources, in their order.
    pub fn new(sources: Vec<Arc<dyn Source>>) -> Self {
        let mut registry = Registry::default();
        for source in sources {
            registry.register_collector(Box::new(SourceCollector(source)));
        }
        Self(registry)
    }

    /// Returns the page.
    pub fn text(&self) -> String {
        let mut page = String::new();
        // A write to a string does not fail.
        let _ = text::encode(&mut page, &self.0);
        page
    }
}

impl Page<'_> {
    /// Begins a metric.
    pub fn family(&mut self, definition: &'static Definition) -> Result<Family<'_>, fmt::Error> {
        self.unit = definition.unit.map(|unit| match unit {
            "seconds" => Unit::Seconds,
            "bytes" => Unit::Bytes,
            other => Unit::Other(other.to_owned()),
        });
        let kind = match definition.kind {
            Kind::Counter => MetricType::Counter,
            Kind::Gauge => MetricType::Gauge,
            Kind::Histogram => MetricType::Histogram,
            Kind::Info => MetricType::Info,
        };
        // The library ends the help with a full stop, and appends the unit to the family's name.
        let encoder = self.encoder.encode_descriptor(
            definition.name,
            definition.help,
            self.unit.as_ref(),
            kind,
        )?;
        Ok(Family { definition, encoder })
    }
}

impl Family<'_> {
    /// Writes a counter. `values` has the values of the labels, in the order of the definition.
    pub fn counter(&mut self, values: &[&str], value: u64) -> fmt::Result {
        self.sample(values, |encoder| encoder.encode_counter::<NoLabelSet, u64, f64>(&value, None))
    }

    /// Writes a counter that is not a whole number.
    pub fn counter_f64(&mut self, values: &[&str], value: f64) -> fmt::Result {
        self.sample(values, |encoder| encoder.encode_counter::<NoLabelSet, f64, f64>(&value, None))
    }

    /// Writes a gauge.
    pub fn gauge(&mut self, values: &[&str], value: f64) -> fmt::Result {
        self.sample(values, |encoder| encoder.encode_gauge(&value))
    }

    /// Writes a histogram. Each bucket has an upper bound, and the number of values between the
    /// previous bound and this bound.
    pub fn histogram(
        &mut self,
        values: &[&str],
        sum: f64,
        buckets: Vec<(f64, u64)>,
    ) -> fmt::Result {
        let count = buckets.iter().map(|(_, count)| count).sum();
        self.sample(values, |encoder| {
            encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
        })
    }

    /// Writes a metric of the kind [`Kind::Info`].
    pub fn info(&mut self, values: &[&str]) -> fmt::Result {
        let labels = self.labels(values);
        self.encoder.encode_info(&labels)
    }

    fn labels<'v>(&self, values: &'v [&'v str]) -> Vec<(&'static str, &'v str)> {
        debug_assert_eq!(values.len(), self.definition.labels.len(), "{}", self.definition.name);
        self.definition.labels.iter().map(|label| label.name).zip(values.iter().copied()).collect()
    }

    fn sample(
        &mut self,
        values: &[&str],
        write: impl FnOnce(&mut MetricEncoder<'_>) -> fmt::Result,
    ) -> fmt::Result {
        let labels = self.labels(values);
        if labels.is_empty() {
            return write(&mut self.encoder);
        }
        write(&mut self.encoder.encode_family(&labels)?)
    }
}
