//! Prices, costs, sizes and shares as columns show them.

use kiyot_proto::admin::Offering;

/// Millionths of a dollar.
const MICROS: u64 = 1_000_000;

/// Returns dollars with four digits after the point, rounded up: a fraction of a cent is never
/// shown as zero.
pub(crate) fn dollars(micros: u64) -> String {
    let hundredths = micros.div_ceil(100);
    format!("{}.{:04}", hundredths / (MICROS / 100), hundredths % (MICROS / 100))
}

/// Returns the price of an offering, with `<=` if only a bound is known, and `~` if the price of
/// another region stands for it.
pub(crate) fn price(offering: &Offering) -> String {
    let mark = match (offering.price_is_at_most, offering.price_is_estimate) {
        (true, _) => "<=",
        (_, true) => "~",
        _ => "",
    };
    format!("{mark}{}", dollars(offering.price_micros))
}

/// Returns bytes as kubectl top shows them.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [(&str, u64); 3] = [("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)];
    let unit = UNITS.iter().find(|(_, size)| bytes >= 10 * size);
    match unit {
        Some((unit, size)) => format!("{}{unit}", bytes / size),
        None if bytes >= 1 << 10 => format!("{}Ki", bytes.div_ceil(1 << 10)),
        None => bytes.to_string(),
    }
}

/// Returns thousandths of a CPU as kubectl top shows them.
pub(crate) fn cpu(nanocores: u64) -> String {
    format!("{}m", nanocores.div_ceil(1_000_000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dollars_are_never_rounded_to_nothing() {
        for (micros, expected) in [
            (0, "0.0000"),
            (1, "0.0001"),
            (5_200, "0.0052"),
            (1_000_000, "1.0000"),
            (MICROS * 12 + 340_000, "12.3400"),
        ] {
            assert_eq!(dollars(micros), expected);
        }
        let exact = Offering { price_micros: 5_200, ..Default::default() };
        assert_eq!(price(&exact), "0.0052");
        assert_eq!(price(&Offering { price_is_at_most: true, ..exact.clone() }), "<=0.0052");
        assert_eq!(price(&Offering { price_is_estimate: true, ..exact }), "~0.0052");
    }

    #[test]
    fn bytes_have_at_least_two_digits_of_their_unit() {
        for (size, expected) in [
            (0, "0"),
            (1023, "1023"),
            (1025, "2Ki"),
            (10 << 20, "10Mi"),
            (9 << 20, "9216Ki"),
            (64 << 30, "64Gi"),
        ] {
            assert_eq!(bytes(size), expected);
        }
        assert_eq!(cpu(1_500_000), "2m");
    }
}
