//! Cleaning up after a test, whatever became of it.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    mount::{UnmountFlags, unmount},
    process::{Pid, Signal, kill_process},
};

use crate::{
    command::output,
    leftovers::{cgroups, links, mounts, processes},
};

/// How long killed processes may take to go.
const LIMIT: Duration = Duration::from_secs(60);

/// Between two looks.
const POLL: Duration = Duration::from_millis(10);

/// Kills every process that has one of `words` in its command line or control group, frozen or not,
/// and waits until they are gone.
pub fn processes_of(words: &[String]) {
    let begun = Instant::now();
    loop {
        thaw(words);
        let ours: Vec<_> = processes()
            .into_iter()
            .filter(|(_, what)| words.iter().any(|word| what.contains(word)))
            .collect();
        if ours.is_empty() {
            return;
        }
        if begun.elapsed() > LIMIT {
            eprintln!("these processes can't be killed: {ours:?}");
            return;
        }
        for pid in ours.iter().filter_map(|(pid, _)| Pid::from_raw(*pid)) {
            let _ = kill_process(pid, Signal::KILL);
        }
        thread::sleep(POLL);
    }
}

/// Thaws the control groups that have one of `words` in their names: what is frozen doesn't die.
/// Those of v1 first, which a kill does not reach at all.
fn thaw(words: &[String]) {
    for cgroup in cgroups().iter().filter(|cgroup| words.iter().any(|word| cgroup.contains(word))) {
        for (file, thawed) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
            let file = Path::new(cgroup).join(file);
            if file.exists() {
                let _ = fs::write(file, thawed);
            }
        }
    }
}

/// Takes away all that has one of `words` in its name: processes, mounts, links, network
/// namespaces, firewall rules, control groups. Then the directory.
pub fn all_of(words: &[String], directory: &Path) {
    let ours = |text: &str| words.iter().any(|word| text.contains(word));
    processes_of(words);
    for mount in mounts().iter().rev().filter(|mount| ours(mount)) {
        let _ = unmount(mount.as_str(), UnmountFlags::DETACH);
        if mount.starts_with("/run/netns/") {
            let _ = fs::remove_file(mount);
        }
    }
    for link in links().iter().filter(|link| ours(link)) {
        let _ = output("ip", &["link", "delete", link.split('@').next().unwrap_or(link)]);
    }
    rules_of(words);
    // What systemd has made, it would make again.
    let slices = cgroups();
    let slices = slices.iter().rev().filter(|cgroup| ours(cgroup) && cgroup.ends_with(".slice"));
    for unit in slices.filter_map(|slice| slice.rsplit('/').next()) {
        let _ = output("systemctl", &["stop", unit]);
    }
    for cgroup in cgroups().iter().rev().filter(|cgroup| ours(cgroup)) {
        if let Err(error) = fs::remove_dir(cgroup) {
            eprintln!("control group {cgroup} can't be removed: {error}");
        }
    }
    let _ = kiyot_tree::remove_path(directory);
}

/// Deletes the rules that name one of `words` (CNI plugins put the network's name in their
/// comments), and the chains to which those rules lead.
fn rules_of(words: &[String]) {
    let Ok(text) = output("iptables-save", &["-t", "nat"]) else { return };
    let mut chains = Vec::new();
    for rule in text
        .lines()
        .filter(|line| line.starts_with("-A ") && words.iter().any(|word| line.contains(word)))
    {
        let rule = words_of(rule);
        chains.extend(
            rule.windows(2)
                .filter(|pair| pair[0] == "-j" && pair[1].starts_with("CNI-"))
                .map(|pair| pair[1].clone()),
        );
        let arguments: Vec<&str> = ["-w", "-t", "nat", "-D"]
            .into_iter()
            .chain(rule.iter().skip(1).map(String::as_str))
            .collect();
        let _ = output("iptables", &arguments);
    }
    for chain in chains.iter().filter(|chain| !is_shared(chain)) {
        let _ = output("iptables", &["-w", "-t", "nat", "-F", chain]);
        let _ = output("iptables", &["-w", "-t", "nat", "-X", chain]);
    }
}

/// Chains that the plugins keep for all networks.
fn is_shared(chain: &str) -> bool {
    chain.starts_with("CNI-HOSTPORT-")
}

/// The words of a line of iptables-save: quoted where they have spaces, with `\` before a quote in
/// them.
fn words_of(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quoted, mut escaped) = (Vec::new(), String::new(), false, false);
    for letter in line.chars() {
        match letter {
            _ if escaped => {
                word.push(letter);
                escaped = false;
            }
            '\\' => escaped = true,
            '"' => quoted = !quoted,
            ' ' if !quoted => words.push(std::mem::take(&mut word)),
            _ => word.push(letter),
        }
    }
    words.push(word);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_split_as_iptables_quotes_them() {
        let words =
            words_of(r#"-A POSTROUTING -m comment --comment "name: \"net\" id: \"1\"" -j CNI-1"#);
        assert_eq!(
            words,
            [
                "-A",
                "POSTROUTING",
                "-m",
                "comment",
                "--comment",
                r#"name: "net" id: "1""#,
                "-j",
                "CNI-1"
            ]
        );
    }
}
