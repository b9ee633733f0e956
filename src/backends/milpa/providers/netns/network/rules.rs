//! Rules of the node's firewall that are ours: each in a chain of our own, so that they can be
//! taken away whatever became of them.

use std::{io, net::IpAddr, path::Path};

use super::super::command::{CommandError, succeed};

/// How long `iptables` waits for others that change rules, in seconds.
const TABLES_WAIT: &str = "10";
/// The exit code of `iptables` when others hold the lock for longer than that, or the kernel has no
/// memory (`RESOURCE_PROBLEM` of xtables.h).
const RESOURCE_PROBLEM: i32 = 4;
/// What it says with the same code where the kernel has no such tables at all (iptables, nft.c).
const NO_TABLES: &str = "Could not fetch rule set generation id";

/// Whose tables: each family of addresses has its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    V4,
    V6,
}

impl Family {
    pub(super) const ALL: [Self; 2] = [Self::V4, Self::V6];

    pub(super) const fn of(address: &IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    const fn program(self) -> &'static str {
        match self {
            Self::V4 => "iptables",
            Self::V6 => "ip6tables",
        }
    }
}

/// A chain of our own in a table, and the jumps to it.
#[derive(Debug)]
pub(super) struct Rules {
    pub(super) family: Family,
    pub(super) table: &'static str,
    pub(super) chain: String,
    /// Each begins with the chain that it is in.
    pub(super) jumps: Vec<Vec<String>>,
    /// Each begins with `chain`.
    pub(super) content: Vec<Vec<String>>,
}

impl Rules {
    /// Makes what is missing of them.
    pub(super) async fn add(&self, dir: Option<&Path>) -> Result<(), CommandError> {
        if !self.is_there(dir).await? {
            self.tables("-N", std::slice::from_ref(&self.chain), dir).await?;
        }
        for rule in self.content.iter().chain(&self.jumps) {
            if !self.has("-C", rule, dir).await? {
                self.tables("-A", rule, dir).await?;
            }
        }
        Ok(())
    }

    /// Takes them away, whatever is in the chain. What is not there is fine.
    pub(super) async fn remove(&self, dir: Option<&Path>) -> Result<(), CommandError> {
        if !self.is_there(dir).await? {
            return Ok(());
        }
        for jump in &self.jumps {
            if self.has("-C", jump, dir).await? {
                self.tables("-D", jump, dir).await?;
            }
        }
        self.tables("-F", std::slice::from_ref(&self.chain), dir).await?;
        self.tables("-X", std::slice::from_ref(&self.chain), dir).await
    }

    async fn is_there(&self, dir: Option<&Path>) -> Result<bool, CommandError> {
        self.has("-n", &["-L".to_owned(), self.chain.clone()], dir).await
    }

    /// Whether there is what a command that only looks is asked for. Who can't look must not go on:
    /// rules that are taken for gone would lead a port of the node to whoever gets the address
    /// next.
    async fn has(
        &self,
        command: &str,
        rule: &[String],
        dir: Option<&Path>,
    ) -> Result<bool, CommandError> {
        match self.tables(command, rule, dir).await {
            Ok(()) => Ok(true),
            Err(error) if says_no(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn tables(
        &self,
        command: &str,
        rule: &[String],
        dir: Option<&Path>,
    ) -> Result<(), CommandError> {
        let mut arguments = vec!["-w", TABLES_WAIT, "-t", self.table, command];
        arguments.extend(rule.iter().map(String::as_str));
        succeed(self.family.program(), &arguments, dir).await
    }
}

/// Whether a program that was to look says that nothing is there. It has not looked if it was
/// killed or could not be started, or if others held the lock.
fn says_no(error: &CommandError) -> bool {
    match error {
        CommandError::Refused { status, said, .. } => match status.code() {
            Some(RESOURCE_PROBLEM) => said.contains(NO_TABLES),
            code => code.is_some(),
        },
        // Without the program there is no rule that it made.
        CommandError::Io { source, .. } => source.kind() == io::ErrorKind::NotFound,
        CommandError::Cgroup { .. }
        | CommandError::Word(_)
        | CommandError::Deadline { .. }
        | CommandError::Output { .. } => false,
    }
}

/// The words of a rule.
pub(super) fn words(text: &str) -> Vec<String> {
    text.split(' ').map(ToOwned::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn failure(script: &str) -> CommandError {
        succeed("/bin/sh", &["-c", script], None).await.unwrap_err()
    }

    #[tokio::test]
    async fn only_a_no_is_a_no() {
        for no in [
            "echo 'iptables: No chain/target/match by that name.' >&2; exit 1",
            "echo 'iptables: Bad rule (does a matching rule exist in that chain?).' >&2; exit 1",
            "echo 'iptables v1.8.9 (legacy): Couldn'\\''t load target `KIYOT-HP-x'\\'':No such file or directory' >&2; exit 2",
            "echo 'ip6tables v1.8.9 (legacy): can'\\''t initialize ip6tables table `nat'\\'': Table does not exist' >&2; exit 3",
            "echo 'iptables v1.8.9 (nf_tables): Could not fetch rule set generation id: Invalid argument' >&2; exit 4",
        ] {
            assert!(says_no(&failure(no).await), "{no}");
        }
        for unknown in [
            "echo 'Another app is currently holding the xtables lock. Perhaps you want to use the -w option?' >&2; exit 4",
            "echo 'iptables v1.8.9 (nf_tables):  RULE_CHECK failed (Resource temporarily unavailable): rule in chain OUTPUT' >&2; exit 4",
            "kill -KILL $$",
        ] {
            assert!(!says_no(&failure(unknown).await), "{unknown}");
        }
        let io = |kind: io::ErrorKind| CommandError::Io {
            program: "iptables".to_owned(),
            source: kind.into(),
        };
        assert!(says_no(&io(io::ErrorKind::NotFound)), "without the program there are no rules");
        assert!(!says_no(&io(io::ErrorKind::OutOfMemory)));
        assert!(!says_no(&CommandError::Deadline { program: "iptables".to_owned(), seconds: 30 }));
    }
}
