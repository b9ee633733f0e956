//! `[metrics]`: the address of metrics and health checks.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use kiyot_values::problems::Table;

/// Default port. Prometheus's list of default ports assigns it to no other exporter.
const PORT: u16 = 9464;
/// Value that disables metrics and health checks.
const OFF: &str = "off";

/// Address of metrics and health checks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metrics {
    /// Address to listen on; `None` serves and counts nothing.
    pub listen: Option<SocketAddr>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self { listen: Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), PORT)) }
    }
}

impl Metrics {
    pub(super) fn read(mut table: Table<'_>) -> Self {
        let mut metrics = Self::default();
        table.set("listen", &mut metrics.listen, |field| {
            field.read("an address and a port, such as \"127.0.0.1:9464\", or \"off\"", |text| {
                if text == OFF { Some(None) } else { text.parse().ok().map(Some) }
            })
        });
        table.finish();
        metrics
    }
}

#[cfg(test)]
mod tests {
    use crate::parse;

    const BACKEND: &str = "[backends.containerd]\ntype = \"cri\"\n";

    /// Verifies O1.
    #[test]
    fn metrics_listen_on_loopback_by_default() {
        let listen = |section: &str| {
            let config = parse("test", &format!("{section}{BACKEND}"), []).unwrap();
            config.metrics.listen.map(|address| address.to_string())
        };
        assert_eq!(listen("").as_deref(), Some("127.0.0.1:9464"));
        assert_eq!(listen("[metrics]\nlisten = \"off\"\n"), None);
        assert_eq!(listen("[metrics]\nlisten = \"[::]:80\"\n").as_deref(), Some("[::]:80"));
        let by_variable = [("KIYOT_METRICS__LISTEN".to_owned(), "127.0.0.1:0".to_owned())];
        let config = parse("test", BACKEND, by_variable).unwrap();
        assert_eq!(config.metrics.listen.map(|address| address.port()), Some(0));
    }

    /// Verifies O1.
    #[test]
    fn address_without_a_port_is_refused_by_key() {
        for value in ["127.0.0.1", "9464", "on", ""] {
            let section = format!("[metrics]\nlisten = \"{value}\"\n{BACKEND}");
            let problems = parse("test", &section, []).unwrap_err().to_string();
            assert!(
                problems.contains(&format!("metrics.listen = {value:?}: is invalid"))
                    && problems.contains("\"127.0.0.1:9464\""),
                "{problems}"
            );
        }
    }
}
