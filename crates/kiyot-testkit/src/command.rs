//! Programs of the system, run to their end.

use std::{
    io::Read,
    process::{Command, Stdio},
    time::Duration,
};

use crate::allowed;

/// Where the programs are that tests use; a user's own PATH may leave out the sbin directories.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The longest that one program may run, for timeout(1).
const LIMIT: Duration = Duration::from_secs(120);

/// Runs a program and gives what it wrote to its standard output, or a text that says what failed.
pub fn output(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("timeout")
        .args(["--signal=KILL", &allowed(LIMIT).as_secs().to_string(), program])
        .args(arguments)
        .env("PATH", PATH)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{program} can't be run: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(format!(
        "{program} {arguments:?}: {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    ))
}

/// Runs a program that must succeed.
///
/// # Panics
/// Says what the program said.
pub fn run(program: &str, arguments: &[&str]) -> String {
    output(program, arguments).unwrap_or_else(|error| panic!("{error}"))
}

/// The last part of a log file, for those who look at a failure. Without what containerd says at
/// each start.
pub fn tail(path: &std::path::Path) -> String {
    const PART: usize = 32 * 1024;
    let mut text = Vec::new();
    let _ = std::fs::File::open(path).and_then(|mut file| file.read_to_end(&mut text));
    let text = String::from_utf8_lossy(&text[text.len().saturating_sub(PART)..]).into_owned();
    text.lines()
        .filter(|line| {
            !line.contains("loading plugin") && !line.contains("Start cri plugin with config")
        })
        .fold(String::new(), |all, line| all + line + "\n")
}
