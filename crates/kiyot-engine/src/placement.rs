//! Placement: the choice of an offering for a pod. Pure functions over data.
//!
//! A [`Catalogue`] has the instance types of a provider and their prices. [`Needs`] has what a pod
//! needs, by its annotations and its CRI request. [`rank`] orders the offerings that fit, the
//! cheapest first, and [`misses`] says why other types do not fit.

mod accuracy;
mod all_refused;
mod catalogue;
mod catalogue_file;
mod choice;
mod fit;
mod instance_type;
mod launch_refusal;
mod misses;
mod most;
mod needs;
mod no_fit;
mod node_share;
mod offering;
mod pod_requests;
mod ranked;
mod ranking;
mod refusals;
mod resize;
pub mod root_volume;
mod rules;
mod selection;
mod size;

#[cfg(test)]
mod tests;

pub use accuracy::Accuracy;
pub use all_refused::AllRefused;
pub use catalogue::{Catalogue, Entry, Offer, Unoffered};
pub use catalogue_file::{CatalogueError, CatalogueFile};
pub use choice::Choice;
pub use fit::{Cpus, Reason};
pub use instance_type::{Gpus, InstanceType};
pub use launch_refusal::LaunchRefusal;
pub use misses::{Miss, misses};
pub use most::Most;
pub use needs::{Amount, Needs, Requested, Source};
pub use no_fit::NoFit;
pub use node_share::NodeShare;
pub use offering::{Market, Offering};
pub use pod_requests::{
    ApiRequests, CellResources, NodeFigure, NodeResource, PodRequests, REQUESTS_TIMEOUT,
};
pub use ranked::Ranked;
pub use ranking::{
    Candidate, MAX_CANDIDATES, leave_out_dear_spot, rank, rank_further, rank_refused,
};
pub use refusals::{Refusal, Refusals, Refused, RefusedAt, RefusedQuota};
pub use resize::{BeyondCell, check_resize};
pub use rules::{Defaults, MachinePrice, Rules};
pub use selection::Selection;
pub use size::Size;
