//! A fake image registry: the part of the distribution API that a pull needs, over HTTP. It listens
//! on an address of the node that pods and cells can reach.

use std::{
    collections::BTreeMap,
    fs,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
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

mod response;

pub use response::REFUSAL;

/// The registry's address, on the node's loopback link: pods and cells reach it through their
/// gateway.
const ADDRESS: &str = "10.89.255.1";

/// Authentication of pulls.
#[derive(Debug, Clone, Default)]
pub enum Access {
    /// Anonymous pulls.
    #[default]
    Open,
    /// This token with every request. No token service issues it.
    Bearer(String),
    /// This name and password with every request.
    Basic(String, String),
    /// A token from the registry's token service, for a name and password or an identity token.
    Token {
        /// User name.
        user: String,
        /// Password.
        password: String,
        /// Identity token.
        identity: String,
    },
}

/// Pace of a blob's transfer.
#[derive(Debug, Clone)]
pub enum Pace {
    /// Sends this many bytes, then nothing until the client hangs up or [`Registry::release`] is
    /// called.
    Stalls(usize),
    /// Sends parts of this many bytes, with a pause after each.
    Trickles(usize, Duration),
}

/// A running registry. Dropping it stops the registry.
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
    stopping: AtomicBool,
    content: Mutex<Content>,
}

#[derive(Debug, Default)]
struct Content {
    /// Digests of manifests by `repository:tag`.
    tags: BTreeMap<String, String>,
    /// Manifests and blobs by digest.
    blobs: BTreeMap<String, Vec<u8>>,
    /// Paces of blobs by digest.
    paces: BTreeMap<String, Pace>,
    /// Received requests: method and path.
    requests: Vec<String>,
    /// Open connections by number.
    open: BTreeMap<usize, TcpStream>,
}

impl Shared {
    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registry {
    /// Starts a registry, and configures it as the mirror of a host that does not exist: a pull
    /// that reaches the registry has used the node's configuration.
    pub fn start(node: &Node, access: Access) -> Self {
        command::run("ip", &["address", "replace", &format!("{ADDRESS}/32"), "dev", "lo"]);
        let listener =
            TcpListener::bind((ADDRESS, 0)).expect("an address of the node can be bound");
        let at = listener.local_addr().expect("a bound socket has an address");
        let host = format!("registry{}.invalid", at.port());
        let directory = node.registries().join(&host);
        fs::create_dir_all(&directory).expect("a directory can be made");
        let hosts = format!(
            "server = \"http://{at}\"\n\n\
             [host.\"http://{at}\"]\ncapabilities = [\"pull\", \"resolve\"]\n"
        );
        fs::write(directory.join("hosts.toml"), hosts)
            .expect("the node's registry configuration can be written");
        let shared = Arc::new(Shared {
            access,
            at,
            stopping: AtomicBool::new(false),
            content: Mutex::default(),
        });
        let serving = Arc::clone(&shared);
        let server = thread::spawn(move || serve(&listener, &serving));
        Self { shared, at, host, server: Some(server) }
    }

    /// Builds an image and serves it as `repository:tag`. Returns the image's full name, and its
    /// name by digest.
    pub fn image(&self, name: &str, spec: &ImageSpec) -> (String, String) {
        let (repository, _) = name.rsplit_once(':').expect("an image is named repository:tag");
        let blobs = spec.blobs().expect("an image can be made");
        let digest = sha256(&blobs.manifest);
        let mut content = self.shared.content();
        content.blobs.extend(
            blobs
                .layers
                .into_iter()
                .chain([blobs.config, blobs.manifest])
                .map(|blob| (sha256(&blob), blob)),
        );
        content.tags.insert(name.to_owned(), digest.clone());
        (format!("{}/{name}", self.host), format!("{}/{repository}@{digest}", self.host))
    }

    /// Returns the directory of the registry's hosts.toml in the node's configuration.
    pub fn configuration(&self, node: &Node) -> PathBuf {
        node.registries().join(&self.host)
    }

    /// Returns the address on which the registry listens.
    pub fn address(&self) -> SocketAddr {
        self.at
    }

    /// Returns the digests and sizes of an image's blobs, by the image's full name: the
    /// configuration first, then the layers.
    pub fn parts(&self, name: &str) -> Vec<(String, u64)> {
        let content = self.shared.content();
        let tag = name.split_once('/').map_or(name, |(_, tag)| tag);
        let manifest = content
            .tags
            .get(tag)
            .and_then(|digest| content.blobs.get(digest))
            .expect("the image is in this registry");
        let manifest: serde_json::Value =
            serde_json::from_slice(manifest).expect("a manifest is JSON");
        let part = |part: &serde_json::Value| {
            Some((part["digest"].as_str()?.to_owned(), part["size"].as_u64()?))
        };
        let layers = manifest["layers"].as_array().cloned().unwrap_or_default();
        [&manifest["config"]].into_iter().chain(&layers).filter_map(part).collect()
    }

    /// Sets the pace of a blob.
    pub fn pace(&self, digest: &str, pace: Pace) {
        self.shared.content().paces.insert(digest.to_owned(), pace);
    }

    /// Serves a blob at full speed, also to clients that wait for it.
    pub fn release(&self, digest: &str) {
        self.shared.content().paces.remove(digest);
    }

    /// Returns and clears the received requests, such as `GET /v2/...`, without token requests.
    pub fn asked(&self) -> Vec<String> {
        let all = std::mem::take(&mut self.shared.content().requests);
        all.into_iter().filter(|request| request.contains("/v2/")).collect()
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        // A write to a cell that has ended would block for a minute.
        for connection in self.shared.content().open.values() {
            let _ = connection.shutdown(Shutdown::Both);
        }
        // Wakes the listener.
        let _ = TcpStream::connect(self.at);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

fn serve(listener: &TcpListener, shared: &Arc<Shared>) {
    // The scope ends the threads of connections before the registry is dropped.
    thread::scope(|connections| {
        for (number, connection) in listener.incoming().flatten().enumerate() {
            let Ok(handle) = connection.try_clone() else { continue };
            shared.content().open.insert(number, handle);
            // Checked after the connection is listed: either `drop` ends the connection, or this
            // check sees that the registry stops.
            if shared.stopping.load(Ordering::Relaxed) {
                return;
            }
            connections.spawn(move || {
                response::serve(connection, shared);
                shared.content().open.remove(&number);
            });
        }
    });
}
