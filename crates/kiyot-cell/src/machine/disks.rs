//! Disks of the machine, found by their serial numbers.

use std::{
    fs,
    path::{Path, PathBuf},
};

use kiyot_linux::tree::beneath;

use super::wait;

/// Directory of block devices in sysfs.
const BLOCK_DEVICES: &str = "/sys/block";

/// No disk has the serial number.
#[derive(Debug, thiserror::Error)]
#[error(
    "no disk has the serial number {serial:?} after {} s; found: {found:?}",
    wait::LIMIT.as_secs()
)]
pub struct DiskError {
    serial: &'static str,
    found: Vec<String>,
}

/// Returns the device of the disk with a serial number. Waits until the kernel has found it.
pub(super) fn find(serial: &'static str) -> Result<PathBuf, DiskError> {
    wait::until(|is_last| {
        let disks = list(Path::new(BLOCK_DEVICES));
        match disks.iter().find(|(_, found)| found == serial) {
            None if is_last => {
                let found = disks.into_iter().map(|(name, serial)| format!("{name}={serial}"));
                Err(DiskError { serial, found: found.collect() })
            }
            found => Ok(found.and_then(|(name, _)| beneath(Path::new("/dev"), name).ok())),
        }
    })
}

/// Returns the names and serial numbers of all disks with a serial number.
fn list(devices: &Path) -> Vec<(String, String)> {
    let entries = fs::read_dir(devices).into_iter().flatten().flatten();
    let disk = |entry: fs::DirEntry| {
        let serial = fs::read_to_string(entry.path().join("serial")).ok()?;
        Some((entry.file_name().into_string().ok()?, serial.trim().to_owned()))
    };
    entries.filter_map(disk).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_listed_with_their_serial_numbers() {
        let dir = tempfile::tempdir().unwrap();
        for (name, serial) in [("vda", Some("root\n")), ("vdb", Some("disk")), ("loop0", None)] {
            fs::create_dir(dir.path().join(name)).unwrap();
            if let Some(serial) = serial {
                fs::write(dir.path().join(name).join("serial"), serial).unwrap();
            }
        }
        let mut disks = list(dir.path());
        disks.sort();
        let expected = [("vda", "root"), ("vdb", "disk")];
        assert_eq!(disks, expected.map(|(name, serial)| (name.to_owned(), serial.to_owned())));
    }
}
