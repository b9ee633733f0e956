//! The meaning of a name on the command line, and the names near to an unknown name.

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
    /// The kind in messages.
    const KIND: &'static str;
    /// Returns the name that means only this object.
    fn full_name(&self) -> String;
    /// Returns the id that all states of the object share.
    fn id(&self) -> &str;
    /// Returns whether a newer object has the name.
    fn is_replaced(&self) -> bool {
        false
    }
    /// Returns whether a name is the object's name or id.
    fn is_named(&self, name: &str) -> bool;
    /// Returns whether a text is the object's id.
    fn is_id(&self, text: &str) -> bool {
        self.id() == text
    }
    /// Returns whether the object's id begins with a text.
    fn begins(&self, prefix: &str) -> bool;
    /// Returns the texts that an unknown name may be near to.
    fn alternatives(&self) -> Vec<String>;
}

impl Named for Pod {
    const KIND: &'static str = "pod";

    fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    fn id(&self) -> &str {
        &self.uid
    }

    fn is_replaced(&self) -> bool {
        self.is_replaced
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

    fn id(&self) -> &str {
        &self.id
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

/// Returns the single object that a name means: by its name first, then by the begin of its id. The
/// name may begin with the kind, as `-o name` prints it. A name of several objects means the
/// newest.
pub(crate) fn find<T: Named>(all: Vec<T>, name: &str) -> Result<T, Error> {
    let without_kind = name.strip_prefix(T::KIND).and_then(|rest| rest.strip_prefix('/'));
    let name = match without_kind {
        Some(rest) if !all.iter().any(|object| object.is_named(name)) => rest,
        _ => name,
    };
    let is_prefix = name.chars().count() >= MIN_PREFIX_CHARS;
    let is_current = |object: &T| object.is_named(name) && !object.is_replaced();
    let (has_current, has_named) =
        (all.iter().any(is_current), all.iter().any(|object| object.is_named(name)));
    let (mut found, others): (Vec<T>, Vec<T>) = all.into_iter().partition(|object| {
        match (has_current, has_named) {
            (true, _) => is_current(object),
            // Only its id means a replaced object.
            (_, true) => object.is_id(name),
            _ => is_prefix && object.begins(name),
        }
    });
    // Earlier states of an object count as the same object.
    if found.len() > 1 && found.windows(2).all(|two| two[0].id() == two[1].id()) {
        let current = found.iter().position(|object| !object.is_replaced());
        let current = current.unwrap_or(found.len() - 1);
        found = vec![found.swap_remove(current)];
    }
    match (found.pop(), found.is_empty()) {
        (Some(only), true) => Ok(only),
        (Some(last), false) => {
            found.push(last);
            let names: Vec<_> = found.iter().map(Named::full_name).collect();
            let names = listed(&names);
            Err(Error::NotUnique(format!("{} {name:?} is not unique: {names}", T::KIND)))
        }
        (None, _) => {
            let texts = |object: &T| (object.full_name(), object.alternatives());
            Err(unknown(T::KIND, others.iter().map(texts), name))
        }
    }
}

/// Returns the error of a name that no object of a kind has. Each object has its full name and
/// texts that the name may be near to.
pub(crate) fn unknown(
    kind: &str,
    all: impl Iterator<Item = (String, Vec<String>)>,
    name: &str,
) -> Error {
    let distance = |text: &String| strsim::damerau_levenshtein(text, name);
    let nearest = |(full_name, texts): (String, Vec<String>)| {
        let near = texts.iter().map(distance).min();
        Some((near.filter(|near| *near <= MAX_DISTANCE)?, full_name))
    };
    let mut near: Vec<_> = all.filter_map(nearest).collect();
    near.sort();
    near.dedup();
    let near: Vec<_> = near.into_iter().map(|(_, name)| name).collect();
    let hint = if near.is_empty() {
        format!("`milpactl get {kind}s` lists all")
    } else {
        format!("did you mean: {}", listed(&near))
    };
    Error::Name(format!("no {kind} {name:?}; {hint}"))
}

/// Returns the first names, and the number of the others.
pub(crate) fn listed(names: &[impl AsRef<str>]) -> String {
    let more = names.len().saturating_sub(MAX_NAMED);
    let shown = names.iter().take(MAX_NAMED).map(AsRef::as_ref).collect::<Vec<_>>().join(", ");
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
    fn name_means_the_newest_pod_and_ids_mean_replaced_pods() {
        let pod = |uid: &str, sandbox: &str, is_replaced| Pod {
            namespace: "shop".to_owned(),
            name: "db-0".to_owned(),
            uid: uid.to_owned(),
            sandbox: sandbox.to_owned(),
            is_replaced,
            ..Default::default()
        };
        // A pod that was created again, and waits for its second cell.
        let pods = || {
            vec![
                pod("uid-1", "milpaa", true),
                pod("uid-2", "milpab", true),
                pod("uid-2", "milpac", false),
            ]
        };
        for (name, sandbox) in [
            ("db-0", "milpac"),
            ("shop/db-0", "milpac"),
            ("pod/shop/db-0", "milpac"),
            ("uid-1", "milpaa"),
            ("uid-2", "milpac"),
            ("milpab", "milpab"),
        ] {
            assert_eq!(find(pods(), name).unwrap().sandbox, sandbox, "{name}");
        }
        assert!(matches!(find(pods(), "uid-").unwrap_err(), Error::NotUnique(_)));
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
