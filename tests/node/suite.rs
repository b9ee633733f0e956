//! The suites of this project, run on the machine.
