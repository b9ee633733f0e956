//! A played registry of images: so much of the distribution API as a pull needs, over HTTP, on an
//! address of the node that its pods and cells reach too.

use std::{
    collections::BTreeMap,
    fs,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use crate::{
    Node, command,
    image::{ImageSpec, MANIFEST, sha256},
};

mod answer;

pub use answer::REFUSAL;

/// An address of the node that is no link's: pods and cells reach it by way of their gateway.
const ADDRESS: &str = "10.89.255.1";

/// Who may pull.
#[derive(Debug, Clone, Default)]
pub enum Access {
    /// Everybody.
    #[default]
    Open,
    /// Who has this token with every request: no service gives it away.
    Bearer(String),
    /// Who gives this name and password with every request.
    Basic(String, String),
    /// Who trades a name and a password, or an identity token, for a token of the registry's own.
    Token {
        /// The name.
        user: String,
        /// Its password.
        password: String,
        /// What does instead of both.
        identity: String,
    },
}

/// How a blob is given.
#[derive(Debug, Clone)]
pub enum Pace {
    /// So many bytes of it, and then nothing more, until who asked hangs up or
    /// [`Registry::release`] is called.
    Stalls(usize),
    /// In parts of so many bytes, with a pause after each.
    Trickles(usize, Duration),
}

/// A registry of one test. It ends when it is dropped.
#[derive(Debug)]
pub struct Registry {
    shared: Arc<Shared>,
    at: SocketAddr,
    host: String,
    server: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    access: Access,
    at: SocketAddr,
    ends: AtomicBool,
    content: Mutex<Content>,
}

#[derive(Debug, Default)]
struct Content {
    /// Digests of manifests by `repository:tag`.
    tags: BTreeMap<String, String>,
    /// Manifests and blobs by digest.
    blobs: BTreeMap<String, Vec<u8>>,
    /// How blobs are given, if not at once.
    paces: BTreeMap<String, Pace>,
    /// What was asked: method and path.
    requests: Vec<String>,
    /// Connections that are open, by their number.
    open: BTreeMap<usize, TcpStream>,
}

impl Shared {
    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registry {
    /// Starts one, and makes it the mirror of a host that does not exist: who pulls from it has
    /// read the node's configuration.
    pub fn start(node: &Node, access: Access) -> Self {
        command::run("ip", &["address", "replace", &format!("{ADDRESS}/32"), "dev", "lo"]);
        let listener =
            TcpListener::bind((ADDRESS, 0)).expect("an address of the node can be bound");
        let at = listener.local_addr().expect("a bound socket has an address");
        let host = format!("registry{}.invalid", at.port());
        let directory = node.registries().join(&host);
        fs::create_dir_all(&directory).expect("a directory can be made");
        let hosts = format!(
            "server = \"http://{at}\"\n\n[host.\"http://{at}\"]\ncapabilities = [\"pull\", \"resolve\"]\n"
        );
        fs::write(directory.join("hosts.toml"), hosts)
            .expect("the node's registry configuration can be written");
        let shared = Arc::new(Shared {
            access,
            at,
            ends: AtomicBool::new(false),
            content: Mutex::default(),
        });
        let serving = Arc::clone(&shared);
        let server = thread::spawn(move || serve(&listener, &serving));
        Self { shared, at, host, server: Some(server) }
    }

    /// Makes an image and keeps it under `repository:tag`. Gives its whole name, and its name by
    /// digest.
    pub fn image(&self, name: &str, spec: &ImageSpec) -> (String, String) {
        let (repository, _) = name.rsplit_once(':').expect("an image is named repository:tag");
        let parts = spec.parts().expect("an image can be made");
        let digest = sha256(&parts.manifest);
        let mut content = self.shared.content();
        content.blobs.extend(
            parts
                .layers
                .into_iter()
                .chain([parts.config, parts.manifest])
                .map(|blob| (sha256(&blob), blob)),
        );
        content.tags.insert(name.to_owned(), digest.clone());
        (format!("{}/{name}", self.host), format!("{}/{repository}@{digest}", self.host))
    }

    /// Where it listens: a host with a port, by HTTP.
    pub fn address(&self) -> SocketAddr {
        self.at
    }

    /// Digests and lengths of what an image of this registry is made of, by its whole name: the
    /// configuration first, then its layers.
    pub fn parts(&self, name: &str) -> Vec<(String, u64)> {
        let content = self.shared.content();
        let tag = name.split_once('/').map_or(name, |(_, tag)| tag);
        let manifest = content
            .tags
            .get(tag)
            .and_then(|digest| content.blobs.get(digest))
            .expect("it is an image of this registry");
        let manifest: serde_json::Value =
            serde_json::from_slice(manifest).expect("a manifest is JSON");
        let part = |part: &serde_json::Value| {
            Some((part["digest"].as_str()?.to_owned(), part["size"].as_u64()?))
        };
        let layers = manifest["layers"].as_array().cloned().unwrap_or_default();
        [&manifest["config"]].into_iter().chain(&layers).filter_map(part).collect()
    }

    /// Gives a blob at this pace.
    pub fn pace(&self, digest: &str, pace: Pace) {
        self.shared.content().paces.insert(digest.to_owned(), pace);
    }

    /// Gives all of a blob, also to those who wait for it.
    pub fn release(&self, digest: &str) {
        self.shared.content().paces.remove(digest);
    }

    /// What was asked since the last time, as `GET /v2/...`; no question for a token.
    pub fn asked(&self) -> Vec<String> {
        let all = std::mem::take(&mut self.shared.content().requests);
        all.into_iter().filter(|request| request.contains("/v2/")).collect()
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        // Who writes to a cell that is gone would wait a minute for an answer.
        for connection in self.shared.content().open.values() {
            let _ = connection.shutdown(Shutdown::Both);
        }
        // It waits for a connection.
        let _ = TcpStream::connect(self.at);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

fn serve(listener: &TcpListener, shared: &Arc<Shared>) {
    // Connections are short, and few: when all have ended, nothing of the registry is left.
    thread::scope(|connections| {
        for (number, connection) in listener.incoming().flatten().enumerate() {
            let Ok(same) = connection.try_clone() else { continue };
            shared.content().open.insert(number, same);
            // Looked at with the connection known: who ends the registry shuts it down otherwise.
            if shared.ends.load(Ordering::Relaxed) {
                return;
            }
            connections.spawn(move || {
                answer::answer(connection, shared);
                shared.content().open.remove(&number);
            });
        }
    });
}
