//! Limits of a QEMU that its guest has taken over, on the node and among other cells.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        net::UnixStream,
    },
    path::Path,
    process::{Command, Stdio},
};

use kiyot_engine::provider::{Instance, Provider};
use kiyot_local::{PauseImage, qemu::Qemu};

use super::{
    super::bench::{LIMIT, run},
    SIZE, Vms, wait_for_qemu,
};

/// Size of a played machine's disk, in bytes.
const DISK_BYTES: u64 = 1 << 20;
/// Script in QEMU's place that tries each way to take space on the node's disk, and prints the ways
/// that are not refused.
const TAKE_SPACE: &str = r#"#!/usr/bin/python3 -I
import ctypes, os, struct
for top in os.listdir("/"):
    if not os.statvfs("/" + top).f_flag & os.ST_RDONLY:
        for directory, _, _ in os.walk("/" + top):
            if os.access(directory, os.W_OK):
                print("directory", directory)
if os.access("/", os.W_OK):
    print("directory /")
libc = ctypes.CDLL(None, use_errno=True)
disk = os.open("/disk", os.O_RDWR)
size, far = os.fstat(disk).st_size, 64 << 20
def take(name, way):
    try:
        if way() not in (-1, 0):
            print(name)
    except OSError:
        pass
    if os.fstat(disk).st_blocks * 512 > size or os.fstat(disk).st_size > size:
        print(name)
        os.truncate(disk, 0)
        os.truncate(disk, size)
take("write", lambda: os.pwrite(disk, b"x", size))
take("truncate", lambda: os.truncate(disk, far))
long = ctypes.c_long
for mode in (0x00, 0x01, 0x10, 0x11):
    take(f"fallocate {mode:#x}", lambda: libc.fallocate(disk, mode, long(0), long(far)))
space = struct.pack("hhqqiI4i", 0, 0, 0, far, 0, 0, 0, 0, 0, 0)
for request in (0x40305828, 0x4030582a, 0x40305839):
    take(f"ioctl {request:#x}", lambda: libc.ioctl(disk, long(request), space))
try:
    os.setxattr(disk, "user.x", b"x")
    print("attribute")
except OSError:
    pass
if libc.syscall(long(425), long(4), ctypes.create_string_buffer(256)) >= 0:
    print("io_uring")
hole = libc.fallocate(disk, 3, long(0), long(4096))
print("done", hole)
"#;

/// Returns the bytes that a directory takes on the disk.
fn space(dir: &Path) -> u64 {
    let kib = run("du", &["-s", "-k", &dir.display().to_string()]);
    kib.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

/// Verifies N30.
#[test]
fn qemu_that_was_taken_over_uses_no_disk_space_beyond_its_own() {
    let bench = super::Bench::new();
    let dir = tempfile::tempdir_in(bench.path()).unwrap();
    let played = dir.path().join("played");
    // A process of its own writes the program: a program can't be started while a child of another
    // thread holds it open for writing.
    run("sh", &["-c", "printf '%s' \"$1\" > \"$0\"", &played.display().to_string(), TAKE_SPACE]);
    fs::set_permissions(&played, fs::Permissions::from_mode(0o755)).unwrap();
    fs::File::create(dir.path().join("disk.img")).unwrap().set_len(DISK_BYTES).unwrap();
    // The kernel is a file that the jail shows.
    let machine = serde_json::json!({
        "program": "/image/kernel",
        "accelerator": "tcg",
        "kernel": played,
        "disk_bytes": DISK_BYTES,
        "command_line": "",
        "cpus": 1,
        "memory_mib": 256,
        "user": 65521,
        "group": 65521,
    });
    fs::write(dir.path().join("vm.json"), machine.to_string()).unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_kiyot")).with_file_name("kiyot-cell");
    let mut jailed = Command::new("unshare");
    jailed.args(["--pid", "--fork"]).arg(program).arg("run-vm").arg("--dir").arg(dir.path());
    let output = jailed.stdin(Stdio::null()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "done 0\n", "{output:?}");
    assert!(space(dir.path()) < 2 * DISK_BYTES, "{}", space(dir.path()));
}

/// Has a machine's QEMU execute a command of its monitor. Returns whether the command succeeded.
fn executes(socket: &Path, command: &str) -> bool {
    let mut monitor = UnixStream::connect(socket).unwrap();
    monitor.set_read_timeout(Some(LIMIT)).unwrap();
    let mut lines = BufReader::new(monitor.try_clone().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("QMP"));
    let mut execute = |command: &str| {
        monitor.write_all(command.as_bytes()).unwrap();
        let is_answer = |line: &String| line.contains("\"return\"") || line.contains("\"error\"");
        // QEMU ends by the signal of its limit, unless it ignores the signal.
        lines.by_ref().map_while(Result::ok).find(is_answer).unwrap_or_default()
    };
    assert!(execute(r#"{"execute": "qmp_capabilities"}"#).contains("\"return\""));
    execute(command).contains("\"return\"")
}

/// Verifies N30.
#[tokio::test]
async fn real_qemu_writes_no_file_and_grows_no_disk() {
    let vms = Vms::new();
    let (_, instance, mut guest) = vms.launch().await;
    let dir = vms.bench.instance_dir(&instance.id);
    guest.succeeds("dd if=/dev/zero of=/dev/vdb bs=1M count=64").await;
    let socket = dir.join("qmp/qmp.sock");
    for file in ["/qmp/file", "/file", "/image/file", "/dev/file"] {
        let command = format!(
            r#"{{"execute": "pmemsave", "arguments": {{"val": 0, "size": 65536, "filename": "{file}"}}}}"#
        );
        assert!(!executes(&socket, &command), "{file}");
    }
    guest.succeeds("true").await;
    let grow =
        r#"{"execute": "block_resize", "arguments": {"device": "disk", "size": 1073741824}}"#;
    assert!(!executes(&socket, grow));
    assert_eq!(fs::metadata(dir.join("disk.img")).unwrap().len(), vms.bench.config.qemu.disk_size);
    vms.end(&instance).await;
}

/// Returns the user of an instance's QEMU.
async fn user(vms: &Vms, instance: &Instance) -> u32 {
    let qemu = wait_for_qemu(vms, instance).await;
    fs::metadata(format!("/proc/{qemu}")).unwrap().uid()
}

/// Verifies N31.
#[tokio::test]
async fn machines_have_users_of_their_own_also_after_a_restart() {
    let mut vms = Vms::new();
    let launch = async |vms: &Vms| vms.provider.launch(&vms.spec(SIZE), "token").await.unwrap();
    let (one, other) = tokio::join!(launch(&vms), launch(&vms));
    let first = vms.bench.config.qemu.first_user;
    let users = BTreeSet::from([user(&vms, &one).await, user(&vms, &other).await]);
    assert_eq!(users, BTreeSet::from([first, first + 1]));
    let of_one = user(&vms, &one).await;

    vms.provider = Qemu::new(&vms.bench.config, PauseImage::new(None));
    let third = launch(&vms).await;
    assert_eq!(user(&vms, &third).await, first + 2);
    assert_eq!(user(&vms, &one).await, of_one, "the machine runs on");

    // A user is free once the end is proven.
    let status = vms.bench.instance_dir(&one.id).join("disk.img");
    assert_eq!(fs::metadata(status).unwrap().uid(), of_one);
    vms.end_beside_others(&one).await;
    let fourth = launch(&vms).await;
    assert_eq!(user(&vms, &fourth).await, of_one);
    for instance in [&other, &third] {
        vms.end_beside_others(instance).await;
    }
    vms.end(&fourth).await;
}
