//! moto's server, a process that serves one cloud after another.

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

/// Python of the environment into which `scripts/setup` installs moto. The installed script has its
/// interpreter's absolute path, which is absent in a copied checkout.
const INSTALLED: &str = "target/moto/bin/python3";

/// The server. It ends when its input ends, and so with the test's process.
const SERVER: &str = "\
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
from moto.server import main
main(sys.argv[1:])";

/// Servers without a cloud. A server takes more than a second to start.
static IDLE: Mutex<Vec<Server>> = Mutex::new(Vec::new());

/// Replies to calls for instance types and their zones. No call changes them, and moto needs
/// seconds to make them.
static TYPES: Mutex<BTreeMap<String, Reply>> = Mutex::new(BTreeMap::new());

/// A running moto, which starts without resources.
#[derive(Debug)]
pub(crate) struct Moto {
    /// `None` after the server was given back.
    server: Option<Server>,
    address: SocketAddr,
    /// Calls without a reply so far, which the server may still carry out.
    open: AtomicUsize,
}

#[derive(Debug)]
struct Server {
    child: Child,
    log: File,
    /// Length of the log in bytes before this cloud.
    logged: u64,
    address: SocketAddr,
}

impl Moto {
    /// Resets and returns an idle server, or starts a server and waits until it answers.
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
        // moto ends if another program takes its port first; the next attempt uses another port.
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
        // Each write appends, wherever this process reads.
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

    /// Returns the server's log for its cloud.
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
