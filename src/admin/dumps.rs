//! The state that all support bundles share.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::renderer::Renderers;

/// Age up to which the next bundle reuses the versions and the provider's list. Both need remote
/// calls, whose rate limits are for pods.
const MAX_AGE: Duration = Duration::from_secs(5);

/// The state that all support bundles share.
#[derive(Debug, Default)]
pub(super) struct Dumps {
    pub(super) renderers: Renderers,
    /// The latest texts from remote calls, by file.
    called: Mutex<HashMap<&'static str, (Instant, Arc<str>)>>,
}

impl Dumps {
    /// Returns a text from remote calls. They are made only if the last text is older than
    /// [`MAX_AGE`].
    pub(super) async fn of_calls(
        &self,
        file: &'static str,
        call: impl Future<Output = String>,
    ) -> Arc<str> {
        let called = || self.called.lock().unwrap_or_else(PoisonError::into_inner);
        let known = called().get(file).cloned();
        if let Some((_, text)) = known.filter(|(at, _)| at.elapsed() < MAX_AGE) {
            return text;
        }
        let text = Arc::from(call.await);
        called().insert(file, (Instant::now(), Arc::clone(&text)));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn remote_calls_are_made_once_for_bundles_in_quick_succession() {
        let dumps = Dumps::default();
        let first = dumps.of_calls("provider.txt", async { "first".to_owned() }).await;
        let second = dumps.of_calls("provider.txt", async { "second".to_owned() }).await;
        assert_eq!((&*first, &*second), ("first", "first"));
        let other = dumps.of_calls("version.txt", async { "other".to_owned() }).await;
        assert_eq!(&*other, "other");
        let old = Instant::now().checked_sub(MAX_AGE).unwrap();
        dumps.called.lock().unwrap().get_mut("provider.txt").unwrap().0 = old;
        let third = dumps.of_calls("provider.txt", async { "third".to_owned() }).await;
        assert_eq!(&*third, "third");
    }
}
