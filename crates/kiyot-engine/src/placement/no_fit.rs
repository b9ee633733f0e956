//! The error of a pod that no offering fits.

use crate::placement::{Catalogue, Needs, Rules, misses};

/// The near misses that an error names.
const NAMED_MISSES: usize = 3;

/// No offering fits a pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no instance type fits the pod, which needs {needs}; {nearest}")]
pub struct NoFit {
    needs: String,
    nearest: String,
}

impl NoFit {
    /// Returns the error with the nearest misses of a catalogue.
    pub fn new(catalogue: &Catalogue, needs: &Needs, rules: &Rules) -> Self {
        if !catalogue.has_image(needs.architecture) {
            let images: Vec<String> = catalogue.images().iter().map(ToString::to_string).collect();
            let nearest = format!(
                "cells have an image for {}, and {} is needed",
                images.join(" and "),
                needs.architecture
            );
            return Self { needs: needs.to_string(), nearest };
        }
        let of_size = needs.of_size();
        let compared = if catalogue.is_sized() { &of_size } else { needs };
        let near = misses(catalogue, compared, rules, None, NAMED_MISSES);
        let named: Vec<String> = near.iter().map(ToString::to_string).collect();
        let nearest = match named.as_slice() {
            [] => "the catalogue has no instance type".to_owned(),
            named => format!("nearest: {}", named.join(" | ")),
        };
        Self { needs: needs.to_string(), nearest }
    }
}
