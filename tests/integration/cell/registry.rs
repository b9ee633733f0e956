//! Images of pods in cells.

mod images;
mod layers;
mod mirrors;
mod pause_image;
mod pulls;
pub(crate) mod registries;
mod transfers;
