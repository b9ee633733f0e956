//! GPUs of an instance.

use std::fmt;

/// GPUs that a pod requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuRequest {
    /// Number; 0 requests an instance for a pod without GPUs.
    pub count: u32,
    /// Manufacturer or name, with single blanks between its words. Without it any GPU fits.
    pub name: Option<String>,
}

impl GpuRequest {
    /// Returns whether a GPU of this manufacturer and name fits. Case is ignored.
    pub fn matches(&self, manufacturer: Option<&str>, name: Option<&str>) -> bool {
        self.name.as_ref().is_none_or(|wanted| {
            [manufacturer, name]
                .iter()
                .flatten()
                .any(|present| wanted.eq_ignore_ascii_case(present))
        })
    }
}

impl fmt::Display for GpuRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count {
            0 => f.write_str("no GPU"),
            1 => f.write_str("1 GPU"),
            count => write!(f, "{count} GPUs"),
        }?;
        self.name.iter().try_for_each(|name| write!(f, " ({name})"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies A4.
    #[test]
    fn gpu_matches_by_manufacturer_or_whole_name() {
        for (wanted, fits) in [
            (None, true),
            (Some("nvidia"), true),
            (Some("NVIDIA"), true),
            (Some("t4"), true),
            (Some("T4G"), false),
            (Some("T"), false),
            (Some("amd"), false),
        ] {
            assert_eq!(
                GpuRequest { count: 1, name: wanted.map(str::to_owned) }
                    .matches(Some("NVIDIA"), Some("T4")),
                fits,
                "{wanted:?}"
            );
        }
    }
}
