//! Boot data of the cell, a [`kiyot_link::bootstrap::CellFile`], from the provider.

use std::{fs::File, io, io::Read};

use super::MachineError;

/// Name of the file that QEMU passes (`-fw_cfg`), in QEMU's namespace for users.
pub(super) const NAME: &str = "opt/org.kiyot/cell.json";
/// The file in sysfs (module `qemu_fw_cfg`).
const PATH: &str = "/sys/firmware/qemu_fw_cfg/by_name/opt/org.kiyot/cell.json/raw";
/// Upper bound on the boot data, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// Reads the boot data.
pub(super) fn read() -> Result<Vec<u8>, MachineError> {
    let failed = |error| MachineError::BootData(NAME, error);
    let mut content = Vec::new();
    File::open(PATH)
        .and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut content))
        .map_err(failed)?;
    if content.len() as u64 > MAX_BYTES {
        return Err(failed(io::Error::other(format!("longer than {MAX_BYTES} bytes"))));
    }
    Ok(content)
}
