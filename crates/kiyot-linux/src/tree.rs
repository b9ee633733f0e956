//! Removal and measurement of untrusted directory trees, and paths from outside.
//!
//! Daemon and agent both walk trees that pods have written. A pod decides on the depth, width and
//! file names of its trees, and may change them during a walk. Therefore:
//!
//! - no function recurses, keeps more than a few files open, or buffers all names of a directory;
//! - no symbolic link is followed, and no other mount is entered;
//! - each call works on a bounded number of entries, and returns whether entries are left.

mod beneath;
mod dir;
mod measure;
mod remove;

pub use beneath::{MAX_PATH_BYTES, MAX_PATH_NAMES, PathError, RelPath, absolute, beneath, own};
pub use dir::{first_subdirectory, open_dir, open_parent};
pub use measure::{MeasureProgress, Measurement, Usage};
pub use remove::{MountPolicy, RemoveProgress, remove, remove_path};
