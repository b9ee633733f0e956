//! Sources of values: the file, then the environment.

use std::{fs::File, io::Read, path::Path};

use figment::{
    Error, Figment, Metadata, Profile, Provider,
    providers::{Format, Toml},
    util::nest,
    value::{Dict, Map as Profiles, Value},
};
use kiyot_values::problems::{Problem, Problems};
use serde_json::Map;

/// Largest configuration, in bytes.
const MAX_BYTES: u64 = 1024 * 1024;

/// Prefix of the variables.
const PREFIX: &str = "KIYOT_";

/// Separator of keys in a variable's name. A variable without it is not a key of the configuration:
/// `KIYOT_LOG`, or a variable that Kubernetes sets for a service.
const DIVIDER: &str = "__";

pub(super) fn read(path: &Path) -> Result<String, Problem> {
    let failed =
        |error: std::io::Error| Problem::new("the file", format!("can't be read: {error}"));
    let mut content = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut content))
        .map_err(failed)?;
    if content.len() as u64 > MAX_BYTES {
        return Err(Problem::new("the file", format!("is too long; allowed: {MAX_BYTES} bytes")));
    }
    String::from_utf8(content).map_err(|error| {
        Problem::new(
            "the file",
            format!("is not UTF-8 at byte {}", error.utf8_error().valid_up_to() + 1),
        )
    })
}

/// Parses a text with the environment's variables over it.
pub(super) fn layers(
    text: &str,
    environment: &Environment,
) -> Result<Map<String, serde_json::Value>, Problem> {
    let figment = Figment::from(Toml::string(text)).merge(environment);
    figment
        .extract()
        .map_err(|error| Problem::new("the text", format!("is not TOML: {}", error.kind)))
}

/// Variables such as `KIYOT_SERVER__LISTEN`.
pub(super) struct Environment(Vec<Variable>);

struct Variable {
    name: String,
    /// Path of keys.
    path: String,
    value: String,
}

impl Environment {
    /// Selects the variables of the configuration.
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

    /// Adds the name of the variable to problems of a value that it sets.
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
            // Parsing doesn't fail: a value that is not a number, list or table is a text.
            let Ok(value) = variable.value.parse::<Value>();
            if let Some(nested) = nest(&variable.path, value).into_dict() {
                dict = Figment::from(Layer(dict)).merge(Layer(nested)).extract()?;
            }
        }
        Layer(dict).data()
    }
}

struct Layer(Dict);

impl Provider for Layer {
    fn metadata(&self) -> Metadata {
        Metadata::named("values")
    }

    fn data(&self) -> Result<Profiles<Profile, Dict>, Error> {
        Ok(Profile::Default.collect(self.0.clone()))
    }
}
