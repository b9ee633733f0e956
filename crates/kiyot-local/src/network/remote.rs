//! The node's part in the network of cells on other machines: their host ports, and the way back
//! for connections that the node's rules send to them.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Mutex, PoisonError},
};

use kiyot_engine::provider::{ErrorClass, Held, HostPort, InstanceId, ProviderError};

use crate::network::ports::{PortError, Ports};

/// Forwards the node's connections to cells on other machines. The rules outlive the daemon. After
/// a reboot of the node, [`restore`](Self::restore) makes them again.
#[derive(Debug)]
pub struct Forwarding {
    /// True if cells reach networks of the cluster through the node. The cluster's services may
    /// then lead to cells.
    serves_cluster: bool,
    /// The host ports of cells until their rules are removed.
    ports: Mutex<BTreeMap<InstanceId, Reserved>>,
    /// The cells of a previous daemon whose rules may be absent, by their addresses.
    adopted: Mutex<BTreeMap<InstanceId, IpAddr>>,
    /// Serialises changes of rules, so that rules are not restored after the end of their cell.
    changes: tokio::sync::Mutex<()>,
}

/// The host ports of a cell.
#[derive(Debug)]
struct Reserved {
    ports: Vec<HostPort>,
    /// True once a call that makes the rules has succeeded. A call that failed or was cancelled may
    /// have made them, too.
    are_made: bool,
}

impl Forwarding {
    /// Returns the forwarding of a node.
    pub fn new(serves_cluster: bool) -> Self {
        Self {
            serves_cluster,
            ports: Mutex::default(),
            adopted: Mutex::default(),
            changes: tokio::sync::Mutex::default(),
        }
    }

    /// Takes over the cells that a previous daemon attached.
    pub fn adopt(&self, held: Vec<Held>) {
        let (mut entries, mut adopted) = (self.entries(), self.adopted());
        for Held { instance, addresses, ports } in held {
            let has_rules = !ports.is_empty() || self.serves_cluster;
            entries.insert(instance.clone(), Reserved { ports, are_made: true });
            if let Some(address) = addresses.first().filter(|_| has_rules) {
                adopted.insert(instance, *address);
            }
        }
    }

    /// Makes the absent rules of adopted cells. Tries all, then returns the last error.
    pub async fn restore(&self) -> Result<(), ProviderError> {
        let mut outcome = Ok(());
        let adopted = self.adopted().clone();
        for (instance, address) in adopted {
            let _alone = self.changes.lock().await;
            // The cell may have been closed meanwhile.
            if !self.adopted().contains_key(&instance) {
                continue;
            }
            let ports = self.ports_of(&instance).unwrap_or_default();
            match Ports::of_remote(&instance, &ports).restore_remote(address).await {
                Ok(()) => drop(self.adopted().remove(&instance)),
                Err(error) => {
                    let doing = format!("restore the ports of {instance}");
                    outcome = Err(ProviderError::transient(doing, error));
                }
            }
        }
        outcome
    }

    /// Forwards the host ports of a pod to its cell. May be repeated.
    pub async fn open(
        &self,
        instance: &InstanceId,
        address: IpAddr,
        ports: &[HostPort],
    ) -> Result<(), ProviderError> {
        let doing = || format!("forward the ports of {instance}");
        let opened = Ports::of_remote(instance, ports);
        opened.check().map_err(|error| ProviderError::new(ErrorClass::Invalid, doing(), error))?;
        if !self.reserve(instance, ports).map_err(|error| {
            // The other pod may be terminating: the kubelet retries.
            ProviderError::transient(doing(), error)
        })? {
            return Ok(());
        }
        if !ports.is_empty() || self.serves_cluster {
            let _alone = self.changes.lock().await;
            let opened = opened.open_remote(address).await;
            opened.map_err(|error| ProviderError::transient(doing(), error))?;
        }
        self.made(instance);
        Ok(())
    }

    /// Ends the forwarding to a cell. May be repeated.
    pub async fn close(&self, instance: &InstanceId) -> Result<(), ProviderError> {
        let known = self.ports_of(instance);
        if known.as_ref().is_some_and(Vec::is_empty) && !self.serves_cluster {
            self.entries().remove(instance);
            return Ok(());
        }
        let _alone = self.changes.lock().await;
        self.adopted().remove(instance);
        // A previous daemon may have forwarded ports to an instance that this daemon does not know.
        Ports::of_remote(instance, &known.unwrap_or_default()).remove().await.map_err(|error| {
            ProviderError::transient(format!("end the ports of {instance}"), error)
        })?;
        self.entries().remove(instance);
        Ok(())
    }

    /// Reserves the ports of an instance until it is closed. Returns whether its rules are still to
    /// be made.
    fn reserve(&self, instance: &InstanceId, ports: &[HostPort]) -> Result<bool, PortError> {
        let mut entries = self.entries();
        if let Some(reserved) = entries.get(instance) {
            return Ok(!reserved.are_made);
        }
        for (other, Reserved { ports: taken, .. }) in &*entries {
            let overlaps = |port: &&HostPort| taken.iter().any(|taken| taken.overlaps(port));
            if let Some(port) = ports.iter().find(overlaps) {
                let cell = other.to_string();
                return Err(PortError::TakenByInstance { port: port.clone(), cell });
            }
        }
        entries.insert(instance.clone(), Reserved { ports: ports.to_vec(), are_made: false });
        Ok(true)
    }

    /// Notes that the rules of an instance are made.
    fn made(&self, instance: &InstanceId) {
        if let Some(reserved) = self.entries().get_mut(instance) {
            reserved.are_made = true;
        }
    }

    /// Returns the ports of an instance, even if their rules are not made yet.
    fn ports_of(&self, instance: &InstanceId) -> Option<Vec<HostPort>> {
        self.entries().get(instance).map(|reserved| reserved.ports.clone())
    }

    fn adopted(&self) -> std::sync::MutexGuard<'_, BTreeMap<InstanceId, IpAddr>> {
        self.adopted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entries(&self) -> std::sync::MutexGuard<'_, BTreeMap<InstanceId, Reserved>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;
    use kiyot_engine::provider::Protocol;

    fn port(number: u16) -> HostPort {
        HostPort { protocol: Protocol::Udp, host_ip: None, host_port: number, container_port: 80 }
    }

    /// Verifies N11.
    #[tokio::test]
    async fn cancelled_call_keeps_the_ports_reserved_for_the_next_call() {
        let forwarding = Forwarding::new(true);
        let (first, second) = (InstanceId("i-1".into()), InstanceId("i-2".into()));
        let alone = forwarding.changes.lock().await;
        let address = IpAddr::from([10, 0, 0, 1]);
        assert!(forwarding.open(&first, address, &[port(1)]).now_or_never().is_none(), "it waits");
        drop(alone);
        // The call may have made rules: a close must still find the flows of these ports.
        assert_eq!(forwarding.ports_of(&first), Some(vec![port(1)]));
        assert!(forwarding.reserve(&second, &[port(1)]).is_err(), "they may lead to the first");
        assert!(forwarding.reserve(&first, &[port(1)]).unwrap(), "the next call makes the rules");
    }

    #[test]
    fn port_of_another_cell_is_refused_until_that_cell_has_ended() {
        let forwarding = Forwarding::new(false);
        let (first, second) = (InstanceId("i-1".into()), InstanceId("i-2".into()));
        assert!(forwarding.reserve(&first, &[port(1), port(2)]).unwrap());
        forwarding.made(&first);
        assert!(!forwarding.reserve(&first, &[port(1), port(2)]).unwrap());
        let error = forwarding.reserve(&second, &[port(3), port(2)]).unwrap_err().to_string();
        assert!(error.contains("hostPort 2/udp") && error.contains("i-1"), "{error}");
        forwarding.entries().remove(&first);
        assert!(forwarding.reserve(&second, &[port(3), port(2)]).unwrap());
    }
}
