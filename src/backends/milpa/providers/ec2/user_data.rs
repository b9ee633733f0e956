//! User data of an instance.

use kiyot_link::bootstrap::CellFile;

/// The form of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ImageForm {
    /// The image has the agent and its service.
    Prebuilt,
    /// The image is that of a distribution.
    Stock,
}

/// Returns the user data.
pub(super) fn render(file: &CellFile, _form: ImageForm) -> Result<String, serde_json::Error> {
    serde_json::to_string(file)
}
