//! Rules of the node's firewall that are ours: each in a chain of our own, so that they can be taken away whatever became of them.

use std::{net::IpAddr, path::Path};

use super::super::command::{CommandError, succeed};

/// How long `iptables` waits for others that change rules, in seconds.
const TABLES_WAIT: &str = "10";

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
        if !self.is_there(dir).await {
            self.tables("-N", std::slice::from_ref(&self.chain), dir).await?;
        }
        for rule in self.content.iter().chain(&self.jumps) {
            if self.tables("-C", rule, dir).await.is_err() {
                self.tables("-A", rule, dir).await?;
            }
        }
        Ok(())
    }

    /// Takes them away, whatever is in the chain. What is not there is fine.
    pub(super) async fn remove(&self, dir: Option<&Path>) -> Result<(), CommandError> {
        if !self.is_there(dir).await {
            return Ok(());
        }
        for jump in &self.jumps {
            if self.tables("-C", jump, dir).await.is_ok() {
                self.tables("-D", jump, dir).await?;
            }
        }
        self.tables("-F", std::slice::from_ref(&self.chain), dir).await?;
        self.tables("-X", std::slice::from_ref(&self.chain), dir).await
    }

    async fn is_there(&self, dir: Option<&Path>) -> bool {
        self.tables("-n", &["-L".to_owned(), self.chain.clone()], dir).await.is_ok()
    }

    async fn tables(&self, command: &str, rule: &[String], dir: Option<&Path>) -> Result<(), CommandError> {
        let mut arguments = vec!["-w", TABLES_WAIT, "-t", self.table, command];
        arguments.extend(rule.iter().map(String::as_str));
        succeed(self.family.program(), &arguments, dir).await
    }
}

/// The words of a rule.
pub(super) fn words(text: &str) -> Vec<String> {
    text.split(' ').map(ToOwned::to_owned).collect()
}
