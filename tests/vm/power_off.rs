//! Power-off of a machine that is unknown to all daemons.

use std::{
    fs,
    process::{Command, Stdio},
};

use kiyot_testkit::{LIMIT, cell_image, wait_until};

/// Boot data of a cell whose gateway does not answer. Its timeout suits a boot on a busy machine.
const BOOT_DATA: &str = r#"{
    "bootstrap": {
        "cell": "cell-aaaaaaaaaaaa",
        "gateway": {"tcp": "169.254.77.1:7700"},
        "ca_sha256": "",
        "token": "",
        "orphan_timeout_secs": 900
    },
    "containerd": "containerd",
    "runc": "runc",
    "pause_image": "pause",
    "machine": {"power_off_after_secs": 1}
}"#;

/// Verifies V5.
#[tokio::test]
async fn machine_that_does_not_enrol_powers_off() {
    let (dir, image) = (tempfile::tempdir().unwrap(), cell_image());
    let path = |name: &str| dir.path().join(name).display().to_string();
    fs::write(path("cell.json"), BOOT_DATA).unwrap();
    fs::File::create(path("disk")).unwrap().set_len(64 << 20).unwrap();
    kiyot_testkit::output("mkfs.ext4", &["-q", "-F", "-O", "^has_journal", &path("disk")]).unwrap();
    let disk = |name: &str, file: String, options: &str| {
        [
            "-drive".to_owned(),
            format!("if=none,id={name},format=raw,file={file}{options}"),
            "-device".to_owned(),
            format!("virtio-blk-pci,drive={name},serial={name}"),
        ]
    };
    let mut machine = Command::new("qemu-system-x86_64")
        .args(["-accel", "tcg", "-machine", "q35", "-cpu", "max", "-m", "512"])
        .args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"])
        .args(["-serial", &format!("file:{}", path("console"))])
        .args(["-kernel", &image.join("kernel").display().to_string()])
        .args(["-initrd", &image.join("initramfs").display().to_string()])
        .args(["-append", "console=ttyS0 panic=-1 quiet -- machine"])
        .args(["-fw_cfg", &format!("name=opt/org.kiyot/cell.json,file={}", path("cell.json"))])
        .args(disk("root", image.join("root.squashfs").display().to_string(), ",readonly=on"))
        .args(disk("disk", path("disk"), ""))
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let ended =
        wait_until("the machine has powered off", LIMIT, async || machine.try_wait().unwrap())
            .await;
    let console = fs::read_to_string(path("console")).unwrap_or_default();
    assert!(ended.success(), "{ended}\n{console}");
    assert!(console.contains("kiyot-cell: not enrolled within"), "{console}");
}
