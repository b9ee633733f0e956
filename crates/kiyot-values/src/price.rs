//! Prices in US dollars an hour, and costs in US dollars.

use std::{fmt, ops::Add, str::FromStr, time::Duration};

use crate::decimal::{self, Rounding};

/// Millionths of a dollar.
const MICROS: u64 = 1_000_000;
/// Decimals of a price that are kept; finer parts are rounded up.
const DECIMALS: usize = 6;
/// Least decimals of a displayed price, as in EC2's price list.
const MIN_SHOWN_DECIMALS: usize = 4;
/// Highest price, in dollars: a hundred times that of the largest instance type.
const MAX_DOLLARS: u64 = 100_000;
/// Highest cost, in dollars: of a month at the highest price.
const MAX_COST_DOLLARS: u64 = 100_000_000;
/// Longest accepted text, in characters.
const MAX_CHARS: usize = 32;

/// Price in US dollars an hour, exact to a millionth of a dollar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Price {
    micros: u64,
}

/// Cost in US dollars, exact to a millionth of a dollar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Cost {
    micros: u64,
}

/// Error of a text that is not a price.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("is invalid; allowed: dollars an hour such as 0.0416, from 0 to {MAX_DOLLARS}")]
pub struct NotAPrice;

/// Error of a text that is not a cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("is invalid; allowed: dollars such as 250.50, from 0 to {MAX_COST_DOLLARS}")]
pub struct NotACost;

impl Price {
    /// Price of 0.
    pub const FREE: Self = Self { micros: 0 };

    /// Returns a price of `micros` millionths of a dollar an hour.
    pub const fn from_micros(micros: u64) -> Self {
        Self { micros }
    }

    /// Returns the millionths of a dollar an hour.
    pub const fn micros(self) -> u64 {
        self.micros
    }

    /// Returns the price of `milli` thousandths of a unit at this price per unit, rounded up.
    pub fn of_milli(self, milli: u64) -> Self {
        let micros = (u128::from(self.micros) * u128::from(milli)).div_ceil(1000);
        Self { micros: u64::try_from(micros).unwrap_or(u64::MAX) }
    }
}

impl Price {
    /// Returns the cost of `time` at this price, rounded up.
    pub fn over(self, time: Duration) -> Cost {
        const MILLIS_OF_HOUR: u128 = 3_600_000;
        let micros =
            u128::from(self.micros).saturating_mul(time.as_millis()).div_ceil(MILLIS_OF_HOUR);
        Cost { micros: u64::try_from(micros).unwrap_or(u64::MAX) }
    }
}

impl Cost {
    /// Returns a cost of `micros` millionths of a dollar.
    pub const fn from_micros(micros: u64) -> Self {
        Self { micros }
    }

    /// Returns the millionths of a dollar.
    pub const fn micros(self) -> u64 {
        self.micros
    }
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { micros: self.micros.saturating_add(other.micros) }
    }
}

impl Add for Price {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { micros: self.micros.saturating_add(other.micros) }
    }
}

impl FromStr for Price {
    type Err = NotAPrice;

    fn from_str(text: &str) -> Result<Self, NotAPrice> {
        read(text, MAX_DOLLARS).map(Self::from_micros).ok_or(NotAPrice)
    }
}

impl FromStr for Cost {
    type Err = NotACost;

    fn from_str(text: &str) -> Result<Self, NotACost> {
        read(text, MAX_COST_DOLLARS).map(Self::from_micros).ok_or(NotACost)
    }
}

fn read(text: &str, max_dollars: u64) -> Option<u64> {
    if text.len() > MAX_CHARS {
        return None;
    }
    let micros = decimal::parse(text, MICROS.into(), Rounding::Up)?;
    u64::try_from(micros).ok().filter(|micros| *micros <= max_dollars * MICROS)
}

impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_dollars(self.micros, f)
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_dollars(self.micros, f)
    }
}

fn write_dollars(micros: u64, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let fraction = format!("{:0DECIMALS$}", micros % MICROS);
    let significant = fraction.trim_end_matches('0').len().max(MIN_SHOWN_DECIMALS);
    write!(f, "${}.{}", micros / MICROS, &fraction[..significant])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn prices_parse_in_the_form_of_price_lists() {
        for (text, micros, shown) in [
            ("0", 0, "$0.0000"),
            ("0.0042", 4_200, "$0.0042"),
            ("0.0052000000", 5_200, "$0.0052"),
            ("0.000001", 1, "$0.000001"),
            ("0.0000001", 1, "$0.000001"),
            ("00.5", 500_000, "$0.5000"),
            ("98.32", 98_320_000, "$98.3200"),
            ("100000", 100_000_000_000, "$100000.0000"),
        ] {
            let price: Price = text.parse().unwrap();
            assert_eq!((price.micros(), price.to_string().as_str()), (micros, shown), "{text}");
        }
        for text in
            ["", ".", ".5", "5.", "-1", "+1", "1e3", "0x1", "1,5", "$1", " 1", "100000.1", "nan"]
        {
            assert_eq!(text.parse::<Price>(), Err(NotAPrice), "{text}");
        }
        let zeros = |count| format!("0.{}", "0".repeat(count));
        assert_eq!(zeros(MAX_CHARS - 2).parse(), Ok(Price::FREE));
        assert_eq!(zeros(MAX_CHARS - 1).parse::<Price>(), Err(NotAPrice));
    }

    #[test]
    fn costs_are_higher_than_prices() {
        let micros = |text: &str| text.parse().map(Cost::micros);
        assert_eq!(micros("250.50"), Ok(250_500_000));
        assert_eq!(micros("100000000"), Ok(100_000_000_000_000));
        for text in ["100000000.000001", "$1", ""] {
            assert_eq!(micros(text), Err(NotACost), "{text}");
        }
    }

    #[test]
    fn sums_are_exact_up_to_their_highest_value() {
        let prices = |a, b| (Price::from_micros(a) + Price::from_micros(b)).micros();
        let costs = |a, b| (Cost::from_micros(a) + Cost::from_micros(b)).micros();
        assert_eq!((prices(2, 3), costs(2, 3)), (5, 5));
        assert_eq!((prices(u64::MAX, 1), costs(u64::MAX, 1)), (u64::MAX, u64::MAX));
    }

    #[test]
    fn price_of_a_part_is_rounded_up() {
        let price = Price::from_micros(50_000);
        let parts = [0, 1, 500, 1000, 3_800].map(|milli| price.of_milli(milli).micros());
        assert_eq!(parts, [0, 50, 25_000, 50_000, 190_000]);
        assert_eq!(Price::from_micros(1).of_milli(1).micros(), 1);
    }

    #[test]
    fn cost_of_time_is_rounded_up() {
        let price = Price::from_micros(3_600_000);
        let costs = [0, 1, 1000, 3_600_000]
            .map(|millis| price.over(Duration::from_millis(millis)).micros());
        assert_eq!(costs, [0, 1, 1000, 3_600_000]);
        assert_eq!(Price::from_micros(1).over(Duration::from_millis(1)).micros(), 1);
        assert_eq!(Price::from_micros(u64::MAX).over(Duration::MAX).micros(), u64::MAX);
        assert_eq!(price.over(Duration::from_secs(90)).to_string(), "$0.0900");
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_parsed_without_panic(text in "\\PC{0,40}") {
            let _ = text.parse::<Price>();
        }

        #[test]
        fn shown_price_round_trips(micros in 0..=MAX_DOLLARS * MICROS) {
            let price = Price::from_micros(micros);
            prop_assert_eq!(price.to_string()[1..].parse(), Ok(price));
        }
    }
}
