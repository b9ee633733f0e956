//! The processes that init keeps running, and the reaping of all that end.

use std::{
    collections::HashMap,
    fmt, io,
    io::PipeWriter,
    process::{Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid},
    unistd::Pid,
};

use super::log::BoundedLog;

/// The shortest wait before a process is started again.
const FIRST_WAIT: Duration = Duration::from_millis(100);
/// The longest.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// A process that ran so long begins with the shortest wait again.
const STEADY: Duration = Duration::from_secs(30);
/// Ends of processes that may wait to be looked at.
const ENDS: usize = 64;
/// How long the reaper rests when there is no process to wait for.
const REST: Duration = Duration::from_millis(20);

/// How long to wait before a process that ended is started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(FIRST_WAIT)
    }
}

impl Backoff {
    /// The wait after a run of this length.
    pub fn after(&mut self, ran: Duration) -> Duration {
        if ran >= STEADY {
            self.0 = FIRST_WAIT;
        }
        let wait = self.0;
        self.0 = (wait * 2).min(LONGEST_WAIT);
        wait
    }
}

/// A process that is to run as long as the cell.
#[derive(Debug)]
pub struct Service {
    name: &'static str,
    command: Command,
    last_exit: Option<i32>,
    patience: Option<Duration>,
    failing_since: Option<Instant>,
    backoff: Backoff,
    state: State,
    // Held, so that one thread drains the output of all its runs.
    _output: PipeWriter,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Due(Instant),
    Running(Pid, Instant),
}

impl Service {
    /// What it prints goes to `log`. `last_exit` is the exit code by which it asks for the cell's
    /// end.
    pub fn new(
        name: &'static str,
        mut command: Command,
        last_exit: Option<i32>,
        log: &BoundedLog,
    ) -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        log.drain(reader)?;
        command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer.try_clone()?);
        let backoff = Backoff::default();
        Ok(Self {
            name,
            command,
            last_exit,
            patience: None,
            failing_since: None,
            backoff,
            state: State::Due(Instant::now()),
            _output: writer,
        })
    }

    /// The cell ends when the service has not run steadily for so long.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    /// After a run of this length: the wait before the next, or `None` when there is to be none.
    fn failed(&mut self, ran: Duration, now: Instant) -> Option<Duration> {
        let since = match self.failing_since {
            Some(since) if ran < STEADY => since,
            _ if ran < STEADY => *self.failing_since.insert(now.checked_sub(ran).unwrap_or(now)),
            _ => {
                self.failing_since = None;
                now
            }
        };
        if self.patience.is_some_and(|patience| now.saturating_duration_since(since) >= patience) {
            return None;
        }
        Some(self.backoff.after(ran))
    }
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Code(i32),
    Signal(i32),
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
        }
    }
}

/// Keeps services running, and reaps all processes of the cell.
#[derive(Debug)]
pub struct Supervisor {
    services: Vec<Service>,
    ends: Receiver<(Pid, End)>,
    // Held while a process is started: a start that fails reaps its process itself.
    starting: Arc<Mutex<()>>,
}

impl Supervisor {
    /// Begins to reap.
    pub fn start() -> io::Result<Self> {
        let (sender, ends) = sync_channel(ENDS);
        let starting = Arc::new(Mutex::new(()));
        let lock = Arc::clone(&starting);
        thread::Builder::new().name("reaper".into()).spawn(move || reap(&lock, &sender))?;
        Ok(Self { services: Vec::new(), ends, starting })
    }

    /// One more service.
    pub fn add(&mut self, service: Service) {
        self.services.push(service);
    }

    /// Runs the services until one asks for the cell's end.
    pub fn run(&mut self, console: &BoundedLog) {
        loop {
            let now = Instant::now();
            let mut due = HashMap::new();
            for service in &mut self.services {
                if let State::Due(at) = service.state
                    && at <= now
                    && !start(service, &self.starting, console)
                {
                    return;
                }
                if let State::Due(at) = service.state {
                    due.insert(service.name, at);
                }
            }
            let wait = due
                .values()
                .min()
                .map_or(STEADY, |at| at.saturating_duration_since(Instant::now()));
            match self.ends.recv_timeout(wait) {
                Ok((pid, end)) => {
                    if self.ended(pid, end, console) {
                        return;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    say(console, "init's reaper ended: the cell ends");
                    return;
                }
            }
        }
    }

    /// Whether the cell ends with it.
    fn ended(&mut self, pid: Pid, end: End, console: &BoundedLog) -> bool {
        for service in &mut self.services {
            let State::Running(running, since) = service.state else { continue };
            if running != pid {
                continue;
            }
            if service.last_exit.is_some_and(|code| end == End::Code(code)) {
                say(console, &format!("{} asks for the cell's end", service.name));
                return true;
            }
            let Some(wait) = service.failed(since.elapsed(), Instant::now()) else {
                say(
                    console,
                    &format!(
                        "{} ended with {end} once more, and has failed for too long: the cell ends",
                        service.name
                    ),
                );
                return true;
            };
            say(
                console,
                &format!("{} ended with {end}, and is started again in {wait:?}", service.name),
            );
            service.state = State::Due(Instant::now() + wait);
        }
        false
    }
}

/// Whether the cell goes on.
fn start(service: &mut Service, starting: &Mutex<()>, console: &BoundedLog) -> bool {
    let _guard = starting.lock().unwrap_or_else(PoisonError::into_inner);
    let now = Instant::now();
    let pid = service
        .command
        .spawn()
        .and_then(|child| i32::try_from(child.id()).map_err(io::Error::other));
    match pid {
        Ok(pid) => service.state = State::Running(Pid::from_raw(pid), now),
        Err(error) => {
            let Some(wait) = service.failed(Duration::ZERO, now) else {
                say(
                    console,
                    &format!(
                        "{} could not be started for too long: the cell ends: {error}",
                        service.name
                    ),
                );
                return false;
            };
            say(
                console,
                &format!(
                    "{} cannot be started, and is tried again in {wait:?}: {error}",
                    service.name
                ),
            );
            service.state = State::Due(now + wait);
        }
    }
    true
}

fn say(console: &BoundedLog, words: &str) {
    console.write(format!("init: {words}\n").as_bytes());
}

/// Waits for any process of the cell: its own, and those whose parent is gone. Ends when nobody
/// listens any more.
fn reap(starting: &Mutex<()>, ends: &SyncSender<(Pid, End)>) {
    loop {
        match waitid(Id::All, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
            Ok(status) => {
                let Some(pid) = status.pid() else { continue };
                let reaped = {
                    let _guard = starting.lock().unwrap_or_else(PoisonError::into_inner);
                    waitpid(pid, Some(WaitPidFlag::WNOHANG))
                };
                let end = match reaped {
                    Ok(WaitStatus::Exited(_, code)) => End::Code(code),
                    Ok(WaitStatus::Signaled(_, signal, _)) => End::Signal(signal as i32),
                    _ => continue,
                };
                if ends.send((pid, end)).is_err() {
                    return;
                }
            }
            Err(Errno::EINTR) => {}
            Err(_) => thread::sleep(REST),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_doubles_to_its_bound_and_begins_anew_after_a_steady_run() {
        let mut backoff = Backoff::default();
        let waits: Vec<_> =
            (0..8).map(|_| backoff.after(Duration::from_secs(1)).as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(backoff.after(STEADY), FIRST_WAIT);
    }

    #[test]
    fn patience_ends_only_without_a_steady_run() {
        let dir = tempfile::tempdir().unwrap();
        let log = BoundedLog::open(dir.path().join("log"), 100).unwrap();
        let mut service = Service::new("it", Command::new("true"), None, &log)
            .unwrap()
            .with_patience(Duration::from_secs(100));
        let begin = Instant::now() + Duration::from_secs(1000);
        let second = Duration::from_secs(1);
        assert!(service.failed(second, begin).is_some());
        assert!(service.failed(second, begin + 90 * second).is_some());
        assert!(service.failed(STEADY, begin + 150 * second).is_some(), "a steady run begins anew");
        assert!(service.failed(second, begin + 160 * second).is_some());
        assert!(service.failed(second, begin + 258 * second).is_some());
        assert!(service.failed(second, begin + 260 * second).is_none());
    }
}
