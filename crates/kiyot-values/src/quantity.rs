//! Kubernetes quantities, such as `500m`, `1.5Gi` or `2e3`.

use std::str::FromStr;

use crate::decimal::{self, Rounding};

/// Resolution: parts of a unit.
const NANO: u128 = 1_000_000_000;

/// Longest accepted text, in characters.
const MAX_CHARS: usize = 64;

/// Non-negative quantity, exact to a billionth; finer parts are rounded up, as Kubernetes does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Quantity {
    nanos: u128,
}

/// Error of a text that is not a quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("is invalid; allowed: a quantity such as 500m, 10 or 1.5Gi, not negative")]
pub struct NotAQuantity;

impl Quantity {
    /// Returns whole units, rounded up.
    pub fn units(self) -> u64 {
        self.rounded_up(NANO)
    }

    /// Returns whether the quantity is a whole number of units.
    pub fn is_whole(self) -> bool {
        self.nanos.is_multiple_of(NANO)
    }

    /// Returns thousandths, rounded up: CPUs in milli-CPUs.
    pub fn milli(self) -> u64 {
        self.rounded_up(NANO / 1000)
    }

    /// Returns bytes in GiB, rounded up.
    pub fn gib(self) -> u64 {
        self.rounded_up(NANO << 30)
    }

    fn rounded_up(self, unit: u128) -> u64 {
        u64::try_from(self.nanos.div_ceil(unit)).unwrap_or(u64::MAX)
    }
}

impl FromStr for Quantity {
    type Err = NotAQuantity;

    fn from_str(text: &str) -> Result<Self, NotAQuantity> {
        read(text).map(|nanos| Self { nanos }).ok_or(NotAQuantity)
    }
}

fn read(text: &str) -> Option<u128> {
    if text.len() > MAX_CHARS {
        return None;
    }
    let text = text.strip_prefix('+').unwrap_or(text);
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.len() + fraction.len() == 0 {
        return None;
    }
    let nanos = decimal::from_parts(whole, fraction, unit(suffix)?, Rounding::Up)?;
    // Kubernetes keeps quantities in 63 bits.
    (nanos <= u128::from(i64::MAX.unsigned_abs()) * NANO).then_some(nanos)
}

/// Returns a suffix's value in billionths.
fn unit(suffix: &str) -> Option<u128> {
    Some(match suffix {
        "n" => 1,
        "u" => 1_000,
        "m" => 1_000_000,
        "" => NANO,
        "k" => NANO * 1_000,
        "M" => NANO * 1_000_000,
        "G" => NANO * 1_000_000_000,
        "T" => NANO * 1_000_000_000_000,
        "P" => NANO * 1_000_000_000_000_000,
        "E" => NANO * 1_000_000_000_000_000_000,
        "Ki" => NANO << 10,
        "Mi" => NANO << 20,
        "Gi" => NANO << 30,
        "Ti" => NANO << 40,
        "Pi" => NANO << 50,
        "Ei" => NANO << 60,
        _ => {
            let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
            10_u128.checked_pow(u32::try_from(exponent.checked_add(9)?).ok()?)?
        }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Verifies A3.
    #[test]
    fn quantities_parse_as_in_kubernetes() {
        let milli = |text: &str| text.parse::<Quantity>().map(Quantity::milli).ok();
        for (text, value) in [
            ("0", 0),
            ("1", 1000),
            ("+1", 1000),
            ("500m", 500),
            ("0.5", 500),
            (".5", 500),
            ("1.", 1000),
            ("1.0001", 1001),
            ("1n", 1),
            ("1u", 1),
            ("2k", 2_000_000),
            ("2e3", 2_000_000),
            ("2E3", 2_000_000),
            ("5e-1", 500),
            ("1Ki", 1_024_000),
            ("1.5Ki", 1_536_000),
            ("001", 1000),
            ("1.000000000000000000000000000", 1000),
        ] {
            assert_eq!(milli(text), Some(value), "{text}");
        }
        for text in [
            "",
            ".",
            "m",
            "-1",
            "1x",
            "1 Gi",
            " 1",
            "1KI",
            "1ki",
            "1e",
            "1E+",
            "1.2.3",
            "0x1",
            "9999999999999999999999",
            "16Ei",
            "1e40",
            "1e-40",
            "١",
        ] {
            assert_eq!(milli(text), None, "{text}");
        }
        assert_eq!("1E".parse::<Quantity>().map(Quantity::units), Ok(1_000_000_000_000_000_000));
    }

    /// Verifies A3.
    #[test]
    fn suffixes_have_their_kubernetes_values() {
        let units = |text: &str| text.parse::<Quantity>().map(Quantity::units);
        for (power, suffix) in (1..).zip(["k", "M", "G", "T", "P", "E"]) {
            assert_eq!(units(&format!("2{suffix}")), Ok(2 * 1000_u64.pow(power)), "{suffix}");
        }
        for (power, suffix) in (1..).zip(["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]) {
            assert_eq!(units(&format!("2{suffix}")), Ok(2 * 1024_u64.pow(power)), "{suffix}");
        }
    }

    /// Verifies A3.
    #[test]
    fn quantity_has_at_most_64_characters_and_63_bits() {
        let units = |text: &str| text.parse::<Quantity>().map(Quantity::units);
        assert_eq!(units(&format!("{:0>64}", 1)), Ok(1));
        assert_eq!(units(&format!("{:0>65}", 1)), Err(NotAQuantity));
        assert_eq!(units("9223372036854775807"), Ok(9_223_372_036_854_775_807));
        assert_eq!(units("9223372036854775808"), Err(NotAQuantity));
    }

    #[test]
    fn whole_quantities_have_no_part_of_a_unit() {
        for (text, whole) in [("1", true), ("1000m", true), ("0", true), ("1500m", false)] {
            assert_eq!(text.parse::<Quantity>().map(Quantity::is_whole), Ok(whole), "{text}");
        }
    }

    /// Verifies A3.
    #[test]
    fn sizes_in_gib_are_rounded_up() {
        for (text, gib) in [
            ("0", 0),
            ("1", 1),
            ("1Gi", 1),
            ("1Gi", 1),
            ("1G", 1),
            ("1073741825", 2),
            ("1.5Gi", 2),
            ("10Gi", 10),
            ("1Ti", 1024),
        ] {
            assert_eq!(text.parse::<Quantity>().map(Quantity::gib), Ok(gib), "{text}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_parsed_without_panic(text in "\\PC{0,80}") {
            let _ = text.parse::<Quantity>();
        }

        #[test]
        fn arbitrary_quantity_is_parsed_without_panic(
            text in "[+-]?[0-9.]{0,40}([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,12})?",
        ) {
            if let Ok(quantity) = text.parse::<Quantity>() {
                prop_assert!(quantity.milli() >= quantity.units());
                prop_assert!(quantity.units() >= quantity.gib());
            }
        }

        #[test]
        fn whole_units_round_trip(units in 0_u64..(1 << 62)) {
            prop_assert_eq!(units.to_string().parse::<Quantity>().map(Quantity::units), Ok(units));
        }

        #[test]
        fn greater_numbers_are_greater_quantities(
            one in 0_u32..,
            other in 0_u32..,
            suffix in "(m||k|Ki|Mi)",
        ) {
            let read = |number: u32| format!("{number}{suffix}").parse::<Quantity>().unwrap();
            prop_assert_eq!(one.cmp(&other), read(one).cmp(&read(other)));
        }
    }
}
