//! Cells as objects of the Kubernetes API, events of their pods, requests of pods, the node's
//! capacity, and its shares of budgets.
//!
//! The core is pure: [`object`] renders cells, [`plan`] finds due writes, [`gate`] and [`pace`]
//! bound them, [`recorder`] correlates events, [`requests`] sums a pod's requests, [`capacity`] and
//! [`tap`] decide the declared figures, [`budgets`] decides the wanted shares. `client`,
//! `reflector`, [`publisher`], [`informer`], [`declarer`] and [`budgets`] make calls.
//!
//! No CRI call waits for this crate, and pods run without it. Only a launch beyond the node's share
//! of a budget waits for it.

pub mod budgets;
pub mod call;
pub mod capacity;
pub mod capacity_check;
mod client;
pub mod counter;
pub mod declarer;
pub mod event_object;
pub mod failure;
pub mod gate;
pub mod informer;
pub mod label;
pub mod object;
pub mod pace;
pub mod plan;
pub mod pod_events;
pub mod publisher;
pub mod recorder;
mod reflector;
pub mod requests;
pub mod source;
pub mod tap;
mod time;

pub use budgets::{BudgetKeeper, BudgetOptions, ShareHolder};
pub use client::{Access, Client, ClientError};
pub use counter::Counter;
pub use declarer::{CapacityDeclarer, DeclarerOptions};
pub use informer::{Counted, PodInformer};
pub use publisher::{Options, Periods, Publisher};
pub use source::{ShownCell, Source};
pub use tap::{Room, RoomSource};
