//! moto's server, a process of its own, which serves one cloud after the other.

use std::{
    collections::BTreeMap,
    env,
    fs::File,
    io::{Read, Seek, SeekFrom},
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use kiyot_testkit::{LIMIT, command, wait_until};

use crate::{
    client::{self, Reply},
    query::Query,
};

/// Interpreter of the environment that `scripts/setup` installs moto into. The installed script
/// names its interpreter by an absolute path, which a copied checkout doesn't have.
const INSTALLED: &str = "target/moto/bin/python3";

/// The server, which ends when its input does, and with it when the test's process ends.
const SERVER: &str = "\
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
from moto.server import main
main(sys.argv[1:])";

/// Servers that no cloud has. A server takes more than a second to start.
static IDLE: Mutex<Vec<Server>> = Mutex::new(Vec::new());

/// The answers to calls for instance types and their zones, which no call changes: moto makes them
/// in seconds.
static TYPES: Mutex<BTreeMap<String, Reply>> = Mutex::new(BTreeMap::new());

/// A running moto, without resources at first.
#[derive(Debug)]
pub(crate) struct Moto {
    /// `None` once it is given back.
    server: Option<Server>,
    address: SocketAddr,
    /// Calls without a reply so far, which a server may still carry out.
    open: AtomicUsize,
}

#[derive(Debug)]
struct Server {
    child: Child,
    log: File,
    /// Bytes of the log before the cloud that has the server.
    logged: u64,
    address: SocketAddr,
}

impl Moto {
    /// Takes an idle server without what it kept, or starts one and waits until it answers.
    ///
    /// # Panics
    /// If moto is not installed, or ends at once.
    pub(crate) async fn start() -> Self {
        loop {
            let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(mut server) = idle else { return Self::started().await };
            server.logged = server.log.metadata().map_or(0, |log| log.len());
            if client::reset(server.address).await.is_ok() {
                return Self::of(server);
            }
        }
    }

    async fn started() -> Self {
        // A port that another program takes first ends moto; the next attempt takes another.
        const MAX_ATTEMPTS: usize = 5;
        let mut log = String::new();
        for _ in 0..MAX_ATTEMPTS {
            let mut server = Server::spawn();
            let address = server.address;
            let answers = wait_until("moto answers", LIMIT, async || {
                if server.child.try_wait().ok()?.is_some() {
                    return Some(false);
                }
                let call = Query::new("DescribeRegions", &[]);
                client::call(address, &call).await.ok().map(|reply| reply.status == 200)
            })
            .await;
            if answers {
                return Self::of(server);
            }
            log = server.log();
        }
        panic!("moto does not start:\n{log}");
    }

    fn of(server: Server) -> Self {
        Self { address: server.address, server: Some(server), open: AtomicUsize::new(0) }
    }

    /// Sends a call with the signature of its caller.
    pub(crate) async fn call(&self, query: &Query, signed: Option<&str>) -> Result<Reply, String> {
        let form = query.form();
        let types = || TYPES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = types().get(&form) {
            return Ok(known.clone());
        }
        self.open.fetch_add(1, Ordering::Relaxed);
        let reply = client::send(self.address, form.clone(), signed).await?;
        self.open.fetch_sub(1, Ordering::Relaxed);
        if query.action.starts_with("DescribeInstanceType") && reply.status == 200 {
            types().insert(form, reply.clone());
        }
        Ok(reply)
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        let Some(mut server) = self.server.take() else { return };
        if std::thread::panicking() {
            eprintln!("log of moto:\n{}", server.log());
        } else if *self.open.get_mut() == 0 {
            IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(server);
        }
    }
}

impl Server {
    fn spawn() -> Self {
        let free = TcpListener::bind(("127.0.0.1", 0)).expect("the loopback link has free ports");
        let address = free.local_addr().expect("a bound socket has an address");
        drop(free);
        // Each write is at its end, wherever this process reads.
        let log = tempfile::Builder::new().append(true).tempfile();
        let log = log.expect("a temporary file can be made").into_file();
        let output = || log.try_clone().expect("a descriptor can be duplicated");
        let child = Command::new(program())
            .args(["-c", SERVER, "-H", "127.0.0.1", "-p", &address.port().to_string()])
            .env("PATH", command::PATH)
            .env("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
            .env("MOTO_ENABLE_AMI_VALIDATION", "true")
            .stdin(Stdio::piped())
            .stdout(output())
            .stderr(output())
            .spawn()
            .expect("an installed interpreter can be started");
        Self { child, log, logged: 0, address }
    }

    /// Returns what the server has logged for its cloud.
    fn log(&mut self) -> String {
        let mut text = Vec::new();
        let _ = self.log.seek(SeekFrom::Start(self.logged));
        let _ = self.log.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns moto's interpreter, in the target directory of the running test or of this checkout.
fn program() -> PathBuf {
    let executable = env::current_exe().unwrap_or_default();
    let beside = executable
        .ancestors()
        .find_map(|directory| Some(directory.join(INSTALLED)).filter(|program| program.exists()));
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(INSTALLED);
    let program = beside.unwrap_or(own);
    assert!(program.exists(), "{} is absent: scripts/setup installs it", program.display());
    program
}
