//! Limit on the space that QEMU takes on the node's disk: the size of its own disk.
//!
//! QEMU has no other file to write, and its file size limit (`RLIMIT_FSIZE`) is the size of the
//! disk. The kernel does not apply this limit to blocks beyond the end of a file or to attributes,
//! so a seccomp filter refuses the system calls that allocate them.

use std::{collections::BTreeMap, env, io};

use rustix::process::{Resource, Rlimit, setrlimit};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// System calls of the filter, by their numbers in the kernel's tables.
struct Numbers {
    fallocate: i64,
    ioctl: i64,
    /// setxattr, lsetxattr and fsetxattr.
    attributes: [i64; 3],
}

/// See [`Numbers`] (Linux, arch/x86/entry/syscalls/syscall_64.tbl).
#[cfg(target_arch = "x86_64")]
const NUMBERS: Numbers = Numbers { fallocate: 285, ioctl: 16, attributes: [188, 189, 190] };
/// See [`Numbers`] (Linux, scripts/syscall.tbl).
#[cfg(not(target_arch = "x86_64"))]
const NUMBERS: Numbers = Numbers { fallocate: 47, ioctl: 29, attributes: [5, 6, 7] };
/// Numbers of io_uring_setup, whose operations no filter sees, and of setxattrat, on all
/// architectures.
const NEWER: [i64; 2] = [425, 463];
/// Requests of ioctl that allocate blocks (Linux, include/uapi/linux/falloc.h): FS_IOC_RESVSP,
/// FS_IOC_RESVSP64 and FS_IOC_ZERO_RANGE.
const ALLOCATING_REQUESTS: [u64; 3] = [0x4030_5828, 0x4030_582a, 0x4030_5839];
/// Flags of fallocate: FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE.
const KEEP_SIZE: u64 = 1;
const PUNCH_HOLE: u64 = 2;

/// Limits the space that this process and the program that it becomes can take. The process can't
/// gain privileges, so the limit is permanent.
pub(super) fn limit(disk_bytes: u64) -> io::Result<()> {
    let bytes = Some(disk_bytes);
    setrlimit(Resource::Fsize, Rlimit { current: bytes, maximum: bytes })?;
    filter()
}

/// Refuses the system calls that allocate space beyond the file size limit.
fn filter() -> io::Result<()> {
    let program = program().map_err(io::Error::other)?;
    seccompiler::apply_filter(&program).map_err(io::Error::other)
}

fn program() -> Result<BpfProgram, seccompiler::BackendError> {
    let rule = |operator, value| {
        let condition = SeccompCondition::new(1, SeccompCmpArgLen::Dword, operator, value)?;
        SeccompRule::new(vec![condition])
    };
    let ioctl = |request| rule(SeccompCmpOp::Eq, request);
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::from([
        // Punching a hole takes no space.
        (NUMBERS.fallocate, vec![rule(SeccompCmpOp::MaskedEq(KEEP_SIZE | PUNCH_HOLE), KEEP_SIZE)?]),
        (NUMBERS.ioctl, ALLOCATING_REQUESTS.map(ioctl).into_iter().collect::<Result<_, _>>()?),
    ]);
    // Refused with any argument.
    rules.extend(NUMBERS.attributes.into_iter().chain(NEWER).map(|number| (number, Vec::new())));
    let refused = SeccompAction::Errno(rustix::io::Errno::OPNOTSUPP.raw_os_error().unsigned_abs());
    SeccompFilter::new(rules, SeccompAction::Allow, refused, env::consts::ARCH.try_into()?)?
        .try_into()
}
