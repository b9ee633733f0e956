//! Differences between two configurations: applied at a reload, or at a restart.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use kiyot_values::problems::{Problem, Problems, Report};

use super::{
    Admin, BackendConfig, Config, CriBackend, GatewayListen, Kubernetes, Limits, Metrics,
    MilpaBackend, Policy, Routing, Rule, Server,
};

mod providers;

/// Changed key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Path of keys.
    pub at: String,
    /// Previous and new value.
    pub what: String,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.at, self.what)
    }
}

/// Changes between the running configuration and a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Diff {
    /// Changes that a reload applies.
    pub live: Vec<Change>,
    /// Changes that need a restart.
    pub restart: Vec<Change>,
}

/// Adds the changed fields of a struct. The struct is destructured, so that a new field doesn't
/// compile without its line here.
macro_rules! fields {
    ($old:expr, $new:expr, $at:expr, $kind:ident { $($field:ident => $list:expr),* $(,)? }) => {{
        let ($kind { $($field: _),* }, at) = ($old, $at);
        $(if $old.$field != $new.$field {
            $list.push(Change {
                at: format!("{at}.{}", stringify!($field)),
                what: format!("{:?} -> {:?}", $old.$field, $new.$field),
            });
        })*
    }};
}

impl Diff {
    /// Compares the running configuration with a new one.
    pub fn between(old: &Config, new: &Config) -> Self {
        let Self { mut live, mut restart } = Self::default();
        fields!(&old.server, &new.server, "server", Server {
            listen => restart,
            drain_timeout => live,
            client_timeout => live,
            max_concurrent_calls => live,
            node_backend => restart,
        });
        fields!(&old.metrics, &new.metrics, "metrics", Metrics { listen => restart });
        fields!(&old.admin, &new.admin, "admin", Admin { listen => restart, group => restart });
        fields!(&old.kubernetes, &new.kubernetes, "kubernetes", Kubernetes {
            kubeconfig => restart,
            cells => restart,
            events => restart,
            requests => restart,
            budgets => restart,
            capacity => restart,
        });
        for name in old.backends.keys().chain(new.backends.keys()).collect::<BTreeSet<_>>() {
            let at = format!("backends.{name}");
            match (old.backends.get(name), new.backends.get(name)) {
                (Some(BackendConfig::Cri(old)), Some(BackendConfig::Cri(new))) => {
                    fields!(old, new, &at, CriBackend {
                        socket => restart,
                        connect_timeout => restart,
                    });
                }
                (Some(BackendConfig::Milpa(old)), Some(BackendConfig::Milpa(new))) => {
                    fields!(&**old, &**new, &at, MilpaBackend {
                        max_cells => live,
                        healthy_timeout => live,
                        ephemeral_storage_limit => restart,
                        state_dir => restart,
                        providers => live,
                        draining => Vec::new(),
                        cluster => restart,
                        node => restart,
                        orphan_timeout => restart,
                        launch_timeout => live,
                        token_ttl => live,
                        image_pull_progress_timeout => restart,
                        image_source => restart,
                        image_bytes_per_second => restart,
                        node_containerd => restart,
                        node_namespace => restart,
                        pause_image => restart,
                        registry_config_dir => restart,
                        kubelet_dir => restart,
                        policy => Vec::new(),
                        placement => restart,
                        warm => live,
                        limits => Vec::new(),
                        gateway => Vec::new(),
                        netns => Vec::new(),
                        qemu => Vec::new(),
                        ec2 => Vec::new(),
                    });
                    providers::compare_tables(old, new, &at, &mut live, &mut restart);
                    fields!(&old.limits, &new.limits, format!("{at}.limits"), Limits {
                        boots => live,
                        price_per_hour => live,
                        namespace_price_per_hour => live,
                    });
                    fields!(&old.gateway, &new.gateway, format!("{at}.gateway"), GatewayListen {
                        listen => restart,
                        advertise => restart,
                        max_unauthenticated_per_peer => restart,
                        ipv6_peer_bits => restart,
                        agent => restart,
                    });
                    fields!(&old.policy, &new.policy, format!("{at}.policy"), Policy {
                        host_path => live,
                        host_network => live,
                        host_pid => live,
                        host_ipc => live,
                        host_users => live,
                        privileged => live,
                        node_resolver => live,
                    });
                }
                (Some(_), Some(_)) => restart.push(Change { at, what: "type changed".into() }),
                (Some(_), None) => restart.push(Change { at, what: "removed".into() }),
                (None, _) => restart.push(Change { at, what: "added".into() }),
            }
        }
        routing(&old.routing, &new.routing, &mut live);
        Self { live, restart }
    }
}

fn routing(old: &Routing, new: &Routing, live: &mut Vec<Change>) {
    fields!(old, new, "routing", Routing { default => live, rules => Vec::new() });
    let by_name = |routing: &Routing| {
        routing
            .rules
            .iter()
            .map(|rule| (rule.name.clone(), rule.clone()))
            .collect::<BTreeMap<String, Rule>>()
    };
    let (was, is) = (by_name(old), by_name(new));
    for rule in &new.rules {
        let at = format!("routing.rule {:?}", rule.name);
        match was.get(&rule.name) {
            None => live.push(Change { at, what: format!("added: {rule:?}") }),
            Some(before) if before != rule => {
                live.push(Change { at, what: format!("{before:?} -> {rule:?}") })
            }
            Some(_) => {}
        }
    }
    for rule in old.rules.iter().filter(|rule| !is.contains_key(&rule.name)) {
        live.push(Change { at: format!("routing.rule {:?}", rule.name), what: "removed".into() });
    }
    let kept = |rules: &[Rule], of: &BTreeMap<String, Rule>| {
        rules.iter().map(|rule| rule.name.clone()).filter(|name| of.contains_key(name)).collect()
    };
    let (before, after): (Vec<_>, Vec<_>) = (kept(&old.rules, &is), kept(&new.rules, &was));
    if before != after {
        live.push(Change {
            at: "routing.rule".into(),
            what: format!("order {before:?} -> {after:?}"),
        });
    }
}

impl Config {
    /// Returns this configuration with the changes of `new` that a reload applies. Fails if the new
    /// rules name a backend that does not run, or if a provider can't be added without a restart.
    pub fn reloaded(&self, new: &Self, name: &str) -> Result<Self, Problems> {
        let report = Report::default();
        let runs = |backend: &String| match (self.backends.get(backend), new.backends.get(backend))
        {
            (Some(old), Some(new)) => std::mem::discriminant(old) == std::mem::discriminant(new),
            _ => false,
        };
        let targets = new
            .routing
            .rules
            .iter()
            .map(|rule| (format!("routing.rule {:?}.backend", rule.name), &rule.backend));
        for (at, backend) in targets
            .chain([("routing.default".to_owned(), &new.routing.default)])
            .filter(|(_, backend)| !runs(backend))
        {
            report.add(Problem::with_value(
                at,
                format!("{backend:?}"),
                "no backend of this name and type runs now; a restart would start it",
            ));
        }
        let mut config = self.clone();
        config.routing.clone_from(&new.routing);
        config.server = Server {
            listen: self.server.listen.clone(),
            node_backend: self.server.node_backend.clone(),
            ..new.server.clone()
        };
        for (name, backend) in &mut config.backends {
            if let (BackendConfig::Milpa(old), Some(BackendConfig::Milpa(new))) =
                (backend, new.backends.get(name))
            {
                old.max_cells = new.max_cells;
                old.limits = new.limits;
                old.warm.clone_from(&new.warm);
                old.healthy_timeout = new.healthy_timeout;
                old.policy = new.policy;
                old.take_providers(new);
            }
        }
        providers::check(self, &config, &report);
        report.finish(name, config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse;

    const BACKENDS: &str =
        "[backends.containerd]\ntype = \"cri\"\n[backends.milpa]\ntype = \"milpa\"\n";

    fn config(text: &str) -> Config {
        parse("test", &format!("{text}{BACKENDS}"), []).unwrap()
    }

    fn rules(names: &[(&str, &str)]) -> String {
        let rule = |(name, backend): &(&str, &str)| {
            format!(
                "[[routing.rule]]\nname = \"{name}\"\nnamespace = [\"{name}\"]\nbackend = \
                 \"{backend}\"\n"
            )
        };
        names.iter().map(rule).collect()
    }

    fn listed(changes: &[Change]) -> Vec<&str> {
        changes.iter().map(|change| change.at.as_str()).collect()
    }

    #[test]
    fn configuration_does_not_differ_from_itself() {
        let config = config(&rules(&[("a", "milpa")]));
        assert_eq!(Diff::between(&config, &config), Diff::default());
    }

    /// Verifies R4.
    #[test]
    fn rules_and_limits_change_at_once_and_other_keys_need_a_restart() {
        let old = config(&rules(&[("a", "milpa"), ("b", "milpa"), ("c", "milpa"), ("d", "milpa")]));
        let new = parse(
            "test",
            &format!(
                "[server]\nlisten = \"/run/other.sock\"\nclient_timeout = \"5s\"\n\
                 max_concurrent_calls = 7\n\
                 [backends.containerd]\ntype = \"cri\"\nsocket = \"/run/elsewhere.sock\"\n\
                 [backends.milpa]\ntype = \"milpa\"\nmax_cells = 3\n\
                 healthy_timeout = \"0s\"\nstate_dir = \"/srv/kiyot\"\n\
                 [routing]\ndefault = \"milpa\"\n{}",
                rules(&[("b", "containerd"), ("d", "milpa"), ("c", "milpa"), ("e", "milpa")])
            ),
            [],
        )
        .unwrap();
        let diff = Diff::between(&old, &new);
        assert_eq!(
            listed(&diff.live),
            [
                "server.client_timeout",
                "server.max_concurrent_calls",
                "backends.milpa.max_cells",
                "backends.milpa.healthy_timeout",
                "routing.default",
                "routing.rule \"b\"",
                "routing.rule \"e\"",
                "routing.rule \"a\"",
                "routing.rule",
            ]
        );
        assert_eq!(diff.live[0].to_string(), "server.client_timeout: 30s -> 5s");
        assert_eq!(
            listed(&diff.restart),
            [
                "server.listen",
                // By default it is beside `server.listen`.
                "admin.listen",
                "backends.containerd.socket",
                "backends.milpa.state_dir",
                "backends.milpa.node_containerd"
            ]
        );
        let reloaded = old.reloaded(&new, "test").unwrap();
        assert_eq!(reloaded.routing, new.routing);
        assert_eq!(
            (reloaded.server.max_concurrent_calls, &reloaded.server.listen),
            (7, &old.server.listen)
        );
        // The other changes need a restart, and are reported again at the next reload.
        assert_eq!(Diff::between(&reloaded, &new), Diff { live: vec![], restart: diff.restart });
    }

    /// Verifies R4.
    #[test]
    fn other_node_backend_needs_a_restart() {
        let of = |backend: &str| {
            config(&format!(
                "[routing]\ndefault = \"containerd\"\n[server]\nnode_backend = {backend:?}\n\
                 [backends.second]\ntype = \"cri\"\nsocket = \"/run/second.sock\"\n"
            ))
        };
        let (old, new) = (of("containerd"), of("second"));
        let reloaded = old.reloaded(&new, "test");
        assert_eq!(reloaded.as_ref(), Ok(&old));
        let restart = Diff::between(&old, &new).restart;
        assert_eq!(listed(&restart), ["server.node_backend", "backends.milpa.node_containerd"]);
    }

    /// Verifies R4.
    #[test]
    fn every_changed_key_of_the_policy_is_named() {
        let new = config(
            &format!(
                "{BACKENDS}[backends.milpa.policy]\nhost_pid = \"cell\"\n\
                                   privileged = \"keep-local\"\n"
            )
            .replace(BACKENDS, ""),
        );
        let diff = Diff::between(&config(""), &new);
        let listed: Vec<String> = diff.live.iter().map(ToString::to_string).collect();
        assert_eq!(
            listed,
            [
                "backends.milpa.policy.host_pid: Refuse -> Cell",
                "backends.milpa.policy.privileged: Refuse -> KeepLocal"
            ]
        );
        assert_eq!(diff.restart, []);
        assert_eq!(config("").reloaded(&new, "test"), Ok(new));
    }

    #[test]
    fn rule_to_an_absent_backend_fails_the_reload() {
        let old = config("");
        let more = format!(
            "[server]\nnode_backend = \"containerd\"\n[backends.second]\ntype = \"cri\"\nsocket = \
             \"/run/second.sock\"\n{}",
            rules(&[("a", "second")])
        );
        let new = config(&more);
        assert_eq!(listed(&Diff::between(&old, &new).restart), ["backends.second"]);
        let problems = old.reloaded(&new, "test").unwrap_err().to_string();
        assert!(
            problems.contains(
                "routing.rule \"a\".backend = \"second\": no backend of this name and type runs now"
            ),
            "{problems}"
        );
    }
}
