//! Images of EC2 instances.

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
