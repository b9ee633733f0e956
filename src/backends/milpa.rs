//! The nodeless backend: each of its pods runs in a cell of its own.

pub mod cells;
pub mod gateway;
pub mod id;
pub mod images;
pub mod logs;
pub mod providers;
pub mod store;
pub mod streaming;
pub mod verbs;
pub mod volumes;

use super::Declared;

/// What is for cells: the annotation `kubernetes.io/target-runtime: kiyot`, and RuntimeClasses with the handler `kiyot`.
pub const DECLARED: Declared = Declared { target_runtimes: &["kiyot"], runtime_handlers: &["kiyot"] };
