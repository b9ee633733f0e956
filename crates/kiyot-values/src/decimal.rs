//! Decimal numbers without a sign, read exactly.

/// The direction in which a number between two integers is rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// Takes the lower integer.
    Down,
    /// Takes the higher integer.
    Up,
}

/// Parses digits, with or without a point between them, and returns the number times `scale` as an
/// integer.
pub fn parse(text: &str, scale: u128, rounding: Rounding) -> Option<u128> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    if whole.is_empty() || fraction.is_empty() {
        return None;
    }
    from_parts(whole, fraction, scale, rounding)
}

/// Returns the number with these digits before and after its point, times `scale`, as an integer.
/// An empty part is zero. Returns `None` for other characters, and for a number whose digits do not
/// fit in 128 bits, also with `scale`.
pub fn from_parts(whole: &str, fraction: &str, scale: u128, rounding: Rounding) -> Option<u128> {
    let fraction = fraction.trim_end_matches('0');
    let number = whole.bytes().chain(fraction.bytes()).try_fold(0_u128, |number, byte| {
        let digit = char::from(byte).to_digit(10)?;
        number.checked_mul(10)?.checked_add(digit.into())
    })?;
    let scaled = number.checked_mul(scale)?;
    let divisor = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    Some(match rounding {
        Rounding::Down => scaled / divisor,
        Rounding::Up => scaled.div_ceil(divisor),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn number_between_integers_is_rounded() {
        for (text, down, up) in [
            ("0", 0, 0),
            ("0.4", 400, 400),
            ("00.40", 400, 400),
            ("7", 7000, 7000),
            ("1.0001", 1000, 1001),
            ("0.9999", 999, 1000),
            ("1.00000000000000000000000000000000000000000000000000", 1000, 1000),
        ] {
            let rounded = [Rounding::Down, Rounding::Up].map(|to| parse(text, 1000, to));
            assert_eq!(rounded, [Some(down), Some(up)], "{text}");
        }
    }

    #[test]
    fn other_text_is_not_a_decimal() {
        for text in ["", ".", ".5", "5.", "-1", "+1", " 1", "1 ", "1.2.3", "1e3", "1,5", "0x1", "١"]
        {
            assert_eq!(parse(text, 1, Rounding::Down), None, "{text}");
        }
        assert_eq!(from_parts("", "5", 10, Rounding::Down), Some(5));
        assert_eq!(from_parts("5", "", 10, Rounding::Down), Some(50));
        assert_eq!(from_parts("", "", 10, Rounding::Down), Some(0));
    }

    #[test]
    fn number_above_128_bits_is_refused() {
        let max = u128::MAX.to_string();
        assert_eq!(parse(&max, 1, Rounding::Down), Some(u128::MAX));
        assert_eq!(parse(&max, 2, Rounding::Down), None);
        assert_eq!(parse(&format!("{max}0"), 1, Rounding::Down), None);
        assert_eq!(parse(&format!("0.{}1", "0".repeat(37)), 1, Rounding::Up), Some(1));
        assert_eq!(parse(&format!("0.{}1", "0".repeat(38)), 1, Rounding::Up), None);
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_parsed_without_panic(text in "[0-9.]{0,60}|\\PC{0,8}", scale: u128) {
            let _ = parse(&text, scale, Rounding::Up);
        }

        #[test]
        fn result_equals_exact_arithmetic(
            number: u64,
            decimals in 0_usize..=18,
            scale in 1_u128..=1 << 60,
            (leading, trailing) in (0_usize..4, 0_usize..4),
        ) {
            // `number` / 10^`decimals`, with zeros before and after it.
            let digits = format!("{number:0>width$}", width = decimals + 1);
            let (whole, fraction) = digits.split_at(digits.len() - decimals);
            let zeros = |count| "0".repeat(count);
            let text = match decimals + trailing {
                0 => format!("{}{whole}", zeros(leading)),
                _ => format!("{}{whole}.{fraction}{}", zeros(leading), zeros(trailing)),
            };
            let exact = u128::from(number) * scale;
            let divisor = 10_u128.pow(decimals as u32);
            let down = parse(&text, scale, Rounding::Down).unwrap();
            prop_assert!(down * divisor <= exact && exact < (down + 1) * divisor, "{}", text);
            let up = parse(&text, scale, Rounding::Up).unwrap();
            prop_assert_eq!(up, down + u128::from(down * divisor < exact), "{}", text);
        }
    }
}
