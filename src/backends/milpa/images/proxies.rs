//! Proxies of the daemon's environment, for pulls of cells on other machines.

use std::collections::HashMap;

use kiyot_link::bind_limits::{MAX_PROXY_BYTES, PROXY_VARIABLES, is_proxy_value};

/// Returns the proxy variables of the daemon's environment.
pub(super) fn of_environment() -> HashMap<String, String> {
    of(|name| std::env::var(name).ok())
}

/// Leaves out values that an agent would refuse.
fn of(variable: impl Fn(&str) -> Option<String>) -> HashMap<String, String> {
    let is_valid = |name: &str, value: &String| {
        let is_valid = is_proxy_value(value);
        if !is_valid {
            tracing::warn!(
                variable = name,
                bytes = value.len(),
                "proxy left out; allowed: at most {MAX_PROXY_BYTES} bytes, no control characters"
            );
        }
        is_valid
    };
    PROXY_VARIABLES
        .into_iter()
        .filter_map(|name| Some((name, variable(name).filter(|value| !value.is_empty())?)))
        .filter(|(name, value)| is_valid(name, value))
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxies_that_an_agent_refuses_are_left_out() {
        let long = "x".repeat(MAX_PROXY_BYTES + 1);
        let found = of(|name| match name {
            "HTTPS_PROXY" => Some("http://user:word@proxy:3128".to_owned()),
            "HTTP_PROXY" => Some("http://proxy\nPATH=/x".to_owned()),
            "https_proxy" => Some(long.clone()),
            "NO_PROXY" => Some(String::new()),
            _ => None,
        });
        let expected = ("HTTPS_PROXY".to_owned(), "http://user:word@proxy:3128".to_owned());
        assert_eq!(found, [expected].into());
    }
}
