//! Volumes between real directories and a fake cell.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use kiyot_link::log_limit::{MAX_LINES, PERIOD};
use kiyot_proto::cell::{FileChange, file_change::Change};
use kiyot_testkit::{LIMIT, log::CapturedLog, wait_for};
use tokio::time::{sleep, timeout};

use super::{watch::Watcher, *};

/// Fake files of a cell. Directories are empty, links are `-> target`.
#[derive(Debug, Default)]
struct FakeFiles {
    files: Mutex<BTreeMap<String, Bytes>>,
    /// Number of changes that are accepted until all are refused.
    refuse_after: Mutex<Option<usize>>,
    /// Number of calls.
    calls: AtomicUsize,
    /// Files that were written in place.
    in_place: Mutex<Vec<String>>,
    /// Contents of all files that were ever written.
    contents: Mutex<Vec<Bytes>>,
}

impl FakeFiles {
    fn key(root: Root, path: &str) -> String {
        format!("{}:{path}", if root == Root::Memory { "memory" } else { "pod" })
    }

    fn get(&self, key: &str) -> Option<String> {
        self.files
            .lock()
            .unwrap()
            .get(key)
            .map(|content| String::from_utf8_lossy(content).into_owned())
    }

    fn below(&self, key: &str) -> Vec<String> {
        let files = self.files.lock().unwrap();
        files
            .keys()
            .filter_map(|path| path.strip_prefix(key)?.strip_prefix('/').map(str::to_owned))
            .collect()
    }
}

#[async_trait]
impl CellFiles for FakeFiles {
    async fn change(&self, changes: Vec<FileChange>) -> Result<(), Failure> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let mut files = self.files.lock().unwrap();
        for change in changes {
            if let Some(left) = &mut *self.refuse_after.lock().unwrap() {
                *left = match left.checked_sub(1) {
                    Some(left) => left,
                    None => return Err(Failure::cell(Code::Unavailable, "the link broke")),
                };
            }
            assert!(kiyot_linux::tree::RelPath::parse(&change.path).is_ok(), "{}", change.path);
            let key = Self::key(change.root(), &change.path);
            match change.change.unwrap() {
                Change::MakeDir(made) => {
                    drop(files.insert(key, format!("dir {:o}", made.mode).into()))
                }
                Change::WriteFile(file) => {
                    if file.in_place {
                        self.in_place.lock().unwrap().push(key.clone());
                    }
                    self.contents.lock().unwrap().push(file.content.clone());
                    files.insert(key, file.content);
                }
                Change::Symlink(target) => drop(files.insert(key, format!("-> {target}").into())),
                Change::Remove(_) => {
                    files.retain(|path, _| *path != key && !path.starts_with(&format!("{key}/")))
                }
                other => panic!("{other:?}"),
            }
        }
        Ok(())
    }

    async fn get(
        &self,
        place: &CellPath,
        limit: u32,
        last: bool,
    ) -> Result<Option<Bytes>, Failure> {
        let files = self.files.lock().unwrap();
        let part = |content: &Bytes| {
            let (length, limit) = (content.len(), content.len().min(limit as usize));
            if last { content.slice(length - limit..) } else { content.slice(..limit) }
        };
        Ok(files.get(&Self::key(place.root, &place.path)).map(part))
    }

    async fn path(&self, place: &CellPath) -> Result<String, Failure> {
        Ok(format!("/cell/{}", Self::key(place.root, &place.path)))
    }
}

struct Scene {
    dir: tempfile::TempDir,
    cell: CellId,
    fake: Arc<FakeFiles>,
    volumes: Arc<Volumes>,
    replaced: Vec<ReplacedFile>,
}

impl Scene {
    fn new(host_path: HostPath) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let volumes = Volumes::new(vec![dir.path().to_owned()], host_path);
        Self {
            dir,
            cell: CellId::mint().unwrap(),
            fake: Arc::default(),
            volumes,
            replaced: Vec::new(),
        }
    }

    /// Simulates a kill and a restart of kiyot.
    fn crash(&mut self) {
        self.volumes = Volumes::new(vec![self.dir.path().to_owned()], HostPath::Refuse);
    }

    fn pod(&self, path: &str) -> PathBuf {
        let path = self.dir.path().join("pods/uid-1").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    /// Writes a volume as the kubelet does.
    fn write(&self, volume: &str, version: &str, files: &[(&str, &str)]) -> PathBuf {
        let path = self.pod(&format!("volumes/{volume}"));
        fs::create_dir_all(path.join(version)).unwrap();
        for (name, content) in files {
            fs::write(path.join(version).join(name), content).unwrap();
        }
        let old = path.join("..data").read_link().ok();
        symlink(version, path.join("..data_tmp")).unwrap();
        fs::rename(path.join("..data_tmp"), path.join("..data")).unwrap();
        for (name, _) in files {
            let _ = symlink(format!("..data/{name}"), path.join(name));
        }
        if let Some(old) = old {
            fs::remove_dir_all(path.join(old)).unwrap();
        }
        path
    }

    fn container(&self, mounts: &[&Path]) -> cri::ContainerConfig {
        let mount = |path: &&Path| cri::Mount {
            host_path: path.to_str().unwrap().into(),
            container_path: "/in".into(),
            ..cri::Mount::default()
        };
        cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: "app".into(), attempt: 0 }),
            labels: [("io.kubernetes.pod.uid".to_owned(), "uid-1".to_owned())].into(),
            mounts: mounts.iter().map(mount).collect(),
            ..cri::ContainerConfig::default()
        }
    }

    fn sandbox() -> cri::PodSandboxConfig {
        cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata { uid: "uid-1".into(), ..Default::default() }),
            ..Default::default()
        }
    }

    fn files(&self) -> Arc<dyn CellFiles> {
        Arc::clone(&self.fake) as Arc<dyn CellFiles>
    }

    async fn prepare(&self, container: &cri::ContainerConfig) -> Result<Vec<String>, Failure> {
        let mounts = self
            .volumes
            .prepare_in(&self.cell, self.files(), &Self::sandbox(), container, &self.replaced)
            .await?;
        Ok(mounts.into_iter().map(|mount| mount.host_path).collect())
    }

    fn keep(&self, container: &cri::ContainerConfig) {
        self.volumes.keep_in(&self.cell, self.files(), &Self::sandbox(), container, &self.replaced);
    }
}

const SECRET: &str = "kubernetes.io~secret/s";
const IN_CELL: &str = "memory:volumes/kubernetes.io~secret/s";

#[tokio::test]
async fn mounts_are_copied_into_the_cell() {
    let scene = Scene::new(HostPath::Refuse);
    let secret = scene.write(SECRET, "..v1", &[("key", "value")]);
    let config = scene.write("kubernetes.io~configmap/c", "..v1", &[("key", "config")]);
    let (hosts, log, empty) = (
        scene.pod("etc-hosts"),
        scene.pod("containers/app/01234567"),
        scene.pod("volumes/kubernetes.io~empty-dir/e"),
    );
    fs::write(&hosts, "127.0.0.1 localhost\n").unwrap();
    fs::write(&log, "").unwrap();
    fs::create_dir(&empty).unwrap();
    fs::set_permissions(&empty, fs::Permissions::from_mode(0o2777)).unwrap();
    let mut container = scene.container(&[&secret, &config, &hosts, &log, &empty]);
    container
        .mounts
        .push(cri::Mount { image: Some(cri::ImageSpec::default()), ..cri::Mount::default() });
    let paths = scene.prepare(&container).await.unwrap();
    assert_eq!(
        paths,
        [
            "/cell/memory:volumes/kubernetes.io~secret/s",
            "/cell/pod:volumes/kubernetes.io~configmap/c",
            "/cell/pod:etc-hosts",
            "/cell/pod:containers/app/01234567",
            "/cell/pod:empty-dir/e",
            ""
        ]
    );
    assert_eq!(scene.fake.get(&format!("{IN_CELL}/..v1/key")).unwrap(), "value");
    assert_eq!(scene.fake.get(&format!("{IN_CELL}/..data")).unwrap(), "-> ..v1");
    assert_eq!(scene.fake.get("pod:etc-hosts").unwrap(), "127.0.0.1 localhost\n");
    assert_eq!(*scene.fake.in_place.lock().unwrap(), ["pod:etc-hosts"]);
    assert_eq!(scene.fake.get("pod:containers/app/01234567").unwrap(), "");
    assert_eq!(scene.fake.get("pod:empty-dir/e").unwrap(), "dir 2777");
}

#[tokio::test]
async fn updates_reach_the_cell() {
    let scene = Scene::new(HostPath::Refuse);
    let container = scene.container(&[&scene.write(SECRET, "..v1", &[("key", "1")])]);
    scene.prepare(&container).await.unwrap();
    scene.keep(&container);
    for version in 2..5 {
        let (directory, content) = (format!("..v{version}"), version.to_string());
        scene.write(SECRET, &directory, &[("key", &content)]);
        wait_for("the cell has only the new directory", || {
            scene.fake.below(IN_CELL)
                == ["..data", directory.as_str(), &format!("{directory}/key"), "key"]
        })
        .await;
        assert_eq!(scene.fake.get(&format!("{IN_CELL}/{directory}/key")), Some(content));
    }
    scene.volumes.release(&scene.cell);
    assert!(scene.volumes.pods().is_empty());
}

/// Verifies D40.
#[tokio::test(start_paused = true)]
async fn updates_are_watched_once_an_inotify_instance_is_free() {
    // By comparisons alone, this many updates would miss the deadline, as in the test of the
    // daemon.
    const UPDATES: usize = 4;
    static USED_UP: AtomicBool = AtomicBool::new(true);
    let start = || match USED_UP.load(Ordering::SeqCst) {
        true => Err(rustix::io::Errno::MFILE.into()),
        false => Watcher::start(),
    };
    let log = CapturedLog::start();
    let mut scene = Scene::new(HostPath::Refuse);
    Arc::get_mut(&mut scene.volumes).unwrap().watcher = Arc::new(SharedWatcher::started_by(start));
    let container = scene.container(&[&scene.write(SECRET, "..v0", &[("key", "0")])]);
    scene.prepare(&container).await.unwrap();
    scene.keep(&container);
    let count = |words: &str| log.lines().iter().filter(|line| line.contains(words)).count();
    sleep(Duration::from_secs(200)).await;
    assert_eq!((count("volumes not watched"), count("volumes watched again")), (1, 0));
    USED_UP.store(false, Ordering::SeqCst);
    sleep(Duration::from_secs(61)).await;
    assert_eq!((count("volumes not watched"), count("volumes watched again")), (1, 1));
    tokio::time::resume();
    let all = async {
        for version in 1..=UPDATES {
            let directory = format!("..v{version}");
            scene.write(SECRET, &directory, &[("key", &version.to_string())]);
            wait_for("the update is in the cell", || {
                scene.fake.get(&format!("{IN_CELL}/{directory}/key")) == Some(version.to_string())
            })
            .await;
        }
    };
    timeout(LIMIT, all).await.expect("updates arrive before the next comparison");
    scene.volumes.release(&scene.cell);
}

/// Each snapshot of a cell starts the sync of its volumes again.
/// Verifies L17.
#[tokio::test(start_paused = true)]
async fn snapshots_of_a_cell_that_refuses_files_cause_few_calls_and_log_lines() {
    const SNAPSHOTS: usize = 100;
    let (log, began) = (CapturedLog::start(), std::time::Instant::now());
    let scene = Scene::new(HostPath::Refuse);
    let container = scene.container(&[&scene.write(SECRET, "..v1", &[("key", "1")])]);
    scene.prepare(&container).await.unwrap();
    scene.write(SECRET, "..v2", &[("key", "2")]);
    *scene.fake.refuse_after.lock().unwrap() = Some(0);
    scene.fake.calls.store(0, Ordering::SeqCst);
    let began_paused = tokio::time::Instant::now();
    for _ in 0..SNAPSHOTS {
        scene.keep(&container);
        sleep(Duration::from_millis(150)).await;
    }
    let calls = scene.fake.calls.load(Ordering::SeqCst);
    let most = began_paused.elapsed().as_secs() as usize + 2;
    assert!((2..=most).contains(&calls), "{calls} calls; allowed: {most}");
    let lines = log.lines().iter().filter(|line| line.contains("volume outdated")).count();
    let periods = began.elapsed().as_secs().div_ceil(PERIOD.as_secs()) as usize + 1;
    assert!((1..=MAX_LINES as usize * periods).contains(&lines), "{lines} lines");
    // The update arrives once the cell accepts files again.
    *scene.fake.refuse_after.lock().unwrap() = None;
    scene.keep(&container);
    wait_for("the update is complete", || {
        scene.fake.get(&format!("{IN_CELL}/..v2/key")) == Some("2".to_owned())
    })
    .await;
}

#[tokio::test]
async fn changes_during_downtime_reach_the_cell_after_restart() {
    let mut scene = Scene::new(HostPath::Refuse);
    let container = scene.container(&[&scene.write(SECRET, "..v1", &[("key", "1"), ("old", "1")])]);
    scene.prepare(&container).await.unwrap();
    scene.crash();
    fs::remove_file(scene.write(SECRET, "..v2", &[("key", "2")]).join("old")).unwrap();
    scene.keep(&container);
    wait_for("the update is complete", || {
        scene.fake.below(IN_CELL) == ["..data", "..v2", "..v2/key", "key"]
    })
    .await;
}

#[tokio::test]
async fn interrupted_update_is_completed_after_restart() {
    for cut in 0..12 {
        let mut scene = Scene::new(HostPath::Refuse);
        let container = scene.container(&[&scene.write(SECRET, "..v1", &[("key", "1")])]);
        scene.prepare(&container).await.unwrap();
        scene.write(SECRET, "..v2", &[("key", "2"), ("new", "2")]);
        *scene.fake.refuse_after.lock().unwrap() = Some(cut);
        let _ = scene.prepare(&container).await;
        *scene.fake.refuse_after.lock().unwrap() = None;
        if cut % 2 == 0 {
            scene.crash();
        }
        scene.write(SECRET, "..v3", &[("key", "3"), ("new", "3")]);
        scene.prepare(&container).await.unwrap();
        assert_eq!(
            scene.fake.below(IN_CELL),
            ["..data", "..v3", "..v3/key", "..v3/new", "key", "new"],
            "after {cut} changes"
        );
    }
}

/// Verifies K23.
#[tokio::test]
async fn replaced_file_never_has_the_nodes_content() {
    const VOLUME: &str = "kubernetes.io~downward-api/about";
    const COPY: &str = "pod:volumes/kubernetes.io~downward-api/about";
    let mut scene = Scene::new(HostPath::Refuse);
    scene.replaced.push(ReplacedFile {
        volume: "about".to_owned(),
        path: "cpus".to_owned(),
        content: "2".to_owned(),
    });
    let container =
        scene.container(&[&scene.write(VOLUME, "..v1", &[("cpus", "1001"), ("label", "1")])]);
    scene.prepare(&container).await.unwrap();
    // The node's content does not cause another copy.
    let calls = scene.fake.calls.load(Ordering::SeqCst);
    scene.prepare(&container).await.unwrap();
    assert_eq!(scene.fake.calls.load(Ordering::SeqCst), calls);
    scene.crash();
    for version in 2..5 {
        let (directory, label) = (format!("..v{version}"), version.to_string());
        let cpus = format!("100{version}");
        scene.write(VOLUME, &directory, &[("cpus", &cpus), ("label", &label)]);
        scene.keep(&container);
        wait_for("the update is complete", || {
            scene.fake.get(&format!("{COPY}/..data")) == Some(format!("-> {directory}"))
        })
        .await;
        let content = |name: &str| scene.fake.get(&format!("{COPY}/{directory}/{name}"));
        assert_eq!((content("cpus"), content("label")), (Some("2".to_owned()), Some(label)));
        // As in a snapshot that began before the files were known.
        scene.replaced.clear();
    }
    let contents = scene.fake.contents.lock().unwrap();
    assert!(!contents.iter().any(|content| content.starts_with(b"100")), "{contents:?}");
}

#[tokio::test]
async fn unknown_volume_keeps_its_copy() {
    let mut scene = Scene::new(HostPath::Refuse);
    let path = scene.write(SECRET, "..v1", &[("key", "1")]);
    let container = scene.container(&[&path]);
    scene.prepare(&container).await.unwrap();
    fs::remove_dir_all(&path).unwrap();
    fs::create_dir(&path).unwrap();
    for _ in 0..2 {
        scene.prepare(&container).await.unwrap();
        assert_eq!(scene.fake.get(&format!("{IN_CELL}/..v1/key")).unwrap(), "1");
        scene.crash();
    }
    let never = scene.pod("volumes/kubernetes.io~secret/never");
    fs::create_dir(&never).unwrap();
    let refused = scene.prepare(&scene.container(&[&never])).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(
        refused.message().contains("secret/never") && refused.message().contains("..data"),
        "{}",
        refused.message()
    );
}

#[tokio::test]
async fn node_paths_are_refused_or_copied_by_policy() {
    let scene = Scene::new(HostPath::Refuse);
    let host = tempfile::tempdir().unwrap();
    fs::write(host.path().join("file"), "content").unwrap();
    let refused = scene.prepare(&scene.container(&[host.path()])).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(
        refused.message().contains(host.path().to_str().unwrap())
            && refused.message().contains("host_path"),
        "{}",
        refused.message()
    );
    let csi = scene.pod("volumes/kubernetes.io~csi/pv/mount");
    assert!(
        scene
            .prepare(&scene.container(&[&csi]))
            .await
            .unwrap_err()
            .message()
            .contains("kubernetes.io~csi")
    );

    let scene = Scene::new(HostPath::CopyReadOnly);
    let mut container = scene.container(&[host.path()]);
    assert!(scene.prepare(&container).await.unwrap_err().message().contains("writable"));
    container.mounts[0].readonly = true;
    let paths = scene.prepare(&container).await.unwrap();
    assert_eq!(
        scene.fake.get(&format!("{}/file", paths[0].strip_prefix("/cell/").unwrap())).unwrap(),
        "content"
    );
}

/// Verifies D29.
#[tokio::test]
async fn replaced_copy_has_no_old_entries() {
    let scene = Scene::new(HostPath::CopyReadOnly);
    let host = tempfile::tempdir().unwrap();
    fs::create_dir(host.path().join("sub")).unwrap();
    fs::write(host.path().join("sub/old"), "1").unwrap();
    let mut container = scene.container(&[host.path()]);
    container.mounts[0].readonly = true;
    let first = scene.prepare(&container).await.unwrap();
    fs::remove_dir_all(host.path().join("sub")).unwrap();
    fs::write(host.path().join("sub"), "a file now").unwrap();
    assert_eq!(scene.prepare(&container).await.unwrap(), first);
    let place = first[0].strip_prefix("/cell/").unwrap();
    assert_eq!(
        (scene.fake.below(place), scene.fake.get(&format!("{place}/sub")).unwrap()),
        (vec!["sub".to_owned()], "a file now".to_owned())
    );
    // Other containers' copies stay.
    container.metadata.as_mut().unwrap().name = "other".to_owned();
    assert_ne!(scene.prepare(&container).await.unwrap(), first);
}

#[tokio::test]
async fn termination_message_is_copied_to_the_node() {
    let scene = Scene::new(HostPath::Refuse);
    let log = scene.pod("containers/app/01234567");
    fs::write(&log, "old and longer").unwrap();
    let (id, container) = (ContainerId::mint().unwrap(), scene.container(&[&log]));
    scene.prepare(&container).await.unwrap();
    scene
        .fake
        .files
        .lock()
        .unwrap()
        .insert("pod:containers/app/01234567".into(), Bytes::from_static(b"bye"));
    scene.volumes.copy_termination_message(&*scene.files(), &id, &container).await;
    assert_eq!(fs::read_to_string(&log).unwrap(), "bye");
    // Only the end of a long message is copied: the kubelet reads no more.
    let long: Vec<u8> = (0..100_000_u32).flat_map(u32::to_be_bytes).collect();
    scene
        .fake
        .files
        .lock()
        .unwrap()
        .insert("pod:containers/app/01234567".into(), Bytes::from(long.clone()));
    scene.volumes.copy_termination_message(&*scene.files(), &id, &container).await;
    assert!(fs::read(&log).unwrap() == long[long.len() - MAX_TERMINATION_MESSAGE_BYTES as usize..]);
    let left = scene.volumes.removals(&container, "logs/id/0.log");
    assert_eq!(
        left.iter().map(|change| &*change.path).collect::<Vec<_>>(),
        ["logs/id", "containers/app/01234567"]
    );
    // Neither recreated nor written through a link.
    fs::remove_file(&log).unwrap();
    scene.volumes.copy_termination_message(&*scene.files(), &id, &container).await;
    assert!(!log.exists());
    let other = scene.pod("other");
    fs::write(&other, "untouched").unwrap();
    symlink(&other, &log).unwrap();
    scene.volumes.copy_termination_message(&*scene.files(), &id, &container).await;
    assert_eq!(fs::read_to_string(&other).unwrap(), "untouched");
}
