//! Pods on instances of EC2, called as a kubelet calls. The instances are namespaces of a test
//! cloud (crates/kiyot-testcloud), which run the user data that the daemon launches them with.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "test code")]

mod life;

use kiyot_testcloud::Cloud;
use kiyot_testkit::{Container, KiyotOptions, Pod, Provider};

/// Script of a container that runs until SIGTERM.
const WAIT: &str = "trap 'exit 0' TERM; while :; do sleep 0.5; done";

/// Returns the options of a daemon whose cells are instances of a cloud.
fn options(cloud: &Cloud) -> KiyotOptions {
    let setup = cloud.setup();
    let subnets: Vec<_> = setup.subnets.iter().map(|subnet| format!("{:?}", subnet.id)).collect();
    let of_provider = format!(
        "region = \"us-east-1\"\nsubnets = [{}]\nsecurity_groups = [\"{}\"]\n\
         image = {{ id = \"{}\" }}\nendpoint_url = \"{}\"\n",
        subnets.join(", "),
        setup.security_group,
        setup.image,
        cloud.endpoint()
    );
    let host = cloud.host().expect("a cloud with instances");
    let credentials = [("AWS_ACCESS_KEY_ID", "AKIATEST"), ("AWS_SECRET_ACCESS_KEY", "secret")];
    let mut options = KiyotOptions::new(env!("CARGO_BIN_EXE_kiyot"));
    options.provider = Provider::Ec2;
    options.milpa = "cluster = \"test\"\nnode = \"worker-1\"\n".to_owned();
    options.of_provider = of_provider;
    options.sections = format!("[backends.milpa.gateway]\nlisten = \"{}:7700\"\n", host.address);
    options.environment =
        credentials.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    options
}

/// Prints the consoles of all instances if the test panics.
struct Consoles<'a>(&'a Cloud);

impl Drop for Consoles<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for instance in self.0.instances() {
                let (id, state) = (&instance.id, instance.state);
                eprintln!("console of {id} ({state:?}):\n{}", self.0.console(id));
            }
        }
    }
}

/// Returns a pod in a cell with one container, `main`.
fn pod(name: &str, script: &str) -> Pod {
    Pod::new(name).in_cell().container(Container::script("main", script))
}
