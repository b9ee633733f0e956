//! Orders with changed offers.

use super::*;

impl OrderSpec {
    /// Changes the offers of every provider.
    pub(super) fn offering(mut self, change: impl Fn(&mut Offers)) -> Self {
        self.offers.iter_mut().for_each(change);
        self
    }

    /// Returns the order of a pod for which all providers have these offerings.
    pub(super) fn of(self, candidates: Result<Vec<Candidate>, CellError>) -> Self {
        self.offering(|offers| offers.candidates = candidates.clone())
    }

    /// Returns the order of a pod for which all providers have these parameters.
    pub(super) fn with_parameters(self, parameters: BTreeMap<String, String>) -> Self {
        self.offering(|offers| offers.parameters = parameters.clone())
    }

    /// Returns the order of a pod with this choice of all providers.
    pub(super) fn choosing(self, choice: Choice) -> Self {
        self.offering(|offers| offers.choice = Some(choice.clone()))
    }
}
