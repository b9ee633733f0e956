//! Directory trees that somebody hostile may have made: their removal and their measurement.
//!
//! Both the daemon and the agent walk what pods have written, so that this is a crate that both
//! may use; it knows neither cells nor the link. A pod decides how deep and how wide its trees are,
//! how they are named, and may change them meanwhile. So nothing here recurses, holds more than a
//! few open files, or keeps the names of a directory; no link is followed, and no other mount
//! entered; every call works on a bounded number of entries and says whether there is more.

mod dir;
mod measure;
mod remove;

pub use dir::{first_subdirectory, open_dir, open_parent};
pub use measure::{MeasureProgress, Measurement, Usage};
pub use remove::{MountPolicy, RemoveProgress, remove, remove_path};
