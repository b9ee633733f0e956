//! Architectures of machines, in the notation of images (GOARCH).

/// The architectures of Linux images.
const NAMES: [&str; 10] =
    ["386", "amd64", "arm", "arm64", "loong64", "mips64le", "ppc64le", "riscv64", "s390x", "mips"];

/// Returns the architecture of this machine.
pub fn of_this_machine() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "x86" => "386",
        "aarch64" => "arm64",
        "powerpc64" if cfg!(target_endian = "little") => "ppc64le",
        other => other,
    }
}

/// Returns the architecture with this name, or `None` if the name is unknown, such as the name that
/// an older agent sends.
pub fn named(name: &str) -> Option<&'static str> {
    NAMES.into_iter().find(|known| *known == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architecture_of_this_machine_is_known() {
        assert_eq!(named(of_this_machine()), Some(of_this_machine()));
        assert_eq!(named(""), None);
        assert_eq!(named("amd64\n"), None);
    }
}
