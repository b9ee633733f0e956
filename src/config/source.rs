//! Where values come from: the file, then the environment.

use std::{fs::File, io::Read, path::Path};

use figment::{
    Error, Figment, Metadata, Profile, Provider,
    providers::{Format, Toml},
    util::nest,
    value::{Dict, Map as Profiles, Value},
};
use serde_json::Map;

use crate::problems::{Problem, Problems};

/// Bytes of the largest configuration that is read.
const MAX_BYTES: u64 = 1024 * 1024;

/// How the names of the variables begin.
const PREFIX: &str = "KIYOT_";

/// What divides the keys of a path in a variable's name. One without it is none of the
/// configuration: `KIYOT_LOG`, or what Kubernetes sets for a service.
const DIVIDER: &str = "__";

/// The text of a file.
pub(super) fn read(path: &Path) -> Result<String, Problem> {
    let failed =
        |error: std::io::Error| Problem::new("the file", format!("can't be read: {error}"));
    let mut content = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut content))
        .map_err(failed)?;
    if content.len() as u64 > MAX_BYTES {
        return Err(Problem::new(
            "the file",
            format!("is too long; allowed are {MAX_BYTES} bytes"),
        ));
    }
    String::from_utf8(content).map_err(|error| {
        Problem::new(
            "the file",
            format!("is no text: its byte {} is not UTF-8", error.utf8_error().valid_up_to() + 1),
        )
    })
}

/// A text with the environment over it.
pub(super) fn layers(
    text: &str,
    environment: &Environment,
) -> Result<Map<String, serde_json::Value>, Problem> {
    let figment = Figment::from(Toml::string(text)).merge(environment);
    figment
        .extract()
        .map_err(|error| Problem::new("the text", format!("is no TOML: {}", error.kind)))
}

/// Variables such as `KIYOT_SERVER__LISTEN`.
pub(super) struct Environment(Vec<Variable>);

struct Variable {
    name: String,
    /// Its path of keys.
    path: String,
    value: String,
}

impl Environment {
    /// Those of a process's variables that are of the configuration.
    pub(super) fn new(variables: impl IntoIterator<Item = (String, String)>) -> Self {
        let variable = |(name, value): (String, String)| {
            let path = name
                .strip_prefix(PREFIX)
                .filter(|path| path.contains(DIVIDER))?
                .to_ascii_lowercase()
                .replace(DIVIDER, ".");
            Some(Variable { name, path, value })
        };
        Self(variables.into_iter().filter_map(variable).collect())
    }

    /// Says of problems with what a variable has set that it was this variable.
    pub(super) fn name_variables(&self, mut problems: Problems) -> Problems {
        for problem in &mut problems.list {
            let is_of = |variable: &&Variable| {
                let below = problem.at.strip_prefix(&variable.path);
                below.is_some_and(|below| below.is_empty() || below.starts_with(['.', '[']))
            };
            if let Some(variable) = self.0.iter().find(is_of) {
                problem.rule =
                    format!("{} (set by the environment variable {})", problem.rule, variable.name);
            }
        }
        problems
    }
}

impl Provider for &Environment {
    fn metadata(&self) -> Metadata {
        Metadata::named("environment")
    }

    fn data(&self) -> Result<Profiles<Profile, Dict>, Error> {
        let mut dict = Dict::new();
        for variable in &self.0 {
            // Parsing does not fail: what is no number, list or so is a text.
            let Ok(value) = variable.value.parse::<Value>();
            if let Some(nested) = nest(&variable.path, value).into_dict() {
                dict = Figment::from(Layer(dict)).merge(Layer(nested)).extract()?;
            }
        }
        Layer(dict).data()
    }
}

/// Values that are there already.
struct Layer(Dict);

impl Provider for Layer {
    fn metadata(&self) -> Metadata {
        Metadata::named("values")
    }

    fn data(&self) -> Result<Profiles<Profile, Dict>, Error> {
        Ok(Profile::Default.collect(self.0.clone()))
    }
}
