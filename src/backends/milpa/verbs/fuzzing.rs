//! What an agent may say, as any bytes. For kiyot-fuzz alone.

use kiyot_proto::{cell, cri, store};
use prost::Message;

use super::transition::{self, End};

/// Reads events, each with its length before it, and applies what they say of containers to one: it never goes back, and ends once.
///
/// # Panics
/// If it does.
pub fn events(mut bytes: &[u8]) {
    let mut current = store::ContainerStatus::default();
    while let Ok(event) = cell::Event::decode_length_delimited(&mut bytes) {
        let before = transition::state(&current);
        let next = match &event.event {
            Some(cell::event::Event::Container(told)) => transition::seen(&current, told),
            Some(cell::event::Event::ContainerGone(_)) => transition::ended(&current, &End::gone(&current), 1),
            Some(cell::event::Event::Snapshot(snapshot)) => snapshot.containers.iter().find_map(|told| transition::seen(&current, told)),
            _ => None,
        };
        if let Some(next) = next {
            assert_ne!(before, cri::ContainerState::ContainerExited, "{event:?}");
            assert!(next.finished_unix_nanos == 0 || next.finished_unix_nanos >= next.started_unix_nanos, "{next:?}");
            current = next;
        }
        if bytes.is_empty() {
            return;
        }
    }
}
