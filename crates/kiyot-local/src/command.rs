//! Short programs of the provider, with bounds on time and output.
//!
//! A program enters the cell's cgroup before it gets its input, so that the next daemon finds
//! programs that a killed daemon left running. Therefore a program that changes anything must take
//! its instructions from its input (`ip -batch -`, `iptables-restore`, CNI plugins): if the daemon
//! is killed before, the input ends and nothing is changed.

use std::{
    ffi::OsStr,
    io,
    os::unix::process::ExitStatusExt as _,
    path::Path,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use rustix::{
    io::retry_on_intr,
    process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{Child, Command},
    task::spawn_blocking,
    time::timeout,
};

use crate::cgroup;

/// Bounds the run time of a program.
const LIMIT: Duration = Duration::from_secs(30);
/// Bounds a program's stdout, in bytes.
const OUTPUT_LIMIT: u64 = 1024 * 1024;
/// Bounds the kept part of a program's stderr, in bytes.
const ERROR_LIMIT: u64 = 16 * 1024;

/// Time from the exit of a program until it is reaped.
const REAP_DELAY: Duration = Duration::from_millis(100);
/// Bits of a wait status below the exit code (wait(2)).
const EXIT_CODE_SHIFT: u32 = 8;

/// An error of a program.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    /// The program could not be started or read.
    #[error("{program}")]
    Io {
        program: String,
        #[source]
        source: std::io::Error,
    },
    /// The program could not be moved into its cell's cgroup, and was killed.
    #[error("move {program} into the cgroup of {cell}")]
    Cgroup {
        program: String,
        cell: String,
        #[source]
        source: std::io::Error,
    },
    /// `ip` would split or drop an argument.
    #[error("argument of ip {0:?}: would be split or dropped; allowed: letters, digits, -_.:/@%")]
    Word(String),
    /// The program exceeded its run time and was killed.
    #[error("{program} did not end within {seconds} s and was killed")]
    Deadline { program: String, seconds: u64 },
    /// The program printed too much and was killed.
    #[error("{program} printed more than {OUTPUT_LIMIT} bytes and was killed")]
    Output { program: String },
    /// The program exited with an error.
    #[error("{program}: {status}: {said}")]
    Refused { program: String, status: std::process::ExitStatus, said: String },
}

/// The exit status and output of a program.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: std::process::ExitStatus,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

/// Kills a program with its process group on drop, unless it has exited.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            let _ended = kill_process_group(group, Signal::KILL);
        }
    }
}

/// Runs a program and returns its exit. If `instance` is an instance's directory, the program gets
/// its input only once it is in the cell's cgroup.
pub(crate) async fn run(
    program: &Path,
    arguments: &[&OsStr],
    instance: Option<&Path>,
    variables: &[(&str, &OsStr)],
    input: &[u8],
) -> Result<Ended, CommandError> {
    run_within(LIMIT, program, arguments, instance, variables, input).await
}

async fn run_within(
    limit: Duration,
    program: &Path,
    arguments: &[&OsStr],
    instance: Option<&Path>,
    variables: &[(&str, &OsStr)],
    input: &[u8],
) -> Result<Ended, CommandError> {
    let name = || {
        arguments.iter().fold(program.display().to_string(), |text, argument| {
            format!("{text} {}", argument.display())
        })
    };
    let io = |source| CommandError::Io { program: name(), source };
    let mut command = Command::new(program);
    command
        .args(arguments)
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.process_group(0).kill_on_drop(true).spawn().map_err(io)?;
    let pid = child.id();
    let mut group = Group(pid.and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)));
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    if let (Some(cell), Some(pid)) = (instance.and_then(Path::file_name), pid) {
        let cell = cell.to_string_lossy().into_owned();
        let cell_of_task = cell.clone();
        spawn_blocking(move || cgroup::enter(&cell_of_task, pid))
            .await
            .map_err(std::io::Error::other)
            .flatten()
            .map_err(|source| CommandError::Cgroup { program: name(), cell, source })?;
    }
    let writing = async {
        if let Some(mut stdin) = stdin {
            // A program that does not read its input explains this by its exit.
            let _broken_pipe = stdin.write_all(input).await;
        }
    };
    let reading = async {
        let mut output = Vec::new();
        if let Some(stdout) = stdout {
            stdout.take(OUTPUT_LIMIT + 1).read_to_end(&mut output).await?;
        }
        Ok::<_, std::io::Error>(output)
    };
    let listening = async {
        let mut said = Vec::new();
        if let Some(mut stderr) = stderr {
            (&mut stderr).take(ERROR_LIMIT).read_to_end(&mut said).await?;
            tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await?;
        }
        Ok::<_, std::io::Error>(said)
    };
    let whole = async {
        let ((), output, said) = tokio::join!(writing, reading, listening);
        let output = output.map_err(io)?;
        if output.len() as u64 > OUTPUT_LIMIT {
            return Err(CommandError::Output { program: name() });
        }
        let status = exit_of(&mut child).await.map_err(io)?;
        Ok(Ended {
            status,
            stdout: output,
            stderr: String::from_utf8_lossy(&said.map_err(io)?).trim().to_owned(),
        })
    };
    let ended = timeout(limit, Box::pin(whole)).await.unwrap_or_else(|_| {
        Err(CommandError::Deadline { program: name(), seconds: limit.as_secs() })
    })?;
    group.0 = None;
    tokio::spawn(async move {
        tokio::time::sleep(REAP_DELAY).await;
        let _status = child.wait().await;
    });
    Ok(ended)
}

/// Waits until a child has exited, and returns its status without reaping it. Reaping removes the
/// process from `/proc`, for which the kernel spins until the threads that exited earlier have
/// removed themselves. On a busy machine these threads wait for the same processor, and the loop
/// lasts for milliseconds.
async fn exit_of(child: &mut Child) -> io::Result<ExitStatus> {
    let Some(pid) = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)) else {
        return child.wait().await;
    };
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let waiting = spawn_blocking(move || retry_on_intr(|| waitid(WaitId::Pid(pid), options)));
    let status = waiting.await.map_err(io::Error::other)??;
    let status = status.ok_or_else(|| io::Error::other("a process ended without a status"))?;
    let raw = match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => code << EXIT_CODE_SHIFT,
        (None, Some(signal)) => signal,
        (None, None) => return Err(io::Error::other("a process ended in an unknown way")),
    };
    Ok(ExitStatus::from_raw(raw))
}

/// Runs `ip -batch` with these lines for an instance, up to the first error. It runs in the network
/// namespace with this name, or else in the daemon's.
pub(crate) async fn ip(
    netns: Option<&str>,
    lines: &[&[&str]],
    instance: &Path,
) -> Result<(), CommandError> {
    let is_plain = |word: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:/@%".contains(&byte);
        !word.is_empty() && word.bytes().all(plain)
    };
    if let Some(word) = lines.iter().copied().flatten().find(|word| !is_plain(word)) {
        return Err(CommandError::Word((*word).to_owned()));
    }
    let lines: Vec<String> = lines.iter().map(|words| words.join(" ")).collect();
    let arguments: Vec<&OsStr> = netns
        .map(|name| ["-n", name])
        .into_iter()
        .flatten()
        .chain(["-batch", "-"])
        .map(OsStr::new)
        .collect();
    let input = lines.join("\n") + "\n";
    let ended = run(Path::new("ip"), &arguments, Some(instance), &[], input.as_bytes()).await?;
    if ended.status.success() {
        return Ok(());
    }
    let program = format!("ip {}", lines.join("; ip "));
    Err(CommandError::Refused { program, status: ended.status, said: ended.stderr })
}

/// Runs a program that must succeed.
pub(crate) async fn succeed(
    program: &str,
    arguments: &[&str],
    instance: Option<&Path>,
) -> Result<(), CommandError> {
    output_of(program, arguments, instance).await.map(drop)
}

/// Runs a program that must succeed and returns its stdout.
pub(crate) async fn output_of(
    program: &str,
    arguments: &[&str],
    instance: Option<&Path>,
) -> Result<Vec<u8>, CommandError> {
    let arguments: Vec<&OsStr> = arguments.iter().map(OsStr::new).collect();
    let ended = run(Path::new(program), &arguments, instance, &[], b"").await?;
    if ended.status.success() {
        return Ok(ended.stdout);
    }
    let program = arguments
        .iter()
        .fold(program.to_owned(), |text, argument| format!("{text} {}", argument.display()));
    Err(CommandError::Refused { program, status: ended.status, said: ended.stderr })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn shell(script: &str, input: &[u8]) -> Result<Ended, CommandError> {
        run(
            Path::new("/bin/sh"),
            &[OsStr::new("-c"), OsStr::new(script)],
            None,
            &[("WHO", OsStr::new("me"))],
            input,
        )
        .await
    }

    #[tokio::test]
    async fn output_and_exit_status_are_returned() {
        let ended = shell("cat; echo $WHO; echo bad >&2; exit 3", b"input ").await.unwrap();
        assert_eq!(ended.stdout, b"input me\n");
        assert_eq!(ended.stderr, "bad");
        assert_eq!(ended.status.code(), Some(3));
    }

    #[tokio::test]
    async fn signal_that_ended_a_program_is_returned() {
        let ended = shell("kill -9 $$", b"").await.unwrap();
        assert_eq!((ended.status.code(), ended.status.signal()), (None, Some(9)));
    }

    #[tokio::test]
    async fn ended_program_is_reaped() {
        let ended = shell("echo $$", b"").await.unwrap();
        let status = format!("/proc/{}/status", String::from_utf8(ended.stdout).unwrap().trim());
        let parent = format!("PPid:\t{}\n", std::process::id());
        let is_child = || std::fs::read_to_string(&status).is_ok_and(|it| it.contains(&parent));
        timeout(Duration::from_secs(60), async {
            while is_child() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await
        .expect("the program is reaped");
    }

    #[tokio::test]
    async fn program_that_reads_no_input_succeeds() {
        assert!(shell("exit 0", &[b'x'; 1 << 20]).await.unwrap().status.success());
    }

    #[tokio::test]
    async fn program_with_endless_output_is_killed() {
        assert!(matches!(shell("yes", b"").await, Err(CommandError::Output { .. })));
    }

    #[tokio::test]
    async fn hanging_program_is_killed_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        // The child keeps the pipe open.
        let script = format!("sleep 1000 > {} & wait", pipe.display());
        let arguments = [OsStr::new("-c"), OsStr::new(&script)];
        let hanging = run_within(
            Duration::from_millis(200),
            Path::new("/bin/sh"),
            &arguments,
            None,
            &[],
            b"",
        );
        let reader = tokio::task::spawn_blocking(move || std::fs::read(pipe));
        assert!(matches!(hanging.await, Err(CommandError::Deadline { .. })));
        // If the deadline passed before the child started, no process has opened the pipe: open a
        // second reader that is closed at once.
        let open = std::process::Command::new("/bin/sh")
            .arg("-c")
            .arg(format!(": > {}", dir.path().join("pipe").display()))
            .spawn();
        assert!(
            timeout(Duration::from_secs(60), reader).await.unwrap().unwrap().unwrap().is_empty()
        );
        let mut open = open.unwrap();
        let _ = open.kill();
        open.wait().unwrap();
    }

    #[tokio::test]
    async fn error_names_the_program() {
        let error = succeed("/bin/sh", &["-c", "echo why >&2; false"], None).await.unwrap_err();
        assert!(
            error.to_string().contains("/bin/sh -c") && error.to_string().ends_with("why"),
            "{error}"
        );
        let error = succeed("/no/such/program", &[], None).await.unwrap_err();
        assert_eq!(error.to_string(), "/no/such/program");
    }

    #[tokio::test]
    async fn argument_that_ip_would_split_is_refused() {
        for word in ["", "a b", "a\nb", "#", "'a", "\\"] {
            let error = ip(None, &[&["link", "delete", word]], Path::new("/x")).await.unwrap_err();
            assert!(matches!(&error, CommandError::Word(named) if named == word), "{error}");
        }
    }
}
