//! Tests of the correlation of events.

use super::*;

fn event(pod: &str, message: &str) -> PodEvent {
    PodEvent {
        pod: PodRef {
            namespace: "default".to_owned(),
            name: pod.to_owned(),
            uid: format!("uid-{pod}"),
        },
        is_warning: true,
        reason: "LaunchRefused",
        message: message.to_owned(),
    }
}

/// Writes all waiting events. Returns their messages and counts.
fn write_all(recorder: &mut Recorder) -> Vec<(String, u32)> {
    let mut written = Vec::new();
    while let Some(record) = recorder.next_record() {
        written.push((record.event.message.clone(), record.count));
        recorder.written(&record);
    }
    written
}

/// Verifies K8.
#[test]
fn equal_events_are_counted_in_one_object() {
    let (now, mut recorder) = (Instant::now(), Recorder::new("worker-1".to_owned()));
    recorder.add(event("web", "no capacity"), now, 1_000_000_000);
    let first = recorder.next_record().unwrap();
    assert!(!first.is_known());
    recorder.written(&first);
    recorder.add(event("web", "no capacity"), now, 3_000_000_000);
    recorder.add(event("web", "no capacity"), now, 4_000_000_000);
    let again = recorder.next_record().unwrap();
    assert_eq!((again.name(), again.count, again.is_known()), (first.name(), 3, true));
    assert_eq!(again.patch(), json!({ "count": 3, "lastTimestamp": "1970-01-01T00:00:04Z" }));
    recorder.written(&again);
    assert!(recorder.is_empty());
    // The API server forgets events after an hour.
    recorder.add(event("web", "no capacity"), now, 5_000_000_000);
    let later = recorder.next_record().unwrap();
    recorder.expired(&later);
    assert!(!recorder.next_record().unwrap().is_known());
}

/// Verifies K8.
#[test]
fn pod_has_a_burst_of_events_and_then_one_in_five_minutes() {
    let (begin, mut recorder) = (Instant::now(), Recorder::new("worker-1".to_owned()));
    let (mut written, mut dropped) = (0, 0);
    for second in 0..3600 {
        let at = begin + Duration::from_secs(second);
        for (pod, at) in [("web", at), ("other", begin)] {
            dropped += usize::from(!recorder.add(event(pod, "no capacity"), at, 0));
        }
        written += write_all(&mut recorder).len();
    }
    // 25 of each at once, and 12 in an hour for the pod whose time passes.
    assert!((25 + 25 + 11..=25 + 25 + 12).contains(&written), "{written}");
    assert_eq!(dropped + written, 7200);
}

/// Verifies K8.
#[test]
fn many_similar_events_are_combined() {
    let (now, mut recorder) = (Instant::now(), Recorder::new("worker-1".to_owned()));
    for number in 0..20 {
        recorder.add(event("web", &format!("no capacity {number}")), now, 0);
    }
    let written = write_all(&mut recorder);
    assert_eq!(written.len(), 10, "{written:?}");
    assert_eq!(written[9], ("(combined from similar events)".to_owned(), 11));
}

#[test]
fn tables_and_queue_are_bounded() {
    let (begin, mut recorder) = (Instant::now(), Recorder::new("worker-1".to_owned()));
    for number in 0..MAX_ENTRIES as u64 + 100 {
        let at = begin + Duration::from_millis(number);
        recorder.add(event(&format!("pod-{number}"), &"x".repeat(5000)), at, 0);
    }
    assert_eq!(recorder.waiting.len(), MAX_WAITING);
    assert!(recorder.seen.len() <= MAX_ENTRIES && recorder.buckets.len() <= MAX_ENTRIES);
    let record = recorder.next_record().unwrap();
    assert_eq!(record.event.message.len(), MAX_MESSAGE_CHARS);
    let long = event(&"p".repeat(253), "x");
    let mut recorder = Recorder::new("worker-1".to_owned());
    recorder.add(long, begin, i64::MAX);
    assert!(recorder.next_record().unwrap().name().len() <= 253);
}
