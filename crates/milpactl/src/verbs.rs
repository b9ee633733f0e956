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
mod get;
mod kinds;
mod logs;
mod sought;
mod top;
mod version;

/// The message of forms that only the original had.
const INSTEAD: &str = "kiyot has no such objects: use kubectl, whose API server has them \
    (kubectl apply, kubectl get services, kubectl get secrets)";

/// Runs a command.
pub(crate) async fn run(arguments: Arguments) -> Result<ExitCode, Error> {
    let connect = || Client::connect(&arguments.socket);
    match arguments.verb {
        Verb::Version => version::run(&connect().await?).await?,
        Verb::Get(get) => get::run(connect, get).await?,
        Verb::Describe(describe) => describe::run(&connect().await?, describe).await?,
        Verb::Logs(logs) => logs::run(&connect().await?, logs).await?,
        Verb::Create(create) => create::run(connect, create).await?,
        Verb::Delete(delete) => delete::run(&connect().await?, delete).await?,
        Verb::Cordon => cordon::cordon(&connect().await?).await?,
        Verb::Uncordon => cordon::uncordon(&connect().await?).await?,
        Verb::Drain(drain) => cordon::drain(&connect().await?, &drain).await?,
        Verb::Pool(listing) => get::pools(&connect().await?, listing).await?,
        Verb::Top(top) => top::run(&connect().await?, &top).await?,
        Verb::Dump(dump) => dump::run(&connect().await?, dump).await?,
        Verb::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "milpactl", &mut script);
            io::stdout().write_all(&script)?;
        }
        Verb::Man => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Arguments::command()).render(&mut page)?;
            io::stdout().write_all(&page)?;
        }
        Verb::Deploy(_) | Verb::Update(_) => return Err(Error::Usage(INSTEAD.to_owned())),
    }
    Ok(ExitCode::SUCCESS)
}
