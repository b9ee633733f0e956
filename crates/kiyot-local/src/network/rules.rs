//! Firewall rules of cells, in chains of our own, so that they can be removed in any state.
//!
//! `iptables` only reads. Each change is a transaction of `iptables-restore`, which reads the rules
//! from its input: a single process changes all of them or nothing.

use std::{ffi::OsStr, io, net::IpAddr, path::Path};

use crate::command::{CommandError, output_of, run, succeed};

/// The time for which `iptables` waits for its lock, in seconds.
const TABLES_WAIT: &str = "10";
/// The exit code of `iptables` and `iptables-restore` if the kernel refuses a command
/// (`OTHER_PROBLEM` of xtables.h).
const OTHER_PROBLEM: i32 = 1;
/// The answers of `iptables` that mean absence, each an exit code and a part of the message. The
/// code alone has other meanings, too: 1 an exhausted kernel, 2 a wrong command line, 3 a lack of
/// rights, 4 a lock timeout. iptables does not translate its messages.
const ABSENT: [(i32, &str); 8] = [
    (OTHER_PROBLEM, "No chain/target/match by that name"),
    (OTHER_PROBLEM, "does a matching rule exist in that chain"),
    // iptables-nft for an absent chain, up to 1.8.9 and in 1.8.10. If it names no chain, the first
    // message means an unreadable table.
    (OTHER_PROBLEM, "' in table `"),
    (OTHER_PROBLEM, "Incompatible with this kernel"),
    // A kernel without netfilter's netlink, without a table, without IPv6, or without nf_tables.
    (OTHER_PROBLEM, "Failed to initialize nft: Protocol not supported"),
    (3, "do you need to insmod?"),
    (3, "Address family not supported by protocol"),
    (4, "Could not fetch rule set generation id: Invalid argument"),
];

/// The line number of the first command in a transaction, after the line of the table.
const FIRST_LINE: usize = 2;
/// Bounds an argument of a rule, in bytes. A chain name, or an address with a port, is far shorter.
const MAX_WORD_BYTES: usize = 128;

/// An error of reading or changing rules.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RuleError {
    /// The rules could not be read, or the program was interrupted.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The kernel or the program refused a line. Nothing was changed.
    #[error("{error}, at {line:?}")]
    Refused { line: String, error: CommandError },
    /// An argument could be split. Nothing was changed.
    #[error(
        "argument of a firewall rule {0:?}: allowed are at most {MAX_WORD_BYTES} letters, digits \
         and -_.:,/!@[]"
    )]
    Word(String),
}

/// An address family, each with its own tables.
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

    const fn restore_program(self) -> &'static str {
        match self {
            Self::V4 => "iptables-restore",
            Self::V6 => "ip6tables-restore",
        }
    }
}

/// Chains of a table, with the jumps to them.
#[derive(Debug)]
pub(super) struct Rules {
    pub(super) family: Family,
    pub(super) table: &'static str,
    pub(super) chains: Vec<Chain>,
}

/// A chain of a cell or of the bridge.
#[derive(Debug)]
pub(super) struct Chain {
    pub(super) name: String,
    /// The jumps to the chain. Each starts with the chain that contains it.
    pub(super) jumps: Vec<Vec<String>>,
    /// The rules. Each starts with the chain's name.
    pub(super) content: Vec<Vec<String>>,
}

impl Rules {
    /// Creates all chains in one transaction. Fails without a change if a chain exists.
    pub(super) async fn create(&self, dir: Option<&Path>) -> Result<(), RuleError> {
        self.creation()?.commit(dir).await
    }

    fn creation(&self) -> Result<Transaction, RuleError> {
        let mut transaction = Transaction::new(self.family, self.table);
        for chain in &self.chains {
            transaction.push("-N", std::slice::from_ref(&chain.name))?;
            for rule in chain.content.iter().chain(&chain.jumps) {
                transaction.push("-A", rule)?;
            }
        }
        Ok(transaction)
    }

    /// Returns whether all chains exist, each with its first jump.
    pub(super) async fn are_present(&self, dir: Option<&Path>) -> Result<bool, RuleError> {
        for chain in &self.chains {
            if !self.has_chain(chain, dir).await? {
                return Ok(false);
            }
            if let Some(jump) = chain.jumps.first()
                && !self.has("-C", jump, dir).await?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Creates the missing chains and jumps.
    pub(super) async fn ensure(&self, dir: Option<&Path>) -> Result<(), RuleError> {
        let mut transaction = Transaction::new(self.family, self.table);
        for chain in &self.chains {
            let is_present = self.has_chain(chain, dir).await?;
            if !is_present {
                transaction.push("-N", std::slice::from_ref(&chain.name))?;
            }
            for rule in chain.content.iter().chain(&chain.jumps) {
                // Nothing jumps to an absent chain. For a jump to it, `-C` would exit as for a
                // wrong command line.
                if !is_present || !self.has("-C", rule, dir).await? {
                    transaction.push("-A", rule)?;
                }
            }
        }
        transaction.commit(dir).await
    }

    /// Removes the chains, whatever they contain, in one transaction. Succeeds if they are absent.
    pub(super) async fn remove(&self, dir: Option<&Path>) -> Result<(), RuleError> {
        let mut present = Vec::new();
        for chain in &self.chains {
            if self.has_chain(chain, dir).await? {
                present.push((chain, chain.jumps.iter().collect::<Vec<_>>()));
            }
        }
        match self.removal(&present)?.commit(dir).await {
            // A daemon of an older version, which changed rules one by one, may have been killed
            // between two changes.
            Err(RuleError::Refused { error, .. }) if exit_code(&error) == Some(OTHER_PROBLEM) => {}
            result => return result,
        }
        for (_, jumps) in &mut present {
            let mut found = Vec::new();
            for jump in std::mem::take(jumps) {
                if self.has("-C", jump, dir).await? {
                    found.push(jump);
                }
            }
            *jumps = found;
        }
        self.removal(&present)?.commit(dir).await
    }

    fn removal(&self, chains: &[(&Chain, Vec<&Vec<String>>)]) -> Result<Transaction, RuleError> {
        let mut transaction = Transaction::new(self.family, self.table);
        for (chain, jumps) in chains {
            for jump in jumps {
                transaction.push("-D", jump)?;
            }
            let name = std::slice::from_ref(&chain.name);
            transaction.push("-F", name)?;
            transaction.push("-X", name)?;
        }
        Ok(transaction)
    }

    async fn has_chain(&self, chain: &Chain, dir: Option<&Path>) -> Result<bool, RuleError> {
        self.has("-n", &["-L".to_owned(), chain.name.clone()], dir).await
    }

    /// Returns whether a read-only command finds its rule. A failed read is an error: if a rule
    /// wrongly counted as absent, its host port would lead to the next cell with the address.
    async fn has(
        &self,
        command: &str,
        rule: &[String],
        dir: Option<&Path>,
    ) -> Result<bool, RuleError> {
        let mut arguments = vec!["-w", TABLES_WAIT, "-t", self.table, command];
        arguments.extend(rule.iter().map(String::as_str));
        match succeed(self.family.program(), &arguments, dir).await {
            Ok(()) => Ok(true),
            Err(error) if says_no(&error) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Removes a chain that a CNI plugin made in the table `nat`, with the jumps to it in
/// `POSTROUTING`. Succeeds if the chain is absent.
pub(super) async fn remove_chain_of_plugin(
    family: Family,
    chain: &str,
    dir: &Path,
) -> Result<(), RuleError> {
    let Some(_) = printed_rules(family, chain, dir).await? else { return Ok(()) };
    let jumps = printed_rules(family, "POSTROUTING", dir).await?.unwrap_or_default();
    let mut transaction = Transaction::new(family, "nat");
    transaction.lines = removals(&jumps, chain);
    let name = [chain.to_owned()];
    transaction.push("-F", &name)?;
    transaction.push("-X", &name)?;
    transaction.commit(Some(dir)).await
}

/// Returns the rules of a chain in the table `nat`, as `iptables -S` prints them; `None` if the
/// chain is absent.
async fn printed_rules(
    family: Family,
    chain: &str,
    dir: &Path,
) -> Result<Option<String>, RuleError> {
    let arguments = ["-w", TABLES_WAIT, "-t", "nat", "-S", chain];
    match output_of(family.program(), &arguments, Some(dir)).await {
        Ok(printed) => Ok(Some(String::from_utf8_lossy(&printed).into_owned())),
        Err(error) if says_no(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns the commands that delete the jumps to a chain. They repeat the rules as printed, because
/// only so comments stay quoted.
fn removals(printed: &str, chain: &str) -> Vec<String> {
    let jump = format!(" -j {chain}");
    printed
        .lines()
        .filter(|line| line.ends_with(&jump))
        .filter_map(|line| Some(format!("-D {}", line.strip_prefix("-A ")?)))
        .collect()
}

/// A transaction of a table, the input of `iptables-restore`.
#[derive(Debug)]
struct Transaction {
    family: Family,
    table: &'static str,
    lines: Vec<String>,
}

impl Transaction {
    const fn new(family: Family, table: &'static str) -> Self {
        Self { family, table, lines: Vec::new() }
    }

    /// Adds a command. Refuses arguments that `iptables-restore` could split, whatever their source
    /// is.
    fn push(&mut self, command: &str, words: &[String]) -> Result<(), RuleError> {
        let mut line = command.to_owned();
        for word in words {
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:,/!@[]".contains(&byte);
            if word.is_empty() || word.len() > MAX_WORD_BYTES || !word.bytes().all(fits) {
                return Err(RuleError::Word(word.clone()));
            }
            line.push(' ');
            line.push_str(word);
        }
        self.lines.push(line);
        Ok(())
    }

    fn input(&self) -> String {
        format!("*{}\n{}\nCOMMIT\n", self.table, self.lines.join("\n"))
    }

    /// Applies the transaction. An incomplete input changes nothing.
    async fn commit(&self, dir: Option<&Path>) -> Result<(), RuleError> {
        if self.lines.is_empty() {
            return Ok(());
        }
        let program = self.family.restore_program();
        let arguments = ["-w", TABLES_WAIT, "--noflush"];
        let ended =
            run(Path::new(program), &arguments.map(OsStr::new), dir, &[], self.input().as_bytes())
                .await?;
        if ended.status.success() {
            return Ok(());
        }
        let line = refused_line(&ended.stderr)
            .and_then(|line| self.lines.get(line.checked_sub(FIRST_LINE)?))
            .cloned()
            .unwrap_or_else(|| "COMMIT".to_owned());
        let program = format!("{program} {}", arguments.join(" "));
        let error = CommandError::Refused { program, status: ended.status, said: ended.stderr };
        Err(RuleError::Refused { line, error })
    }
}

/// Returns the number of the line that `iptables-restore` refused.
fn refused_line(said: &str) -> Option<usize> {
    let (_, behind) = said.rsplit_once("line")?;
    let digits = behind.trim_start_matches([':', ' ']);
    digits.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

fn exit_code(error: &CommandError) -> Option<i32> {
    match error {
        CommandError::Refused { status, .. } => status.code(),
        _ => None,
    }
}

/// Returns whether the error of a read-only program means absence. A program that was killed, did
/// not start or could not read the rules proves nothing.
fn says_no(error: &CommandError) -> bool {
    match error {
        CommandError::Refused { status, said, .. } => ABSENT
            .iter()
            .any(|(code, message)| status.code() == Some(*code) && said.contains(message)),
        // Without the program, it has made no rules.
        CommandError::Io { source, .. } => source.kind() == io::ErrorKind::NotFound,
        CommandError::Cgroup { .. }
        | CommandError::Word(_)
        | CommandError::Deadline { .. }
        | CommandError::Output { .. } => false,
    }
}

/// Returns the arguments of a rule.
pub(super) fn words(text: &str) -> Vec<String> {
    text.split(' ').map(ToOwned::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn failure(script: &str) -> CommandError {
        succeed("/bin/sh", &["-c", script], None).await.unwrap_err()
    }

    fn rules(word: &str) -> Rules {
        Rules {
            family: Family::V4,
            table: "nat",
            chains: vec![Chain {
                name: "OURS".to_owned(),
                jumps: vec![words("OUTPUT -j OURS")],
                content: vec![words("OURS -p tcp -j DNAT --to-destination [fd00::1]:80"), {
                    let mut rule = words("OURS -s");
                    rule.push(word.to_owned());
                    rule
                }],
            }],
        }
    }

    #[test]
    fn chains_are_created_in_one_transaction() {
        let rules = rules("10.0.0.0/8");
        assert_eq!(
            rules.creation().unwrap().input(),
            "*nat\n-N OURS\n-A OURS -p tcp -j DNAT --to-destination [fd00::1]:80\n\
             -A OURS -s 10.0.0.0/8\n-A OUTPUT -j OURS\nCOMMIT\n"
        );
        let chain = &rules.chains[0];
        assert_eq!(
            rules.removal(&[(chain, chain.jumps.iter().collect())]).unwrap().input(),
            "*nat\n-D OUTPUT -j OURS\n-F OURS\n-X OURS\nCOMMIT\n"
        );
    }

    /// Verifies N14.
    #[test]
    fn argument_that_could_be_split_is_refused() {
        for word in [
            "",
            "10.0.0.0/8 -j ACCEPT",
            "10.0.0.0/8\n-F",
            "\t",
            "\"x\"",
            "'x'",
            "x\\",
            "#",
            "\u{a0}",
            "\0",
            &"x".repeat(MAX_WORD_BYTES + 1),
        ] {
            let error = rules(word).creation().unwrap_err().to_string();
            assert!(error.contains(&format!("{word:?}")) && error.contains("allowed"), "{error}");
        }
        assert!(rules(&"x".repeat(MAX_WORD_BYTES)).creation().is_ok());
    }

    #[test]
    fn jumps_to_a_chain_are_deleted_as_printed() {
        let rule = r#"POSTROUTING -s 10.88.0.5/32 -m comment --comment "id: \"m\"" -j CNI-ab"#;
        let printed = format!(
            "-P POSTROUTING ACCEPT\n-A {rule}\n-A POSTROUTING -j CNI-abc\n\
             -A POSTROUTING -m comment --comment \" -j CNI-ab\" -j KUBE-POSTROUTING\n"
        );
        assert_eq!(removals(&printed, "CNI-ab"), [format!("-D {rule}")]);
    }

    #[test]
    fn refused_line_is_found_in_messages_of_both_iptables() {
        for (said, line) in [
            ("iptables-restore: line 2 failed", Some(2)),
            ("iptables-nft-restore: line 17 failed: Chain already exists.", Some(17)),
            ("invalid port\nError occurred at line: 3\nTry `iptables-restore -h'", Some(3)),
            ("COMMIT expected at line 9", Some(9)),
            ("Another app is currently holding the xtables lock", None),
            ("line", None),
        ] {
            assert_eq!(refused_line(said), line, "{said}");
        }
    }

    /// Verifies X18.
    #[tokio::test]
    async fn iptables_failure_is_not_absence() {
        for no in [
            "echo 'iptables: No chain/target/match by that name.' >&2; exit 1",
            "echo 'iptables: Bad rule (does a matching rule exist in that chain?).' >&2; exit 1",
            "echo 'iptables v1.8.9 (nf_tables): chain `KIYOT-HP-x'\\'' in table `nat'\\'' is \
             incompatible, use '\\''nft'\\'' tool.' >&2; exit 1",
            "echo 'iptables: Incompatible with this kernel.' >&2; exit 1",
            "echo 'iptables/1.8.9 Failed to initialize nft: Protocol not supported' >&2; exit 1",
            "echo 'ip6tables v1.8.9 (legacy): can'\\''t initialize ip6tables table `nat'\\'': \
             Table does not exist (do you need to insmod?)' >&2; exit 3",
            "echo 'iptables v1.8.9 (legacy): can'\\''t initialize iptables table `nat'\\'': \
             iptables who? (do you need to insmod?)' >&2; exit 3",
            "echo 'ip6tables v1.8.9 (legacy): can'\\''t initialize ip6tables table `nat'\\'': \
             Address family not supported by protocol' >&2; exit 3",
            "echo 'iptables v1.8.9 (nf_tables): Could not fetch rule set generation \
             id: Invalid argument' >&2; exit 4",
        ] {
            assert!(says_no(&failure(no).await), "{no}");
        }
        for unknown in [
            "echo 'Another app is currently holding the xtables lock. Perhaps you want to use \
             the -w option?' >&2; exit 4",
            "echo 'iptables v1.8.9 (nf_tables):  RULE_CHECK failed (Resource temporarily \
             unavailable): rule in chain OUTPUT' >&2; exit 4",
            "echo 'iptables: Memory allocation problem.' >&2; exit 1",
            "echo 'iptables/1.8.9 Failed to initialize nft: Too many open files' >&2; exit 1",
            "echo 'iptables v1.8.9 (nf_tables): table `nat'\\'' is incompatible, use \
             '\\''nft'\\'' tool.' >&2; exit 1",
            "echo 'iptables v1.8.9 (nf_tables): unknown option \"--frob\"' >&2; exit 2",
            "echo 'iptables v1.8.9 (legacy): Couldn'\\''t load match `addrtype'\\'':No such \
             file or directory' >&2; exit 2",
            "echo 'iptables v1.8.9 (legacy): can'\\''t initialize iptables table `nat'\\'': \
             Permission denied (you must be root)' >&2; exit 3",
            "echo 'iptables v1.8.9 (nf_tables): Could not fetch rule set generation id: \
             Permission denied (you must be root)' >&2; exit 4",
            "echo 'iptables: error while loading shared libraries: libxtables.so.12: cannot \
             open shared object file: Error 24' >&2; exit 127",
            "kill -KILL $$",
        ] {
            let error = failure(unknown).await;
            assert!(!says_no(&error), "{unknown}");
            assert!(error.to_string().contains("/bin/sh -c"), "{error}");
        }
        let io = |kind: io::ErrorKind| CommandError::Io {
            program: "iptables".to_owned(),
            source: kind.into(),
        };
        assert!(says_no(&io(io::ErrorKind::NotFound)), "an absent program has made no rules");
        assert!(!says_no(&io(io::ErrorKind::OutOfMemory)));
        assert!(!says_no(&CommandError::Deadline { program: "iptables".to_owned(), seconds: 30 }));
    }
}
