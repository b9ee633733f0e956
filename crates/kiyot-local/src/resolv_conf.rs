//! resolv.conf(5).

use std::{fs::File, io::Read, net::IpAddr};

/// The files of the node's name servers, in order of preference. A stub on loopback is no name
/// server for a cell (systemd-resolved(8)).
const FILES: [&str; 2] = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];
/// Bounds the read part of a file, in bytes.
const MAX_FILE_BYTES: u64 = 64 * 1024;
/// Bounds the name servers, as the C library does (`MAXNS`).
const MAX_SERVERS: usize = 3;
/// Bounds the search domains, as Kubernetes does (`MaxDNSSearchPaths`).
const MAX_SEARCHES: usize = 32;
/// Bounds a domain, in bytes.
const MAX_WORD_BYTES: usize = 253;

/// Contents of a resolv.conf.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ResolvConf {
    /// `nameserver`
    pub(crate) servers: Vec<IpAddr>,
    /// `search`, or `domain`
    pub(crate) searches: Vec<String>,
}

impl ResolvConf {
    /// Parses a resolv.conf. Unknown and invalid entries are skipped, as the resolver does.
    pub(crate) fn parse(content: &str) -> Self {
        let mut all = Self::default();
        for line in content.lines() {
            let mut words = line.split_ascii_whitespace();
            let keyword = words.next();
            let mut words = words.filter(|word| word.len() <= MAX_WORD_BYTES).map(str::to_owned);
            match keyword {
                Some("nameserver") => {
                    all.servers.extend(words.next().and_then(|word| word.parse::<IpAddr>().ok()));
                }
                // The last line of these counts.
                Some("search" | "domain") => all.searches = words.take(MAX_SEARCHES).collect(),
                _ => {}
            }
        }
        all.servers.truncate(MAX_SERVERS);
        all
    }

    /// Returns the node's configuration, without name servers on loopback, which no other machine
    /// reaches.
    pub(crate) fn of_node() -> Self {
        let mut found = Self::default();
        for path in FILES {
            let mut content = String::new();
            let read = File::open(path)
                .and_then(|file| file.take(MAX_FILE_BYTES).read_to_string(&mut content));
            if read.is_ok() {
                found = Self::parse(&content).without_loopback();
                if !found.servers.is_empty() {
                    break;
                }
            }
        }
        found
    }

    fn without_loopback(self) -> Self {
        let is_remote = |server: &IpAddr| !server.is_loopback();
        Self { servers: self.servers.into_iter().filter(is_remote).collect(), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_read_and_loopback_servers_can_be_left_out() {
        let text = "# c\nnameserver 127.0.0.53\nnameserver 10.0.0.2\nsearch x\nsearch a.b c\n\
                    nameserver x\noptions ndots:2 edns0\n";
        let all = ResolvConf::parse(text);
        assert_eq!(all.servers.len(), 2);
        assert_eq!(all.searches, ["a.b", "c"]);
        assert_eq!(all.without_loopback().servers, ["10.0.0.2".parse::<IpAddr>().unwrap()]);
    }

    #[test]
    fn lists_and_words_are_bounded() {
        let long = "x".repeat(MAX_WORD_BYTES + 1);
        let many = "a ".repeat(100);
        let servers = "nameserver 10.0.0.1\n".repeat(9);
        let all = ResolvConf::parse(&format!("search {long} {many}\n{servers}"));
        assert_eq!([all.searches.len(), all.servers.len()], [MAX_SEARCHES, MAX_SERVERS]);
    }
}
