//! The unit files `config/kiyot.service` and `config/kiyot-cell.service`.

use std::collections::BTreeMap;

use crate::tree;

/// Values by section and key, as systemd reads unit files.
type Unit = BTreeMap<(String, String), Vec<String>>;

fn unit() -> Unit {
    read("config/kiyot.service")
}

fn read(path: &str) -> Unit {
    let mut unit = Unit::new();
    let mut section = String::new();
    for (number, line) in tree::text(path).replace("\\\n    ", "").lines().enumerate() {
        if line.is_empty() || line.starts_with('#') {
        } else if let Some(name) = line.strip_prefix('[') {
            section = name.strip_suffix(']').unwrap().to_owned();
        } else {
            let (key, value) = line
                .split_once('=')
                .unwrap_or_else(|| panic!("line {}: {line:?} is not KEY=VALUE", number + 1));
            assert!(!key.contains(' ') && !value.is_empty(), "line {}: {line:?}", number + 1);
            unit.entry((section.clone(), key.to_owned())).or_default().push(value.to_owned());
        }
    }
    unit
}

fn words(unit: &Unit, section: &str, key: &str) -> Vec<String> {
    unit.get(&(section.to_owned(), key.to_owned()))
        .into_iter()
        .flatten()
        .flat_map(|value| value.split(' ').map(str::to_owned))
        .collect()
}

/// Verifies C6.
#[test]
fn service_starts_between_runtime_and_kubelet_and_stops_no_cell() {
    let unit = unit();
    assert!(words(&unit, "Unit", "After").contains(&"containerd.service".to_owned()));
    assert!(words(&unit, "Unit", "Before").contains(&"kubelet.service".to_owned()));
    for (key, value) in [
        ("Type", "notify"),
        ("NotifyAccess", "main"),
        ("WatchdogSec", "1min"),
        ("KillMode", "process"),
        ("Restart", "always"),
        ("Delegate", "yes"),
        ("MountFlags", "shared"),
        ("TasksMax", "infinity"),
        ("LimitCORE", "0:infinity"),
        ("RuntimeDirectoryMode", "0711"),
        ("StateDirectoryMode", "0700"),
    ] {
        assert_eq!(words(&unit, "Service", key), [value], "{key}");
    }
    assert_eq!(words(&unit, "Service", "ExecReload"), ["/bin/kill", "-HUP", "$MAINPID"]);
    // A stop of containerd must not stop kiyot: pods in cells keep running.
    for key in ["Requires", "BindsTo", "PartOf"] {
        assert!(words(&unit, "Unit", key).is_empty(), "{key}");
    }
    assert_eq!(words(&unit, "Install", "WantedBy"), ["multi-user.target"]);
}

/// Verifies X48.
#[test]
fn service_memory_is_limited_and_an_oom_kill_does_not_stop_the_unit() {
    let unit = unit();
    for (key, value) in [
        ("MemoryMax", "512M"),
        ("MemorySwapMax", "0"),
        ("OOMPolicy", "continue"),
        ("OOMScoreAdjust", "-999"),
        ("Restart", "always"),
    ] {
        assert_eq!(words(&unit, "Service", key), [value], "{key}");
    }
    // Above `MemoryHigh`, calls would wait until the page cache of image copies is reclaimed.
    assert!(words(&unit, "Service", "MemoryHigh").is_empty());
    let table = tree::text("docs/operate.md");
    assert!(table.contains("`MemoryMax=512M`"), "the page names the default");
}

/// Verifies V21, V102.
#[test]
fn cell_service_restarts_to_power_off_its_machine() {
    let unit = read("config/kiyot-cell.service");
    for (key, value) in [
        ("Restart", "always"),
        ("KillMode", "control-group"),
        ("Delegate", "yes"),
        ("TasksMax", "infinity"),
        ("LimitCORE", "0:infinity"),
        ("StandardError", "journal+console"),
    ] {
        assert_eq!(words(&unit, "Service", key), [value], "{key}");
    }
    let before = words(&unit, "Service", "ExecStartPre");
    assert!(before.contains(&"kernel.panic=10".to_owned()), "a panic reboots: {before:?}");
    assert_eq!(words(&unit, "Unit", "StartLimitIntervalSec"), ["0"]);
    // Without `After`, systemd stops the other unit and starts this unit at the same time.
    let (other, after) = (words(&unit, "Unit", "Conflicts"), words(&unit, "Unit", "After"));
    assert!(other.contains(&"containerd.service".to_owned()), "{other:?}");
    assert!(
        other.iter().all(|unit| after.contains(unit)),
        "{other:?} are stopped first: {after:?}"
    );
    assert_eq!(words(&unit, "Install", "WantedBy"), ["multi-user.target"]);
}

/// Verifies C6.
#[test]
fn services_are_verified_by_systemd_without_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let unit = dir.path().join("kiyot.service");
    let verify = |text: &str| {
        // systemd-analyze checks that the program exists, which is not installed here.
        let lines = text
            .lines()
            .map(|line| if line.starts_with("ExecStart=") { "ExecStart=/bin/true" } else { line });
        std::fs::write(&unit, lines.collect::<Vec<_>>().join("\n") + "\n").unwrap();
        let output = std::process::Command::new("systemd-analyze")
            .args(["verify", "--man=no"])
            .arg(&unit)
            .output()
            .expect("systemd-analyze can be run: scripts/setup installs it");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let of_unit = stderr.lines().filter(|line| line.contains("kiyot.service"));
        (output.status.success(), of_unit.map(str::to_owned).collect::<Vec<_>>())
    };
    let of_cell = tree::text("config/kiyot-cell.service");
    assert_eq!(verify(&of_cell), (true, Vec::new()));
    let text = tree::text("config/kiyot.service");
    assert_eq!(verify(&text), (true, Vec::new()));
    // Unknown values and keys, which would have no effect, do cause a warning.
    let (_, complaints) = verify(&text.replace("KillMode=process", "KillMode=main"));
    assert!(complaints.iter().any(|line| line.contains("kill mode")), "{complaints:?}");
    let (_, complaints) = verify(&text.replace("Delegate=", "Delegates="));
    assert!(complaints.iter().any(|line| line.contains("Delegates")), "{complaints:?}");
}

/// Verifies C6.
#[test]
fn service_has_no_mount_namespace() {
    let unit = unit();
    let makers = [
        "PrivateTmp",
        "PrivateDevices",
        "PrivateMounts",
        "ProtectSystem",
        "ProtectHome",
        "ReadOnlyPaths",
        "ReadWritePaths",
        "InaccessiblePaths",
        "BindPaths",
        "TemporaryFileSystem",
        "RootDirectory",
        "ProtectKernelTunables",
        "ProtectControlGroups",
        "DynamicUser",
    ];
    for key in makers {
        assert!(
            words(&unit, "Service", key).is_empty(),
            "{key} creates a mount namespace, so that mounts would not leave it"
        );
    }
}

#[test]
fn service_runs_the_installed_daemon() {
    assert_eq!(
        words(&unit(), "Service", "ExecStart"),
        ["/usr/bin/kiyot", "serve", "--config", "/etc/kiyot/kiyot.toml"]
    );
}
