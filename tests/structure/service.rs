//! config/kiyot.service.

use std::collections::BTreeMap;

use crate::tree;

/// Section and key -> values, as systemd reads unit files.
type Unit = BTreeMap<(String, String), Vec<String>>;

fn unit() -> Unit {
    let mut unit = Unit::new();
    let mut section = String::new();
    for (number, line) in tree::text("config/kiyot.service").lines().enumerate() {
        if line.is_empty() || line.starts_with('#') {
        } else if let Some(name) = line.strip_prefix('[') {
            section = name.strip_suffix(']').unwrap().to_owned();
        } else {
            let (key, value) = line
                .split_once('=')
                .unwrap_or_else(|| panic!("line {}: {line:?} is no KEY=VALUE", number + 1));
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

#[test]
fn it_starts_between_the_runtime_and_the_kubelet_and_stops_no_cell() {
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
    ] {
        assert_eq!(words(&unit, "Service", key), [value], "{key}");
    }
    assert_eq!(words(&unit, "Service", "ExecReload"), ["/bin/kill", "-HUP", "$MAINPID"]);
    // With containerd's end kiyot's must not come: pods in cells go on.
    for key in ["Requires", "BindsTo", "PartOf"] {
        assert!(words(&unit, "Unit", key).is_empty(), "{key}");
    }
    assert_eq!(words(&unit, "Install", "WantedBy"), ["multi-user.target"]);
}

#[test]
fn nothing_in_it_makes_a_mount_namespace() {
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
            "{key} makes a mount namespace, which mounts would not leave"
        );
    }
}

#[test]
fn it_runs_a_command_line_that_there_is() {
    assert_eq!(
        words(&unit(), "Service", "ExecStart"),
        ["/usr/bin/kiyot", "serve", "--config", "/etc/kiyot/kiyot.toml"]
    );
}
