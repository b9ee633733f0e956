//! Summary of a configuration.

use std::{fmt::Write, path::Path};

use kiyot_config::{BackendConfig, Config, ProviderKind};
use kiyot_proto::text::counted;

use crate::backends::milpa::{live_check::NoLiveCheck, policy::Rules};

/// Summarises a configuration in a few lines.
pub(super) fn of(path: &Path, config: &Config) -> String {
    let mut text = format!("{} is valid\n", path.display());
    // Writing to a String does not fail.
    let _ = writeln!(text, "  listens on {}", config.server.listen.display());
    for (name, backend) in &config.backends {
        let _ = match backend {
            BackendConfig::Cri(cri) => {
                let role = if config.server.node_backend.as_ref() == Some(name) {
                    ", answers for the node"
                } else {
                    ""
                };
                writeln!(
                    text,
                    "  backend {name}: the container runtime at {}{role}",
                    cri.socket.display()
                )
            }
            BackendConfig::Milpa(milpa) => {
                let rules = Rules::of(milpa);
                let notes: String = rules
                    .iter()
                    .flat_map(Rules::unmet)
                    .chain(milpa.gateway.warning())
                    .chain(milpa.has(ProviderKind::Ec2).then(|| milpa.ec2.warning()).flatten())
                    .chain(
                        (milpa.has(ProviderKind::Ec2) && !cfg!(feature = "ec2"))
                            .then(|| NoLiveCheck::NoEc2.to_string()),
                    )
                    .map(|unmet| format!("\n  note: backend {name}: {unmet}"))
                    .collect();
                writeln!(
                    text,
                    "  backend {name}: up to {}, state in {}{notes}",
                    counted(milpa.max_cells, "cell", "cells"),
                    milpa.state_dir.display()
                )
            }
        };
    }
    for rule in &config.routing.rules {
        let providers: Vec<_> = rule.providers.iter().map(|it| it.name()).collect();
        let cells = if providers.is_empty() {
            String::new()
        } else {
            format!(", in cells of {}", providers.join(" or "))
        };
        let _ = writeln!(text, "  rule {}: to {}{cells}", rule.name, rule.backend);
    }
    let _ = writeln!(text, "  other pods: to {}", config.routing.default);
    text
}
