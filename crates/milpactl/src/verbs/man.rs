//! `man`: the manual page of all verbs, or a page for each.

use std::{
    io::{self, Write},
    path::Path,
};

use clap::{Command, CommandFactory};
use clap_mangen::Man;

use crate::{cli::Arguments, error::Error};

/// Returns a page with the sections of the program, followed by the sections of each verb.
pub(super) fn page() -> io::Result<Vec<u8>> {
    let mut command = command();
    let mut page = Vec::new();
    Man::new(command.clone()).render(&mut page)?;
    command.build();
    for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set()) {
        let verb = verb.clone();
        let title = format!("milpactl {}", verb.get_name()).to_uppercase();
        let man = Man::new(verb);
        let mut sections = Vec::new();
        man.render_description_section(&mut sections)?;
        man.render_synopsis_section(&mut sections)?;
        man.render_options_section(&mut sections)?;
        // They are parts of the verb's section.
        let sections = String::from_utf8_lossy(&sections).replace(".SH ", ".SS ");
        write!(page, ".SH \"{title}\"\n{sections}")?;
    }
    Ok(page)
}

/// Writes a page for the program, and one for each verb.
pub(super) fn write(directory: &Path) -> Result<(), Error> {
    let written = std::fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(command(), directory));
    written.map_err(|error| Error::Failed(format!("{}: {error}", directory.display())))
}

fn command() -> Command {
    Arguments::command().disable_help_subcommand(true)
}
