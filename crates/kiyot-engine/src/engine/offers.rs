//! Offers of providers for a pod, and the offerings that may be launched now.

use std::collections::BTreeMap;

use crate::{
    engine::{BootKind, CellError, Engine, Now, OrderSpec, ProviderKey, order::Order},
    placement::{Candidate, Choice, Ranked},
    request::InstanceType,
};

/// The offers of a provider for a pod.
#[derive(Debug, Clone)]
pub struct Offers {
    /// The provider.
    pub provider: ProviderKey,
    /// The offerings that suit the pod, the preferred first, or the reason why the provider has no
    /// offering.
    pub candidates: Result<Vec<Candidate>, CellError>,
    /// The provider's own parameters of a launch.
    pub parameters: BTreeMap<String, String>,
    /// The choice among running instances; `None` if the pod takes no running instance.
    pub choice: Option<Choice>,
}

impl Offers {
    /// Returns the offers of a provider that has no offering, with the reason.
    pub fn none(provider: ProviderKey, reason: CellError) -> Self {
        Self { provider, candidates: Err(reason), parameters: BTreeMap::new(), choice: None }
    }

    /// Returns whether there is an offering.
    pub(super) fn has_candidates(&self) -> bool {
        self.candidates.as_ref().is_ok_and(|candidates| !candidates.is_empty())
    }

    /// Takes the offers of a later call, and keeps the parts that the later call could not read.
    fn renew(&mut self, later: Self) {
        if later.choice.is_some() {
            (self.parameters, self.choice) = (later.parameters, later.choice);
        }
        if later.candidates.is_ok() || !self.has_candidates() {
            self.candidates = later.candidates;
        }
    }
}

impl OrderSpec {
    /// Returns the reason why no provider offers the pod a new cell; `None` if a provider does.
    pub fn refusal(&self) -> Option<CellError> {
        if self.offers.iter().any(|offers| offers.candidates.is_ok()) {
            return None;
        }
        let causes = self.offers.iter();
        let causes =
            causes.filter_map(|it| Some((it.provider, it.candidates.as_ref().err()?.clone())));
        CellError::of_providers(causes.collect())
    }
}

impl Order {
    /// Takes the offers of a later call.
    pub(super) fn renew_offers(&mut self, later: Vec<Offers>) {
        for later in later {
            match self.offers.iter_mut().find(|offers| offers.provider == later.provider) {
                Some(offers) => offers.renew(later),
                None => self.offers.push(later),
            }
        }
    }

    pub(super) fn offers_of(&self, provider: &str) -> Option<&Offers> {
        self.offers.iter().find(|offers| offers.provider == provider)
    }

    /// Returns the instance types that the pod names or accepts.
    pub(super) fn types(&self) -> Option<&InstanceType> {
        let choice = self.offers.iter().find_map(|offers| offers.choice.as_ref())?;
        choice.needs.instance_type.as_ref()
    }

    pub(super) fn candidates(&self) -> impl Iterator<Item = &Candidate> {
        self.offers.iter().flat_map(|offers| offers.candidates.iter().flatten())
    }
}

impl Engine {
    /// Returns the offerings that may be launched now, of all providers in one ranking, or the
    /// reasons why no provider can launch.
    pub(super) fn launchable(&self, offers: &[Offers], now: Now) -> Result<Vec<Ranked>, CellError> {
        let (mut lists, mut causes) = (Vec::new(), Vec::new());
        for offers in offers {
            match self.launchable_of(offers, now) {
                Ok(candidates) if candidates.is_empty() => {}
                Ok(candidates) => lists.push((offers.provider, candidates)),
                Err(error) => causes.push((offers.provider, error)),
            }
        }
        match CellError::of_providers(causes).filter(|_| lists.is_empty()) {
            Some(error) => Err(error),
            None => Ok(Ranked::merge(lists)),
        }
    }

    fn launchable_of(&self, offers: &Offers, now: Now) -> Result<Vec<Candidate>, CellError> {
        let candidates = offers.candidates.as_ref().map_err(Clone::clone)?;
        let provider = self.providers.get(offers.provider);
        let provider = provider.ok_or(CellError::Removed(offers.provider))?;
        provider.check_launches()?;
        if let Some(instance) = provider.evidence.foreign() {
            return Err(CellError::Foreign(instance.clone()));
        }
        self.check_machine(provider, offers)?;
        let kind = self.boot_kind(offers);
        let candidates = self.bootable(candidates, &kind, now)?;
        match provider.denials.of_all(now) {
            Some(denial) => Err(denial.error(now)),
            None => Ok(candidates),
        }
    }

    /// Returns the kind of the boots of these offers.
    pub(super) fn boot_kind(&self, offers: &Offers) -> BootKind {
        let machine = offers.choice.as_ref().map(|choice| choice.needs.machine());
        self.boot_kind_of(offers.provider, &offers.parameters, &machine.unwrap_or_default())
    }

    /// Returns the kind of a provider's boots with these parameters. `machine` has the architecture
    /// and the instance types that the pod asks for.
    pub(super) fn boot_kind_of(
        &self,
        key: ProviderKey,
        parameters: &BTreeMap<String, String>,
        machine: &str,
    ) -> BootKind {
        let provider = self.providers.get(key);
        let ignored = provider.map(|it| it.capabilities.parameters_without_effect_on_boots);
        BootKind::new(key, ignored.unwrap_or_default(), parameters, machine)
    }
}
