//! `check-config --live`: proves ids and permissions over the provider's API.

use std::process::ExitCode;

use kiyot_config::{BackendConfig, Config};
use tokio::runtime::Builder;

use super::Output;
use crate::backends::milpa::live_check::check_live;

/// Checks the backend with cells, and adds the report to the summary of the configuration.
pub(super) fn run(config: &Config, summary: String) -> Output {
    let failed = |why: &str| Output {
        text: format!("{summary}\ncheck-config --live: {why}\n"),
        code: ExitCode::FAILURE,
    };
    let milpa = config.backends.iter().find_map(|(name, backend)| match backend {
        BackendConfig::Milpa(milpa) => Some((name, milpa)),
        BackendConfig::Cri(_) => None,
    });
    let Some((name, milpa)) = milpa else {
        return failed("no backend has the type \"milpa\"");
    };
    let runtime = match Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&format!("runtime can't be started: {error}")),
    };
    match runtime.block_on(check_live(milpa)) {
        Ok(report) => {
            let code = if report.is_fine() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
            Output { text: format!("{summary}\n{report}"), code }
        }
        Err(error) => failed(&format!("backend {name}: {error}")),
    }
}
