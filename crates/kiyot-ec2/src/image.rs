//! Machine images.

/// The images to list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageFilter {
    /// The image with this id.
    Id(String),
    /// Images of an owner whose name matches a pattern.
    Named {
        /// The id of an account, `self`, or an alias such as `amazon`.
        owner: String,
        /// The name, with `*` and `?`.
        name: String,
    },
}

/// A machine image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// The id, such as `ami-0123456789abcdef0`.
    pub id: String,
    /// The name.
    pub name: String,
    /// The architecture, such as `x86_64`.
    pub architecture: String,
    /// The time of its creation, in ISO 8601, so that texts compare as times do.
    pub created: String,
    /// The device of its root volume, such as `/dev/xvda`.
    pub root_device: String,
}
