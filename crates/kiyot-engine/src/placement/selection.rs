//! The reason why an instance has its offering.

use std::fmt;

use crate::{
    placement::{Candidate, Offering},
    request::InstanceType as TypeChoice,
};

/// The offering of an instance among the candidates of its launch. Displays the reason for the
/// choice.
#[derive(Debug, Clone, Copy)]
pub struct Selection<'a> {
    /// The candidates of the launch, the preferred first.
    pub candidates: &'a [Candidate],
    /// The offering of the instance.
    pub offering: &'a Offering,
    /// The instance type that the pod names, or the types that it accepts.
    pub types: Option<&'a TypeChoice>,
}

impl fmt::Display for Selection<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { candidates, offering, types } = self;
        let count = candidates.len();
        let rank = candidates.iter().position(|candidate| candidate.offering == **offering);
        let least = candidates.iter().map(|candidate| candidate.price).min();
        match rank.map(|rank| (rank, candidates[rank].price)) {
            None => f.write_str("none of the candidates; the provider launched it")?,
            Some(_) if count == 1 => f.write_str("the only candidate")?,
            Some((_, price)) if Some(price) == least => {
                write!(f, "cheapest of {count} candidates")?
            }
            Some((0, _)) => {
                let market = offering.market;
                write!(f, "cheapest of {count} candidates on {market}, which the pod prefers")?;
            }
            Some((rank, _)) => write!(f, "candidate {} of {count}", rank + 1)?,
        }
        types.iter().try_for_each(|types| write!(f, " for instance type {types}"))?;
        if rank.is_some_and(|rank| rank > 0) {
            f.write_str("; the provider refused those before it")?;
        }
        match rank.and_then(|rank| candidates.get(rank + 1)) {
            Some(Candidate { offering, price, .. }) => {
                write!(f, "; next is {offering} at {price} an hour")
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::{Accuracy, Market};
    use kiyot_values::price::Price;

    fn candidate(instance_type: &str, market: Market, micros: u64) -> Candidate {
        Candidate {
            offering: Offering {
                instance_type: instance_type.to_owned(),
                zone: "us-east-1a".to_owned(),
                market,
            },
            price: Price::from_micros(micros),
            accuracy: Accuracy::Exact,
        }
    }

    #[test]
    fn reason_of_a_selection_has_its_rank_and_the_next_candidate() {
        let large = candidate("c5.large", Market::OnDemand, 85_000);
        let small = candidate("t3.small", Market::OnDemand, 20_800);
        let spot = candidate("c5.large", Market::Spot, 31_000);
        let named = TypeChoice::Glob("c5.*".into());
        let pair = [small.clone(), large.clone()];
        for (candidates, chosen, types, expected) in [
            (&pair[..1], &small, None, "the only candidate"),
            (
                &pair[..],
                &small,
                None,
                "cheapest of 2 candidates; next is c5.large in us-east-1a (On-Demand) at $0.0850 \
                 an hour",
            ),
            (
                &pair[..],
                &large,
                Some(&named),
                "candidate 2 of 2 for instance type c5.*; the provider refused those before it",
            ),
            (
                &[spot.clone(), small.clone()][..],
                &spot,
                None,
                "cheapest of 2 candidates on Spot, which the pod prefers; next is t3.small in \
                 us-east-1a (On-Demand) at $0.0208 an hour",
            ),
            (&pair[..], &spot, None, "none of the candidates; the provider launched it"),
        ] {
            let selection = Selection { candidates, offering: &chosen.offering, types };
            assert_eq!(selection.to_string(), expected);
        }
    }
}
