//! `version`: the line of the original, and a line on standard error for a daemon of another
//! version.

use std::io::{self, Write};

use kiyot_proto::ADMIN_REVISION;
use serde_json::json;

use crate::{
    client::Client,
    error::{Error, OWN, advice},
};

pub(super) async fn run(client: &Client) -> Result<(), Error> {
    let version = client.version().await?;
    writeln!(io::stdout(), "{}", line(&version.version, &version.git_commit))?;
    if let Some(advice) = advice(version.revision) {
        eprintln!(
            "milpactl: the API of the daemon has revision {}, milpactl {OWN} uses revision \
             {ADMIN_REVISION}: {advice}",
            version.revision
        );
    }
    Ok(())
}

fn line(version: &str, commit: &str) -> String {
    let mut parts = version.split('.');
    let mut part = || json!(parts.next().unwrap_or("0")).to_string();
    let (major, minor) = (part(), part());
    format!(
        "Milpa server version: {{\"Major\": {major}, \"Minor\": {minor}, \"GitVersion\": {}, \
         \"GitCommit\": {}}}",
        json!(format!("v{version}")),
        json!(commit)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_that_of_the_original() {
        assert_eq!(
            line("1.0.3", "abc"),
            "Milpa server version: {\"Major\": \"1\", \"Minor\": \"0\", \"GitVersion\": \
             \"v1.0.3\", \"GitCommit\": \"abc\"}"
        );
        assert!(line("1.0.3", "").ends_with(", \"GitCommit\": \"\"}"));
    }
}
