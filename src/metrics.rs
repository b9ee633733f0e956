//! Metrics: their definitions, the handles into which other parts count, and the page of a scrape.
//!
//! Each part has its counters, or is given them; nothing is global. A scrape reads the counters,
//! and asks other sources, such as the engine of cells. Every label has a bounded number of values.

mod api_calls;
mod byte_counter;
mod cri_calls;
#[cfg(test)]
mod dashboards;
pub mod definition;
mod definitions;
#[cfg(test)]
mod document;
mod labels;
mod launches;
mod page;
mod process;
mod traffic;

pub use api_calls::ApiCalls;
pub use byte_counter::ByteCounter;
pub use cri_calls::{BACKEND_ALL, BACKEND_KIYOT, CallRecord, CriCalls, FIRST_BACKEND};
pub use definition::{Definition, Kind, Label};
pub use definitions::*;
pub use labels::StableLabels;
pub use launches::{LaunchLabels, Launches};
pub use page::{Exposition, Family, Page, Source};
pub use process::Process;
pub use traffic::Traffic;
