//! Products of AWS's price list.

/// A page of the price list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProductPage {
    /// The products, each a JSON document.
    pub products: Vec<String>,
    /// The token of the next page; `None` for the last.
    pub next: Option<String>,
}
