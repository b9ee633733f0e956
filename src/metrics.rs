//! Metrics: their definitions, the handles into which other parts count, and the page of a scrape.
//!
//! Each part counts into handles that it is given; nothing is global. A scrape reads the handles,
//! and asks other sources, such as the engine of cells. Every label has a bounded number of values.

mod api_calls;
mod byte_counter;
mod cri_calls;
pub mod definition;
mod definitions;
mod document;
mod handles;
mod labels;
mod launches;
mod page;
mod process;

pub use api_calls::ApiCalls;
pub use byte_counter::ByteCounter;
pub use cri_calls::{BACKEND_ALL, BACKEND_KIYOT, CallRecord, CriCalls, FIRST_BACKEND};
pub use definition::{Definition, Kind, Label};
pub use definitions::*;
pub use document::document;
pub use handles::{Handles, Traffic};
pub use labels::StableLabels;
pub use launches::{LaunchLabels, Launches};
pub use page::{Exposition, Family, Page, Source};
pub use process::Process;
