//! The guest of a test: its first process connects a shell to the gateway over the link.

use std::{
    fs,
    path::{Path, PathBuf},
};

use ring::digest::{SHA256, digest};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    time::timeout,
};

use super::bench::LIMIT;

/// The first process. The devices are found in the order of the command line of QEMU.
const INIT: &str = r#"#!/busybox sh
/busybox mkdir -p /bin /proc /sys /dev
/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module"; done < /modules/list
ip link set lo up
ip address add 169.254.77.2/30 dev eth1
ip link set eth1 up
echo "guest is ready: $*"
while :; do nc 169.254.77.1 7700 -e /bin/sh; sleep 1; done
"#;

/// The line that ends the output of a command, before its exit code.
const END: &str = "END OF COMMAND ";

/// Makes an image whose first process is [`INIT`]. It has the kernel of the cell image, and its
/// initramfs with another archive behind it, whose files replace files of the initramfs.
pub(super) fn make_image(dir: &Path) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/cell-image");
    assert!(from.join("initramfs").exists(), "{} is absent: make cell-image", from.display());
    fs::create_dir(dir).unwrap();
    fs::copy(from.join("kernel"), dir.join("kernel")).unwrap();
    fs::copy(from.join("root.squashfs"), dir.join("root.squashfs")).unwrap();
    let mut initramfs = fs::read(from.join("initramfs")).unwrap();
    initramfs.resize(initramfs.len().next_multiple_of(4), 0);
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].map(PathBuf::from);
    let busybox = busybox.iter().find(|path| path.exists()).unwrap();
    add(&mut initramfs, "busybox", 0o100_755, &fs::read(busybox).unwrap());
    add(&mut initramfs, "init", 0o100_755, INIT.as_bytes());
    add(&mut initramfs, "TRAILER!!!", 0, b"");
    fs::write(dir.join("initramfs"), initramfs).unwrap();
    list(dir);
}

/// Writes the list of an image's files.
pub(crate) fn list(dir: &Path) {
    let listed = |name: &str| {
        let content = fs::read(dir.join(name)).unwrap();
        let sha256 = hex::encode(digest(&SHA256, &content));
        (name.to_owned(), serde_json::json!({ "sha256": sha256, "size": content.len() }))
    };
    let files: serde_json::Map<_, _> =
        ["kernel", "initramfs", "root.squashfs"].map(listed).into_iter().collect();
    let list = serde_json::json!({ "architecture": "amd64", "files": files });
    fs::write(dir.join("image.json"), list.to_string()).unwrap();
}

/// Adds a file to an archive (Linux, driver-api/early-userspace/buffer-format).
fn add(archive: &mut Vec<u8>, name: &str, mode: u32, content: &[u8]) {
    let (size, name_size) = (content.len(), name.len() + 1);
    let inode = archive.len();
    archive.extend(
        format!(
            "070701{inode:08x}{mode:08x}{:08x}{:08x}{:08x}{:08x}{size:08x}{:08x}{:08x}{:08x}{:08x}\
             {name_size:08x}{:08x}",
            0, 0, 1, 0, 0, 0, 0, 0, 0
        )
        .into_bytes(),
    );
    archive.extend(name.as_bytes());
    archive.push(0);
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend(content);
    archive.resize(archive.len().next_multiple_of(4), 0);
}

/// The shell of a guest.
pub(super) struct Guest(BufReader<UnixStream>);

impl Guest {
    /// Waits for the connection of a guest.
    pub(super) async fn accept(gateway: &UnixListener, console: impl Fn() -> String) -> Self {
        let accepted = timeout(LIMIT, gateway.accept()).await;
        let (connection, _) = accepted.unwrap_or_else(|_| panic!("{}", console())).unwrap();
        Self(BufReader::new(connection))
    }

    /// Runs a command, and returns its exit code and its output.
    pub(super) async fn runs(&mut self, command: &str) -> (i32, String) {
        // In a subshell, so that an option of the command does not end the shell.
        let line = format!("({command}) 2>&1; echo \"{END}$?\"\n");
        self.0.get_mut().write_all(line.as_bytes()).await.unwrap();
        let mut output = String::new();
        let read = async {
            loop {
                let mut line = String::new();
                assert_ne!(self.0.read_line(&mut line).await.unwrap(), 0, "{command}: {output}");
                match line.split_once(END) {
                    Some((last, code)) => {
                        output.push_str(last);
                        return code.trim().parse().unwrap();
                    }
                    None => output.push_str(&line),
                }
            }
        };
        let code = timeout(LIMIT, read).await.unwrap_or_else(|_| panic!("{command} hangs"));
        (code, output)
    }

    /// Runs a command that must succeed, and returns its output.
    pub(super) async fn succeeds(&mut self, command: &str) -> String {
        let (code, output) = self.runs(command).await;
        assert_eq!(code, 0, "{command}: {output}");
        output
    }

    /// Runs a command that must fail.
    pub(super) async fn fails(&mut self, command: &str) {
        let (code, output) = self.runs(command).await;
        assert_ne!(code, 0, "{command}: {output}");
    }
}
