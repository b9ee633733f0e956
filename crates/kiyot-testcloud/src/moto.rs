//! moto's server, a process of its own.

use std::{
    env, fs,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use kiyot_testkit::{LIMIT, command, wait_until};

use crate::{client, query::Query};

/// Interpreter of the environment that `scripts/setup` installs moto into. The installed script
/// names its interpreter by an absolute path, which a copied checkout doesn't have.
const INSTALLED: &str = "target/moto/bin/python3";

/// A running moto. It ends with the thread that started it, and with its handle.
#[derive(Debug)]
pub(crate) struct Moto {
    child: Child,
    log: PathBuf,
    /// Address on the loopback link.
    pub(crate) address: SocketAddr,
}

impl Moto {
    /// Starts moto on a free port and waits until it answers.
    ///
    /// # Panics
    /// If moto is not installed, or ends at once.
    pub(crate) async fn start(directory: &Path) -> Self {
        // A port that another program takes first ends moto; the next attempt takes another.
        const MAX_ATTEMPTS: usize = 5;
        for _ in 0..MAX_ATTEMPTS {
            let mut moto = Self::spawn(directory);
            let address = moto.address;
            let answers = wait_until("moto answers", LIMIT, async || {
                if moto.child.try_wait().ok()?.is_some() {
                    return Some(false);
                }
                let call = Query::new("DescribeRegions", &[]);
                client::call(address, &call).await.ok().map(|reply| reply.status == 200)
            })
            .await;
            if answers {
                return moto;
            }
        }
        panic!("moto does not start:\n{}", command::tail(&directory.join("moto.log")));
    }

    fn spawn(directory: &Path) -> Self {
        let free = TcpListener::bind(("127.0.0.1", 0)).expect("the loopback link has free ports");
        let address = free.local_addr().expect("a bound socket has an address");
        drop(free);
        let log = directory.join("moto.log");
        let file =
            fs::File::options().create(true).append(true).open(&log).expect("a log can be written");
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(program())
            // The interpreter ignores this option, by which a test recognises the process.
            .args(["-X", &format!("cloud={}", directory.display())])
            .args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &address.port().to_string()])
            .env("PATH", command::PATH)
            .env("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
            .env("MOTO_ENABLE_AMI_VALIDATION", "true")
            .stdin(Stdio::null())
            .stdout(file.try_clone().expect("a descriptor can be duplicated"))
            .stderr(file)
            .spawn()
            .expect("setpriv can be started: it is part of util-linux");
        Self { child, log, address }
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log of moto:\n{}", command::tail(&self.log));
        }
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
