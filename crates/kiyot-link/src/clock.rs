//! The time of day, by which certificates end. Nothing else of the link asks for it: waits go by a
//! clock that nobody sets.

use std::{
    fmt,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use rustls::{pki_types::UnixTime, time_provider::TimeProvider};

/// A clock with the time of day. Cheap to clone; the default is the machine's, another is for
/// tests.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> SystemTime + Send + Sync>);

impl Clock {
    /// One that says what this function says.
    pub fn new(now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// The time of day.
    pub fn now(&self) -> SystemTime {
        (self.0)()
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new(SystemTime::now)
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Clock").field(&self.now()).finish()
    }
}

impl TimeProvider for Clock {
    fn current_time(&self) -> Option<UnixTime> {
        self.now().duration_since(UNIX_EPOCH).ok().map(UnixTime::since_unix_epoch)
    }
}
