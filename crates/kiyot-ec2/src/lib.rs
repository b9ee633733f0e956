//! The calls of Amazon EC2 that kiyot makes, with the fields that it uses.
//!
//! [`Ec2Api`] is the interface; `sdk` implements it by AWS's SDK, and is the only module that
//! names it. Neither retries: the engine of cells decides about retries, because it records a
//! launch before it is made.

mod api;
mod call_error;
mod image;
mod instance;
mod offering;
mod product;
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
