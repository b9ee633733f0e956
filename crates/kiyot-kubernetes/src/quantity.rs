//! Quantities of Kubernetes (`resource.Quantity`).

/// Most digits that are read: more than any amount of a machine has.
const MAX_DIGITS: usize = 24;

/// Returns a quantity in thousandths, rounded up; `None` for another text, or a negative one.
pub fn thousandths(text: &str) -> Option<u64> {
    parse(text, 3)
}

/// Returns a quantity in whole units, rounded up; `None` for another text, or a negative one.
pub fn units(text: &str) -> Option<u64> {
    parse(text, 0)
}

/// Returns a quantity in units of a negative power of ten.
fn parse(text: &str, power: i32) -> Option<u64> {
    let end = text.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b'.').count();
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = format!("{whole}{fraction}");
    if digits.is_empty() || digits.len() > MAX_DIGITS || fraction.contains('.') {
        return None;
    }
    let mantissa: u128 = digits.parse().ok()?;
    let (binary, tens) = suffix_of(suffix)?;
    let scaled = mantissa.checked_mul(1_u128.checked_shl(binary)?)?;
    let tens = tens + power - i32::try_from(fraction.len()).ok()?;
    let value = match u32::try_from(tens) {
        Ok(tens) => scaled.checked_mul(10_u128.checked_pow(tens)?)?,
        Err(_) => scaled.div_ceil(10_u128.checked_pow(tens.unsigned_abs())?),
    };
    u64::try_from(value).ok()
}

/// Returns the powers of two and of ten of a suffix.
fn suffix_of(suffix: &str) -> Option<(u32, i32)> {
    Some(match suffix {
        "" => (0, 0),
        "n" => (0, -9),
        "u" => (0, -6),
        "m" => (0, -3),
        "k" => (0, 3),
        "M" => (0, 6),
        "G" => (0, 9),
        "T" => (0, 12),
        "P" => (0, 15),
        "E" => (0, 18),
        "Ki" => (10, 0),
        "Mi" => (20, 0),
        "Gi" => (30, 0),
        "Ti" => (40, 0),
        "Pi" => (50, 0),
        "Ei" => (60, 0),
        exponent => {
            let exponent: i32 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            (0, (-18..=18).contains(&exponent).then_some(exponent)?)
        }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quantities_are_read_as_kubernetes_reads_them() {
        for (text, expected) in [
            ("100m", Some(100)),
            ("0.5", Some(500)),
            (".5", Some(500)),
            ("1.", Some(1000)),
            ("2", Some(2000)),
            ("1e3", Some(1_000_000)),
            ("1500u", Some(2)),
            ("1n", Some(1)),
            ("0", Some(0)),
            ("", None),
            (".", None),
            ("-1", None),
            ("1.2.3", None),
            ("1x", None),
            ("1e99", None),
        ] {
            assert_eq!(thousandths(text), expected, "{text:?}");
        }
        for (text, expected) in [
            ("128Mi", Some(128 << 20)),
            ("1.5Gi", Some(3 << 29)),
            ("512M", Some(512_000_000)),
            ("1500m", Some(2)),
            ("1E", Some(1_000_000_000_000_000_000)),
            ("16Ei", None),
            ("128974848", Some(128_974_848)),
        ] {
            assert_eq!(units(text), expected, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_a_panic(text in "\\PC{0,40}") {
            let _read = (thousandths(&text), units(&text));
        }

        #[test]
        fn whole_numbers_are_themselves(number in 0_u64..1 << 50) {
            prop_assert_eq!(units(&number.to_string()), Some(number));
            prop_assert_eq!(thousandths(&format!("{number}m")), Some(number));
        }
    }
}
