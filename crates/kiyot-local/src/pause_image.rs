//! The image of sandbox containers in cells.

use std::{
    fs, io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kiyot_link::private_file;

/// The image if neither the configuration nor the node's runtime names an image.
const DEFAULT: &str = "registry.k8s.io/pause:3.9";
/// Bounds the images that are kept for cells of earlier launches.
const MAX_KNOWN: usize = 8;
/// Bounds an image's name, in bytes.
const MAX_BYTES: usize = 512;
/// The file in the daemon's state directory with an image on each line, for the next daemon.
const FILE: &str = "pause-images";

/// The pause image of cells: the configured image, or else the image of the node's runtime.
///
/// A cell keeps the image of its launch, because the configuration of its containerd names it.
#[derive(Debug)]
pub struct PauseImage {
    is_configured: bool,
    /// The images of all launches, the current last. Never empty.
    known: Mutex<Vec<String>>,
}

impl PauseImage {
    /// Returns the configured image, or else a default that [`Self::learn`] replaces.
    pub fn new(configured: Option<String>) -> Arc<Self> {
        Self::after(Vec::new(), configured)
    }

    /// Returns the configured image, or else the image that a previous daemon kept.
    pub fn read(configured: Option<String>, state_dir: &Path) -> Arc<Self> {
        let kept = fs::read_to_string(state_dir.join(FILE)).unwrap_or_default();
        let kept = kept.lines().filter(|name| is_image(name)).take(MAX_KNOWN);
        Self::after(kept.map(str::to_owned).collect(), configured)
    }

    fn after(kept: Vec<String>, configured: Option<String>) -> Arc<Self> {
        let is_configured = configured.is_some();
        let mut known = Vec::new();
        kept.into_iter().chain(configured).for_each(|image| add(&mut known, image));
        if known.is_empty() {
            known.push(DEFAULT.to_owned());
        }
        Arc::new(Self { is_configured, known: Mutex::new(known) })
    }

    /// Returns whether the image is configured. A configured image is not replaced by that of the
    /// node's runtime.
    pub fn is_configured(&self) -> bool {
        self.is_configured
    }

    /// Returns the image of new cells.
    pub fn current(&self) -> String {
        self.known().last().cloned().unwrap_or_else(|| DEFAULT.to_owned())
    }

    /// Returns the image of a cell by the name that the cell reports. A name that no launch had is
    /// replaced by the current image, so that a cell can't choose an image of the node.
    pub fn of_cell(&self, reported: String) -> String {
        if self.has(&reported) { reported } else { self.current() }
    }

    /// Returns whether cells were launched with this image.
    pub fn has(&self, image: &str) -> bool {
        self.known().iter().any(|known| known == image)
    }

    /// Sets the image of new cells to that of the node's runtime, unless an image is configured.
    /// Returns whether the image changed.
    pub fn learn(&self, image: String) -> bool {
        let mut known = self.known();
        if self.is_configured || known.last() == Some(&image) || !is_image(&image) {
            return false;
        }
        tracing::info!(image, "pause image of new cells is that of the node's runtime");
        add(&mut known, image);
        true
    }

    /// Keeps the images for the next daemon.
    pub fn keep(&self, state_dir: &Path) -> io::Result<()> {
        let lines = self.known().join("\n");
        private_file::write(&state_dir.join(FILE), lines.as_bytes())
    }

    fn known(&self) -> MutexGuard<'_, Vec<String>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes an image current.
fn add(known: &mut Vec<String>, image: String) {
    known.retain(|other| *other != image);
    if known.len() == MAX_KNOWN {
        known.remove(0);
    }
    known.push(image);
}

/// Returns whether a text may be the name of an image.
fn is_image(name: &str) -> bool {
    (1..=MAX_BYTES).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies I29.
    #[test]
    fn cell_keeps_the_pause_image_of_its_launch_and_names_no_other() {
        let pause = PauseImage::new(None);
        assert_eq!(pause.current(), DEFAULT);
        for (image, is_other) in [("a:1", true), ("b:1", true), ("b:1", false), ("a:1", true)] {
            assert_eq!(pause.learn(image.to_owned()), is_other);
        }
        for image in ["", "a b", &"x".repeat(MAX_BYTES + 1)] {
            assert!(!pause.learn(image.to_owned()), "{image}");
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

    /// Verifies I29.
    #[test]
    fn restart_keeps_the_pause_images_of_earlier_cells() {
        let state = tempfile::tempdir().unwrap();
        assert_eq!(PauseImage::read(None, state.path()).current(), DEFAULT);
        let pause = PauseImage::new(None);
        assert!(["a:1", "b:1"].into_iter().all(|image| pause.learn(image.to_owned())));
        pause.keep(state.path()).unwrap();
        let again = PauseImage::read(None, state.path());
        assert_eq!((again.current().as_str(), again.has("a:1")), ("b:1", true));
        let configured = PauseImage::read(Some("mine:1".to_owned()), state.path());
        assert_eq!((configured.current().as_str(), configured.has("b:1")), ("mine:1", true));
    }
}
