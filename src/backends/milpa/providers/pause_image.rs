//! The image of sandbox containers in cells.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The image if neither the configuration nor the node's runtime names one.
const DEFAULT: &str = "registry.k8s.io/pause:3.9";
/// The most images that are kept for cells of earlier launches.
const MAX_KNOWN: usize = 8;

/// The pause image of cells: the configured one, or else that of the node's runtime.
///
/// A cell keeps the image of its launch, which is in the configuration of its containerd.
#[derive(Debug)]
pub struct PauseImage {
    is_configured: bool,
    /// The images of all launches, the current last. Never empty.
    known: Mutex<Vec<String>>,
}

impl PauseImage {
    /// Returns the configured image, or one that [`Self::learn`] replaces.
    pub fn new(configured: Option<String>) -> Arc<Self> {
        let is_configured = configured.is_some();
        let known = Mutex::new(vec![configured.unwrap_or_else(|| DEFAULT.to_owned())]);
        Arc::new(Self { is_configured, known })
    }

    /// Returns whether the image is configured, so that the node's runtime does not choose it.
    pub fn is_configured(&self) -> bool {
        self.is_configured
    }

    /// Returns the image of new cells.
    pub fn current(&self) -> String {
        self.known().last().cloned().unwrap_or_else(|| DEFAULT.to_owned())
    }

    /// Returns the image of a cell by the name that the cell reports. Any other than that of a
    /// launch is replaced by the current one, so that no cell chooses an image of the node.
    pub fn of_cell(&self, reported: String) -> String {
        if self.has(&reported) { reported } else { self.current() }
    }

    /// Returns whether cells were launched with this image.
    pub fn has(&self, image: &str) -> bool {
        self.known().iter().any(|known| known == image)
    }

    /// Sets the image of new cells to that of the node's runtime, unless one is configured.
    pub fn learn(&self, image: String) {
        let mut known = self.known();
        if self.is_configured || known.last() == Some(&image) {
            return;
        }
        tracing::info!(image, "pause image of new cells is that of the node's runtime");
        known.retain(|other| *other != image);
        if known.len() == MAX_KNOWN {
            known.remove(0);
        }
        known.push(image);
    }

    fn known(&self) -> MutexGuard<'_, Vec<String>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies I29.
    #[test]
    fn cell_keeps_the_pause_image_of_its_launch_and_names_no_other() {
        let pause = PauseImage::new(None);
        assert_eq!(pause.current(), DEFAULT);
        for image in ["a:1", "b:1", "a:1"] {
            pause.learn(image.to_owned());
        }
        assert_eq!(pause.current(), "a:1");
        for (reported, expected) in
            [("b:1", "b:1"), (DEFAULT, DEFAULT), ("", "a:1"), ("secret:1", "a:1")]
        {
            assert_eq!(pause.of_cell(reported.to_owned()), expected, "{reported}");
        }
        for number in 0..2 * MAX_KNOWN {
            pause.learn(format!("c:{number}"));
        }
        assert_eq!(pause.known().len(), MAX_KNOWN);
    }

    /// Verifies I29.
    #[test]
    fn configured_pause_image_wins() {
        let pause = PauseImage::new(Some("mine:1".to_owned()));
        pause.learn("other:1".to_owned());
        assert_eq!((pause.current().as_str(), pause.has("other:1")), ("mine:1", false));
    }
}
