//! Providers of a backend, which a reload adds and removes.
//!
//! A running provider keeps its table until a restart. An added provider starts with the running
//! values of all keys that need a restart.

use kiyot_values::problems::{Problem, Report};

use super::Change;
use crate::{BackendConfig, Config, MilpaBackend, ProviderKind, checks};

impl MilpaBackend {
    /// Returns whether a provider runs: it is configured, or drains.
    pub fn runs(&self, provider: ProviderKind) -> bool {
        self.has(provider) || self.draining.contains(&provider)
    }

    /// Takes the providers of a new configuration, with the tables of providers that don't run.
    pub(super) fn take_providers(&mut self, new: &Self) {
        for provider in &new.providers {
            match provider {
                running if self.runs(*running) => {}
                ProviderKind::Netns => self.netns.clone_from(&new.netns),
                ProviderKind::Qemu => self.qemu.clone_from(&new.qemu),
                ProviderKind::Ec2 => self.ec2.clone_from(&new.ec2),
            }
        }
        self.providers.clone_from(&new.providers);
        (self.launch_timeout, self.token_ttl) = (new.launch_timeout, new.token_ttl);
    }
}

/// Adds the changed tables of providers that are configured now.
pub(super) fn compare_tables(
    old: &MilpaBackend,
    new: &MilpaBackend,
    at: &str,
    live: &mut Vec<Change>,
    restart: &mut Vec<Change>,
) {
    for provider in &new.providers {
        let what = match provider {
            ProviderKind::Netns if old.netns != new.netns => {
                format!("{:?} -> {:?}", old.netns, new.netns)
            }
            ProviderKind::Qemu if old.qemu != new.qemu => {
                format!("{:?} -> {:?}", old.qemu, new.qemu)
            }
            ProviderKind::Ec2 if old.ec2 != new.ec2 => format!("{:?} -> {:?}", old.ec2, new.ec2),
            _ => continue,
        };
        let changes = if old.runs(*provider) { &mut *restart } else { &mut *live };
        changes.push(Change { at: format!("{at}.{}", provider.name()), what });
    }
}

/// Reports changed providers that need a restart.
pub(super) fn check(old: &Config, reloaded: &Config, report: &Report) {
    for (name, backend) in &reloaded.backends {
        if let (Some(BackendConfig::Milpa(old)), BackendConfig::Milpa(new)) =
            (old.backends.get(name), backend)
            && old.providers != new.providers
        {
            check_local(name, old, new, report);
            check_keys(reloaded, name, new, report);
        }
    }
}

/// Reports an added provider of cells on the node if another such provider runs.
fn check_local(name: &str, old: &MilpaBackend, new: &MilpaBackend, report: &Report) {
    let is_local = |provider: &&ProviderKind| !provider.has_remote_cells();
    let mut running = old.providers.iter().chain(&old.draining).filter(is_local);
    let mut added = new.providers.iter().filter(is_local).filter(|it| !old.runs(**it));
    if let (Some(running), Some(added)) = (running.next(), added.next()) {
        let rule = format!(
            "can't be added while {0:?} runs, because both use the same state directory and \
             network; allowed: a reload that removes {0:?}, then, once it has no cells, a reload \
             that adds this provider; or a restart",
            running.name()
        );
        let value = format!("{:?}", added.name());
        report.add(Problem::with_value(format!("backends.{name}.providers"), value, rule));
    }
}

/// Reports keys that the providers need and whose new values take effect only at a restart.
fn check_keys(reloaded: &Config, name: &str, new: &MilpaBackend, report: &Report) {
    let running = Report::default();
    checks::check_providers(reloaded, name, new, &running);
    for problem in running.finish(name, ()).err().into_iter().flat_map(|problems| problems.list) {
        let rule = format!(
            "{}. The running daemon lacks this key or has an earlier value. The file's value takes \
             effect at a restart, and the providers can change only then",
            problem.rule
        );
        report.add(Problem { rule, ..problem });
    }
}

#[cfg(test)]
mod tests {
    use kiyot_values::problems::Problems;

    use super::*;
    use crate::{Diff, parse};

    const GATEWAY: &str = "cluster = \"c\"\ngateway = { listen = \"10.0.0.5:7700\" }\n";
    const EC2: &str = "[backends.milpa.ec2]\nregion = \"eu-west-1\"\nsecurity_groups = [\"sg-1\"]\n\
                       image = { id = \"ami-1\" }\n";

    fn config(keys: &str) -> Config {
        let text = format!(
            "[backends.containerd]\ntype = \"cri\"\n[backends.milpa]\ntype = \"milpa\"\n{keys}"
        );
        parse("test", &text, []).unwrap()
    }

    fn with(providers: &str, keys: &str) -> Config {
        config(&format!("providers = [{providers}]\n{GATEWAY}{keys}"))
    }

    fn milpa(config: &mut Config) -> &mut MilpaBackend {
        match config.backends.get_mut("milpa") {
            Some(BackendConfig::Milpa(milpa)) => milpa,
            _ => unreachable!("the configuration has it"),
        }
    }

    fn listed(changes: &[Change]) -> Vec<&str> {
        changes.iter().map(|change| change.at.as_str()).collect()
    }

    fn refused(reloaded: Result<Config, Problems>) -> String {
        reloaded.unwrap_err().to_string()
    }

    /// Verifies R4, A41.
    #[test]
    fn added_provider_comes_with_its_table_and_a_running_one_keeps_its_own() {
        let old = with("\"netns\"", "");
        let netns = "[backends.milpa.netns]\nreserve_cpu = 2\n";
        let new = with("\"ec2\", \"netns\"", &format!("{EC2}{netns}"));
        let diff = Diff::between(&old, &new);
        assert_eq!(
            listed(&diff.live),
            ["providers", "launch_timeout", "token_ttl", "ec2"]
                .map(|key| format!("backends.milpa.{key}"))
        );
        assert_eq!(listed(&diff.restart), ["backends.milpa.netns"]);
        let mut reloaded = old.reloaded(&new, "test").unwrap();
        assert_eq!(Diff::between(&reloaded, &new).live, []);
        assert_eq!(milpa(&mut reloaded).ec2.region, "eu-west-1");
        assert_eq!(milpa(&mut reloaded).netns, milpa(&mut old.clone()).netns);
        // A removed provider keeps its table while it drains; the file's table has no effect.
        let mut removed = reloaded.reloaded(&old, "test").unwrap();
        assert_eq!(milpa(&mut removed).providers, [ProviderKind::Netns]);
        assert_eq!(Diff::between(&removed, &old), Diff::default());
        let other = with("\"netns\", \"ec2\"", &EC2.replace("west", "south"));
        for (draining, region) in [(vec![ProviderKind::Ec2], "west"), (vec![], "south")] {
            milpa(&mut removed).draining = draining;
            let diff = Diff::between(&removed, &other);
            let named = if region == "west" { diff.restart } else { diff.live };
            assert!(listed(&named).contains(&"backends.milpa.ec2"), "{named:?}");
            let mut again = removed.reloaded(&other, "test").unwrap();
            assert_eq!(milpa(&mut again).ec2.region, format!("eu-{region}-1"));
        }
    }

    /// Verifies A41.
    #[test]
    fn added_provider_whose_key_needs_a_restart_fails_the_reload() {
        let old = config("");
        let problems = refused(old.reloaded(&with("\"netns\", \"ec2\"", EC2), "test"));
        for key in ["gateway.listen: is missing", "cluster: is missing"] {
            assert!(problems.contains(&format!("backends.milpa.{key}")), "{problems}");
        }
        assert!(problems.contains("takes effect at a restart"), "{problems}");
        // Without a change of the providers these keys are not required.
        assert_eq!(old.reloaded(&with("\"netns\"", ""), "test"), Ok(old.clone()));
    }

    /// Verifies A41.
    #[test]
    fn local_provider_is_replaced_once_the_first_has_left() {
        let (old, new) = (with("\"netns\", \"ec2\"", EC2), with("\"qemu\", \"ec2\"", EC2));
        let problem = "backends.milpa.providers = \"qemu\": can't be added while \"netns\" runs";
        assert!(refused(old.reloaded(&new, "test")).contains(problem));
        let mut between = old.reloaded(&with("\"ec2\"", EC2), "test").unwrap();
        milpa(&mut between).draining = vec![ProviderKind::Netns];
        assert!(refused(between.reloaded(&new, "test")).contains(problem));
        milpa(&mut between).draining.clear();
        assert!(between.reloaded(&new, "test").is_ok());
    }
}
