//! Runs of programs.

use std::{
    io::Read,
    process::{Command, Stdio},
    time::Duration,
};

use crate::allowed;

/// PATH of the programs that tests run; a user's own PATH may lack the sbin directories.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The program that kills others after a time. An absolute path, because fork(2) starts programs
/// that are looked up in another PATH, and copies the page tables of the tests.
const TIMEOUT: &str = "/usr/bin/timeout";

/// Time after which timeout(1) kills a program.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(120);

/// Runs a program. Returns its standard output, or an error with its exit status and standard
/// error.
pub fn output(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(TIMEOUT)
        .args(["--signal=KILL", &allowed(PROGRAM_TIMEOUT).as_secs().to_string(), program])
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

/// Runs a program that must succeed, and returns its standard output.
///
/// # Panics
/// If the program fails; the message has its standard error.
pub fn run(program: &str, arguments: &[&str]) -> String {
    output(program, arguments).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the end of a log file for a failed test's output, without the lines that containerd logs
/// at each start.
pub fn tail(path: &std::path::Path) -> String {
    const MAX_TAIL_BYTES: usize = 32 * 1024;
    let mut text = Vec::new();
    let _ = std::fs::File::open(path).and_then(|mut file| file.read_to_end(&mut text));
    let text =
        String::from_utf8_lossy(&text[text.len().saturating_sub(MAX_TAIL_BYTES)..]).into_owned();
    text.lines()
        .filter(|line| {
            !line.contains("loading plugin") && !line.contains("Start cri plugin with config")
        })
        .fold(String::new(), |all, line| all + line + "\n")
}
