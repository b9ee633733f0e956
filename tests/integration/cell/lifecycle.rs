//! Pods and containers from creation to removal.

mod attempts;
pub(crate) mod endings;
mod filters;
mod former_pods;
mod life;
mod lists;
mod placement;
mod retries;
mod static_pods;
pub(crate) mod stops;
mod together;
mod unknown_ids;
mod usage;
mod warm;
