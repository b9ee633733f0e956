//! Failed pulls by sandbox and image: CRI creates no container for a failed pull, and an operator
//! looks for the reason.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
};

use kiyot_engine::id::SandboxId;

use crate::backends::milpa::images::normalized;

/// Bounds the images of a sandbox. The oldest failure is dropped.
const MAX_IMAGES: usize = 16;
/// Bounds an error and the name of an image, in bytes.
const MAX_TEXT_BYTES: usize = 2048;

/// The last error of an image's pulls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PullFailure {
    pub(crate) error: String,
    /// The time of the failure, in nanoseconds since 1970.
    pub(crate) unix_nanos: i64,
}

/// The failures of a sandbox, by image.
pub(crate) type ImageFailures = BTreeMap<String, PullFailure>;

/// Failed pulls that have not succeeded since.
#[derive(Debug, Default)]
pub(super) struct PullFailures(Mutex<HashMap<SandboxId, ImageFailures>>);

impl PullFailures {
    /// Records a failed pull, and drops the failures of unknown sandboxes.
    pub(super) fn add(
        &self,
        sandbox: &SandboxId,
        image: &str,
        failure: PullFailure,
        is_known: impl Fn(&SandboxId) -> bool,
    ) {
        let mut all = self.lock();
        all.retain(|id, _| is_known(id));
        let images = all.entry(sandbox.clone()).or_default();
        let error = bounded(&failure.error).to_owned();
        images.insert(bounded(image).to_owned(), PullFailure { error, ..failure });
        if images.len() > MAX_IMAGES {
            let first = images.iter().min_by_key(|(_, failure)| failure.unix_nanos);
            let first = first.map(|(image, _)| image.clone());
            first.map(|first| images.remove(&first));
        }
    }

    /// Drops the failures of an image after its pull.
    pub(super) fn clear(&self, sandbox: &SandboxId, image: &str) {
        let mut all = self.lock();
        if let Some(images) = all.get_mut(sandbox) {
            images.remove(bounded(image));
            if images.is_empty() {
                all.remove(sandbox);
            }
        }
    }

    pub(super) fn of(&self, sandbox: &SandboxId) -> ImageFailures {
        self.lock().get(sandbox).cloned().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, ImageFailures>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns whether two references name the same image: a kubelet adds the default tag.
pub(crate) fn is_same_image(one: &str, other: &str) -> bool {
    one == other || normalized(one) == normalized(other)
}

fn bounded(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT_BYTES)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_bounded_and_end_with_a_success_or_with_the_sandbox() {
        let failures = PullFailures::default();
        let id = |number: u8| SandboxId::from_random(&[number; SandboxId::RANDOM_BYTES]);
        let add = |sandbox: u8, image: usize, known: &[u8]| {
            let failure = PullFailure {
                error: "é".repeat(MAX_TEXT_BYTES),
                unix_nanos: i64::try_from(image).unwrap(),
            };
            let is_known = |sandbox: &SandboxId| known.iter().any(|number| id(*number) == *sandbox);
            failures.add(&id(sandbox), &format!("image-{image}"), failure, is_known);
        };
        for image in 0..=MAX_IMAGES {
            add(1, image, &[1]);
        }
        let images = failures.of(&id(1));
        assert_eq!((images.len(), images.contains_key("image-0")), (MAX_IMAGES, false));
        assert_eq!(images["image-1"].error.len(), MAX_TEXT_BYTES);
        failures.clear(&id(1), "image-1");
        failures.clear(&id(2), "image-1");
        assert_eq!(failures.of(&id(1)).len(), MAX_IMAGES - 1);
        add(2, 1, &[1, 2]);
        assert_eq!(failures.of(&id(1)).len(), MAX_IMAGES - 1);
        add(3, 1, &[2, 3]);
        let left = [1, 2, 3].map(|sandbox| failures.of(&id(sandbox)).len());
        assert_eq!(left, [0, 1, 1]);
        failures.clear(&id(3), "image-1");
        assert!(failures.of(&id(3)).is_empty());
    }
}
