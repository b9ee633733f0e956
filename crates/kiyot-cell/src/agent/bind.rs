//! `Bind`: checks and sets the pod's host name and sysctls, if the cell has the namespaces for
//! them.

use std::collections::HashMap;

use kiyot_proto::cell::BindRequest;
use rustix::{
    fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2},
    io::Errno,
};
use tonic::Status;

use crate::namespaces::OwnNamespaces;

/// Longest host name that Linux accepts, in bytes (`HOST_NAME_MAX`).
const MAX_HOST_NAME_BYTES: usize = 64;
/// Upper bound on the sysctls of a pod.
const MAX_SYSCTLS: usize = 256;
/// Longest value of a sysctl, in bytes: one page.
const MAX_SYSCTL_VALUE_BYTES: usize = 4096;

/// The validated host name and sysctls of a request.
#[derive(Debug)]
pub struct Checked<'a> {
    host_name: &'a str,
    /// Path, name and value.
    sysctls: Vec<(String, &'a str, &'a str)>,
}

/// Validates host name and sysctls.
pub fn check(own: OwnNamespaces, request: &BindRequest) -> Result<Checked<'_>, Status> {
    let name = &request.hostname;
    if !name.is_empty() {
        if !own.uts {
            return Err(Status::failed_precondition(
                "host name: can't be set, the cell shares the host's UTS namespace",
            ));
        }
        if name.len() > MAX_HOST_NAME_BYTES
            || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.'))
        {
            return Err(Status::invalid_argument(format!(
                "host name {name:?}: invalid; allowed: at most {MAX_HOST_NAME_BYTES} \
                 letters, digits, \"-\" and \".\""
            )));
        }
    }
    if !request.sysctls.is_empty() && !own.net {
        return Err(Status::failed_precondition(
            "sysctls: can't be set, the cell shares the host's network namespace",
        ));
    }
    Ok(Checked { host_name: name, sysctls: sysctl_paths(&request.sysctls)? })
}

impl Checked<'_> {
    /// Sets host name and sysctls.
    pub fn apply(self) -> Result<(), Status> {
        let name = self.host_name;
        if !name.is_empty() {
            rustix::system::sethostname(name.as_bytes()).map_err(|error| {
                Status::internal(format!("cannot set host name {name:?}: {error}"))
            })?;
        }
        for (path, name, value) in self.sysctls {
            write_sysctl(&path, value).map_err(|error| match error {
                Errno::NOENT | Errno::INVAL | Errno::NOTDIR | Errno::ISDIR => {
                    Status::invalid_argument(format!("sysctl {name} = {value:?}: {error}"))
                }
                _ => Status::internal(format!("cannot set sysctl {name} = {value:?}: {error}")),
            })?;
        }
        Ok(())
    }
}

fn sysctl_paths(sysctls: &HashMap<String, String>) -> Result<Vec<(String, &str, &str)>, Status> {
    if sysctls.len() > MAX_SYSCTLS {
        return Err(Status::invalid_argument(format!(
            "{} sysctls: too many; allowed: at most {MAX_SYSCTLS}",
            sysctls.len()
        )));
    }
    let mut paths = Vec::with_capacity(sysctls.len());
    for (name, value) in sysctls {
        let path = sysctl_path(name).ok_or_else(|| {
            Status::invalid_argument(format!(
                "sysctl {name:?}: not allowed in a cell; allowed: names that begin with \"net.\""
            ))
        })?;
        if value.len() > MAX_SYSCTL_VALUE_BYTES {
            return Err(Status::invalid_argument(format!(
                "sysctl {name}: value of {} bytes is too long; allowed: at most \
                 {MAX_SYSCTL_VALUE_BYTES}",
                value.len()
            )));
        }
        paths.push((path, name.as_str(), value.as_str()));
    }
    // A fixed order makes the result of dependent sysctls repeatable.
    paths.sort();
    Ok(paths)
}

/// Returns the path of a sysctl below /proc/sys/net, or `None` if the name is invalid or outside of
/// `net`. As in sysctl(8), whichever of "." and "/" comes first in the name is the separator; the
/// other character stands for a "." within a component (the name of a VLAN interface).
pub fn sysctl_path(name: &str) -> Option<String> {
    let separator = name.chars().find(|character| matches!(character, '.' | '/'))?;
    let mut parts = name
        .split(separator)
        .map(|part| if separator == '.' { part.replace('/', ".") } else { part.to_owned() });
    if parts.next().as_deref() != Some("net") {
        return None;
    }
    let parts: Vec<_> = parts.collect();
    let character =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b'@' | b':');
    let plain = |part: &String| {
        !part.is_empty()
            && part.len() <= 255
            && !part.starts_with('.')
            && part.bytes().all(character)
    };
    (!parts.is_empty() && parts.len() <= 16 && parts.iter().all(plain)).then(|| parts.join("/"))
}

fn write_sysctl(path: &str, value: &str) -> Result<(), Errno> {
    let root = openat(
        CWD,
        "/proc/sys/net",
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    let file = openat2(&root, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty(), resolve)?;
    rustix::io::write(&file, value.as_bytes()).map(drop)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tonic::Code;

    use super::*;

    #[test]
    fn sysctl_name_maps_to_path_below_net() {
        for (name, path) in [
            ("net.ipv4.ip_forward", Some("ipv4/ip_forward")),
            ("net/ipv4/conf/eth0.1/forwarding", Some("ipv4/conf/eth0.1/forwarding")),
            ("net.ipv4.conf.eth0/1.forwarding", Some("ipv4/conf/eth0.1/forwarding")),
            ("net.core.somaxconn", Some("core/somaxconn")),
            ("kernel.hostname", None),
            ("net", None),
            ("net.", None),
            ("net..x", None),
            ("net/../kernel/hostname", None),
            ("net.//.kernel", None),
            ("netty.x", None),
            ("net.a b", None),
            ("", None),
        ] {
            assert_eq!(sysctl_path(name).as_deref(), path, "{name}");
        }
    }

    #[test]
    fn bind_with_shared_namespaces_is_refused() {
        let shared = OwnNamespaces { uts: false, net: false };
        let request = BindRequest { hostname: "pod".into(), ..Default::default() };
        assert_eq!(check(shared, &request).unwrap_err().code(), Code::FailedPrecondition);
        let request = BindRequest {
            sysctls: [("net.ipv4.ip_forward".to_owned(), "1".to_owned())].into(),
            ..Default::default()
        };
        assert_eq!(check(shared, &request).unwrap_err().code(), Code::FailedPrecondition);
        check(shared, &BindRequest::default()).unwrap().apply().unwrap();
    }

    #[test]
    fn invalid_bind_is_refused() {
        let own = OwnNamespaces { uts: true, net: true };
        let sysctls = [("kernel.msgmax".to_owned(), "1".to_owned())].into();
        let request = BindRequest { hostname: "pod".into(), sysctls, ..Default::default() };
        let error = check(own, &request).unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains("kernel.msgmax"));
        let request = BindRequest { hostname: "a\nb".into(), ..Default::default() };
        assert_eq!(check(own, &request).unwrap_err().code(), Code::InvalidArgument);
    }

    proptest! {
        #[test]
        fn sysctl_path_stays_below_net(name in "(net)?[./a-c]{0,20}") {
            if let Some(path) = sysctl_path(&name) {
                let plain = |part: &str| !matches!(part, "" | "." | "..");
                prop_assert!(path.split('/').all(plain));
                prop_assert!(!path.starts_with('/'));
            }
        }
    }
}
