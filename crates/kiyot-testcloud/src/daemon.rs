//! Options of a daemon whose cells are instances of a cloud.

use std::path::PathBuf;

use kiyot_testkit::{KiyotOptions, Provider};

use crate::{Cloud, Instance};

/// Port on which the daemon's gateway listens.
pub(crate) const GATEWAY_PORT: u16 = 7700;

impl Cloud {
    /// Returns the options of a daemon on this host whose cells are instances of the cloud.
    ///
    /// # Panics
    /// Without instances.
    pub fn daemon_options(&self, binary: impl Into<PathBuf>) -> KiyotOptions {
        let host = self.host().expect("the host of a cloud with instances");
        self.daemon_options_with(binary, &format!("listen = \"{}:{GATEWAY_PORT}\"", host.address))
    }

    /// Returns the options of a daemon whose cells are instances of the cloud. `gateway` is the
    /// content of the table `backends.milpa.gateway`.
    pub fn daemon_options_with(&self, binary: impl Into<PathBuf>, gateway: &str) -> KiyotOptions {
        let setup = self.setup();
        let subnets: Vec<_> =
            setup.subnets.iter().map(|subnet| format!("{:?}", subnet.id)).collect();
        let endpoint = self.endpoint();
        let of_provider = format!(
            "region = \"us-east-1\"\nsubnets = [{}]\nsecurity_groups = [\"{}\"]\n\
             image = {{ id = \"{}\" }}\nendpoint_url = \"{endpoint}\"\n\
             pricing_endpoint_url = \"{endpoint}\"\n",
            subnets.join(", "),
            setup.security_group,
            setup.image,
        );
        // moto does not check signatures.
        let credentials = [("AWS_ACCESS_KEY_ID", "AKIATEST"), ("AWS_SECRET_ACCESS_KEY", "secret")];
        let mut options = KiyotOptions::new(binary);
        options.provider = Provider::Ec2;
        // Instances of the cloud reach no registry.
        options.milpa =
            "cluster = \"test\"\nnode = \"worker-1\"\nimage_source = \"node\"\n".to_owned();
        options.of_provider = of_provider;
        options.sections = format!("[backends.milpa.gateway]\n{gateway}\n");
        options.environment =
            credentials.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        options
    }

    /// Returns all instances that were launched through the API.
    pub fn launched(&self) -> Vec<Instance> {
        let host = self.host().map(|host| host.id.clone());
        self.instances().into_iter().filter(|it| Some(&it.id) != host.as_ref()).collect()
    }

    /// Returns the launched instances that have not ended.
    pub fn running(&self) -> Vec<Instance> {
        self.launched().into_iter().filter(|instance| !instance.state.is_ended()).collect()
    }
}
