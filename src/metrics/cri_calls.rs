//! Calls of the CRI socket, counted by method, backend and code.
//!
//! All counters exist from the start, so that a call allocates nothing and takes no lock: its place
//! in the arrays is computed from three small numbers.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::{CRI_CALL_DURATION, CRI_CALLS, CRI_CALLS_OPEN, Page, Source};

/// Index of the calls that the proxy answers itself, such as refusals.
pub const BACKEND_KIYOT: u8 = 0;
/// Index of the calls that all backends answer together, such as lists.
pub const BACKEND_ALL: u8 = 1;
/// Index of the first configured backend.
pub const FIRST_BACKEND: u8 = 2;
/// Labels of the indexes before [`FIRST_BACKEND`].
const OWN_BACKENDS: [&str; FIRST_BACKEND as usize] = ["(kiyot)", "(all)"];
/// Limit of the configured backends that have counters of their own.
const MAX_BACKENDS: usize = 16;
/// Label of methods that this version of CRI doesn't have.
const UNKNOWN_METHOD: &str = "unknown";

/// Codes of gRPC, by number.
const CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];
/// The code of a call that its caller has left.
const CANCELLED: u8 = 1;
/// The code of a response whose status can't be read.
const UNKNOWN: u8 = 2;

/// Upper bounds of durations, in microseconds: from an answer from memory to a slow pull.
const BOUNDS_MICROS: [u64; 16] = [
    100,
    250,
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    1_000_000,
    2_500_000,
    10_000_000,
    30_000_000,
    120_000_000,
];
/// Buckets of a histogram; the last has no bound.
const BUCKETS: usize = BOUNDS_MICROS.len() + 1;

/// Durations of the calls of a method by a backend.
#[derive(Debug, Default)]
struct Durations {
    buckets: [AtomicU64; BUCKETS],
    sum_micros: AtomicU64,
}

/// Counters of all calls.
pub struct CriCalls {
    methods: Vec<&'static str>,
    backends: Vec<String>,
    /// Number of calls by method, backend and code.
    counts: Box<[[AtomicU64; CODES.len()]]>,
    /// Durations by method and backend.
    durations: Box<[Durations]>,
    begun: AtomicU64,
}

impl CriCalls {
    /// Makes counters for methods and configured backends. The index of a method is its position;
    /// the first backend has the index [`FIRST_BACKEND`].
    pub fn new(
        methods: impl IntoIterator<Item = &'static str>,
        backends: impl IntoIterator<Item = String>,
    ) -> Arc<Self> {
        let methods: Vec<_> = methods.into_iter().chain([UNKNOWN_METHOD]).collect();
        let own = OWN_BACKENDS.into_iter().map(str::to_owned);
        let backends: Vec<_> = own.chain(backends.into_iter().take(MAX_BACKENDS)).collect();
        let places = methods.len() * backends.len();
        Arc::new(Self {
            counts: (0..places).map(|_| std::array::from_fn(|_| AtomicU64::new(0))).collect(),
            durations: (0..places).map(|_| Durations::default()).collect(),
            begun: AtomicU64::new(0),
            methods,
            backends,
        })
    }

    /// Begins to measure a call; `None` is a method that CRI doesn't have.
    pub fn begin(self: &Arc<Self>, method: Option<usize>) -> CallRecord {
        self.begun.fetch_add(1, Ordering::Relaxed);
        let unknown = self.methods.len() - 1;
        let method = method.unwrap_or(unknown).min(unknown);
        let (backend, code, begun) = (BACKEND_KIYOT, CANCELLED, Instant::now());
        CallRecord(Some(Open { calls: Arc::clone(self), method, backend, code, begun }))
    }

    fn count(&self, method: usize, backend: u8, code: u8, duration: Duration) {
        let backend = usize::from(backend);
        // Backends beyond the limit share the counters of the proxy.
        let backend = if backend < self.backends.len() { backend } else { 0 };
        let place = method * self.backends.len() + backend;
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_MICROS.partition_point(|bound| *bound < micros);
        if let Some(count) = self.counts[place].get(usize::from(code)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        let durations = &self.durations[place];
        durations.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        durations.sum_micros.fetch_add(micros, Ordering::Relaxed);
    }

    /// Returns each method and backend with its place in the arrays.
    fn places(&self) -> impl Iterator<Item = (usize, &'static str, &str)> {
        let each = |(index, method): (usize, &'static str)| {
            let backends = self.backends.iter().enumerate();
            let begin = index * self.backends.len();
            backends.map(move |(backend, name)| (begin + backend, method, name.as_str()))
        };
        self.methods.iter().copied().enumerate().flat_map(each)
    }
}

impl fmt::Debug for CriCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CriCalls").field("backends", &self.backends).finish_non_exhaustive()
    }
}

impl Source for CriCalls {
    fn write(&self, page: &mut Page<'_>) -> fmt::Result {
        let (mut counted, mut family) = (0_u64, page.family(&CRI_CALLS)?);
        for (place, method, backend) in self.places() {
            for (code, count) in CODES.iter().zip(&self.counts[place]) {
                let count = count.load(Ordering::Relaxed);
                if count > 0 {
                    counted += count;
                    family.counter(&[method, backend, code], count)?;
                }
            }
        }
        let mut family = page.family(&CRI_CALL_DURATION)?;
        for (place, method, backend) in self.places() {
            let Durations { buckets, sum_micros } = &self.durations[place];
            let counts = buckets.each_ref().map(|count| count.load(Ordering::Relaxed));
            if counts.iter().any(|count| *count > 0) {
                let bounds = BOUNDS_MICROS.map(|micros| micros as f64 / 1e6);
                let sum = sum_micros.load(Ordering::Relaxed) as f64 / 1e6;
                family.histogram(&[method, backend], sum, bounds.into_iter().zip_all(counts))?;
            }
        }
        let open = self.begun.load(Ordering::Relaxed).saturating_sub(counted);
        page.family(&CRI_CALLS_OPEN)?.gauge(&[], open as f64)
    }
}

/// Adds the bucket without a bound.
trait ZipAll: Iterator<Item = f64> + Sized {
    fn zip_all(self, counts: [u64; BUCKETS]) -> Vec<(f64, u64)> {
        self.chain([f64::INFINITY]).zip(counts).collect()
    }
}

impl<T: Iterator<Item = f64>> ZipAll for T {}

/// An open call. Dropping the record counts the call.
#[derive(Debug)]
pub struct CallRecord(Option<Open>);

#[derive(Debug)]
struct Open {
    calls: Arc<CriCalls>,
    method: usize,
    backend: u8,
    code: u8,
    begun: Instant,
}

impl CallRecord {
    /// Returns a record of a call that is not counted.
    pub const fn off() -> Self {
        Self(None)
    }

    /// Sets the backend that answers.
    pub fn set_backend(&mut self, backend: u8) {
        if let Some(open) = &mut self.0 {
            open.backend = backend;
        }
    }

    /// Sets the code of the response; `None` if it is not readable. Without a code the call counts
    /// as cancelled.
    pub fn set_code(&mut self, code: Option<u8>) {
        if let Some(open) = &mut self.0 {
            let known = code.filter(|code| usize::from(*code) < CODES.len());
            open.code = known.unwrap_or(UNKNOWN);
        }
    }
}

impl Drop for CallRecord {
    fn drop(&mut self) {
        if let Some(Open { calls, method, backend, code, begun }) = self.0.take() {
            calls.count(method, backend, code, begun.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Exposition;

    #[test]
    fn call_is_counted_by_method_backend_and_code() {
        let calls = CriCalls::new(["Version", "Status"], ["containerd".to_owned()]);
        for (method, backend, code) in
            [(Some(0), 2, Some(0)), (Some(0), 2, Some(5)), (Some(1), 1, Some(99)), (None, 9, None)]
        {
            let mut record = calls.begin(method);
            record.set_backend(backend);
            record.set_code(code);
        }
        let open = calls.begin(Some(7));
        let text = Exposition::new(vec![calls.clone()]).text();
        for line in [
            "kiyot_cri_calls_total{method=\"Version\",backend=\"containerd\",code=\"OK\"} 1",
            "kiyot_cri_calls_total{method=\"Version\",backend=\"containerd\",code=\"NOT_FOUND\"} 1",
            "kiyot_cri_calls_total{method=\"Status\",backend=\"(all)\",code=\"UNKNOWN\"} 1",
            "kiyot_cri_calls_total{method=\"unknown\",backend=\"(kiyot)\",code=\"UNKNOWN\"} 1",
            "kiyot_cri_call_duration_seconds_count{method=\"Version\",backend=\"containerd\"} 2",
            "kiyot_cri_calls_open 1.0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        drop(open);
        let text = Exposition::new(vec![calls]).text();
        assert!(
            text.contains("code=\"CANCELLED\"} 1") && text.contains("calls_open 0.0"),
            "{text}"
        );
    }

    #[test]
    fn duration_is_in_the_bucket_of_its_upper_bound() {
        let calls = CriCalls::new(["Version"], []);
        for micros in [100, 101, 120_000_000, 120_000_001] {
            calls.count(0, 0, 0, Duration::from_micros(micros));
        }
        let text = Exposition::new(vec![calls]).text();
        let bucket = |le: &str, count: u64| {
            let labels = format!("method=\"Version\",backend=\"(kiyot)\",le=\"{le}\"");
            let found = [
                format!("kiyot_cri_call_duration_seconds_bucket{{{labels}}} {count}"),
                format!(
                    "kiyot_cri_call_duration_seconds_bucket{{le=\"{le}\",method=\"Version\",\
                     backend=\"(kiyot)\"}} {count}"
                ),
            ];
            assert!(found.iter().any(|line| text.contains(line)), "{le} {count}\n{text}");
        };
        bucket("0.0001", 1);
        bucket("0.00025", 2);
        bucket("120.0", 3);
        bucket("+Inf", 4);
    }
}
