//! Correlation of events, like client-go's recorder (`EventCorrelator`).
//!
//! Equal events of a pod increase the count of the first. Many similar events become a combined
//! event. An object may have a burst of 25 events, and then one every five minutes.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    event_object::{self, EventObject},
    time,
};

/// Burst of an object's events (client-go: `defaultSpamBurst`).
const SPAM_BURST: f64 = 25.0;
/// Time after which an object may have another event after its burst (`defaultSpamQPS`).
const SPAM_INTERVAL: Duration = Duration::from_secs(300);
/// The number of similar events from which they are combined (`defaultAggregateMaxEvents`).
const MAX_SIMILAR: usize = 10;
/// Time within which events count as similar (`defaultAggregateIntervalInSeconds`).
const SIMILAR_INTERVAL: Duration = Duration::from_secs(600);
/// Bounds the entries of each table (`maxLruCacheEntries`).
const MAX_ENTRIES: usize = 4096;
/// Bounds the events that wait for their write. Further events are dropped.
const MAX_WAITING: usize = 256;
/// Bounds the tries of an event (`maxTriesPerEvent`).
const MAX_TRIES: u32 = 12;
/// Bounds a message, in characters (the API's limit is 1,024 bytes).
const MAX_MESSAGE_CHARS: usize = 256;

/// A reference to the pod of an event.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodRef {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Uid.
    pub uid: String,
}

/// An event of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodEvent {
    /// The pod.
    pub pod: PodRef,
    /// True for the type `Warning`, false for `Normal`.
    pub is_warning: bool,
    /// Reason, a word.
    pub reason: &'static str,
    /// Details.
    pub message: String,
}

/// An event to write.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    event: PodEvent,
    name: String,
    first_unix_nanos: i64,
    last_unix_nanos: i64,
    count: u32,
    /// True if the API server has an earlier count of the event.
    is_known: bool,
}

/// The parts that similar events share: all but the message.
type Similar = (PodRef, bool, &'static str);

#[derive(Debug)]
struct Bucket {
    tokens: f64,
    at: Instant,
}

/// Correlates events, and keeps the events that wait for their write.
#[derive(Debug)]
pub struct Recorder {
    node: String,
    buckets: BTreeMap<PodRef, Bucket>,
    /// The messages of similar events.
    similar: BTreeMap<Similar, (Vec<String>, Instant)>,
    /// The recorded events.
    seen: BTreeMap<PodEvent, (Record, Instant)>,
    waiting: VecDeque<PodEvent>,
    /// The number of failed tries of the next event.
    tries: u32,
    names: u64,
}

impl Recorder {
    /// Returns a recorder without events.
    pub fn new(node: String) -> Self {
        Self {
            node,
            buckets: BTreeMap::new(),
            similar: BTreeMap::new(),
            seen: BTreeMap::new(),
            waiting: VecDeque::new(),
            tries: 0,
            names: 0,
        }
    }

    /// Adds an event. Returns whether it was accepted; an event beyond its pod's share is dropped.
    pub fn add(&mut self, mut event: PodEvent, now: Instant, unix_nanos: i64) -> bool {
        event.message = event.message.chars().take(MAX_MESSAGE_CHARS).collect();
        self.combine(&mut event, now);
        let (names, known) = (&mut self.names, self.seen.remove(&event));
        let record = match known {
            Some((mut record, _)) => {
                record.count = record.count.saturating_add(1);
                record.last_unix_nanos = unix_nanos;
                record
            }
            None => {
                *names += 1;
                // The count distinguishes events of the same nanosecond.
                let number = unix_nanos.unsigned_abs().wrapping_add(*names);
                let name = event_object::name(&event.pod.name, number);
                Record {
                    event: event.clone(),
                    name,
                    first_unix_nanos: unix_nanos,
                    last_unix_nanos: unix_nanos,
                    count: 1,
                    is_known: false,
                }
            }
        };
        bound(&mut self.seen, |(_, at)| *at);
        self.seen.insert(event.clone(), (record, now));
        if !self.takes(&event.pod, now) || self.waiting.len() >= MAX_WAITING {
            return false;
        }
        if !self.waiting.contains(&event) {
            self.waiting.push_back(event);
        }
        true
    }

    /// Replaces the message of an event that has many similar events.
    fn combine(&mut self, event: &mut PodEvent, now: Instant) {
        let key = (event.pod.clone(), event.is_warning, event.reason);
        bound(&mut self.similar, |(_, at)| *at);
        let (messages, since) = self.similar.entry(key).or_insert_with(|| (Vec::new(), now));
        if now.saturating_duration_since(*since) > SIMILAR_INTERVAL {
            messages.clear();
        }
        *since = now;
        if !messages.contains(&event.message) && messages.len() < MAX_SIMILAR {
            messages.push(event.message.clone());
        }
        if messages.len() >= MAX_SIMILAR {
            event.message = "(combined from similar events)".to_owned();
        }
    }

    /// Takes a token of an object's bucket.
    fn takes(&mut self, pod: &PodRef, now: Instant) -> bool {
        bound(&mut self.buckets, |bucket| bucket.at);
        let bucket =
            self.buckets.entry(pod.clone()).or_insert(Bucket { tokens: SPAM_BURST, at: now });
        let passed = now.saturating_duration_since(bucket.at).as_secs_f64();
        bucket.tokens = (bucket.tokens + passed / SPAM_INTERVAL.as_secs_f64()).min(SPAM_BURST);
        bucket.at = now;
        let has_token = bucket.tokens >= 1.0;
        if has_token {
            bucket.tokens -= 1.0;
        }
        has_token
    }

    /// Returns the next event to write. It stays the next until its outcome is noted.
    pub fn next_record(&mut self) -> Option<Record> {
        loop {
            let event = self.waiting.front()?;
            if let Some((record, _)) = self.seen.get(event) {
                return Some(record.clone());
            }
            self.drop_next();
        }
    }

    fn drop_next(&mut self) {
        self.waiting.pop_front();
        self.tries = 0;
    }

    /// Returns whether no event waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Notes that the next event was written.
    pub fn written(&mut self, record: &Record) {
        if let Some((seen, _)) = self.seen.get_mut(&record.event) {
            seen.is_known = true;
        }
        // A count that grew meanwhile is written again.
        let is_current =
            self.seen.get(&record.event).is_none_or(|(seen, _)| seen.count == record.count);
        self.tries = 0;
        if is_current {
            self.drop_next();
        }
    }

    /// Notes that the write of the next event failed. Returns whether the event was dropped, after
    /// its last try.
    pub fn failed(&mut self, record: &Record) -> bool {
        self.tries += 1;
        let is_last = self.tries >= MAX_TRIES;
        if is_last {
            self.refused(record);
        }
        is_last
    }

    /// Notes that the API server does not have the next event any more: it keeps events for an
    /// hour.
    pub fn expired(&mut self, record: &Record) {
        if let Some((seen, _)) = self.seen.get_mut(&record.event) {
            seen.is_known = false;
        }
    }

    /// Drops the next event, which was refused.
    pub fn refused(&mut self, record: &Record) {
        self.seen.remove(&record.event);
        self.drop_next();
    }

    /// Returns the object of an event.
    pub fn object(&self, record: &Record) -> Value {
        let Record { event, .. } = record;
        let subject = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": event.pod.namespace,
            "name": event.pod.name,
            "uid": event.pod.uid,
        });
        let object = EventObject {
            name: &record.name,
            namespace: &event.pod.namespace,
            subject,
            is_warning: event.is_warning,
            reason: event.reason,
            message: &event.message,
            first_unix_nanos: record.first_unix_nanos,
            last_unix_nanos: record.last_unix_nanos,
            count: record.count,
        };
        object.of_node(&self.node)
    }
}

impl Record {
    /// Returns the namespace of the event.
    pub fn namespace(&self) -> &str {
        &self.event.pod.namespace
    }

    /// Returns the name of the event.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether the API server has an earlier count of the event.
    pub fn is_known(&self) -> bool {
        self.is_known
    }

    /// Returns the patch for an event that the API server has.
    pub fn patch(&self) -> Value {
        json!({ "count": self.count, "lastTimestamp": time::seconds(self.last_unix_nanos) })
    }
}

/// Removes the least recently used entry from a full table.
fn bound<K: Ord + Clone, V>(table: &mut BTreeMap<K, V>, used: impl Fn(&V) -> Instant) {
    if table.len() < MAX_ENTRIES {
        return;
    }
    let oldest = table.iter().min_by_key(|(_, value)| used(value)).map(|(key, _)| key.clone());
    if let Some(oldest) = oldest {
        table.remove(&oldest);
    }
}

#[cfg(test)]
mod tests;
