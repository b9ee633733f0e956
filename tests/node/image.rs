//! Disks of a virtual machine: a Debian that is built once, and the programs of this build.

use std::{
    collections::BTreeSet,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    process::Command,
};

use kiyot_testkit::{image::ImageSpec, node};

/// Root of the source tree.
const SOURCES: &str = env!("CARGO_MANIFEST_DIR");

/// Returns the directory of cargo's build profile.
pub(crate) fn build_directory() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_kiyot")).parent().unwrap().to_owned()
}

/// A disk with Debian.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Variant {
    /// Has the packages of a node.
    Node,
    /// Has cloud-init and no container runtime, as an image of EC2.
    Stock,
}

/// Returns the directory with the files `root.ext4` (Debian's disk) and `kernel`. The directory is
/// in cargo's target directory, and is rebuilt when its inputs have changed.
pub(crate) fn debian(variant: Variant) -> PathBuf {
    let (variant, guest) = match variant {
        Variant::Node => ("node", "guest"),
        Variant::Stock => ("stock", "stock-guest"),
    };
    let script = Path::new(SOURCES).join("scripts/node-image");
    let mut inputs = BTreeSet::new();
    files(&Path::new(SOURCES).join("tests/node").join(guest), &mut inputs);
    let mut hasher = DefaultHasher::new();
    for file in [script.clone(), "/etc/os-release".into()].iter().chain(&inputs) {
        (file, fs::read(file).unwrap()).hash(&mut hasher);
    }
    let target = build_directory().parent().unwrap().to_owned();
    let all = target.join(variant);
    let ready = all.join(format!("{:016x}", hasher.finish()));
    if ready.is_dir() {
        return ready;
    }
    // Images of other inputs are stale.
    let _ = fs::remove_dir_all(&all);
    fs::create_dir_all(&all).unwrap();
    let making = tempfile::tempdir_in(&all).unwrap().keep();
    run(Command::new(&script).arg(&making).arg(variant));
    fs::set_permissions(&making, fs::Permissions::from_mode(0o755)).unwrap();
    // Root builds the directory, but `cargo clean` runs as the owner of the target directory.
    let owner = fs::metadata(&target).unwrap();
    for path in [&all, &making, &making.join("root.ext4"), &making.join("kernel")] {
        chown(path, Some(owner.uid()), Some(owner.gid())).unwrap();
    }
    fs::rename(&making, &ready).unwrap();
    ready
}

fn files(directory: &Path, found: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else {
            found.insert(path);
        }
    }
}

/// Builds the disk `parts.ext4` in a directory, with the stripped programs of this build, the unit,
/// the configuration, container images and the examples.
pub(crate) fn parts(directory: &Path) -> PathBuf {
    let tree = directory.join("parts");
    fs::create_dir(&tree).unwrap();
    let built = build_directory();
    let programs = [
        ("kiyot", built.join("kiyot")),
        ("kiyot-cell", built.join("kiyot-cell")),
        ("milpactl", built.join("milpactl")),
        ("podctl", built.join("examples/podctl")),
        ("demo", built.join("examples/demo")),
        ("integration", integration_tests()),
    ];
    for (name, program) in programs {
        assert!(
            program.exists(),
            "{} is missing: build it first by `cargo test --workspace --no-run`",
            program.display()
        );
        run(Command::new("strip").arg("-s").arg("-o").arg(tree.join(name)).arg(program));
    }
    for file in ["config/kiyot.service", "config/kiyot-cell.service", "config/kiyot.toml"] {
        let file = Path::new(SOURCES).join(file);
        fs::copy(&file, tree.join(file.file_name().unwrap())).unwrap();
    }
    run(Command::new("cp").arg("-R").arg(Path::new(SOURCES).join("examples")).arg(&tree));
    ImageSpec::pause().write(node::PAUSE_IMAGE, &tree.join("pause.tar")).unwrap();
    let shell = ImageSpec { cmd: vec!["sh".to_owned()], ..ImageSpec::default() };
    shell.write(node::BUSYBOX_IMAGE, &tree.join("busybox.tar")).unwrap();
    let disk = directory.join("parts.ext4");
    run(Command::new("mke2fs")
        .args(["-q", "-t", "ext4", "-O", "^has_journal", "-d"])
        .args([&tree, &disk])
        .arg("512M"));
    fs::remove_dir_all(&tree).unwrap();
    disk
}

/// Returns the program of the integration tests.
pub(crate) fn integration_tests() -> PathBuf {
    newest(&build_directory().join("deps"), "integration-")
}

/// Returns the program of the tests of instances of EC2.
pub(crate) fn instance_tests() -> PathBuf {
    newest(&build_directory().join("deps"), "instances-")
}

/// Returns the newest file with this prefix: cargo does not pass the path of a test binary to
/// another.
fn newest(directory: &Path, prefix: &str) -> PathBuf {
    let built = fs::read_dir(directory).unwrap().flatten().map(|entry| entry.path());
    let named = built.filter(|path| {
        path.extension().is_none()
            && path.file_name().unwrap().to_string_lossy().starts_with(prefix)
    });
    let newest = named.max_by_key(|path| fs::metadata(path).unwrap().modified().unwrap());
    newest.unwrap_or_else(|| directory.join(prefix))
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}
