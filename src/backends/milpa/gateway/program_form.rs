//! The form of a program, by its ELF header (System V ABI, "Object Files").

/// The bytes of a header of 64 bits.
pub(super) const HEADER_BYTES: usize = 64;
/// The most bytes of the program headers of a known program.
pub(super) const MAX_PROGRAM_HEADERS_BYTES: usize = 64 * 1024;

/// The first bytes of a little-endian file of 64 bits.
const IDENTITY: [u8; 6] = [0x7f, b'E', b'L', b'F', 2, 1];
/// Machines (`e_machine`).
const X86_64: u16 = 62;
const AARCH64: u16 = 183;
/// Type of a program header that names a dynamic linker (`PT_INTERP`).
const INTERPRETER: u32 = 3;
const PROGRAM_HEADER_BYTES: u16 = 56;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// The architecture of the program, by its name in images.
    pub(super) architecture: &'static str,
    /// The position of the program headers.
    pub(super) program_headers_at: u64,
    pub(super) program_headers_bytes: usize,
}

impl Header {
    /// Reads a header; `None` if the file is not a program for a known architecture.
    pub(super) fn parse(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        if !bytes.starts_with(&IDENTITY) {
            return None;
        }
        let half = |at: usize| Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        let architecture = match half(18)? {
            X86_64 => "amd64",
            AARCH64 => "arm64",
            _ => return None,
        };
        if half(54)? != PROGRAM_HEADER_BYTES {
            return None;
        }
        let program_headers_at = u64::from_le_bytes(*bytes.get(32..)?.first_chunk()?);
        let program_headers_bytes = usize::from(half(56)?) * usize::from(PROGRAM_HEADER_BYTES);
        (program_headers_bytes <= MAX_PROGRAM_HEADERS_BYTES).then_some(Self {
            architecture,
            program_headers_at,
            program_headers_bytes,
        })
    }
}

/// Returns whether a program with these program headers needs a dynamic linker, and so the
/// libraries of the machine that runs it.
pub(super) fn is_dynamic(program_headers: &[u8]) -> bool {
    let mut headers = program_headers.chunks_exact(PROGRAM_HEADER_BYTES.into());
    headers.any(|header| header.starts_with(&INTERPRETER.to_le_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(machine: u16, count: u16) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..6].copy_from_slice(&IDENTITY);
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes[32..40].copy_from_slice(&64_u64.to_le_bytes());
        bytes[54..56].copy_from_slice(&PROGRAM_HEADER_BYTES.to_le_bytes());
        bytes[56..58].copy_from_slice(&count.to_le_bytes());
        bytes
    }

    #[test]
    fn header_has_the_architecture_and_the_place_of_program_headers() {
        for (machine, architecture) in [(X86_64, "amd64"), (AARCH64, "arm64")] {
            let parsed = Header::parse(&header(machine, 9)).unwrap();
            let expected =
                Header { architecture, program_headers_at: 64, program_headers_bytes: 9 * 56 };
            assert_eq!(parsed, expected);
        }
    }

    #[test]
    fn file_of_another_format_has_no_header() {
        let changed = |at: usize, byte: u8| {
            let mut bytes = header(X86_64, 9);
            bytes[at] = byte;
            bytes
        };
        // Not ELF, 32 bits, big-endian, another machine, other program headers.
        for bytes in [
            changed(0, b'#'),
            changed(4, 1),
            changed(5, 2),
            changed(18, 8),
            changed(54, 32),
            header(X86_64, u16::MAX),
        ] {
            assert_eq!(Header::parse(&bytes), None);
        }
    }

    #[test]
    fn program_with_an_interpreter_is_dynamic() {
        let of_types = |types: &[u32]| -> Vec<u8> {
            let header = |kind: &u32| {
                let mut header = vec![0xff; PROGRAM_HEADER_BYTES.into()];
                header[..4].copy_from_slice(&kind.to_le_bytes());
                header
            };
            types.iter().flat_map(header).collect()
        };
        assert!(is_dynamic(&of_types(&[6, 3, 1])));
        assert!(!is_dynamic(&of_types(&[1, 2, 7])));
        assert!(!is_dynamic(&[]));
        // A truncated program header.
        assert!(!is_dynamic(&of_types(&[3])[..20]));
    }
}
