//! Conversion of containerd's `registry.mirrors` and `registry.configs` to a directory of
//! `HOST/hosts.toml` files. Pure, except for the caller's function that reads certificates.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use kiyot_linux::tree::beneath;

use super::configured::{Configured, Tls};

/// Host in the names of Docker's images, and the host that serves them (containerd,
/// docker.DefaultHost).
const DOCKER: (&str, &str) = ("docker.io", "registry-1.docker.io");
/// Directory for hosts without a directory of their own, and its name among mirrors.
const DEFAULT_HOST: (&str, &str) = ("_default", "*");

/// Endpoint of a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Endpoint {
    scheme: String,
    host: String,
    path: String,
}

impl Endpoint {
    /// Parses an endpoint as containerd does: https by default, http for the loopback, path `/v2`
    /// by default (addDefaultScheme, registryHosts). Ignores user name and password.
    fn parse(text: &str) -> Option<Self> {
        let (scheme, rest) =
            text.split_once("://").map_or((None, text), |(scheme, rest)| (Some(scheme), rest));
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, rest) = rest.split_at(end);
        let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
        let path = &rest[..rest.find(['?', '#']).unwrap_or(rest.len())];
        let scheme = scheme.unwrap_or_else(|| default_scheme(host));
        let is_host = !host.is_empty()
            && host.chars().all(|c| c.is_ascii_alphanumeric() || ".-_:[]".contains(c));
        let path = if path.is_empty() { "/v2" } else { path };
        let is_url = is_host
            && ["http", "https"].contains(&scheme)
            && path.chars().all(|c| c.is_ascii_graphic());
        is_url.then(|| Self {
            scheme: scheme.to_owned(),
            host: host.to_owned(),
            path: path.to_owned(),
        })
    }

    fn url(&self) -> String {
        format!("{}://{}{}", self.scheme, self.host, self.path)
    }
}

/// Returns whether a host is the loopback: in a cell, that is the cell's own (containerd,
/// isLocalHost).
fn is_loopback(host: &str) -> bool {
    let name = host
        .rsplit_once(':')
        .filter(|(_, port)| !port.contains(']'))
        .map_or(host, |(name, _)| name);
    name == "localhost"
        || name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn default_scheme(host: &str) -> &'static str {
    if is_loopback(host) { "http" } else { "https" }
}

/// Returns the endpoints of a host in order: its mirrors, then the host itself unless it is a
/// mirror (containerd, registryEndpoints). Leaves out endpoints that a cell can't use, and adds
/// them to `problems`.
fn endpoints(
    configured: &Configured,
    host: &str,
    problems: &mut BTreeSet<String>,
) -> Vec<Endpoint> {
    let mut endpoints: Vec<Endpoint> = Vec::new();
    for text in configured.endpoints(host) {
        match Endpoint::parse(text) {
            Some(endpoint) if endpoints.contains(&endpoint) => {}
            Some(endpoint) => endpoints.push(endpoint),
            // The endpoint is not shown, because it may contain a password.
            None => drop(problems.insert(format!(
                "an endpoint of registry.mirrors.{host:?} is not an http or https URL"
            ))),
        }
    }
    if host != DEFAULT_HOST.1 && !endpoints.iter().any(|endpoint| endpoint.host == host) {
        let own = if host == DOCKER.0 { DOCKER.1 } else { host };
        endpoints.extend(
            Endpoint::parse(&format!("{}://{own}", default_scheme(own)))
                .filter(|own| !endpoints.contains(own)),
        );
    }
    endpoints.retain(|endpoint| {
        let reached = !is_loopback(&endpoint.host);
        if !reached && endpoint.host != host {
            problems.insert(format!(
                "the endpoint {} of registry.mirrors.{host:?} is the node's own loopback",
                endpoint.host
            ));
        }
        reached
    });
    endpoints
}

/// Returns the first endpoint of a host that has credentials.
pub(super) fn host_with_auth(configured: &Configured, host: &str) -> Option<String> {
    let endpoints = if configured.config_path.is_empty() {
        endpoints(configured, host, &mut BTreeSet::new())
    } else {
        // Only the files name further endpoints.
        Endpoint::parse(&format!("https://{}", if host == DOCKER.0 { DOCKER.1 } else { host }))
            .into_iter()
            .filter(|own| !is_loopback(&own.host))
            .collect()
    };
    endpoints.into_iter().map(|endpoint| endpoint.host).find(|host| configured.auth(host).is_some())
}

/// Files of the directory, and problems of the configuration.
#[derive(Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Contents by path below the directory. Keys are secret.
    pub(super) files: BTreeMap<PathBuf, Vec<u8>>,
    /// Problems, each as part of a sentence, without secrets.
    pub(super) problems: BTreeSet<String>,
}

/// Converts the configuration. `read` reads a file of the node.
pub(super) fn plan(configured: &Configured, read: &dyn Fn(&Path) -> io::Result<Vec<u8>>) -> Plan {
    let mut plan = Plan::default();
    let mut hosts: BTreeSet<&str> = configured.hosts().into_iter().collect();
    if hosts.contains(DOCKER.1) {
        hosts.insert(DOCKER.0);
    }
    for host in hosts {
        let Some(directory) = directory(host) else {
            plan.problems.insert(format!("registry.mirrors.{host:?} is not a host"));
            continue;
        };
        let mut entries = Vec::new();
        for endpoint in endpoints(configured, host, &mut plan.problems) {
            let number = entries.len();
            match configured
                .tls(&endpoint.host)
                .map(|tls| certificates(tls, number, read))
                .transpose()
            {
                Ok(certificates) => entries.push((endpoint, certificates.unwrap_or_default())),
                Err(problem) => drop(
                    plan.problems
                        .insert(format!("registry.configs.{:?}.tls: {problem}", endpoint.host)),
                ),
            }
        }
        if entries.is_empty() {
            continue;
        }
        plan.files.insert(
            directory.join("hosts.toml"),
            text(&entries, host == DEFAULT_HOST.1).into_bytes(),
        );
        let certificates = entries.into_iter().flat_map(|(_, certificates)| certificates.files);
        plan.files.extend(
            certificates
                .filter_map(|(name, content)| Some((beneath(&directory, name).ok()?, content))),
        );
    }
    plan
}

/// Returns the directory of a host (containerd, hostDirectory).
fn directory(host: &str) -> Option<PathBuf> {
    if host == DEFAULT_HOST.1 {
        return Some(DEFAULT_HOST.0.into());
    }
    let is_name = !host.is_empty()
        && !host.starts_with(['.', '_'])
        && host.chars().all(|c| c.is_ascii_alphanumeric() || ".-_:[]".contains(c));
    let name = host
        .rsplit_once(':')
        .map_or_else(|| host.to_owned(), |(name, port)| format!("{name}_{port}_"));
    is_name.then(|| name.into())
}

/// Certificates of an endpoint: lines of its table, and the files that they name.
#[derive(Default)]
struct Certificates {
    lines: Vec<String>,
    files: Vec<(String, Vec<u8>)>,
}

fn certificates(
    tls: &Tls,
    number: usize,
    read: &dyn Fn(&Path) -> io::Result<Vec<u8>>,
) -> Result<Certificates, String> {
    let (mut lines, mut files) = (Vec::new(), Vec::new());
    let mut take = |path: &Path, what: &str| {
        let name = format!("{number}-{what}.pem");
        let content =
            read(path).map_err(|error| format!("{} can't be read: {error}", path.display()))?;
        files.push((name.clone(), content));
        Ok::<_, String>(name)
    };
    let is_there = |path: &Path| !path.as_os_str().is_empty();
    if is_there(&tls.ca_file) {
        lines.push(format!("ca = [{:?}]", take(&tls.ca_file, "ca")?));
    }
    match (is_there(&tls.cert_file), is_there(&tls.key_file)) {
        (false, false) => {}
        (true, true) => {
            let (certificate, key) = (take(&tls.cert_file, "client")?, take(&tls.key_file, "key")?);
            lines.push(format!("client = [[{certificate:?}, {key:?}]]"));
        }
        _ => return Err("cert_file and key_file are needed together".to_owned()),
    }
    if tls.insecure_skip_verify {
        lines.push("skip_verify = true".to_owned());
    }
    Ok(Certificates { lines, files })
}

/// Returns the text of a hosts.toml. The last endpoint is the server. With `has_no_server`, the
/// server is omitted, because containerd adds it.
fn text(entries: &[(Endpoint, Certificates)], has_no_server: bool) -> String {
    let mut toml = String::from(
        "# Generated from registry.mirrors and registry.configs of the node's containerd.\n",
    );
    let about = |(endpoint, certificates): &(Endpoint, Certificates)| {
        // containerd appends /v2 to any other path.
        let path = (!endpoint.path.ends_with("/v2")).then(|| "override_path = true".to_owned());
        let lines = [r#"capabilities = ["pull", "resolve"]"#.to_owned()]
            .into_iter()
            .chain(path)
            .chain(certificates.lines.iter().cloned());
        lines.map(|line| line + "\n").collect::<String>()
    };
    let (before, last) = if has_no_server {
        (entries, None)
    } else {
        entries.split_last().map_or((entries, None), |(last, before)| (before, Some(last)))
    };
    // Writing to a string cannot fail.
    if let Some(last) = last {
        let _ = write!(toml, "server = {:?}\n{}", last.0.url(), about(last));
    }
    for entry in before {
        let _ = write!(toml, "\n[host.{:?}]\n{}", entry.0.url(), about(entry));
    }
    if before.is_empty() {
        // containerd 1.6 rejects a file without this table.
        toml.push_str("\n[host]\n");
    }
    toml
}

#[cfg(test)]
mod tests;
