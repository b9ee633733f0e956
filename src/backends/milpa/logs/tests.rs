//! Logs between a fake cell and real files.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::Path,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt as _, stream, stream::BoxStream};
use kiyot_testkit::{LIMIT, wait_for};
use proptest::prelude::*;

use super::{source::Part, *};

/// Fake log of a cell.
#[derive(Default)]
struct FakeLog {
    log: Mutex<Vec<u8>>,
    part: usize,
    /// Number of reads to fail after their first part.
    breaks: AtomicUsize,
    reads: AtomicUsize,
    trimmed: AtomicU64,
    /// Start of the kept content, at the beginning of a line.
    kept_from: AtomicU64,
}

#[async_trait]
impl Source for FakeLog {
    async fn read(
        &self,
        _: &str,
        position: u64,
    ) -> Result<BoxStream<'static, Result<Part, Failure>>, Failure> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let log = self.log.lock().unwrap();
        if log.is_empty() {
            return Err(Failure::cell(Code::NotFound, "no such log"));
        }
        let gap = self.kept_from.load(Ordering::SeqCst).saturating_sub(position);
        let rest = log
            .get((position + gap) as usize..)
            .ok_or_else(|| Failure::cell(Code::OutOfRange, "beyond its end"))?;
        let gap = (gap > 0).then_some(Ok(Part::Gap(gap))).into_iter();
        let mut parts: Vec<Result<Part, Failure>> = gap
            .chain(rest.chunks(self.part).map(|part| Ok(Part::Bytes(Bytes::copy_from_slice(part)))))
            .collect();
        if self
            .breaks
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1))
            .is_ok()
        {
            parts.truncate(1);
            parts.push(Err(Failure::cell(Code::Unavailable, "the link broke")));
        }
        Ok(stream::iter(parts).boxed())
    }

    async fn trim(&self, _: &str, position: u64) -> Result<(), Failure> {
        self.trimmed.fetch_max(position, Ordering::SeqCst);
        Ok(())
    }
}

struct Scene {
    dir: tempfile::TempDir,
    cell: CellId,
    container: ContainerId,
    fake: Arc<FakeLog>,
    logs: Arc<Logs>,
    bases: Arc<Bases>,
}

impl Scene {
    fn new(part: usize) -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            cell: CellId::mint().unwrap(),
            container: ContainerId::mint().unwrap(),
            fake: Arc::new(FakeLog { part, ..FakeLog::default() }),
            logs: Logs::new(),
            bases: Arc::default(),
        }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("0.log")
    }

    fn write(&self, text: &str) {
        let mut log = self.fake.log.lock().unwrap();
        log.extend_from_slice(text.as_bytes());
        self.logs.on_growth(&self.cell, "logs/0.log", log.len() as u64);
    }

    fn route(&self, base: i64) -> LogRoute {
        LogRoute {
            container: self.container.clone(),
            node_path: self.path(),
            cell_path: "logs/0.log".into(),
            base,
        }
    }

    async fn follow(&self, base: i64) -> Result<(), Failure> {
        self.logs
            .follow_from(&self.cell, Arc::clone(&self.fake) as Arc<dyn Source>, self.route(base))
            .await
    }

    async fn resume(&self, base: i64) -> bool {
        self.logs
            .resume_from(&self.cell, Arc::clone(&self.fake) as Arc<dyn Source>, self.route(base))
            .await
            .unwrap()
    }

    async fn drain(&self) -> bool {
        self.logs.drain(&self.container, LIMIT).await
    }

    /// Simulates a kill and a restart of kiyot.
    fn crash(&mut self) {
        self.logs = Logs::new();
        self.keep();
    }

    fn keep(&self) {
        let kept: std::sync::Weak<Bases> = Arc::downgrade(&self.bases);
        self.logs.set_base_store(kept);
    }

    fn kept(&self) -> Option<i64> {
        self.bases.0.lock().unwrap().last().copied()
    }
}

#[derive(Default)]
struct Bases(Mutex<Vec<i64>>);

#[async_trait]
impl BaseStore for Bases {
    async fn store_base(&self, _: &ContainerId, base: i64) {
        self.0.lock().unwrap().push(base);
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

#[tokio::test]
async fn file_exists_at_once_and_follows_the_log() {
    let scene = Scene::new(3);
    scene.follow(0).await.unwrap();
    assert!(scene.path().is_file());
    scene.write("one\n");
    wait_for("the first line is in the file", || read(&scene.path()) == "one\n").await;
    scene.write("two\n");
    wait_for("the second line is in the file", || read(&scene.path()) == "one\ntwo\n").await;
}

#[tokio::test]
async fn idle_log_is_not_read() {
    let scene = Scene::new(100);
    scene.write("one\n");
    scene.follow(0).await.unwrap();
    scene.drain().await;
    let reads = scene.fake.reads.load(Ordering::SeqCst);
    scene.logs.on_growth(&scene.cell, "logs/0.log", 4);
    scene.logs.on_growth(&scene.cell, "logs/0.log", 2);
    // A writer handles the reopening only while it waits for growth.
    scene.logs.reopen(&scene.container).await.unwrap();
    assert_eq!(scene.fake.reads.load(Ordering::SeqCst), reads);
}

#[tokio::test]
async fn absent_log_is_read_when_it_appears() {
    let scene = Scene::new(100);
    scene.follow(0).await.unwrap();
    scene.drain().await;
    // A read at the start, and at most another for the drain: the cell isn't polled.
    assert!(scene.fake.reads.load(Ordering::SeqCst) <= 2);
    scene.write("one\n");
    wait_for("the first line is in the file", || read(&scene.path()) == "one\n").await;
}

/// Verifies D16.
#[tokio::test]
async fn rotation_keeps_every_byte_once() {
    let mut scene = Scene::new(7);
    scene.follow(0).await.unwrap();
    scene.write(&"first file\n".repeat(50));
    scene.drain().await;
    let old = scene.dir.path().join("0.log.old");
    fs::rename(scene.path(), &old).unwrap();
    let base = scene.logs.reopen(&scene.container).await.unwrap();
    let metadata = fs::metadata(&old).unwrap();
    assert_eq!(base, metadata.len() as i64);
    // A power failure of the node must not cut off bytes that the base counts.
    let synced = file::SYNCED.lock().unwrap().clone();
    assert!(synced.contains(&((metadata.dev(), metadata.ino()), metadata.len())));
    assert!(scene.path().is_file());
    scene.write(&"second file\n".repeat(50));
    scene.drain().await;
    assert_eq!(read(&scene.path()), "second file\n".repeat(50));
    scene.crash();
    scene.write("third\n");
    scene.follow(base).await.unwrap();
    scene.drain().await;
    assert_eq!(
        read(&old) + &read(&scene.path()),
        String::from_utf8(scene.fake.log.lock().unwrap().clone()).unwrap()
    );
}

/// Verifies D16.
#[tokio::test]
async fn rotation_during_a_read_falls_between_lines() {
    let scene = Scene::new(7);
    scene.follow(0).await.unwrap();
    scene.write(&"a line of the log\n".repeat(2000));
    let mut files = Vec::new();
    for number in 0..20 {
        let old = scene.dir.path().join(format!("old.{number}"));
        fs::rename(scene.path(), &old).unwrap();
        scene.logs.reopen(&scene.container).await.unwrap();
        files.push(read(&old));
    }
    scene.drain().await;
    files.push(read(&scene.path()));
    assert!(files.iter().all(|file| file.is_empty() || file.ends_with('\n')), "{files:?}");
    assert_eq!(files.concat(), "a line of the log\n".repeat(2000));
}

/// Verifies D16.
#[tokio::test]
async fn rotation_within_a_line_waits_for_its_available_end() {
    let scene = Scene::new(7);
    scene.follow(0).await.unwrap();
    // Repeated, because growth and rotation are concurrent: the writer may see either first.
    for number in 0..20 {
        scene.write("half of a line");
        scene.drain().await;
        let old = scene.dir.path().join(format!("old.{number}"));
        fs::rename(scene.path(), &old).unwrap();
        scene.write(", and its end\n");
        scene.logs.reopen(&scene.container).await.unwrap();
        assert_eq!(read(&old), "half of a line, and its end\n");
    }
    // A line without an end delays no rotation.
    scene.write("half of a line");
    scene.drain().await;
    scene.logs.reopen(&scene.container).await.unwrap();
}

/// Verifies D16.
#[tokio::test]
async fn rotation_after_a_crash_within_a_line_falls_between_lines() {
    let scene = Scene::new(7);
    scene.write("half of a line, and its end\nanother\n");
    fs::write(scene.path(), "half of").unwrap();
    scene.follow(0).await.unwrap();
    let old = scene.dir.path().join("old");
    fs::rename(scene.path(), &old).unwrap();
    scene.logs.reopen(&scene.container).await.unwrap();
    scene.drain().await;
    assert_eq!(
        (read(&old).as_str(), read(&scene.path()).as_str()),
        ("half of a line, and its end\n", "another\n")
    );
}

#[tokio::test]
async fn reopening_without_a_rename_changes_nothing() {
    let scene = Scene::new(7);
    scene.write("one\n");
    scene.follow(0).await.unwrap();
    scene.drain().await;
    assert_eq!(scene.logs.reopen(&scene.container).await.unwrap(), 0);
    scene.write("two\n");
    scene.drain().await;
    assert_eq!(read(&scene.path()), "one\ntwo\n");
}

#[tokio::test]
async fn reverted_rename_is_detected() {
    let scene = Scene::new(7);
    scene.write("one\n");
    scene.follow(0).await.unwrap();
    scene.drain().await;
    let old = scene.dir.path().join("0.log.old");
    fs::rename(scene.path(), &old).unwrap();
    scene.logs.reopen(&scene.container).await.unwrap();
    scene.write("two\n");
    scene.drain().await;
    fs::rename(&old, scene.path()).unwrap();
    scene.write("three\n");
    scene.drain().await;
    assert_eq!(read(&scene.path()), "one\ntwo\nthree\n");
}

#[tokio::test]
async fn broken_link_is_retried() {
    let scene = Scene::new(10);
    scene.fake.breaks.store(2, Ordering::SeqCst);
    scene.write(&"some line\n".repeat(100));
    scene.follow(0).await.unwrap();
    scene.drain().await;
    assert_eq!(read(&scene.path()), "some line\n".repeat(100));
    assert!(scene.fake.reads.load(Ordering::SeqCst) >= 3);
}

#[tokio::test]
async fn copied_log_is_discarded_in_the_cell() {
    let scene = Scene::new(64 << 10);
    scene.write(&"0123456789abcde\n".repeat(1 << 20));
    scene.follow(0).await.unwrap();
    scene.drain().await;
    wait_for("the log is trimmed", || scene.fake.trimmed.load(Ordering::SeqCst) >= 8 << 20).await;
    assert_eq!(fs::metadata(scene.path()).unwrap().len(), 16 << 20);
}

#[tokio::test]
async fn lost_part_is_noted_as_gap_and_followed_by_a_line() {
    let mut scene = Scene::new(100);
    scene.keep();
    scene.write(&"some line\n".repeat(10));
    scene.follow(0).await.unwrap();
    scene.drain().await;
    // The file is removed during the downtime, and the cell has discarded most of the log.
    scene.crash();
    fs::remove_file(scene.path()).unwrap();
    scene.fake.kept_from.store(80, Ordering::SeqCst);
    scene.follow(0).await.unwrap();
    scene.drain().await;
    let file = read(&scene.path());
    let (note, rest) = file.split_once('\n').unwrap();
    assert!(note.contains(" stderr F kiyot: 80 bytes "), "{note}");
    assert_eq!(rest, "some line\n".repeat(2));
    // The new base is recorded, so that neither the gap nor a line is repeated.
    let base = scene.kept().unwrap();
    assert_eq!(base, 100 - i64::try_from(file.len()).unwrap());
    scene.crash();
    scene.write("more\n");
    scene.follow(base).await.unwrap();
    scene.drain().await;
    assert_eq!(read(&scene.path()), format!("{file}more\n"));
}

#[tokio::test]
async fn gap_after_a_partial_line_ends_it() {
    let scene = Scene::new(100);
    scene.write("one\ntwo\nthree\n");
    scene.fake.kept_from.store(8, Ordering::SeqCst);
    fs::write(scene.path(), "one\nt").unwrap();
    scene.follow(0).await.unwrap();
    scene.drain().await;
    let file = read(&scene.path());
    let lines: Vec<_> = file.lines().collect();
    assert_eq!((lines[0], lines[1], lines[3], lines.len()), ("one", "t", "three", 4));
    assert!(lines[2].contains(" stderr F kiyot: 3 bytes "), "{file}");
}

/// Log of a hostile cell: a line without an end; the cell sends a part each second.
#[derive(Default)]
struct EndlessLog {
    reads: AtomicUsize,
    sent: Arc<AtomicUsize>,
}

#[async_trait]
impl Source for EndlessLog {
    async fn read(
        &self,
        _: &str,
        _: u64,
    ) -> Result<BoxStream<'static, Result<Part, Failure>>, Failure> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let sent = Arc::clone(&self.sent);
        let parts = stream::repeat(Bytes::from_static(b"no end ")).then(move |bytes| {
            let sent = Arc::clone(&sent);
            async move {
                tokio::time::sleep(Duration::from_secs(1)).await;
                sent.fetch_add(1, Ordering::SeqCst);
                Ok(Part::Bytes(bytes))
            }
        });
        Ok(parts.boxed())
    }

    async fn trim(&self, _: &str, _: u64) -> Result<(), Failure> {
        Ok(())
    }
}

impl EndlessLog {
    /// Waits, with a paused clock, until the cell has sent this many parts.
    async fn has_sent(&self, parts: usize) {
        while self.sent.load(Ordering::SeqCst) < parts {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
}

/// Verifies D44.
#[tokio::test(start_paused = true)]
async fn line_without_an_end_does_not_hold_rotations() {
    let scene = Scene::new(1);
    let endless = Arc::new(EndlessLog::default());
    let source = Arc::clone(&endless) as Arc<dyn Source>;
    scene.logs.follow_from(&scene.cell, source, scene.route(0)).await.unwrap();
    for number in 0..3 {
        let sent = endless.sent.load(Ordering::SeqCst);
        endless.has_sent(sent + 2).await;
        let old = scene.dir.path().join(format!("old.{number}"));
        fs::rename(scene.path(), &old).unwrap();
        let reopened = tokio::time::timeout(LIMIT, scene.logs.reopen(&scene.container)).await;
        reopened.expect("a rotation ends within a line").unwrap();
        assert_eq!(read(&old).replace("no end ", ""), "");
        assert!(scene.path().is_file());
    }
    // The caller bounds the drain, because an endless log is never complete.
    assert!(!scene.logs.drain(&scene.container, Duration::from_secs(60)).await);
    assert_eq!(endless.reads.load(Ordering::SeqCst), 1);
}

/// Verifies D44.
#[tokio::test(start_paused = true)]
async fn gaps_without_end_write_a_bounded_number_of_notes_and_records() {
    const MAX_GAPS: usize = 60;
    let scene = Scene::new(1);
    scene.keep();
    // Each read has a few gaps, and the cell reports growth after each.
    let cell = Arc::new(GapLog::default());
    let source = Arc::clone(&cell) as Arc<dyn Source>;
    scene.logs.follow_from(&scene.cell, source, scene.route(0)).await.unwrap();
    for size in 1..1_000 {
        scene.logs.on_growth(&scene.cell, "logs/0.log", u64::MAX - 1_000 + size);
        scene.logs.reopen(&scene.container).await.unwrap();
    }
    // After handling all growth, the writer waits for a part of the last read, or pauses.
    let (notes, records) =
        (read(&scene.path()).lines().count(), scene.bases.0.lock().unwrap().len());
    assert!((1..=MAX_GAPS).contains(&notes), "{notes} notes");
    assert!((1..=MAX_GAPS).contains(&records), "{records} records");
    // The log continues in the next period.
    cell.is_honest.store(true, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(61)).await;
    scene.logs.on_growth(&scene.cell, "logs/0.log", u64::MAX);
    while !read(&scene.path()).ends_with("line\n") {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// Log of a hostile cell: each read has only gaps.
#[derive(Default)]
struct GapLog {
    is_honest: std::sync::atomic::AtomicBool,
}

#[async_trait]
impl Source for GapLog {
    async fn read(
        &self,
        _: &str,
        _: u64,
    ) -> Result<BoxStream<'static, Result<Part, Failure>>, Failure> {
        let parts = if self.is_honest.load(Ordering::SeqCst) {
            vec![Ok(Part::Bytes(Bytes::from_static(b"line\n")))]
        } else {
            vec![Ok(Part::Gap(1)), Ok(Part::Gap(1)), Ok(Part::Gap(1))]
        };
        Ok(stream::iter(parts).boxed())
    }

    async fn trim(&self, _: &str, _: u64) -> Result<(), Failure> {
        Ok(())
    }
}

/// Verifies D33.
#[tokio::test]
async fn truncated_file_continues_with_later_bytes() {
    let mut scene = Scene::new(100);
    scene.keep();
    scene.write("one\ntwo\n");
    scene.follow(0).await.unwrap();
    scene.drain().await;
    fs::File::options().write(true).open(scene.path()).unwrap().set_len(0).unwrap();
    scene.write("three\n");
    scene.drain().await;
    assert_eq!((read(&scene.path()).as_str(), scene.kept()), ("three\n", Some(8)));
    // A replaced file continues like a truncated one.
    fs::remove_file(scene.path()).unwrap();
    fs::write(scene.path(), "").unwrap();
    scene.write("four\n");
    scene.drain().await;
    assert_eq!((read(&scene.path()).as_str(), scene.kept()), ("four\n", Some(14)));
    scene.crash();
    scene.write("five\n");
    scene.follow(14).await.unwrap();
    scene.drain().await;
    assert_eq!(read(&scene.path()), "four\nfive\n");
}

/// Verifies Y51.
#[tokio::test]
async fn links_and_absent_parents_are_refused() {
    let scene = Scene::new(1);
    std::os::unix::fs::symlink("elsewhere", scene.path()).unwrap();
    let refused = scene.follow(0).await.unwrap_err();
    assert_eq!(refused.code(), Code::Internal);
    assert!(refused.message().contains("0.log"));
    fs::remove_file(scene.path()).unwrap();
    fs::create_dir(scene.path()).unwrap();
    assert!(scene.follow(0).await.is_err());
}

#[tokio::test]
async fn closed_log_is_not_followed() {
    let scene = Scene::new(10);
    scene.follow(0).await.unwrap();
    scene.logs.close(&scene.container);
    scene.write("late\n");
    assert!(!scene.drain().await);
    assert_eq!(read(&scene.path()), "");
    assert_eq!(scene.logs.reopen(&scene.container).await.unwrap_err().code(), Code::NotFound);
    assert!(scene.logs.routes().by_path.is_empty());
}

/// Verifies D20.
#[tokio::test]
async fn earlier_content_of_a_file_stays_before_the_log() {
    let mut scene = Scene::new(7);
    assert_eq!(Logs::base_for(scene.path()).await, 0);
    fs::write(scene.path(), "of another container, and longer than the log\n").unwrap();
    let base = Logs::base_for(scene.path()).await;
    scene.follow(base).await.unwrap();
    scene.write("one\n");
    scene.drain().await;
    scene.crash();
    scene.write("two\n");
    scene.follow(base).await.unwrap();
    scene.drain().await;
    assert_eq!(read(&scene.path()), "of another container, and longer than the log\none\ntwo\n");
    let old = scene.dir.path().join("0.log.old");
    fs::rename(scene.path(), &old).unwrap();
    fs::write(scene.path(), "made by another process\n").unwrap();
    let base = scene.logs.reopen(&scene.container).await.unwrap();
    scene.crash();
    scene.write("three\n");
    scene.follow(base).await.unwrap();
    scene.drain().await;
    assert_eq!(read(&scene.path()), "made by another process\nthree\n");
}

#[tokio::test]
async fn earlier_content_of_a_file_may_be_removed() {
    let scene = Scene::new(7);
    fs::write(scene.path(), "of another container\n").unwrap();
    let base = Logs::base_for(scene.path()).await;
    fs::write(scene.path(), "").unwrap();
    scene.follow(base).await.unwrap();
    scene.write("one\n");
    scene.drain().await;
    scene.write("two\n");
    scene.drain().await;
    assert_eq!(read(&scene.path()), "one\ntwo\n");
}

#[tokio::test]
async fn ended_log_is_completed_unless_its_file_was_removed() {
    let mut scene = Scene::new(7);
    scene.follow(0).await.unwrap();
    scene.write("one\n");
    assert!(scene.drain().await);
    scene.crash();
    scene.write("two\n");
    assert!(scene.resume(0).await, "following begins with this call");
    assert!(!scene.resume(0).await, "the log is followed already");
    assert!(scene.logs.wait_complete(&scene.container).await);
    assert_eq!(read(&scene.path()), "one\ntwo\n");
    scene.crash();
    fs::remove_file(scene.path()).unwrap();
    assert!(!scene.resume(0).await);
    assert!(!scene.path().exists());
    assert!(!scene.logs.wait_complete(&scene.container).await);
}

#[derive(Debug, Clone)]
enum Step {
    Write(usize),
    Drain,
    Rotate,
    Crash,
    Break,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn files_in_order_are_the_log(
        part in 1_usize..40,
        before in 0_usize..100,
        steps in proptest::collection::vec(prop_oneof![
            4 => (1_usize..200).prop_map(Step::Write),
            2 => Just(Step::Drain),
            1 => Just(Step::Rotate),
            1 => Just(Step::Crash),
            1 => Just(Step::Break)
        ], 0..20),
    ) {
        // Each run of kiyot has its own runtime: dropping the runtime waits for pending writes.
        let (mut scene, mut base) = (Scene::new(part), 0);
        let (mut rotated, mut written) = (Vec::new(), 0_u64);
        let mut runtime = new_runtime();
        let before = "x".repeat(before);
        if !before.is_empty() {
            fs::write(scene.path(), &before).unwrap();
            base = runtime.block_on(Logs::base_for(scene.path()));
        }
        runtime.block_on(scene.follow(base)).unwrap();
        for step in steps {
            match step {
                Step::Write(lines) => {
                    let numbers = written..written + lines as u64;
                    let text: String = numbers.map(|line| format!("{line}\n")).collect();
                    written += lines as u64;
                    scene.write(&text);
                }
                Step::Drain => drop(runtime.block_on(scene.drain())),
                Step::Rotate => {
                    let old = scene.dir.path().join(format!("old.{}", rotated.len()));
                    fs::rename(scene.path(), &old).unwrap();
                    base = runtime.block_on(scene.logs.reopen(&scene.container)).unwrap();
                    rotated.push(old);
                }
                Step::Crash => {
                    scene.crash();
                    runtime = new_runtime();
                    runtime.block_on(scene.follow(base)).unwrap();
                }
                Step::Break => scene.fake.breaks.store(1, Ordering::SeqCst),
            }
        }
        runtime.block_on(scene.drain());
        let rotated: String = rotated.iter().map(|path| read(path)).collect();
        let files = rotated + &read(&scene.path());
        let log = String::from_utf8(scene.fake.log.lock().unwrap().clone()).unwrap();
        prop_assert_eq!(files, before + &log);
    }
}

fn new_runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}
