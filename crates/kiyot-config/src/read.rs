//! Readers of values that only configurations have.

use std::{
    ops::RangeInclusive,
    path::{Path, PathBuf},
    time::Duration,
};

use jiff::SignedDuration;
use kiyot_values::problems::Field;

/// Longest path of a unix socket, in bytes: Linux's `sun_path` without the NUL.
pub(super) const SOCKET_PATH_BYTES: usize = 107;

/// Reads a duration such as "1m 30s", in a range.
pub(super) fn duration(field: Field<'_>, range: RangeInclusive<Duration>) -> Option<Duration> {
    let allowed = allowed_durations(&range);
    field.read(&allowed, |text| parsed(text).filter(|duration| range.contains(duration)))
}

/// Reads a duration in a range, or "0s".
pub(super) fn duration_or_zero(
    field: Field<'_>,
    range: RangeInclusive<Duration>,
) -> Option<Duration> {
    let allowed = format!("\"0s\" (never), or {}", allowed_durations(&range));
    field.read(&allowed, |text| {
        parsed(text).filter(|duration| duration.is_zero() || range.contains(duration))
    })
}

fn allowed_durations(range: &RangeInclusive<Duration>) -> String {
    let (from, to) = (words(*range.start()), words(*range.end()));
    format!("a duration such as \"10s\" or \"2m\", from {from} to {to}")
}

fn parsed(text: &str) -> Option<Duration> {
    Duration::try_from(text.parse::<SignedDuration>().ok()?).ok()
}

/// Formats a duration such as "1m30s".
fn words(duration: Duration) -> String {
    SignedDuration::try_from(duration)
        .map_or_else(|_| format!("{duration:?}"), |signed| format!("{signed:#}"))
}

/// Reads a number of bytes such as "20Gi".
pub(super) fn bytes(field: Field<'_>) -> Option<u64> {
    field.read("a number of bytes, such as \"0\", \"500Mi\" or \"20Gi\"", number_of_bytes)
}

/// Reads a number of bytes such as "512Mi", in a range.
pub(super) fn bytes_in(field: Field<'_>, allowed: &str, range: RangeInclusive<u64>) -> Option<u64> {
    field.read(&format!("a number of bytes, {allowed}"), |text| {
        number_of_bytes(text).filter(|bytes| range.contains(bytes))
    })
}

/// Range of the memory that an image's system needs beside a pod: no system of a cell needs more.
const MEMORY_OVERHEADS: RangeInclusive<u64> = (16 << 20)..=(64 << 30);

/// Reads the memory that an image's system needs beside a pod.
pub(super) fn memory_overhead(field: Field<'_>) -> Option<u64> {
    bytes_in(field, "from 16Mi to 64Gi", MEMORY_OVERHEADS)
}

/// Reads a number of bytes such as "64Mi", in a range or 0.
pub(super) fn bytes_or_zero_in(
    field: Field<'_>,
    allowed: &str,
    range: RangeInclusive<u64>,
) -> Option<u64> {
    field.read(&format!("a number of bytes, \"0\" or {allowed}"), |text| {
        number_of_bytes(text).filter(|bytes| *bytes == 0 || range.contains(bytes))
    })
}

fn number_of_bytes(text: &str) -> Option<u64> {
    const UNITS: [(&str, u32); 4] = [("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40)];
    let (number, power) = UNITS
        .iter()
        .find_map(|(unit, power)| text.strip_suffix(unit).map(|number| (number, *power)))
        .unwrap_or((text, 0));
    if !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    number.parse::<u64>().ok()?.checked_mul(1 << power)
}

/// Reads an absolute path without `.` or `..`.
pub(super) fn path(field: Field<'_>) -> Option<PathBuf> {
    field.read("an absolute path without \".\" and \"..\"", plain_path)
}

/// Returns an absolute path without `.` or `..`.
pub(super) fn plain_path(text: &str) -> Option<PathBuf> {
    is_plain(Path::new(text)).then(|| text.into())
}

/// Reads an absolute path that fits a unix socket.
pub(super) fn socket(field: Field<'_>) -> Option<PathBuf> {
    let allowed = format!(
        "the absolute path of a unix socket, without \".\" and \"..\", of at most \
         {SOCKET_PATH_BYTES} bytes"
    );
    field.read(&allowed, |text| {
        (is_plain(Path::new(text)) && text.len() <= SOCKET_PATH_BYTES).then(|| text.into())
    })
}

/// Reads a program: a name on PATH, or an absolute path.
pub(super) fn program(field: Field<'_>) -> Option<PathBuf> {
    field.read("the name of a program on PATH, or its absolute path", |text| {
        let path = Path::new(text);
        (is_plain(path)
            || (!text.is_empty() && !text.contains(['/', '\0']) && text != "." && text != ".."))
            .then(|| text.into())
    })
}

fn is_plain(path: &Path) -> bool {
    use std::path::Component::{Normal, RootDir};
    // `components` drops an inner ".".
    let text = path.as_os_str().as_encoded_bytes();
    path.is_absolute()
        && !text.contains(&0)
        && path.components().all(|component| matches!(component, Normal(_) | RootDir))
        && !text.split(|byte| *byte == b'/').any(|part| part == b".")
}
