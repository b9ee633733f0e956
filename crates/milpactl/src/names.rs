//! The meaning of a name on the command line, and the nearest names of an unknown one.

use kiyot_proto::admin::{Cell, Pod};

use crate::error::Error;

/// Bounds the names of an error.
const MAX_NAMED: usize = 5;
/// The least characters of a prefix of an id.
const MIN_PREFIX_CHARS: usize = 3;
/// The most differences of a near name.
const MAX_DISTANCE: usize = 3;

/// An object that a name may mean.
pub(crate) trait Named {
    /// Returns the kind, in messages.
    const KIND: &'static str;
    /// Returns the name that means only this object.
    fn full_name(&self) -> String;
    /// Returns true if the name means it: its name, or its id.
    fn is_named(&self, name: &str) -> bool;
    /// Returns true if the name is the begin of its id.
    fn begins(&self, prefix: &str) -> bool;
    /// Returns the texts that the nearest names are chosen from.
    fn alternatives(&self) -> Vec<String>;
}

impl Named for Pod {
    const KIND: &'static str = "pod";

    fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    fn is_named(&self, name: &str) -> bool {
        self.name == name || self.uid == name || self.full_name() == name
    }

    fn begins(&self, prefix: &str) -> bool {
        [&self.uid, &self.sandbox, &self.cell].into_iter().any(|id| id.starts_with(prefix))
    }

    fn alternatives(&self) -> Vec<String> {
        vec![self.name.clone(), self.full_name()]
    }
}

impl Named for Cell {
    const KIND: &'static str = "cell";

    fn full_name(&self) -> String {
        self.id.clone()
    }

    fn is_named(&self, name: &str) -> bool {
        self.id == name || self.instance == name
    }

    fn begins(&self, prefix: &str) -> bool {
        self.id.starts_with(prefix)
            || self.id.strip_prefix("cell-").is_some_and(|id| id.starts_with(prefix))
    }

    fn alternatives(&self) -> Vec<String> {
        vec![self.id.clone(), self.instance.clone()]
    }
}

/// Returns the single object that a name means: by its name first, then by the begin of its id.
pub(crate) fn find<T: Named>(all: Vec<T>, name: &str) -> Result<T, Error> {
    let is_prefix = name.chars().count() >= MIN_PREFIX_CHARS;
    let by_name = all.iter().any(|object| object.is_named(name));
    let (mut found, others): (Vec<T>, Vec<T>) = all.into_iter().partition(|object| {
        if by_name { object.is_named(name) } else { is_prefix && object.begins(name) }
    });
    match (found.pop(), found.is_empty()) {
        (Some(only), true) => Ok(only),
        (Some(last), false) => {
            found.push(last);
            let names: Vec<_> = found.iter().map(Named::full_name).collect();
            Err(Error::Name(format!("{} {name:?} is not unique: {}", T::KIND, listed(&names))))
        }
        (None, _) => Err(unknown(&others, name)),
    }
}

fn unknown<T: Named>(all: &[T], name: &str) -> Error {
    let distance = |text: &String| strsim::damerau_levenshtein(text, name);
    let nearest = |object: &T| {
        let near = object.alternatives().iter().map(distance).min();
        Some((near.filter(|near| *near <= MAX_DISTANCE)?, object.full_name()))
    };
    let mut near: Vec<_> = all.iter().filter_map(nearest).collect();
    near.sort();
    let near: Vec<_> = near.into_iter().map(|(_, name)| name).collect();
    let hint = if near.is_empty() {
        format!("`milpactl get {}s` lists all", T::KIND)
    } else {
        format!("did you mean: {}", listed(&near))
    };
    Error::Name(format!("no {} {name:?}; {hint}", T::KIND))
}

fn listed(names: &[String]) -> String {
    let more = names.len().saturating_sub(MAX_NAMED);
    let shown = names.iter().take(MAX_NAMED).cloned().collect::<Vec<_>>().join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pods() -> Vec<Pod> {
        [("default", "web", "aaa1"), ("shop", "web", "aaa2"), ("shop", "cart", "bbb1")]
            .into_iter()
            .map(|(namespace, name, uid)| Pod {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                uid: uid.to_owned(),
                cell: format!("cell-{uid}"),
                ..Default::default()
            })
            .collect()
    }

    #[test]
    fn name_means_a_pod_by_name_uid_or_the_begin_of_an_id() {
        for (name, expected) in [
            ("cart", "shop/cart"),
            ("default/web", "default/web"),
            ("bbb1", "shop/cart"),
            ("bbb", "shop/cart"),
            ("cell-aaa2", "shop/web"),
        ] {
            assert_eq!(find(pods(), name).unwrap().full_name(), expected, "{name}");
        }
    }

    #[test]
    fn ambiguous_and_unknown_names_are_refused_with_the_nearest() {
        let text = |name: &str| find(pods(), name).unwrap_err().text();
        assert_eq!(text("web"), "pod \"web\" is not unique: default/web, shop/web");
        assert_eq!(text("aaa"), "pod \"aaa\" is not unique: default/web, shop/web");
        assert_eq!(text("crat"), "no pod \"crat\"; did you mean: shop/cart");
        assert_eq!(
            text("nothing-alike"),
            "no pod \"nothing-alike\"; `milpactl get pods` lists all"
        );
        assert_eq!(find(pods(), "aa").unwrap_err().exit_code(), 66, "too short a prefix");
    }
}
