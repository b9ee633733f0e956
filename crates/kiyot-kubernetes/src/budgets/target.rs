//! The share of a budget that a node should have.
//!
//! A share grows by the price of waiting orders and a cushion, so that not every launch is a write.
//! It shrinks to the used part after it was too large for a while. While less than half of the
//! budget is left, shares have no cushion and shrink soon, because other nodes need the rest.

use kiyot_values::{
    price::Cost,
    spending::{Period, Spending},
};

use super::object::Amounts;

/// A share divided by this is its cushion.
const CUSHION: u64 = 4;
/// Bound the unreported cost of all nodes together, as divisors of the rest of a limit and of the
/// whole limit. The larger quotient is the bound. The second bounds the number of writes.
const UNREPORTED_OF_REST: u64 = 8;
const UNREPORTED_OF_LIMIT: u64 = 100;

/// The wish of a namespace's cells and orders on this node, in millionths of a dollar an hour.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Wish {
    /// The price of the cells.
    pub held: u64,
    /// The cost of the cells.
    pub spent: Spending,
    /// The orders that wait for a larger share.
    pub orders: Vec<OrderWish>,
}

/// The wish of an order, in millionths of a dollar an hour.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrderWish {
    /// The order's id.
    pub id: String,
    /// The price of the order's cheapest candidate.
    pub cheapest: u64,
    /// The price of the order's most expensive candidate.
    pub dearest: u64,
}

impl Wish {
    /// Returns the share that suffices for each order's most expensive candidate.
    pub(super) fn whole(&self) -> u64 {
        self.orders.iter().fold(self.held, |sum, order| sum.saturating_add(order.dearest))
    }

    /// Returns the least share that suffices for an order's cheapest candidate.
    fn least(&self) -> Option<u64> {
        self.orders.iter().map(|order| self.held.saturating_add(order.cheapest)).min()
    }
}

impl Amounts {
    /// Returns whether other nodes may soon need the part that this node does not use.
    pub(super) fn are_scarce(&self, own: u64) -> bool {
        self.limit.is_some_and(|limit| self.room(limit).saturating_sub(own) < limit / 2)
    }

    /// Returns the part of the limit that is not in other nodes' shares.
    fn room(&self, limit: u64) -> u64 {
        limit.saturating_sub(self.others)
    }

    fn with_cushion(&self, limit: u64, share: u64) -> u64 {
        if self.are_scarce(share) {
            return share;
        }
        let free = self.room(limit).saturating_sub(share);
        share.saturating_add((share / CUSHION).min(free / 2))
    }

    /// Returns whether the share is larger than the wish.
    pub(super) fn has_surplus(&self, wish: &Wish) -> bool {
        self.own.is_some_and(|own| own > wish.whole())
    }

    /// Returns the share that the node should have. `is_patient` allows a surplus to stay for now.
    pub(super) fn target(&self, wish: &Wish, is_patient: bool) -> u64 {
        let own = self.own.unwrap_or(0);
        let whole = wish.whole();
        // Without a limit no share is needed.
        let Some(limit) = self.limit else { return own.min(whole) };
        let room = self.room(limit);
        if whole > own {
            let grown = if whole <= room {
                self.with_cushion(limit, whole)
            } else if wish.least().is_some_and(|least| least <= room) {
                room
            } else {
                // Reserve as much of the running cells' price as possible, before other nodes take
                // it.
                wish.held.min(room)
            };
            return grown.max(own);
        }
        if is_patient { own } else { whole }
    }

    /// Returns whether the cost of the node's cells should be reported. `is_late` means that the
    /// last report is old.
    pub(super) fn must_report(&self, spent: Spending, is_late: bool) -> bool {
        let reported = self.own_spent.unwrap_or_default();
        let unreported = spent.beyond(reported);
        if self.spending_limits.is_empty() {
            return self.own_spent.is_some();
        }
        if unreported.month == Cost::default() && unreported.day == Cost::default() {
            // The reported cost is of an earlier month.
            let is_over = self.own == Some(0) && spent.month == Cost::default();
            return is_over && reported.on(spent.date).month == Cost::default();
        }
        let nodes = self.spenders.saturating_add(1);
        let (all, known) = (self.spent(spent), self.spent(reported.on(spent.date)));
        let is_much = |period: Period| {
            let Some(limit) = self.spending_limits.of(period).map(Cost::micros) else {
                return false;
            };
            let left = limit.saturating_sub(known.of(period).micros());
            let part = (left / UNREPORTED_OF_REST).max(limit / UNREPORTED_OF_LIMIT) / nodes;
            let is_reached = all.of(period).micros() >= limit && left > 0;
            is_reached || unreported.of(period).micros() > part
        };
        // After the first report, other nodes count this node.
        is_late || self.own_spent.is_none() || Period::ALL.into_iter().any(is_much)
    }
}

#[cfg(test)]
mod tests {
    use kiyot_values::spending::SpendingLimits;
    use proptest::prelude::*;

    use super::*;

    fn order(&(cheapest, dearest): &(u64, u64)) -> OrderWish {
        OrderWish { id: String::new(), cheapest, dearest }
    }

    fn target(limit: u64, others: u64, own: u64, wish: &Wish, is_patient: bool) -> u64 {
        let (limit, own) = (Some(limit), Some(own));
        Amounts { limit, others, own, ..Amounts::default() }.target(wish, is_patient)
    }

    /// Verifies K21.
    #[test]
    fn share_grows_with_a_cushion_and_shrinks_late_while_much_is_left() {
        let wish = |held, orders: &[(u64, u64)]| {
            let orders = orders.iter().map(order).collect();
            Wish { held, orders, ..Wish::default() }
        };
        for (limit, others, own, wish, is_patient, expected) in [
            // Plenty is left: a cushion of a quarter.
            (1000, 0, 0, wish(0, &[(10, 100)]), true, 125),
            (1000, 0, 125, wish(100, &[]), true, 125),
            (1000, 0, 125, wish(60, &[]), true, 125),
            (1000, 0, 125, wish(60, &[]), false, 60),
            (1000, 0, 125, wish(0, &[]), false, 0),
            // Little is left: exact.
            (1000, 500, 0, wish(0, &[(10, 100)]), true, 100),
            (1000, 500, 125, wish(60, &[]), false, 60),
            // Too little for the most expensive candidates: the rest, if a candidate fits.
            (1000, 950, 0, wish(0, &[(50, 100)]), true, 50),
            (1000, 950, 0, wish(0, &[(51, 100)]), true, 0),
            (1000, 900, 50, wish(50, &[(51, 60)]), true, 50),
            // Cells run without a share, because the budget is new, or replaced a former budget of
            // its name.
            (1000, 900, 0, wish(300, &[]), true, 100),
            // The limit was lowered below the shares.
            (100, 200, 50, wish(50, &[(1, 1)]), true, 50),
            (100, 200, 50, wish(20, &[]), false, 20),
            (0, 0, 0, wish(0, &[(1, 1)]), true, 0),
        ] {
            let found = target(limit, others, own, &wish, is_patient);
            assert_eq!(found, expected, "{limit} {others} {own} {wish:?} {is_patient}");
        }
    }

    /// Verifies K24.
    #[test]
    fn cost_is_reported_in_steps_when_a_limit_is_reached_and_after_a_while() {
        let spent = |date: &str, day, month| Spending {
            date: date.parse().unwrap(),
            day: Cost::from_micros(day),
            month: Cost::from_micros(month),
        };
        let today = |day, month| spent("2026-11-30", day, month);
        let limits = SpendingLimits { day: Some(Cost::from_micros(3200)), month: None };
        let amounts = |own, own_spent, others_spent| Amounts {
            own,
            own_spent,
            others_spent,
            spenders: 1,
            spending_limits: limits,
            ..Amounts::default()
        };
        let reported = |day| amounts(Some(5), Some(today(day, day)), vec![today(1600, 1600)]);
        for (amounts, found, is_late, expected) in [
            // The first report.
            (amounts(None, None, vec![]), today(1, 1), false, true),
            (amounts(Some(5), None, vec![]), today(0, 0), true, false),
            // Half of an eighth of the rest, which is 1600.
            (reported(0), today(100, 100), false, false),
            (reported(0), today(101, 101), false, true),
            (reported(0), today(1, 1), true, true),
            (reported(100), today(100, 100), true, false),
            // Half of a hundredth of the limit, while little is left.
            (reported(1580), today(1596, 1596), false, false),
            (reported(1580), today(1597, 1597), false, true),
            (reported(1599), today(1600, 1600), false, true),
            (reported(1600), today(1616, 1616), false, false),
            // The next day, and the next month.
            (reported(1600), spent("2026-12-01", 1, 1), false, false),
            (reported(1600), spent("2026-12-01", 1, 1), true, true),
            (reported(1600), spent("2026-12-01", 0, 0), true, false),
            (amounts(Some(0), Some(today(9, 9)), vec![]), spent("2026-12-01", 0, 0), false, true),
            (amounts(Some(0), Some(today(9, 9)), vec![]), today(9, 9), true, false),
        ] {
            let found_report = amounts.must_report(found, is_late);
            assert_eq!(found_report, expected, "{amounts:?} {found:?} {is_late}");
        }
        let unlimited = Amounts { own_spent: Some(today(1, 1)), ..Amounts::default() };
        assert!(unlimited.must_report(today(1, 1), false), "it is dropped");
        assert!(!Amounts::default().must_report(today(1, 1), true));
        let none = Wish { held: 9, ..Wish::default() };
        let without_a_limit = Amounts { own: Some(20), ..Amounts::default() };
        assert_eq!(without_a_limit.target(&none, true), 9);
        assert_eq!(Amounts::default().target(&none, true), 0);
    }

    proptest! {
        /// Verifies K21.
        #[test]
        fn share_stays_within_the_limit_and_above_the_cells_price(
            limit in 0_u64..100, others in 0_u64..120, own in 0_u64..120, held in 0_u64..120,
            orders in proptest::collection::vec((1_u64..40, 0_u64..40), 0..4), is_patient: bool,
        ) {
            let orders = orders.iter().map(|(least, more)| order(&(*least, least + more)));
            let orders = orders.collect();
            let wish = Wish { held, orders, ..Wish::default() };
            let target = target(limit, others, own, &wish, is_patient);
            prop_assert!(target <= own.max(limit.saturating_sub(others)));
            prop_assert!(target >= own.min(wish.whole()));
        }
    }
}
