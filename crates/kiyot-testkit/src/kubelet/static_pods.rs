//! Static pods: the pods in a directory's files, run as a kubelet runs them.

use std::{collections::BTreeMap, fs, path::PathBuf};

use super::{Kubelet, RunningPod, manifest::pods_of};

/// Annotation of the kubelet with the source of a pod.
const CONFIG_SOURCE: &str = "kubernetes.io/config.source";

/// The pods of a directory.
#[derive(Debug)]
pub struct StaticPods {
    kubelet: Kubelet,
    directory: PathBuf,
    /// The node's name, which is appended to the names of pods.
    node: String,
    running: BTreeMap<PathBuf, RunningPod>,
}

impl StaticPods {
    /// Returns the pods of a directory. No pod runs yet.
    pub fn new(kubelet: Kubelet, directory: PathBuf, node: &str) -> Self {
        Self { kubelet, directory, node: node.to_owned(), running: BTreeMap::new() }
    }

    /// Runs the pods of new files, and ends the pods of deleted files. Skips names that begin with
    /// a dot, as a kubelet does.
    ///
    /// # Panics
    /// If a pod can't be run or ended.
    pub async fn sync(&mut self) {
        let entries = fs::read_dir(&self.directory).expect("the directory can be read");
        let paths = entries.map(|entry| entry.expect("an entry can be read").path());
        let is_shown = |path: &PathBuf| {
            path.file_name().is_some_and(|name| !name.as_encoded_bytes().starts_with(b"."))
        };
        let files: Vec<PathBuf> = paths.filter(is_shown).collect();
        let absent: Vec<PathBuf> =
            self.running.keys().filter(|path| !files.contains(path)).cloned().collect();
        for path in absent {
            let pod = self.running.remove(&path).expect("the pod was listed");
            self.kubelet.stop_and_remove(&pod).await.expect("the pod ends");
        }
        for path in files {
            if self.running.contains_key(&path) {
                continue;
            }
            // The file was removed meanwhile.
            let Ok(text) = fs::read_to_string(&path) else { continue };
            for mut pod in pods_of(&text) {
                pod.name = format!("{}-{}", pod.name, self.node);
                pod = pod.annotation(CONFIG_SOURCE, "file");
                let running = self.kubelet.run_pod(&pod).await.expect("the pod runs");
                self.running.insert(path.clone(), running);
            }
        }
    }

    /// Returns the running pods.
    pub fn running(&self) -> impl Iterator<Item = &RunningPod> {
        self.running.values()
    }
}
