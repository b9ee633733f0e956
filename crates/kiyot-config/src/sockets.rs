//! Checks that sockets differ, so that no call can return to kiyot.

use std::{
    fs,
    path::{Path, PathBuf},
};

use kiyot_values::problems::{Problem, Report};

use super::{BackendConfig, Config};

/// Symbolic links followed at most: the kernel's `MAXSYMLINKS`.
const MOST_LINKS: u32 = 40;

/// Reports sockets with several uses. `real` resolves a path.
pub(super) fn check(config: &Config, real: &dyn Fn(&Path) -> PathBuf, report: &Report) {
    let own = real(&config.server.listen);
    let admin = [real(&config.admin.listen), real(&config.admin.socket())];
    if admin.contains(&own) {
        let rule = "is the socket of server.listen too; allowed: a path of its own";
        report.add(Problem::with_value("admin.listen", describe(&config.admin.listen, &own), rule));
    }
    let mut seen: Vec<(String, PathBuf)> = Vec::new();
    for (name, backend) in &config.backends {
        let (key, socket) = match backend {
            BackendConfig::Cri(cri) => ("socket", &cri.socket),
            // A default that is a runtime's socket is checked with that runtime.
            BackendConfig::Milpa(milpa) if is_runtimes(config, &milpa.node_containerd) => continue,
            BackendConfig::Milpa(milpa) => ("node_containerd", &milpa.node_containerd),
        };
        let (at, leads_to) = (format!("backends.{name}.{key}"), real(socket));
        for (key, path, listens) in [
            ("server", &config.server.listen, std::slice::from_ref(&own)),
            ("admin", &config.admin.listen, &admin),
        ] {
            if listens.contains(&leads_to) {
                report.add(Problem::with_value(
                    format!("{key}.listen"),
                    describe(path, &leads_to),
                    format!("is the socket of {at} too; allowed: a path of its own"),
                ));
            }
        }
        // The containerd that images come from may be a backend too.
        if key == "node_containerd" {
            continue;
        }
        if let Some((twin, _)) = seen.iter().find(|(_, other)| *other == leads_to) {
            report.add(Problem::with_value(
                at,
                describe(socket, &leads_to),
                format!("is the socket of {twin} too; allowed: a socket for each backend"),
            ));
        } else {
            seen.push((format!("backends.{name}"), leads_to));
        }
    }
}

fn is_runtimes(config: &Config, socket: &Path) -> bool {
    config
        .backends
        .values()
        .any(|backend| matches!(backend, BackendConfig::Cri(cri) if cri.socket == socket))
}

/// Returns a path, and its target if that differs.
fn describe(path: &Path, leads_to: &Path) -> String {
    if path == leads_to {
        format!("{path:?}")
    } else {
        format!("{path:?} (which leads to {leads_to:?})")
    }
}

/// Resolves symbolic links of a path, existing or not.
pub(super) fn real(path: &Path) -> PathBuf {
    follow(path, MOST_LINKS)
}

fn follow(path: &Path, links: u32) -> PathBuf {
    if let Ok(real) = fs::canonicalize(path) {
        return real;
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return path.into() };
    match fs::read_link(path) {
        // An absolute target replaces the parent.
        Ok(target) if links > 0 => follow(&parent.join(target), links - 1),
        _ => follow(parent, links).join(name),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_to_absent_files_are_resolved() {
        let dir = tempfile::tempdir().unwrap();
        let top = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir(top.join("run")).unwrap();
        symlink("run", top.join("var-run")).unwrap();
        symlink(top.join("var-run/kiyot/cri.sock"), top.join("alias.sock")).unwrap();
        symlink("loop", top.join("loop")).unwrap();
        let expected = top.join("run/kiyot/cri.sock");
        for path in ["run/kiyot/cri.sock", "var-run/kiyot/cri.sock", "alias.sock"] {
            assert_eq!(real(&top.join(path)), expected, "{path}");
        }
        fs::create_dir(top.join("run/kiyot")).unwrap();
        fs::write(&expected, "").unwrap();
        assert_eq!(real(&top.join("alias.sock")), expected);
        assert_eq!(real(&top.join("loop")), top.join("loop"));
        assert_eq!(real(Path::new("/")), Path::new("/"));
    }
}
