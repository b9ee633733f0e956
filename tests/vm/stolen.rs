//! Credentials of a cell in the hands of its pod, and attempts with them at the gateway. The tests
//! use the gateway's socket, because the launcher of a machine only copies the bytes of its link.

use std::path::PathBuf;

use kiyot_link::{
    bootstrap::{Bootstrap, CellFile, GatewayAddress},
    frames::Frames,
    tls::{self, Identity},
};
use kiyot_proto::cell::{FromCell, HelloReply, ToCell, from_cell, to_cell};
use kiyot_testkit::{Kubelet, LIMIT};
use prost::Message;
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::time::timeout;
use tonic::Code;

use super::{enrolment, run};

/// The boot data, which stay readable for root of the machine.
const BOOT_DATA: &str = "/proc/1/root/sys/firmware/qemu_fw_cfg/by_name/opt/org.kiyot/cell.json/raw";
/// The directory of the agent's key and certificate.
const AGENT_DIR: &str = "/proc/1/root/var/lib/kiyot-cell/private/agent";
/// Limit of a message of the gateway, in bytes.
const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// The credentials of a cell.
pub(crate) struct Stolen {
    bootstrap: Bootstrap,
    key: Vec<u8>,
    certificate: Vec<u8>,
}

impl Stolen {
    /// Reads the credentials in a container with all power over its machine.
    pub(crate) async fn read(kubelet: &mut Kubelet, container: &str, gateway: PathBuf) -> Self {
        let boot_data = run(kubelet, container, &format!("cat {BOOT_DATA}")).await;
        let mut files = Vec::new();
        for name in ["key.der", "certificate.der"] {
            let script = format!("xxd -p {AGENT_DIR}/{name} | tr -d '\\n'");
            files.push(hex::decode(run(kubelet, container, &script).await).unwrap());
        }
        let file = CellFile::parse(&PathBuf::from(BOOT_DATA), boot_data.as_bytes()).unwrap();
        let mut bootstrap = file.bootstrap;
        bootstrap.gateway = GatewayAddress::Unix(gateway);
        let certificate = files.remove(1);
        Self { bootstrap, key: files.remove(0), certificate }
    }

    /// Returns the cell.
    pub(crate) fn cell(&self) -> &str {
        &self.bootstrap.cell
    }

    /// Returns the token, which the cell has spent.
    pub(crate) fn token(&self) -> &str {
        &self.bootstrap.token
    }

    /// Returns the cell's own key.
    pub(crate) fn key(&self) -> KeyPair {
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(self.key.clone()));
        KeyPair::from_der_and_sign_algo(&key, &PKCS_ECDSA_P256_SHA256).unwrap()
    }

    /// Enrols as a cell. Returns the code of the response.
    pub(crate) async fn enrol(&self, cell: &str, token: &str, key: &KeyPair) -> Code {
        enrolment::enrol(&self.bootstrap, cell, token, key).await
    }

    /// Connects with the cell's certificate, claims to be another cell, and waits until the gateway
    /// has cut the connection. Returns the number of messages before the cut.
    pub(crate) async fn claim_to_be(&self, cell: &str) -> usize {
        let identity = Identity::new(vec![self.certificate.clone()], self.key.clone());
        let tls = tls::cell_client(&self.bootstrap.ca_sha256, identity).unwrap();
        let mut frames =
            Frames::new(enrolment::dial(&self.bootstrap, tls).await, MAX_MESSAGE_BYTES);
        let hello = HelloReply {
            cell: cell.to_owned(),
            build_id: "stolen".to_owned(),
            generation: 1 << 40,
            incarnation: "forged".to_owned(),
            ..HelloReply::default()
        };
        let forged = FromCell { message: Some(from_cell::Message::Hello(hello)) }.encode_to_vec();
        let mut others = 0;
        let cut = async {
            while let Ok(Some(message)) = frames.next().await {
                match ToCell::decode(message).unwrap().message {
                    Some(to_cell::Message::Hello(_)) => {
                        let _cut = frames.send(&forged).await;
                    }
                    _ => others += 1,
                }
            }
        };
        timeout(LIMIT, cut).await.expect("the gateway cuts a connection with a forged Hello");
        others
    }
}
