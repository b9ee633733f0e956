//! Names of static pods, and of their files.

use std::fmt;

/// Namespace of a pod that has no namespace.
const DEFAULT_NAMESPACE: &str = "default";
/// Begin and end of the name of a file.
const PREFIX: &str = "kiyot-";
const SUFFIX: &str = ".json";
/// Separator of namespace and name in the name of a file. No name of Kubernetes has it.
const SEPARATOR: char = '_';
/// Bounds the name of a file in bytes, as Linux does (`NAME_MAX`).
const MAX_FILE_NAME_BYTES: usize = 255;
/// Bounds a label of DNS in bytes.
const MAX_LABEL_BYTES: usize = 63;
/// Bounds a name in bytes.
const MAX_NAME_BYTES: usize = 253;

/// Namespace and name of a pod, valid in Kubernetes and as the name of a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PodName {
    namespace: String,
    name: String,
}

impl PodName {
    /// Checks a namespace and a name. The error says what is allowed.
    pub(crate) fn new(namespace: Option<&str>, name: &str) -> Result<Self, String> {
        let namespace = namespace.unwrap_or(DEFAULT_NAMESPACE);
        if !is_label(namespace) {
            return Err(format!(
                "namespace {namespace:?}; allowed: 1 to {MAX_LABEL_BYTES} of a-z, 0-9 and -, with \
                 no - at either end"
            ));
        }
        if name.len() > MAX_NAME_BYTES || !name.split('.').all(is_label) {
            return Err(format!(
                "name {name:?}; allowed: 1 to {MAX_NAME_BYTES} bytes, of parts of a-z, 0-9 and - \
                 with dots between them"
            ));
        }
        let name = Self { namespace: namespace.to_owned(), name: name.to_owned() };
        match name.file().len() {
            ..=MAX_FILE_NAME_BYTES => Ok(name),
            bytes => Err(format!(
                "namespace and name need {bytes} bytes as the name of a file; allowed: \
                 {MAX_FILE_NAME_BYTES}"
            )),
        }
    }

    /// Reads a name of the command line: `name`, `namespace/name`, or a line of `-o name`.
    pub(crate) fn parse(namespace: Option<&str>, text: &str) -> Result<Self, String> {
        let text = text.strip_prefix("pod/").unwrap_or(text);
        match text.split_once('/') {
            Some((own, name)) if namespace.is_none_or(|namespace| namespace == own) => {
                Self::new(Some(own), name)
            }
            Some((own, _)) => {
                Err(format!("pod {text:?} is in namespace {own:?}; allowed: -n {own}, or no -n"))
            }
            None => Self::new(namespace, text),
        }
    }

    /// Returns the name of the pod's file.
    pub(super) fn file(&self) -> String {
        format!("{PREFIX}{}{SEPARATOR}{}{SUFFIX}", self.namespace, self.name)
    }

    /// Returns the pod of a file; `None` for a file that milpactl did not make.
    pub(super) fn of_file(file: &str) -> Option<Self> {
        let (namespace, name) =
            file.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.split_once(SEPARATOR)?;
        Self::new(Some(namespace), name).ok()
    }
}

impl fmt::Display for PodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Returns whether a text is a label of DNS.
fn is_label(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=MAX_LABEL_BYTES).contains(&text.len())
        && text.bytes().all(fits)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Verifies O50.
    #[test]
    fn name_that_could_leave_the_directory_is_refused() {
        let long_label = "a".repeat(64);
        for (namespace, name) in [
            ("default", ""),
            ("default", "."),
            ("default", ".."),
            ("default", "../web"),
            ("default", "a/../../web"),
            ("default", "web\0"),
            ("default", "a_b"),
            ("default", "Web"),
            ("default", ".hidden"),
            ("../etc", "web"),
            ("a.b", "web"),
            ("", "web"),
            ("default", long_label.as_str()),
        ] {
            let refused = PodName::new(Some(namespace), name).unwrap_err();
            assert!(refused.contains("; allowed: "), "{refused}");
        }
        let label = "a".repeat(63);
        let long = [label.as_str(); 3].join(".");
        assert!(PodName::new(None, &long).is_ok());
        let refused = PodName::new(Some(&label), &long).unwrap_err();
        assert!(refused.contains("allowed: 255"), "{refused}");
    }

    #[test]
    fn forms_of_the_command_line_are_read() {
        let parsed = |namespace, text| PodName::parse(namespace, text).map(|name| name.to_string());
        for (namespace, text, expected) in [
            (None, "web", "default/web"),
            (Some("shop"), "web", "shop/web"),
            (None, "shop/web", "shop/web"),
            (Some("shop"), "shop/web", "shop/web"),
            (None, "pod/shop/web", "shop/web"),
        ] {
            assert_eq!(parsed(namespace, text).unwrap(), expected);
        }
        assert!(parsed(Some("other"), "shop/web").unwrap_err().contains("-n shop"));
        assert!(parsed(None, "shop/../web").is_err());
    }

    proptest! {
        #[test]
        fn file_name_of_any_pod_is_one_component_and_parses_back(
            namespace in "[a-z0-9-]{1,20}",
            name in "[a-z0-9.-]{1,40}",
        ) {
            if let Ok(valid) = PodName::new(Some(&namespace), &name) {
                prop_assert!(!valid.file().contains('/'));
                prop_assert_eq!(PodName::of_file(&valid.file()), Some(valid));
            }
        }
    }
}
