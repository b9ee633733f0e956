//! `exec` and `attach`: the streams of a command, or of a container.

use std::{
    io::{self, Write},
    path::Path,
    process::ExitCode,
};

use kiyot_proto::admin::{AttachRequest, ExecRequest, Pod, Unit};

use super::sought;
use crate::{
    cli::{Attach, Exec},
    client::Client,
    error::{self, Error},
    names::Named,
    output::plain,
    session::{self, End, Status, Wanted},
    signals, terminal,
};

/// The message of kubectl for an absent terminal.
const NO_TERMINAL: &str = "unable to use a TTY: input is not a terminal or the right kind of file";

pub(super) async fn exec(socket: &Path, client: &Client, exec: Exec) -> Result<ExitCode, Error> {
    let Exec { name, streams, command } = exec;
    let wanted = with_terminal(streams.stdin, streams.tty);
    let pod = sought::pod(client, streams.namespace.as_deref(), &name).await?;
    let request = ExecRequest {
        namespace: pod.namespace.clone(),
        pod: sought::text_of(&pod),
        unit: streams.unit.unwrap_or_default(),
        command,
        stdin: wanted.stdin,
        tty: wanted.tty,
    };
    let answer = client.call(async |mut admin| admin.exec(request).await).await?;
    ended(session::run(&answer.url, wanted).await?, socket, &pod).await
}

pub(super) async fn attach(
    socket: &Path,
    client: &Client,
    attach: Attach,
) -> Result<ExitCode, Error> {
    let Attach { name, streams } = attach;
    let pod = sought::pod(client, streams.namespace.as_deref(), &name).await?;
    let unit = unit(&pod, streams.unit.as_deref())?;
    let wanted = of_unit(unit, streams.stdin, streams.tty);
    let request = AttachRequest {
        namespace: pod.namespace.clone(),
        pod: sought::text_of(&pod),
        unit: unit.name.clone(),
        stdin: wanted.stdin,
        tty: wanted.tty,
    };
    let answer = client.call(async |mut admin| admin.attach(request).await).await?;
    if wanted.stdin && wanted.tty && terminal::is_input() {
        say("if you don't see a prompt, press enter");
    }
    ended(session::run(&answer.url, wanted).await?, socket, &pod).await
}

/// Returns the streams of a command. Continues without an absent terminal, as kubectl does.
fn with_terminal(stdin: bool, tty: bool) -> Wanted {
    let has_terminal = tty && stdin && terminal::is_input();
    if tty && !stdin {
        say("unable to use a TTY: -t needs -i");
    } else if tty && !has_terminal {
        say(NO_TERMINAL);
    }
    Wanted { stdin, tty: has_terminal }
}

/// Returns the streams of a unit. The unit's own settings decide.
fn of_unit(unit: &Unit, stdin: bool, tty: bool) -> Wanted {
    let name = plain(&unit.name);
    if stdin && !unit.stdin {
        say(&format!("unit {name} has no stdin: no input is passed"));
    }
    if tty && !unit.tty {
        say(&format!("unable to use a TTY: unit {name} has none"));
    } else if tty && !(stdin && terminal::is_input()) {
        say(NO_TERMINAL);
    }
    Wanted { stdin: stdin && unit.stdin, tty: unit.tty }
}

/// Returns the unit of a name, or the default unit.
pub(super) fn unit<'a>(pod: &'a Pod, name: Option<&str>) -> Result<&'a Unit, Error> {
    let default = || {
        let mut units = pod.units.iter();
        units.find(|unit| unit.name == pod.default_unit).or(pod.units.first())
    };
    let named = |name: &str| pod.units.iter().find(|unit| unit.name == name);
    name.map_or_else(default, named).ok_or_else(|| {
        let pod_name = pod.full_name();
        let names: Vec<_> = pod.units.iter().map(|unit| unit.name.as_str()).collect();
        Error::Name(match name {
            Some(name) => {
                format!("no unit {name:?} in {pod_name}; allowed: {}", names.join(", "))
            }
            None => format!("{pod_name} has no unit yet"),
        })
    })
}

/// Writes a remark. A closed standard error is not an error.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "milpactl: {text}");
}

/// Returns the exit code of a session.
async fn ended(end: End, socket: &Path, pod: &Pod) -> Result<ExitCode, Error> {
    match end {
        End::Status(Status::Exited(code)) => {
            Ok(ExitCode::from(u8::try_from(code).unwrap_or(error::FAILURE)))
        }
        End::Status(Status::Failed(message)) => Err(Error::Failed(message)),
        End::Signal(signal) => Ok(ExitCode::from(signals::exit_code(signal))),
        End::Lost => Err(lost(socket, pod).await),
    }
}

/// Returns the error of a connection that has ended by itself: the daemon's, or the pod's.
pub(super) async fn lost(socket: &Path, pod: &Pod) -> Error {
    let asked = async { Client::connect(socket).await?.version().await };
    match asked.await {
        Ok(_) => {
            let pod = pod.full_name();
            Error::Failed(format!("connection to {pod} lost: its pod or cell has ended"))
        }
        Err(cause) => Error::Lost { pod: pod.full_name(), cause: Box::new(cause) },
    }
}
