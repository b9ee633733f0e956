//! The netns provider under test. Its faults are faults of the node: a state directory that can't
//! be read, a program that can't be started, a CNI plugin that hangs or fails.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use kiyot_engine::{
    id::CellId,
    provider::{InstanceId, Provider},
};
use kiyot_local::{
    PauseImage, RegistryConfig,
    netns::{CAPABILITIES, Netns},
};

use super::{
    super::bench::{Bench, cgroup_mounts},
    Subject,
    fault::{Fault, Gate, reason_without_meaning},
    listings,
};

/// A CNI plugin that hangs or fails at DEL while a file exists.
const PLUGIN: &str = r#"#!/bin/sh
if [ $CNI_COMMAND = DEL ]; then
    while [ -e DIR/slow ]; do sleep 0.05; done
    if [ -e DIR/broken ]; then echo '{"code": 11, "msg": "not now"}'; exit 1; fi
    exit 0
fi
sed 's/.*"prevResult":\({.*}\),"type".*/\1/'
"#;

/// The registry configuration, which a launch reads after its first steps.
#[derive(Debug, Default)]
struct Registries(Gate);

#[async_trait]
impl RegistryConfig for Registries {
    async fn config_path(&self) -> Option<PathBuf> {
        self.0.pass().await;
        None
    }
}

/// The netns provider under test.
pub(super) struct NetnsSubject {
    pub(super) bench: Bench,
    registries: Arc<Registries>,
}

impl NetnsSubject {
    pub(super) fn new() -> Self {
        let mut bench = Bench::new();
        bench.configure_cni(r#", {"type": "moody"}"#);
        let plugin = PLUGIN.replace("DIR", &bench.path().display().to_string());
        bench.add_plugin("moody", &plugin);
        Self { bench, registries: Arc::default() }
    }

    pub(super) fn cells(&self) -> PathBuf {
        self.bench.config.state_dir.join("cells")
    }

    fn program(&self) -> &Path {
        self.bench.config.netns.cell_binary.as_deref().unwrap()
    }

    /// Returns the cells that have a directory, even if the directory is moved.
    fn ids(&self) -> Vec<CellId> {
        let dirs = [self.cells(), aside(&self.cells())];
        let entries = dirs.iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter_map(|name| CellId::parse(&name).ok()).collect()
    }

    fn records(&self) -> Vec<PathBuf> {
        let ids = self.ids();
        ids.iter().map(|id| self.cells().join(id.as_str()).join("instance.json")).collect()
    }
}

fn aside(path: &Path) -> PathBuf {
    path.with_extension("aside")
}

fn has_processes(cell: &CellId) -> bool {
    cgroup_mounts().iter().any(|mount| {
        let processes = mount.join("kiyot").join(cell.as_str()).join("cgroup.procs");
        fs::read_to_string(processes).is_ok_and(|processes| !processes.is_empty())
    })
}

impl Subject for NetnsSubject {
    /// Returns a new provider, which knows only the files.
    fn provider(&self) -> Arc<dyn Provider> {
        Arc::new(Netns::new(
            &self.bench.config,
            Arc::clone(&self.registries) as _,
            PauseImage::new(None),
        ))
    }

    fn inject(&self, fault: Fault) -> bool {
        match fault {
            Fault::HeldLaunch => self.registries.0.close(),
            Fault::RefusedLaunch => set_mode(self.program(), 0o644),
            Fault::PartialList => {
                for record in self.records() {
                    fs::rename(&record, aside(&record)).unwrap();
                    fs::create_dir(&record).unwrap();
                }
            }
            Fault::SlowEnd => fs::write(self.bench.path().join("slow"), "").unwrap(),
            Fault::FailedEnd => fs::write(self.bench.path().join("broken"), "").unwrap(),
            Fault::Interruption => {
                for cell in self.ids() {
                    let launcher = self.bench.launcher(&InstanceId(cell.to_string()));
                    kiyot_testkit::kill_all(&[launcher.to_string()]);
                }
            }
            Fault::Outage => {
                fs::create_dir_all(self.cells()).unwrap();
                fs::rename(self.cells(), aside(&self.cells())).unwrap();
                // As on a failing disk, the error is not "not found".
                fs::write(self.cells(), "").unwrap();
            }
            _ => {
                assert!(reason_without_meaning("netns", fault).is_some(), "{fault:?}");
                return false;
            }
        }
        true
    }

    fn heal(&self) {
        self.registries.0.open();
        set_mode(self.program(), 0o755);
        for file in ["slow", "broken"] {
            let _absent = fs::remove_file(self.bench.path().join(file));
        }
        if aside(&self.cells()).exists() {
            fs::remove_file(self.cells()).unwrap();
            fs::rename(aside(&self.cells()), self.cells()).unwrap();
        }
        for record in self.records().iter().filter(|record| aside(record).exists()) {
            fs::remove_dir(record).unwrap();
            fs::rename(aside(record), record).unwrap();
        }
    }

    fn holds_launch(&self) -> bool {
        self.registries.0.holds()
    }

    fn shutdowns(&self) -> Option<&Gate> {
        None
    }

    fn settle(&self) {}

    fn running(&self) -> Vec<(InstanceId, CellId)> {
        let running = self.ids().into_iter().filter(has_processes);
        running.map(|cell| (InstanceId(cell.to_string()), cell)).collect()
    }

    fn assert_nothing_left(&self, launched: &[InstanceId]) {
        for instance in launched {
            self.bench.assert_clean(instance);
        }
    }

    fn listings_of_outage(&self) -> usize {
        listings(CAPABILITIES.listing_period)
    }
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}
