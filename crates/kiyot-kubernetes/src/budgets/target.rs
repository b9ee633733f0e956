//! The share that a node should have of a budget.
//!
//! A share grows by what waits and a cushion, so that not each launch is a write, and shrinks to
//! what is used once it was larger for a while. While less than half of the budget is left, shares
//! have no cushion and shrink soon: other nodes need the rest.

use super::object::Amounts;

/// Divisor of a share whose quotient is its cushion.
const CUSHION: u64 = 4;

/// The wish of a namespace's cells and orders on this node, in millionths of a dollar an hour.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Wish {
    /// The price of the cells.
    pub held: u64,
    /// The orders that wait for a larger share.
    pub orders: Vec<OrderWish>,
}

/// The wish of an order, in millionths of a dollar an hour.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrderWish {
    /// Its id.
    pub id: String,
    /// The price of its cheapest candidate.
    pub cheapest: u64,
    /// The price of its most expensive candidate.
    pub dearest: u64,
}

impl Wish {
    /// Returns the share with which each order may have its most expensive candidate.
    pub(super) fn whole(&self) -> u64 {
        self.orders.iter().fold(self.held, |sum, order| sum.saturating_add(order.dearest))
    }

    /// Returns the share with which an order may have its cheapest candidate.
    fn least(&self) -> Option<u64> {
        self.orders.iter().map(|order| self.held.saturating_add(order.cheapest)).min()
    }
}

impl Amounts {
    /// Returns true if other nodes may soon lack what this one does not use.
    pub(super) fn are_scarce(&self, own: u64) -> bool {
        self.limit.saturating_sub(self.others).saturating_sub(own) < self.limit / 2
    }

    fn with_cushion(&self, share: u64) -> u64 {
        if self.are_scarce(share) {
            return share;
        }
        let free = self.limit.saturating_sub(self.others).saturating_sub(share);
        share.saturating_add((share / CUSHION).min(free / 2))
    }

    /// Returns true if the share is larger than its wish.
    pub(super) fn has_surplus(&self, wish: &Wish) -> bool {
        self.own.is_some_and(|own| own > wish.whole())
    }

    /// Returns the share that the node should have. `is_patient` if a surplus may stay for now.
    pub(super) fn target(&self, wish: &Wish, is_patient: bool) -> u64 {
        let own = self.own.unwrap_or(0);
        let room = self.limit.saturating_sub(self.others);
        let whole = wish.whole();
        if whole > own {
            let grown = if whole <= room {
                self.with_cushion(whole)
            } else if wish.least().is_some_and(|least| least <= room) {
                room
            } else {
                // What runs is reserved as far as it can be, before it is anything else's.
                wish.held.min(room)
            };
            return grown.max(own);
        }
        if is_patient { own } else { whole }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn order(&(cheapest, dearest): &(u64, u64)) -> OrderWish {
        OrderWish { id: String::new(), cheapest, dearest }
    }

    fn target(limit: u64, others: u64, own: u64, wish: &Wish, is_patient: bool) -> u64 {
        Amounts { limit, others, own: Some(own) }.target(wish, is_patient)
    }

    /// Verifies K21.
    #[test]
    fn share_grows_in_steps_and_shrinks_late_while_much_is_left() {
        let wish =
            |held, orders: &[(u64, u64)]| Wish { held, orders: orders.iter().map(order).collect() };
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
            // What runs without a share: a new budget, or a former one of its name.
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

    proptest! {
        /// Verifies K21.
        #[test]
        fn share_never_grows_beyond_the_limit_and_never_shrinks_below_the_cells(
            limit in 0_u64..100, others in 0_u64..120, own in 0_u64..120, held in 0_u64..120,
            orders in proptest::collection::vec((1_u64..40, 0_u64..40), 0..4), is_patient: bool,
        ) {
            let orders = orders.iter().map(|(least, more)| order(&(*least, least + more)));
            let orders = orders.collect();
            let wish = Wish { held, orders };
            let target = target(limit, others, own, &wish, is_patient);
            prop_assert!(target <= own.max(limit.saturating_sub(others)));
            prop_assert!(target >= own.min(wish.whole()));
        }
    }
}
