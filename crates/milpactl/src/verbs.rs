//! The verbs, one file each.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use clap::CommandFactory;

use crate::{
    cli::{Arguments, Verb},
    client::Client,
    error::Error,
};

mod cordon;
mod create;
mod delete;
mod describe;
mod dump;
mod forwarder;
mod get;
mod kinds;
mod logs;
mod man;
mod manifest_files;
mod plan;
mod port_forward;
mod sought;
mod streams;
mod top;
mod version;

/// The message for verbs that only the original had, and for verbs of kubectl.
const NO_SUCH_VERB: &str = "kiyot has no deployments, services and secrets: `kubectl apply` makes \
    them; allowed: `milpactl create -f`, which gives a pod to the kubelet without the API server";
/// The message for kinds that only the original had.
const NO_SUCH_KIND: &str = "kiyot has no services and secrets, the API server has them: use \
    `kubectl get services` and `kubectl get secrets`";

/// Runs a command.
pub(crate) async fn run(arguments: Arguments) -> Result<ExitCode, Error> {
    let connect = || Client::connect(&arguments.socket);
    match arguments.verb {
        Verb::Version => version::run(&connect().await?).await?,
        Verb::Get(get) => get::run(connect, get).await?,
        Verb::Describe(describe) => describe::run(&connect().await?, describe).await?,
        Verb::Logs(logs) => logs::run(connect, logs).await?,
        Verb::Plan(plan) => return plan::run(connect, plan).await,
        Verb::Create(create) => create::run(connect, create).await?,
        Verb::Delete(delete) => delete::run(delete)?,
        Verb::Exec(exec) => {
            return streams::exec(&arguments.socket, &connect().await?, exec).await;
        }
        Verb::Attach(attach) => {
            return streams::attach(&arguments.socket, &connect().await?, attach).await;
        }
        Verb::PortForward(forward) => {
            return port_forward::run(&arguments.socket, connect, forward).await;
        }
        Verb::Cordon => cordon::cordon(&connect().await?).await?,
        Verb::Uncordon => cordon::uncordon(&connect().await?).await?,
        Verb::Drain(drain) => return cordon::drain(connect, &drain).await,
        Verb::Pool(listing) => get::pools(&connect().await?, listing).await?,
        Verb::Top(top) => top::run(&connect().await?, &top).await?,
        Verb::Dump(dump) => return dump::run(&connect().await?, dump).await,
        Verb::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "milpactl", &mut script);
            io::stdout().write_all(&script)?;
        }
        Verb::Man { directory: Some(directory) } => man::write(&directory)?,
        Verb::Man { directory: None } => io::stdout().write_all(&man::page()?)?,
        Verb::Deploy(_) | Verb::Update(_) => return Err(Error::Usage(NO_SUCH_VERB.to_owned())),
    }
    Ok(ExitCode::SUCCESS)
}
