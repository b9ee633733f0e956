//! Note in a log in place of bytes discarded by the cell.

use bytes::Bytes;
use jiff::Timestamp;

/// Returns a line in CRI's log format, as if from the container's standard error. If the file ends
/// within a line (`within_line`), ends that line first.
pub(super) fn note(within_line: bool, bytes: u64, now: Timestamp) -> Bytes {
    let end = if within_line { "\n" } else { "" };
    format!(
        "{end}{now:.9} stderr F kiyot: {bytes} bytes of this log are missing here: they were on \
         the node, and the cell keeps no second copy\n"
    )
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gap_note_is_a_cri_log_line() {
        let now = Timestamp::new(1_767_322_800, 5).unwrap();
        let said = String::from_utf8(note(false, 42, now).to_vec()).unwrap();
        assert!(
            said.starts_with("2026-01-02T03:00:00.000000005Z stderr F kiyot: 42 bytes "),
            "{said}"
        );
        assert_eq!(said.find('\n'), Some(said.len() - 1));
        assert_eq!(note(true, 42, now), format!("\n{said}"));
    }
}
