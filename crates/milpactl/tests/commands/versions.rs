//! Daemons of other versions.

use kiyot_proto::ADMIN_REVISION;

use super::{
    daemon::{Behaviour, Daemon},
    run,
};

/// Verifies O26.
#[test]
fn unknown_method_names_the_program_to_upgrade() {
    let with = |revision| {
        Daemon::start(Behaviour { lacks_methods: true, revision, ..Behaviour::default() })
    };
    let own = env!("CARGO_PKG_VERSION");
    for (revision, advice) in [
        (ADMIN_REVISION - 1, "it is older, upgrade the daemon"),
        (ADMIN_REVISION + 1, "it is newer, upgrade milpactl"),
        (ADMIN_REVISION, "use the milpactl of its version"),
    ] {
        let (text, error, code) = run(&with(revision), "cordon");
        let expected = format!(
            "milpactl: the daemon (version 0.0.1) does not have the method that milpactl {own} \
             calls: {advice}\n"
        );
        assert_eq!((text, error, code), (String::new(), expected, 76), "revision {revision}");
    }
    let other = Behaviour { lacks_methods: true, lacks_version: true, ..Behaviour::default() };
    let other = Daemon::start(other);
    for line in ["cordon", "version"] {
        let (text, error, code) = run(&other, line);
        let expected = format!(
            "milpactl: the daemon (of an unknown version) does not have the method that milpactl \
             {own} calls: use the milpactl of its version\n"
        );
        assert_eq!((text, error, code), (String::new(), expected, 76), "{line}");
    }
}

/// Verifies O26.
#[test]
fn version_of_an_older_and_of_a_newer_daemon_is_shown_with_the_program_to_upgrade() {
    for (revision, advice) in [
        (ADMIN_REVISION - 1, "it is older, upgrade the daemon"),
        (ADMIN_REVISION, ""),
        (ADMIN_REVISION + 1, "it is newer, upgrade milpactl"),
    ] {
        let daemon = Daemon::start(Behaviour { revision, ..Behaviour::default() });
        let (text, error, code) = run(&daemon, "version");
        assert!(text.contains("\"GitVersion\": \"v0.0.1\""), "{text}");
        assert_eq!((text.lines().count(), code), (1, 0), "{text}");
        assert_eq!(error.is_empty(), advice.is_empty(), "{error}");
        assert!(error.trim_end().ends_with(advice), "{error}");
    }
}

/// Verifies O26.
#[test]
fn phases_of_a_newer_daemon_are_shown_as_unknown() {
    let daemon = Daemon::start(Behaviour { has_later_phases: true, ..Behaviour::default() });
    for line in ["get pods", "get cells"] {
        let (text, error, code) = run(&daemon, line);
        assert_eq!((text.matches("Unknown").count(), code), (3, 0), "{line}: {text}{error}");
    }
    let (text, error, code) = run(&daemon, "get pod web-0 -o json");
    let pod: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((pod["status"]["phase"].as_str(), code), (Some("Unknown"), 0), "{text}{error}");
}
