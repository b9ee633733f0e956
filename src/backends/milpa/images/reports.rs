//! Images reported by cells, for an `ImageStatus` without a pod: a kubelet asks for the user of an
//! image before it creates a container with `runAsNonRoot`. In memory only.
//!
//! A cell may lie, and the kubelet may ask for any pod. So a report counts only for references that
//! the kubelet named for this cell's pod, and contradicting reports give no result: without a
//! result, the kubelet assumes the user root.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

use kiyot_engine::id::CellId;
use kiyot_proto::cri;
use prost::Message;

use super::reference::{is_id, normalized};

/// Most references with a report for a cell's pod.
const MAX_REFERENCES: usize = 64;

/// Most bytes of the id and of the user of a reported image.
const MAX_FIELD_BYTES: usize = 256;

/// Most bytes of a reported image: an untrusted cell may cause thousands of reports.
const MAX_IMAGE_BYTES: usize = 16 << 10;

/// References of a cell's pod, oldest first.
type References = VecDeque<(String, cri::Image)>;

/// Images reported by cells.
#[derive(Debug, Default)]
pub(super) struct Reports(Mutex<HashMap<CellId, References>>);

impl Reports {
    /// Stores a cell's report on an image that the kubelet named for this cell's pod. Skips an
    /// image without id or size, because a kubelet would reject it (cri-client, ImageStatus).
    pub(super) fn put(&self, cell: &CellId, reference: &str, image: &cri::Image) {
        if reference.is_empty() || image.id.is_empty() || image.size == 0 {
            return;
        }
        let (name, mut cells) = (normalized(reference), self.locked());
        let references = cells.entry(cell.clone()).or_default();
        references.retain(|(known, _)| *known != name);
        references.push_back((name, bounded(image)));
        if references.len() > MAX_REFERENCES {
            references.pop_front();
        }
    }

    /// Returns the reported image for a reference or an id, from cells with a pod (`has_pod`);
    /// `None` if no cell reported it, or if reports differ in the image's user.
    pub(super) fn get(
        &self,
        reference: &str,
        has_pod: impl Fn(&CellId) -> bool,
    ) -> Option<cri::Image> {
        let name = normalized(reference);
        let is_meant = |known: &str, image: &cri::Image| {
            if is_id(&name) { image.id == name } else { known == name }
        };
        let cells = self.locked();
        let mut images = cells.iter().filter(|(cell, _)| has_pod(cell)).flat_map(|(_, known)| {
            known.iter().filter(|(known, image)| is_meant(known, image)).map(|(_, image)| image)
        });
        let first = images.next()?;
        let is_same =
            |other: &cri::Image| (&other.uid, &other.username) == (&first.uid, &first.username);
        images.all(is_same).then(|| first.clone())
    }

    pub(super) fn forget(&self, cell: &CellId) {
        self.locked().remove(cell);
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<CellId, References>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns an image; without names and annotations if it exceeds the bound.
fn bounded(image: &cri::Image) -> cri::Image {
    if image.encoded_len() <= MAX_IMAGE_BYTES {
        return image.clone();
    }
    let word = |text: &str| text[..text.floor_char_boundary(MAX_FIELD_BYTES)].to_owned();
    cri::Image {
        id: word(&image.id),
        size: image.size,
        uid: image.uid,
        username: word(&image.username),
        pinned: image.pinned,
        ..cri::Image::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(id: u8, username: &str) -> cri::Image {
        let id = format!("sha256:{}", hex::encode([id; 32]));
        cri::Image { id, size: 1, username: username.to_owned(), ..cri::Image::default() }
    }

    fn user_of(reports: &Reports, reference: &str) -> Option<String> {
        reports.get(reference, |_| true).map(|image| image.username)
    }

    /// Verifies I20.
    #[test]
    fn contradicting_users_of_an_image_give_no_status() {
        let (reports, [honest, liar]) =
            (Reports::default(), [(); 2].map(|()| CellId::mint().unwrap()));
        reports.put(&honest, "app:1", &image(1, "root"));
        assert_eq!(user_of(&reports, "app:1").as_deref(), Some("root"));
        // The newest report contradicts, whichever id it claims.
        for id in [1, 2] {
            reports.put(&liar, "docker.io/library/app:1", &image(id, "nobody"));
            assert_eq!(user_of(&reports, "app:1"), None);
        }
        // The id of the honest pod's image.
        reports.put(&liar, "other", &image(1, "nobody"));
        assert_eq!(user_of(&reports, &image(1, "").id), None);
        assert_eq!(
            user_of(&reports, "other").as_deref(),
            Some("nobody"),
            "the liar's own reference"
        );
        let of_honest = reports.get("app:1", |cell| *cell == honest);
        assert_eq!(of_honest.unwrap().username, "root", "the other cell has no pod");
        reports.forget(&liar);
        assert_eq!(user_of(&reports, "app:1").as_deref(), Some("root"));
        assert_eq!(user_of(&reports, &image(1, "").id).as_deref(), Some("root"));
        // A moved tag, with the same user.
        reports.put(&liar, "app:1", &image(3, "root"));
        assert_eq!(user_of(&reports, "app:1").as_deref(), Some("root"));
    }

    /// Verifies I20.
    #[test]
    fn contradicting_numeric_users_give_no_status() {
        let (reports, [one, other]) =
            (Reports::default(), [(); 2].map(|()| CellId::mint().unwrap()));
        let of = |uid: Option<i64>| cri::Image {
            uid: uid.map(|value| cri::Int64Value { value }),
            ..image(1, "")
        };
        reports.put(&one, "app", &of(Some(0)));
        for (uid, is_told) in [(Some(0), true), (Some(1000), false), (None, false)] {
            reports.put(&other, "app", &of(uid));
            assert_eq!(reports.get("app", |_| true).is_some(), is_told, "{uid:?}");
        }
    }

    /// Verifies I20.
    #[test]
    fn references_of_a_cell_are_bounded() {
        let (reports, [one, other]) =
            (Reports::default(), [(); 2].map(|()| CellId::mint().unwrap()));
        reports.put(&other, "kept", &image(1, "root"));
        for n in 0..=MAX_REFERENCES {
            reports.put(&one, &format!("app:{n}"), &image(2, ""));
        }
        assert_eq!(reports.get("app:0", |_| true), None);
        assert!(
            reports.get("app:1", |_| true).is_some() && reports.get("kept", |_| true).is_some()
        );
        reports.put(&one, "", &image(2, ""));
        assert_eq!(reports.get("", |_| true), None);
    }

    /// Verifies L8.
    #[test]
    fn image_with_endless_names_is_stored_without_names() {
        let usual = cri::Image {
            id: "sha256:0".to_owned(),
            repo_tags: vec!["busybox".to_owned()],
            ..cri::Image::default()
        };
        assert_eq!(bounded(&usual), usual);
        let endless = cri::Image {
            repo_tags: vec!["tag".repeat(1000); 1000],
            username: "u".repeat(1 << 20),
            size: 7,
            ..usual
        };
        let kept = bounded(&endless);
        assert!(kept.encoded_len() < MAX_IMAGE_BYTES && kept.repo_tags.is_empty());
        assert_eq!((kept.id, kept.size, kept.username.len()), (endless.id, 7, MAX_FIELD_BYTES));
    }
}
