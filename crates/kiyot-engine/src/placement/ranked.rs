//! The offerings of several providers in one ranking.

use std::{cmp::Reverse, collections::VecDeque};

use crate::{id::ProviderKey, placement::Candidate};

/// An offering with its provider.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranked {
    /// The provider.
    pub provider: ProviderKey,
    /// The offering with its price.
    pub candidate: Candidate,
}

impl AsRef<Candidate> for Ranked {
    fn as_ref(&self) -> &Candidate {
        &self.candidate
    }
}

impl Ranked {
    /// Merges the offerings of several providers, the preferred first. The offerings of a provider
    /// keep their order. Of the providers' next offerings the cheapest comes first; at equal prices
    /// the first provider wins.
    pub fn merge(lists: impl IntoIterator<Item = (ProviderKey, Vec<Candidate>)>) -> Vec<Self> {
        let mut lists: Vec<(ProviderKey, VecDeque<Candidate>)> =
            lists.into_iter().map(|(provider, list)| (provider, list.into())).collect();
        let mut ranked = Vec::new();
        loop {
            // `max_by_key` returns the last of equal elements.
            let next = lists.iter_mut().rev().filter(|(_, list)| !list.is_empty());
            let next = next.max_by_key(|(_, list)| Reverse(list.front().map(|it| it.price)));
            let Some((provider, list)) = next else { return ranked };
            let provider = *provider;
            ranked.extend(list.pop_front().map(|candidate| Self { provider, candidate }));
        }
    }

    /// Returns the provider of the preferred offering, with its offerings before the first offering
    /// of another provider; `None` without offerings.
    pub fn first_run(ranked: &[Self]) -> Option<(ProviderKey, Vec<Candidate>)> {
        let provider = ranked.first()?.provider;
        let run = ranked.iter().take_while(|it| it.provider == provider);
        Some((provider, run.map(|it| it.candidate.clone()).collect()))
    }
}
