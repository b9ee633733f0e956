//! Supervises the services of init, and reaps all processes of the cell.

use std::{
    collections::HashMap,
    fmt, fs, io,
    io::PipeWriter,
    path::Path,
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

/// Delay before the first restart.
const INITIAL_DELAY: Duration = Duration::from_millis(100);
/// Upper bound on the delay before a restart.
const MAX_DELAY: Duration = Duration::from_secs(5);
/// Length of a run after which a service counts as stable and the delay starts again.
const STABLE_RUN: Duration = Duration::from_secs(30);
/// Upper bound on process exits that wait to be handled.
const MAX_QUEUED_EXITS: usize = 64;
/// Pause of the reaper while there is no child process.
const IDLE_SLEEP: Duration = Duration::from_millis(20);

/// Exponential backoff between restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(INITIAL_DELAY)
    }
}

impl Backoff {
    /// Returns the delay after a run of this length.
    pub fn after(&mut self, ran: Duration) -> Duration {
        if ran >= STABLE_RUN {
            self.0 = INITIAL_DELAY;
        }
        let delay = self.0;
        self.0 = (delay * 2).min(MAX_DELAY);
        delay
    }
}

/// A process that is restarted as long as the cell runs.
#[derive(Debug)]
pub struct Service {
    name: &'static str,
    command: Command,
    power_off_code: Option<i32>,
    max_failing: Option<Duration>,
    oom_score_adj: Option<i32>,
    environment: Option<&'static Path>,
    failing_since: Option<Instant>,
    backoff: Backoff,
    state: ServiceState,
    // Kept open, so that a single thread drains the output of all runs.
    _output: PipeWriter,
}

#[derive(Debug, Clone, Copy)]
enum ServiceState {
    Due(Instant),
    Running(Pid, Instant),
}

impl Service {
    /// Creates a service whose output goes to `log`. The cell ends when it exits with
    /// `power_off_code`.
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
            oom_score_adj: None,
            environment: None,
            failing_since: None,
            backoff,
            state: ServiceState::Due(Instant::now()),
            _output: writer,
        })
    }

    /// Ends the cell when the service has had no stable run for this long.
    #[must_use]
    pub fn with_max_failing(mut self, max_failing: Duration) -> Self {
        self.max_failing = Some(max_failing);
        self
    }

    /// Sets the OOM score adjustment of the service's process.
    #[must_use]
    pub fn with_oom_score_adj(mut self, oom_score_adj: i32) -> Self {
        self.oom_score_adj = Some(oom_score_adj);
        self
    }

    /// Reads environment variables from a file, one a line, at each start of the service.
    #[must_use]
    pub fn with_environment(mut self, file: &'static Path) -> Self {
        self.environment = Some(file);
        self
    }

    /// Returns the delay before a restart after a run of this length, or `None` if the cell must
    /// exit.
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

/// Exit code or signal of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExitStatus {
    Code(i32),
    Signal(i32),
}

impl fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "code:{code}"),
            Self::Signal(signal) => write!(f, "signal:{signal}"),
        }
    }
}

/// Restarts services, and reaps all processes of the cell.
#[derive(Debug)]
pub struct Supervisor {
    services: Vec<Service>,
    exits: Receiver<(Pid, ExitStatus)>,
    // Held while a process is spawned: a failed spawn reaps its own process.
    spawn_lock: Arc<Mutex<()>>,
}

impl Supervisor {
    /// Starts the reaper thread.
    pub fn start() -> io::Result<Self> {
        let (sender, exits) = sync_channel(MAX_QUEUED_EXITS);
        let spawn_lock = Arc::new(Mutex::new(()));
        let lock = Arc::clone(&spawn_lock);
        thread::Builder::new().name("reaper".into()).spawn(move || reap(&lock, &sender))?;
        Ok(Self { services: Vec::new(), exits, spawn_lock })
    }

    /// Adds a service.
    pub fn add(&mut self, service: Service) {
        self.services.push(service);
    }

    /// Runs the services until the cell must exit.
    pub fn run(&mut self, console: &BoundedLog) {
        loop {
            let now = Instant::now();
            let mut due = HashMap::new();
            for service in &mut self.services {
                if let ServiceState::Due(at) = service.state
                    && at <= now
                    && !start(service, &self.spawn_lock, console)
                {
                    return;
                }
                if let ServiceState::Due(at) = service.state {
                    due.insert(service.name, at);
                }
            }
            let delay = due
                .values()
                .min()
                .map_or(STABLE_RUN, |at| at.saturating_duration_since(Instant::now()));
            match self.exits.recv_timeout(delay) {
                Ok((pid, exit)) => {
                    if self.on_exit(pid, exit, console) {
                        return;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    log_event(console, "reaper stopped, powering off");
                    return;
                }
            }
        }
    }

    /// Handles a process exit. Returns whether the cell must exit.
    fn on_exit(&mut self, pid: Pid, exit: ExitStatus, console: &BoundedLog) -> bool {
        for service in &mut self.services {
            let ServiceState::Running(running, since) = service.state else { continue };
            if running != pid {
                continue;
            }
            if service.power_off_code.is_some_and(|code| exit == ExitStatus::Code(code)) {
                log_event(console, &format!("power-off requested service={}", service.name));
                return true;
            }
            let Some(delay) = service.restart_delay(since.elapsed(), Instant::now()) else {
                log_event(
                    console,
                    &format!(
                        "service failing for too long, powering off service={} exit={exit}",
                        service.name
                    ),
                );
                return true;
            };
            log_event(
                console,
                &format!(
                    "service exited service={} exit={exit} restart_in={delay:?}",
                    service.name
                ),
            );
            service.state = ServiceState::Due(Instant::now() + delay);
        }
        false
    }
}

/// Starts a service. Returns whether the cell continues.
fn start(service: &mut Service, spawn_lock: &Mutex<()>, console: &BoundedLog) -> bool {
    let _guard = spawn_lock.lock().unwrap_or_else(PoisonError::into_inner);
    let now = Instant::now();
    let variables = service.environment.and_then(|file| fs::read_to_string(file).ok());
    let variables = variables.iter().flat_map(|content| content.lines());
    service.command.envs(variables.filter_map(|line| line.split_once('=')));
    let pid = service
        .command
        .spawn()
        .and_then(|child| i32::try_from(child.id()).map_err(io::Error::other));
    match pid {
        Ok(pid) => {
            if let Some(score) = service.oom_score_adj
                && let Err(error) =
                    fs::write(format!("/proc/{pid}/oom_score_adj"), score.to_string())
            {
                log_event(
                    console,
                    &format!("OOM score not set service={} error=\"{error}\"", service.name),
                );
            }
            service.state = ServiceState::Running(Pid::from_raw(pid), now);
        }
        Err(error) => {
            let Some(delay) = service.restart_delay(Duration::ZERO, now) else {
                log_event(
                    console,
                    &format!(
                        "service failing to start for too long, powering off service={} \
                         error=\"{error}\"",
                        service.name
                    ),
                );
                return false;
            };
            log_event(
                console,
                &format!(
                    "service not started service={} retry_in={delay:?} error=\"{error}\"",
                    service.name
                ),
            );
            service.state = ServiceState::Due(now + delay);
        }
    }
    true
}

fn log_event(console: &BoundedLog, event: &str) {
    console.write(format!("init: {event}\n").as_bytes());
}

/// Reaps any child of init, orphaned processes of the cell included. Returns when the receiver is
/// dropped.
fn reap(spawn_lock: &Mutex<()>, exits: &SyncSender<(Pid, ExitStatus)>) {
    loop {
        match waitid(Id::All, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
            Ok(status) => {
                let Some(pid) = status.pid() else { continue };
                let reaped = {
                    let _guard = spawn_lock.lock().unwrap_or_else(PoisonError::into_inner);
                    waitpid(pid, Some(WaitPidFlag::WNOHANG))
                };
                let exit = match reaped {
                    Ok(WaitStatus::Exited(_, code)) => ExitStatus::Code(code),
                    Ok(WaitStatus::Signaled(_, signal, _)) => ExitStatus::Signal(signal as i32),
                    _ => continue,
                };
                if exits.send((pid, exit)).is_err() {
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
    fn restart_delay_doubles_and_resets_after_a_stable_run() {
        let mut backoff = Backoff::default();
        let waits: Vec<_> =
            (0..8).map(|_| backoff.after(Duration::from_secs(1)).as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(backoff.after(STABLE_RUN), INITIAL_DELAY);
    }

    #[test]
    fn service_has_its_oom_score() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = BoundedLog::open(path.clone(), 100).unwrap();
        let mut command = Command::new("sh");
        // Waits until the score is set; an unprivileged process can only raise it.
        let script = "until grep -x 500 /proc/self/oom_score_adj; do sleep 0.01; done; exit 7";
        command.args(["-c", script]);
        let service = Service::new("it", command, Some(7), &log).unwrap().with_oom_score_adj(500);
        let mut supervisor = Supervisor::start().unwrap();
        supervisor.add(service);
        supervisor.run(&log);
    }

    #[test]
    fn service_without_stable_run_ends_the_cell() {
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
            "a stable run resets the time"
        );
        assert!(service.restart_delay(second, begin + 160 * second).is_some());
        assert!(service.restart_delay(second, begin + 258 * second).is_some());
        assert!(service.restart_delay(second, begin + 260 * second).is_none());
    }
}
