//! Probe of an accelerator (`kiyot-cell probe-vm`). On a node that is itself a virtual machine, the
//! device may open and guests may then hang without output.

use std::{io::Read, path::Path, sync::mpsc, thread, time::Duration};

use kiyot_link::vm_file::NOT_USABLE;

use super::{Machine, VmError, step};
use crate::dirs::CellDir;

/// Bounds the time until the kernel prints; with a usable accelerator it takes tenths of a second.
pub const LIMIT: Duration = Duration::from_secs(5);
/// Start of a kernel's first line, which is in no message of QEMU.
const SIGN: &[u8] = b"Linux version";
/// Bounds the output that is searched, in bytes.
const MAX_OUTPUT_BYTES: u64 = 64 * 1024;

/// Boots the virtual machine of a directory. Returns 0 if its kernel printed in time, otherwise
/// [`NOT_USABLE`].
pub fn run(dir: &Path) -> Result<i32, VmError> {
    let dir = CellDir::open(dir)?;
    let (machine, output) = Machine::start(&dir)?;
    let (sender, receiver) = mpsc::sync_channel(1);
    thread::Builder::new()
        .name("output".into())
        .spawn(move || {
            let _unless_late = sender.send(has_sign(output));
        })
        .map_err(step("read the console"))?;
    let printed = receiver.recv_timeout(LIMIT).unwrap_or(false);
    machine.kill().map_err(step("end the virtual machine"))?;
    Ok(if printed { 0 } else { NOT_USABLE })
}

/// Returns whether the output has a kernel's first line. Reads no further than this line.
fn has_sign(output: impl Read) -> bool {
    let mut seen = Vec::new();
    let mut output = output.take(MAX_OUTPUT_BYTES);
    let mut chunk = [0; 1024];
    while let Ok(length @ 1..) = output.read(&mut chunk) {
        seen.extend_from_slice(&chunk[..length]);
        if seen.windows(SIGN.len()).any(|window| window == SIGN) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_has_booted_only_if_its_first_line_is_printed() {
        assert!(has_sign(&b"SeaBIOS\n[    0.000000] Linux version 6.1.0\n"[..]));
        assert!(!has_sign(&b"qemu-system-x86_64: error: failed to set MSR 0x48\n"[..]));
        assert!(!has_sign(&b""[..]));
    }
}
