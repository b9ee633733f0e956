//! The calls of Amazon EC2 that kiyot makes, with the fields that it uses.
//!
//! [`Ec2Api`] is the interface; `sdk` implements it by AWS's SDK, and no other module uses the SDK.
//! Neither retries: the engine of cells decides about retries, because it records a launch before
//! the call.

use std::sync::Arc;

use kiyot_config::Ec2;

mod api;
pub mod cached;
mod call_error;
mod image;
mod instance;
mod offering;
mod product;
pub mod provider;
mod route;
mod run_instances;
#[cfg(feature = "sdk")]
pub mod sdk;
mod subnet;

pub use api::{DryRun, Ec2Api, InstanceFilter, MAX_DESCRIBED_TYPES, MetadataOptionsState};
pub use call_error::{CallError, DRY_RUN_SUCCEEDED, Failure};
pub use image::{Image, ImageVolume};
pub use instance::{InstanceDescription, InstanceStateName, MetadataOptions, StateReason};
pub use offering::{SpotPrice, TypeDescription, TypeGpus, TypeInZone};
pub use product::ProductPage;
pub use route::{LOCAL_TARGET, Route, RouteTable, RouteTableFilter};
pub use run_instances::{CpuCredits, RunInstances};
pub use subnet::Subnet;

/// Returns a client of the EC2 of a configuration; `None` if it was built without the feature
/// `sdk`.
#[cfg(feature = "sdk")]
pub async fn api(config: &Ec2) -> Option<Arc<dyn Ec2Api>> {
    let config = sdk::ClientConfig {
        region: config.region.clone(),
        endpoint_url: config.endpoint_url.clone(),
        pricing_endpoint_url: config.pricing_endpoint_url.clone(),
    };
    Some(Arc::new(sdk::Client::new(&config).await))
}

/// Returns a client of the EC2 of a configuration; `None` if it was built without the feature
/// `sdk`.
#[cfg(not(feature = "sdk"))]
pub async fn api(_config: &Ec2) -> Option<Arc<dyn Ec2Api>> {
    None
}
