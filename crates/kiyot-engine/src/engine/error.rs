//! Errors of launches and terminations.

use std::sync::Arc;

use kiyot_proto::text::counted;
use kiyot_values::error_chain::error_chain;

use crate::{
    StoreError,
    engine::{BudgetRefusal, OverBudget, PortTaken, ProviderKey},
    id::{CellId, NoRandomness},
    placement::{AllRefused, NoFit, NodeShare},
    provider::{ErrorClass, InstanceId, ProviderError},
};

/// An error of the launch or the termination of a cell. Cheap to clone.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CellError {
    /// The provider refused or failed.
    #[error("the provider of cells")]
    Provider(#[source] ProviderError),
    /// The record could not be written.
    #[error("the record of cell {0}")]
    Store(CellId, #[source] Arc<StoreError>),
    /// Several launches failed, one after the other.
    #[error(
        "{} failed: {}", counted(.causes.len(), "launch", "launches"), numbered(.causes)
    )]
    Launches {
        /// The causes, in order.
        causes: Vec<String>,
        /// The last cause.
        last: Box<CellError>,
    },
    /// The provider permits no launches, or no launches with the pod's parameters, or a quota of
    /// the account is full.
    #[error(
        "no cell is launched for {seconds} s{}, because the last launch was {}",
        if source.is_of_request { " with this instance type and these annotations" } else { "" },
        if source.class == ErrorClass::Auth { "not permitted" } else { "over a quota" }
    )]
    Denied {
        /// The time after which a launch is tried again, in seconds.
        seconds: u64,
        /// The error of the last launch.
        source: ProviderError,
    },
    /// The launch was repeated until its time limit passed.
    #[error("cell {cell} was not launched within {seconds} s")]
    NotLaunched {
        /// The cell.
        cell: CellId,
        /// The time limit, in seconds.
        seconds: u64,
        /// The error of the last call.
        source: Box<ProviderError>,
    },
    /// The agent did not connect in time.
    #[error("cell {cell} did not connect within {seconds} s; its console ends: {console}")]
    Silent {
        /// The cell.
        cell: CellId,
        /// The time limit, in seconds.
        seconds: u64,
        /// The end of its console output.
        console: String,
    },
    /// The cell ended during its launch.
    #[error("cell {0} ended: {1}")]
    Ended(CellId, String),
    /// Another cell of the pod has not ended in time.
    #[error(
        "no cell was launched for {seconds} s, because an earlier cell of the pod has not ended{}",
        named(.cell)
    )]
    Blocked {
        /// The earlier cell.
        cell: Option<CellId>,
        /// The time limit, in seconds.
        seconds: u64,
    },
    /// The order was replaced by another of the pod.
    #[error("{0}")]
    Replaced(&'static str),
    /// No provider can launch a cell for the pod.
    #[error("no provider has a cell for the pod: {}", by_provider(.causes))]
    NoProvider {
        /// The cause of each provider.
        causes: Vec<(ProviderKey, String)>,
        /// The cause that may end first.
        last: Box<CellError>,
    },
    /// The pod can't run in the cells of a provider.
    #[error("{0}")]
    Refused(Arc<str>),
    /// No instance type fits the pod.
    #[error(transparent)]
    NoFit(#[from] NoFit),
    /// All offerings that fit the pod were refused lately.
    #[error(transparent)]
    AllRefused(#[from] AllRefused),
    /// A price limit is reached.
    #[error(transparent)]
    OverBudget(#[from] OverBudget),
    /// A CellBudget of the namespace has no share for the launch.
    #[error(transparent)]
    NoShare(#[from] Box<BudgetRefusal>),
    /// The limit of boots was reached until the deadline.
    #[error(
        "no cell was launched for {seconds} s, because {} ({}) and limits.boots allows no more; \
         {} in turn", counted(*.boots, "cell boots", "cells boot"), listed(.holders),
        counted(*.orders, "pod waits", "pods wait")
    )]
    Queued {
        /// The limit.
        boots: usize,
        /// The time since the pod's first order, in seconds.
        seconds: u64,
        /// The number of waiting orders.
        orders: usize,
        /// Some of the cells that boot.
        holders: Vec<CellId>,
    },
    /// Another pod has a host port or a network of the pod.
    #[error(transparent)]
    PortTaken(#[from] PortTaken),
    /// The limit `max_cells` is reached.
    #[error(
        "{}, and max_cells allows no more than {limit}; most of them are of {}",
        counted(*.cells, "cell has not ended", "cells have not ended"), by_namespace(.holders)
    )]
    Full {
        /// The limit.
        limit: usize,
        /// The number of cells.
        cells: usize,
        /// The namespaces with the most cells, and their numbers of cells; "" for the warm pools.
        holders: Vec<(String, usize)>,
    },
    /// The node has no room for the pod's cell.
    #[error(
        "cells on the node may have {free} more (reserve_cpu, reserve_memory{}), and the pod's \
         cell needs {needed}", of_pods(.pods)
    )]
    NodeFull {
        /// The need of the pod's cell.
        needed: NodeShare,
        /// The part of the node that is left for cells.
        free: NodeShare,
        /// The requests of the pods on the node.
        pods: NodeShare,
    },
    /// Another daemon launched an instance of this owner.
    #[error(
        "instance {0} of this owner was launched by a daemon with another certificate authority; \
         no cell is launched until it has ended, or the daemon is started with --take-over"
    )]
    Foreign(InstanceId),
    /// An operator has stopped launches.
    #[error("no cell is launched until the node's cells are uncordoned (milpactl uncordon)")]
    Cordoned,
    /// A reload has removed the provider.
    #[error(
        "provider {0:?} was removed from the configuration, and launches no further cell; allowed: \
         one of providers"
    )]
    Removed(ProviderKey),
    /// A reload has added the provider.
    #[error("no cell is launched by provider {0:?} until its instances are listed")]
    NotListed(ProviderKey),
    /// The daemon is starting or stopping.
    #[error("no cell is launched while the daemon is starting or stopping")]
    Starting,
    /// The daemon stopped before the outcome was known.
    #[error("the daemon is stopping")]
    Stopping,
    /// The system returned no random bytes.
    #[error(transparent)]
    Randomness(#[from] NoRandomness),
}

impl CellError {
    /// Returns the error of a pod that no provider has a cell for; `None` without causes. The cause
    /// of a single provider is returned unchanged.
    pub fn of_providers(causes: Vec<(ProviderKey, Self)>) -> Option<Self> {
        let texts = causes.iter().map(|(key, cause)| (*key, error_chain(cause))).collect();
        let is_alone = causes.len() == 1;
        // A pod that fits no instance type of a provider may fit a type of another provider later.
        let last = causes
            .iter()
            .position(|(_, cause)| !matches!(cause, Self::NoFit(_) | Self::Refused(_)));
        let last = causes.into_iter().nth(last.unwrap_or_default())?.1;
        Some(if is_alone { last } else { Self::NoProvider { causes: texts, last: Box::new(last) } })
    }
}

fn of_pods(pods: &NodeShare) -> String {
    if *pods == NodeShare::default() {
        return String::new();
    }
    format!(", {pods} of pods on the node")
}

fn by_provider(causes: &[(ProviderKey, String)]) -> String {
    let causes = causes.iter().map(|(provider, cause)| format!("{provider}: {cause}"));
    causes.collect::<Vec<_>>().join("; ")
}

fn numbered(causes: &[String]) -> String {
    let causes = causes.iter().zip(1..).map(|(cause, number)| format!("({number}) {cause}"));
    causes.collect::<Vec<_>>().join("; ")
}

fn listed(cells: &[CellId]) -> String {
    cells.iter().map(CellId::as_str).collect::<Vec<_>>().join(", ")
}

fn by_namespace(holders: &[(String, usize)]) -> String {
    let named = holders.iter().map(|(namespace, cells)| match namespace.as_str() {
        "" => format!("warm pools ({cells})"),
        namespace => format!("namespace {namespace} ({cells})"),
    });
    named.collect::<Vec<_>>().join(", ")
}

fn named(cell: &Option<CellId>) -> String {
    cell.as_ref().map(|cell| format!(": {cell}")).unwrap_or_default()
}
