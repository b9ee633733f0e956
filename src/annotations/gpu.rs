//! GPUs of an instance.

use kiyot_engine::request::GpuRequest;
use kiyot_values::problems::Field;

/// Limit on GPUs: four times as many as the largest instance types have.
const MAX_GPUS: u32 = 64;
/// Longest name of a GPU, in characters.
const MAX_NAME_CHARS: usize = 64;
/// Longest accepted text, in characters: a number, a name, and blanks around them.
const MAX_CHARS: usize = 2 * MAX_NAME_CHARS;

/// Reads a number, and perhaps a manufacturer or name.
pub(super) fn gpu(field: Field<'_>) -> Option<GpuRequest> {
    let allowed = format!(
        "0 to {MAX_GPUS} GPUs, with a manufacturer or name, such as 1, \"2 nvidia\" or \"1 T4\""
    );
    field.read(&allowed, read)
}

fn read(text: &str) -> Option<GpuRequest> {
    if text.len() > MAX_CHARS {
        return None;
    }
    let mut words = text.split(' ').filter(|word| !word.is_empty());
    let digits = words.next().filter(|word| word.bytes().all(|byte| byte.is_ascii_digit()))?;
    let count = digits.parse().ok().filter(|count| *count <= MAX_GPUS)?;
    let name = words.collect::<Vec<_>>().join(" ");
    let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, ' ' | '.' | '-');
    if name.len() > MAX_NAME_CHARS || !name.chars().all(is_word) {
        return None;
    }
    Some(GpuRequest { count, name: Some(name).filter(|name| count > 0 && !name.is_empty()) })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(count: u32, name: Option<&str>) -> GpuRequest {
        GpuRequest { count, name: name.map(str::to_owned) }
    }

    /// Verifies A4.
    #[test]
    fn number_and_name_of_gpus_are_read() {
        for (text, count, name, shown) in [
            ("0", 0, None, "no GPU"),
            ("1", 1, None, "1 GPU"),
            ("64", 64, None, "64 GPUs"),
            ("2 nvidia", 2, Some("nvidia"), "2 GPUs (nvidia)"),
            ("1 T4", 1, Some("T4"), "1 GPU (T4)"),
            (" 04   Radeon  Pro V520 ", 4, Some("Radeon Pro V520"), "4 GPUs (Radeon Pro V520)"),
            ("0 nvidia", 0, None, "no GPU"),
        ] {
            let gpus = read(text).unwrap();
            assert_eq!((&gpus, &*gpus.to_string()), (&request(count, name), shown), "{text}");
        }
        let long = format!("1 {}", "x".repeat(MAX_NAME_CHARS + 1));
        let blank = format!("1{}", " ".repeat(MAX_CHARS));
        for text in
            ["", " ", "T4", "T4 1", "65", "-1", "+1", "1.5", "1m", "1 T4, 1", "1\tT4", "1 ä", "१"]
                .into_iter()
                .chain([&*long, &*blank])
        {
            assert_eq!(read(text), None, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn written_request_round_trips(
            count in 1..=MAX_GPUS,
            name in "[A-Za-z0-9.-]{1,20}( [A-Za-z0-9.-]{1,20}){0,2}",
        ) {
            let read = read(&format!("{count} {name}")).unwrap();
            prop_assert_eq!(&read, &request(count, Some(&name)));
            prop_assert!(read.matches(Some(&name.to_uppercase()), None));
            prop_assert!(read.matches(Some("other"), Some(&name.to_lowercase())));
        }
    }
}
