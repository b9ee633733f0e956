//! The part of the node that its cells may use.

use crate::{
    engine::{CellError, Effects, Engine, Event, Now, Offers, cell::Cell, providers::Provider},
    placement::{Choice, NodeShare},
};

impl Engine {
    /// Sets the requests of the pods on the node, which further launches leave free.
    pub fn set_node_pods(&mut self, requests: NodeShare, now: Now) -> Effects {
        self.node_pods = requests;
        self.handle(Event::Tick, now)
    }

    /// Returns the part of the node that is free for cells, and the requests of the pods on the
    /// node; `None` without a bound.
    pub fn free_on_node(&self) -> Option<(NodeShare, NodeShare)> {
        let mut configured = self.providers.configured();
        let free = configured.find_map(|provider| self.free_beside(provider, None))?;
        Some((free, self.node_pods))
    }

    /// Refuses a provider's offers if the node has no room for the pod's cell.
    pub(super) fn check_machine(
        &self,
        provider: &Provider,
        offers: &Offers,
    ) -> Result<(), CellError> {
        let share = offers.choice.as_ref().and_then(Choice::share);
        match share.map(|needed| (needed, self.free_beside(provider, None))) {
            Some((needed, Some(free))) if !needed.fits(free) => {
                Err(CellError::NodeFull { needed, free, pods: self.node_pods })
            }
            _ => Ok(()),
        }
    }

    /// Returns the part of the node that is free for a provider's cells, beside all cells except
    /// `but`; `None` without a bound.
    pub(super) fn free_beside(&self, provider: &Provider, but: Option<&Cell>) -> Option<NodeShare> {
        let machine = provider.machine?;
        let is_on_it = |cell: &&Cell| {
            self.providers.callee(cell).is_some_and(|of_cell| of_cell.key() == provider.key())
        };
        let others = self.cells.values().filter(|cell| but.is_none_or(|but| but.id != cell.id));
        let used = others.filter(is_on_it).fold(NodeShare::default(), |sum, it| sum + it.share);
        Some(machine - self.node_pods - used)
    }
}
