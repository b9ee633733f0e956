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

use super::bounded_log::BoundedLog;

/// The shortest wait before a process is started again.
const INITIAL_DELAY: Duration = Duration::from_millis(100);
/// The longest.
const MAX_DELAY: Duration = Duration::from_secs(5);
/// A process that ran so long begins with the shortest wait again.
const STABLE_RUN: Duration = Duration::from_secs(30);
/// Ends of processes that may wait to be looked at.
const MAX_QUEUED_EXITS: usize = 64;
/// How long the reaper rests when there is no process to wait for.
const IDLE_SLEEP: Duration = Duration::from_millis(20);

/// How long to wait before a process that ended is started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(INITIAL_DELAY)
    }
}

impl Backoff {
    /// The wait after a run of this length.
    pub fn after(&mut self, ran: Duration) -> Duration {
        if ran >= STABLE_RUN {
            self.0 = INITIAL_DELAY;
        }
        let wait = self.0;
        self.0 = (wait * 2).min(MAX_DELAY);
        wait
    }
}

/// A process that is to run as long as the cell.
#[derive(Debug)]
pub struct Service {
    name: &'static str,
    command: Command,
    power_off_code: Option<i32>,
    max_failing: Option<Duration>,
    failing_since: Option<Instant>,
    backoff: Backoff,
    state: ServiceState,
    // Held, so that one thread drains the output of all its runs.
    _output: PipeWriter,
}

#[derive(Debug, Clone, Copy)]
enum ServiceState {
    Due(Instant),
    Running(Pid, Instant),
}

impl Service {
    /// What it prints goes to `log`. `power_off_code` is the exit code by which it asks for the cell's
    /// end.
    pub fn new(
        name: &'static str,
        mut command: Command,
        power_off_code: Option<i32>,
        log: &BoundedLog,
    ) -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        log.drain(reader)?;
        command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer.try_clone()?);
        let backoff = Backoff::default();
        Ok(Self {
            name,
            command,
            power_off_code,
            max_failing: None,
            failing_since: None,
            backoff,
            state: ServiceState::Due(Instant::now()),
            _output: writer,
        })
    }

    /// The cell exits when the service has not run steadily for so long.
    #[must_use]
    pub fn with_max_failing(mut self, max_failing: Duration) -> Self {
        self.max_failing = Some(max_failing);
        self
    }

    /// After a run of this length: the wait before the next, or `None` when there is to be none.
    fn restart_delay(&mut self, ran: Duration, now: Instant) -> Option<Duration> {
        let since = match self.failing_since {
            Some(since) if ran < STABLE_RUN => since,
            _ if ran < STABLE_RUN => {
                *self.failing_since.insert(now.checked_sub(ran).unwrap_or(now))
            }
            _ => {
                self.failing_since = None;
                now
            }
        };
        if self
            .max_failing
            .is_some_and(|max_failing| now.saturating_duration_since(since) >= max_failing)
        {
            return None;
        }
        Some(self.backoff.after(ran))
    }
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExitStatus {
    Code(i32),
    Signal(i32),
}

impl fmt::Display for ExitStatus {
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
    exits: Receiver<(Pid, ExitStatus)>,
    // Held while a process is started: a start that fails reaps its process itself.
    starting: Arc<Mutex<()>>,
}

impl Supervisor {
    /// Begins to reap.
    pub fn start() -> io::Result<Self> {
        let (sender, exits) = sync_channel(MAX_QUEUED_EXITS);
        let starting = Arc::new(Mutex::new(()));
        let lock = Arc::clone(&starting);
        thread::Builder::new().name("reaper".into()).spawn(move || reap(&lock, &sender))?;
        Ok(Self { services: Vec::new(), exits, starting })
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
                if let ServiceState::Due(at) = service.state
                    && at <= now
                    && !start(service, &self.starting, console)
                {
                    return;
                }
                if let ServiceState::Due(at) = service.state {
                    due.insert(service.name, at);
                }
            }
            let wait = due
                .values()
                .min()
                .map_or(STABLE_RUN, |at| at.saturating_duration_since(Instant::now()));
            match self.exits.recv_timeout(wait) {
                Ok((pid, end)) => {
                    if self.on_exit(pid, end, console) {
                        return;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    log_event(console, "init's reaper ended: the cell exits");
                    return;
                }
            }
        }
    }

    /// Whether the cell exits with it.
    fn on_exit(&mut self, pid: Pid, end: ExitStatus, console: &BoundedLog) -> bool {
        for service in &mut self.services {
            let ServiceState::Running(running, since) = service.state else { continue };
            if running != pid {
                continue;
            }
            if service.power_off_code.is_some_and(|code| end == ExitStatus::Code(code)) {
                log_event(console, &format!("{} asks for the cell's end", service.name));
                return true;
            }
            let Some(wait) = service.restart_delay(since.elapsed(), Instant::now()) else {
                log_event(
                    console,
                    &format!(
                        "{} ended with {end} once more, and has failed for too long: the cell exits",
                        service.name
                    ),
                );
                return true;
            };
            log_event(
                console,
                &format!("{} ended with {end}, and is started again in {wait:?}", service.name),
            );
            service.state = ServiceState::Due(Instant::now() + wait);
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
        Ok(pid) => service.state = ServiceState::Running(Pid::from_raw(pid), now),
        Err(error) => {
            let Some(wait) = service.restart_delay(Duration::ZERO, now) else {
                log_event(
                    console,
                    &format!(
                        "{} could not be started for too long: the cell exits: {error}",
                        service.name
                    ),
                );
                return false;
            };
            log_event(
                console,
                &format!(
                    "{} cannot be started, and is tried again in {wait:?}: {error}",
                    service.name
                ),
            );
            service.state = ServiceState::Due(now + wait);
        }
    }
    true
}

fn log_event(console: &BoundedLog, words: &str) {
    console.write(format!("init: {words}\n").as_bytes());
}

/// Waits for any process of the cell: its own, and those whose parent is gone. Ends when nobody
/// listens any more.
fn reap(starting: &Mutex<()>, exits: &SyncSender<(Pid, ExitStatus)>) {
    loop {
        match waitid(Id::All, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
            Ok(status) => {
                let Some(pid) = status.pid() else { continue };
                let reaped = {
                    let _guard = starting.lock().unwrap_or_else(PoisonError::into_inner);
                    waitpid(pid, Some(WaitPidFlag::WNOHANG))
                };
                let end = match reaped {
                    Ok(WaitStatus::Exited(_, code)) => ExitStatus::Code(code),
                    Ok(WaitStatus::Signaled(_, signal, _)) => ExitStatus::Signal(signal as i32),
                    _ => continue,
                };
                if exits.send((pid, end)).is_err() {
                    return;
                }
            }
            Err(Errno::EINTR) => {}
            Err(_) => thread::sleep(IDLE_SLEEP),
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
        assert_eq!(backoff.after(STABLE_RUN), INITIAL_DELAY);
    }

    #[test]
    fn patience_ends_only_without_a_steady_run() {
        let dir = tempfile::tempdir().unwrap();
        let log = BoundedLog::open(dir.path().join("log"), 100).unwrap();
        let mut service = Service::new("it", Command::new("true"), None, &log)
            .unwrap()
            .with_max_failing(Duration::from_secs(100));
        let begin = Instant::now() + Duration::from_secs(1000);
        let second = Duration::from_secs(1);
        assert!(service.restart_delay(second, begin).is_some());
        assert!(service.restart_delay(second, begin + 90 * second).is_some());
        assert!(
            service.restart_delay(STABLE_RUN, begin + 150 * second).is_some(),
            "a steady run begins anew"
        );
        assert!(service.restart_delay(second, begin + 160 * second).is_some());
        assert!(service.restart_delay(second, begin + 258 * second).is_some());
        assert!(service.restart_delay(second, begin + 260 * second).is_none());
    }
}
