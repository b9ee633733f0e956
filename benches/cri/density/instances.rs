//! Boot data of instances that boot nothing, for the agents of this bench.

use std::{collections::BTreeSet, fs, path::PathBuf, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use kiyot_link::bootstrap::CellFile;
use kiyot_testcloud::Cloud;
use tokio::{task::JoinHandle, time::sleep};

/// Period of the scans for new instances.
const LOOK_PERIOD: Duration = Duration::from_millis(200);

/// The instances of a cloud. Dropping them ends the cloud.
#[derive(Debug)]
pub(super) struct Instances(JoinHandle<()>);

impl Instances {
    /// Writes the boot data of each new instance to the directory of its cell, and then creates the
    /// cell's file in the spool directory.
    pub(super) fn start(cloud: Cloud, spool: PathBuf, boot_data: PathBuf) -> Self {
        Self(tokio::spawn(async move {
            let mut seen = BTreeSet::new();
            loop {
                for instance in cloud.launched() {
                    if !seen.insert(instance.id) {
                        continue;
                    }
                    let content = STANDARD.decode(&instance.user_data).unwrap();
                    let file = CellFile::parse("user data".as_ref(), &content).unwrap();
                    let dir = boot_data.join(&file.bootstrap.cell);
                    fs::create_dir_all(&dir).unwrap();
                    file.write(&dir.join("cell.json")).unwrap();
                    fs::write(spool.join(&file.bootstrap.cell), "").unwrap();
                }
                sleep(LOOK_PERIOD).await;
            }
        }))
    }
}

impl Drop for Instances {
    fn drop(&mut self) {
        self.0.abort();
    }
}
