//! Removal of a test's resources, however the test ended.

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
    leftovers::{CGROUPS, cgroups, directories_below, links, mounts, processes},
};

/// Time within which killed processes must end.
const KILL_TIMEOUT: Duration = Duration::from_secs(60);

/// Period of the checks for killed processes. Cleanup runs in `drop`, which can't await.
const POLL_PERIOD: Duration = Duration::from_millis(10);

/// Kills all processes with one of `words` in their command line or cgroup, even frozen processes,
/// and waits until they have ended.
pub fn processes_of(words: &[String]) {
    let begun = Instant::now();
    loop {
        let ours: Vec<_> = processes()
            .into_iter()
            .filter(|(_, what)| words.iter().any(|word| what.contains(word)))
            .collect();
        if ours.is_empty() {
            return;
        }
        if begun.elapsed() > KILL_TIMEOUT {
            eprintln!("these processes can't be killed: {ours:?}");
            return;
        }
        thaw(words);
        for pid in ours.iter().filter_map(|(pid, _)| Pid::from_raw(*pid)) {
            let _ = kill_process(pid, Signal::KILL);
        }
        thread::sleep(POLL_PERIOD);
    }
}

/// Thaws the cgroups with one of `words` in their names: in version 1, frozen processes don't die.
fn thaw(words: &[String]) {
    let freezer = Path::new(CGROUPS).join("freezer");
    let cgroups = directories_below(if freezer.exists() { &freezer } else { Path::new(CGROUPS) });
    for cgroup in cgroups.iter().filter(|cgroup| words.iter().any(|word| cgroup.contains(word))) {
        for (file, thawed) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
            let file = Path::new(cgroup).join(file);
            if file.exists() {
                let _ = fs::write(file, thawed);
            }
        }
    }
}

/// Removes all processes, mounts, links, network namespaces, firewall rules and cgroups with one of
/// `words` in their names, then the directory.
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
    // systemd would create the cgroup of a loaded slice again.
    let mut left = cgroups();
    left.retain(|cgroup| ours(cgroup));
    let slices = left.iter().rev().filter(|cgroup| cgroup.ends_with(".slice"));
    for unit in slices.filter_map(|slice| slice.rsplit('/').next()) {
        let _ = output("systemctl", &["stop", unit]);
    }
    left.retain(|cgroup| Path::new(cgroup).exists());
    for cgroup in left.iter().rev() {
        if let Err(error) = fs::remove_dir(cgroup) {
            eprintln!("cgroup {cgroup} can't be removed: {error}");
        }
    }
    let _ = kiyot_linux::tree::remove_path(directory);
}

/// Deletes the rules that contain one of `words` (CNI plugins put the network's name in comments),
/// and the chains to which they jump.
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

/// Returns whether all networks of the plugins share a chain.
fn is_shared(chain: &str) -> bool {
    chain.starts_with("CNI-HOSTPORT-")
}

/// Splits a line of iptables-save into words. Words with spaces are quoted, with escaped quotes.
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
    fn iptables_rule_splits_at_unquoted_spaces() {
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
