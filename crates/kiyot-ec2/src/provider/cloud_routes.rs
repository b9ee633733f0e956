//! Routes of the VPC to instances (the annotation `pod.elotl.co/cloud-route`).
//!
//! A route is created at Bind and removed before its instance is terminated. EC2 is the record: a
//! route to the instance belongs to the instance, and no other route is ever removed or replaced.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
};

use kiyot_engine::provider::{ErrorClass, InstanceId, ProviderError};
use kiyot_values::cidr::Cidr;

use crate::{CallError, Ec2Api, LOCAL_TARGET, RouteTable, RouteTableFilter, provider::classify};

/// The code of the removal of a route that does not exist.
const NO_ROUTE: &str = "InvalidRoute.NotFound";
/// Bounds the instances that are known to have no route; further instances are looked up again.
const MAX_KNOWN: usize = 10_000;
/// Bounds the instances of a list, as EC2 bounds the values of a filter.
const MAX_TARGETS: usize = 200;

/// The routes to instances.
#[derive(Debug)]
pub(super) struct CloudRoutes {
    api: Arc<dyn Ec2Api>,
    /// True if pods may have routes.
    is_enabled: bool,
    /// The node's address; no route may cover it.
    node: Option<IpAddr>,
    /// Instances that have no route.
    without: Mutex<BTreeSet<InstanceId>>,
}

/// Reason why a table can't have a route.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum Conflict {
    #[error("overlaps {0}, a network of the VPC itself")]
    Vpc(String),
    #[error("leads to {0} already, in {1}")]
    Taken(String, String),
}

impl CloudRoutes {
    pub(super) fn new(api: Arc<dyn Ec2Api>, is_enabled: bool, node: Option<IpAddr>) -> Self {
        Self { api, is_enabled, node, without: Mutex::default() }
    }

    /// Checks routes before an instance is launched for them. An existing route may lead only to an
    /// instance that an earlier call for the same pod has launched: otherwise a route that can't be
    /// removed would cause a launch with each call.
    pub(super) async fn check(
        &self,
        vpc: &str,
        subnets: impl Iterator<Item = &String>,
        networks: &[Cidr],
        is_own: impl Fn(&str) -> bool,
    ) -> Result<(), ProviderError> {
        let tables = self.tables(RouteTableFilter::Vpc(vpc.to_owned())).await?;
        for network in networks {
            if self.node.is_some_and(|node| network.contains(node)) {
                return Err(refused(network, "has the node's address"));
            }
        }
        for subnet in subnets {
            let table = table_of(&tables, subnet)?;
            for network in networks {
                match is_made(table, network, None) {
                    Err(Conflict::Taken(target, _)) if is_own(&target) => {}
                    checked => drop(checked.map_err(|conflict| refused(network, conflict))?),
                }
            }
        }
        Ok(())
    }

    /// Creates the routes of an instance in the table of its subnet. A repeated call creates the
    /// absent routes.
    pub(super) async fn open(
        &self,
        instance: &InstanceId,
        networks: &[String],
    ) -> Result<(), ProviderError> {
        if networks.is_empty() {
            self.remember(instance);
            return Ok(());
        }
        self.known().remove(instance);
        // An annotation may name a network twice, and EC2 would refuse the second route.
        let networks: BTreeSet<Cidr> =
            networks.iter().filter_map(|text| text.parse().ok()).collect();
        let filter = crate::InstanceFilter::Ids(vec![instance.0.clone()]);
        let described = self.api.describe_instances(&filter).await;
        let described = described.map_err(failed("describe the instance of routes"))?;
        let place = described.into_iter().next().and_then(|it| Some((it.vpc?, it.subnet?)));
        let (vpc, subnet) = place.ok_or_else(|| {
            let what = format!("instance {instance} has no subnet, which routes need");
            ProviderError::without_cause(ErrorClass::Transient, what)
        })?;
        let tables = self.tables(RouteTableFilter::Vpc(vpc)).await?;
        let table = table_of(&tables, &subnet)?;
        let mut absent = Vec::new();
        for network in &networks {
            match is_made(table, network, Some(&instance.0)) {
                Ok(true) => {}
                Ok(false) => absent.push(network),
                Err(conflict) => return Err(refused(network, conflict)),
            }
        }
        let switched = self.api.disable_source_dest_check(&instance.0).await;
        switched.map_err(failed("turn off the source/destination check"))?;
        for network in absent {
            let made = self.api.create_route(&table.id, &network.to_string(), &instance.0).await;
            let doing = format!("route {network} to instance {instance} in {}", table.id);
            made.map_err(failed(&doing))?;
            tracing::info!(%instance, %network, table = table.id, "route made");
        }
        Ok(())
    }

    /// Removes the routes to these instances, which a single list shows for all.
    pub(super) async fn close(&self, instances: &[InstanceId]) -> Result<(), ProviderError> {
        if !self.is_enabled {
            return Ok(());
        }
        let unknown: Vec<&InstanceId> = {
            let known = self.known();
            instances.iter().filter(|instance| !known.contains(*instance)).collect()
        };
        for instances in unknown.chunks(MAX_TARGETS) {
            match self.remove(instances).await {
                Ok(()) => instances.iter().for_each(|instance| self.remember(instance)),
                // The instances end nevertheless, because they cost money.
                Err(error) if error.is_denied() => {
                    let error = &error as &dyn std::error::Error;
                    tracing::error!(?instances, error, "routes not removed, the policy denies it");
                }
                Err(error) => return Err(failed("remove the routes of an instance")(error)),
            }
        }
        Ok(())
    }

    /// Removes all routes that can be removed, and returns the first error.
    async fn remove(&self, instances: &[&InstanceId]) -> Result<(), CallError> {
        let targets = instances.iter().map(|instance| instance.0.clone()).collect();
        let mut removed = Ok(());
        for table in self.api.route_tables(&RouteTableFilter::Targets(targets)).await? {
            for route in &table.routes {
                let target =
                    instances.iter().find(|instance| Some(&instance.0) == route.target.as_ref());
                let Some(instance) = target else { continue };
                match self.api.delete_route(&table.id, &route.network).await {
                    Err(error) if error.code() != Some(NO_ROUTE) => {
                        removed = removed.and(Err(error))
                    }
                    _ => {
                        let (network, table) = (&route.network, &table.id);
                        tracing::info!(%instance, network, table, "route removed");
                    }
                }
            }
        }
        removed
    }

    async fn tables(&self, filter: RouteTableFilter) -> Result<Vec<RouteTable>, ProviderError> {
        self.api.route_tables(&filter).await.map_err(failed("read the route tables"))
    }

    /// Records that an instance has no route.
    fn remember(&self, instance: &InstanceId) {
        let mut without = self.known();
        if without.len() >= MAX_KNOWN {
            without.clear();
        }
        without.insert(instance.clone());
    }

    fn known(&self) -> std::sync::MutexGuard<'_, BTreeSet<InstanceId>> {
        self.without.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(doing: &str) -> impl FnOnce(CallError) -> ProviderError {
    let doing = doing.to_owned();
    move |error| ProviderError::new(classify(&error).0, doing, error)
}

fn refused(network: &Cidr, why: impl std::fmt::Display) -> ProviderError {
    let what = format!("pod.elotl.co/cloud-route = {network}: {why}");
    ProviderError::without_cause(ErrorClass::Invalid, what)
}

/// Returns the table of a subnet: its own, or otherwise the VPC's main table.
pub(super) fn table_of<'a>(
    tables: &'a [RouteTable],
    subnet: &str,
) -> Result<&'a RouteTable, ProviderError> {
    let own = tables.iter().find(|table| table.subnets.iter().any(|id| id == subnet));
    own.or_else(|| tables.iter().find(|table| table.is_main)).ok_or_else(|| {
        let what = format!("subnet {subnet} has no route table");
        ProviderError::without_cause(ErrorClass::Transient, what)
    })
}

/// Returns whether a table already has the route of an instance; fails if the route can't be
/// created.
fn is_made(table: &RouteTable, network: &Cidr, instance: Option<&str>) -> Result<bool, Conflict> {
    for route in &table.routes {
        let Ok(other) = route.network.parse::<Cidr>() else { continue };
        let target = route.target.as_deref();
        if target == Some(LOCAL_TARGET) && other.overlaps(network) {
            return Err(Conflict::Vpc(route.network.clone()));
        }
        if other != *network {
            continue;
        }
        if target.is_some() && target == instance {
            return Ok(true);
        }
        let target = target.unwrap_or("another target").to_owned();
        return Err(Conflict::Taken(target, table.id.clone()));
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use crate::Route;

    use super::*;

    fn table(id: &str, is_main: bool, subnets: &[&str], routes: &[(&str, &str)]) -> RouteTable {
        let route = |(network, target): &(&str, &str)| Route {
            network: (*network).to_owned(),
            target: Some((*target).to_owned()).filter(|id| !id.is_empty()),
        };
        RouteTable {
            id: id.to_owned(),
            is_main,
            subnets: subnets.iter().map(|id| (*id).to_owned()).collect(),
            routes: routes.iter().map(route).collect(),
        }
    }

    #[test]
    fn subnet_without_an_association_has_the_main_table() {
        let tables = [table("rtb-1", false, &["subnet-1"], &[]), table("rtb-2", true, &[], &[])];
        assert_eq!(table_of(&tables, "subnet-1").unwrap().id, "rtb-1");
        assert_eq!(table_of(&tables, "subnet-2").unwrap().id, "rtb-2");
        assert!(table_of(&tables[..1], "subnet-2").is_err());
    }

    #[test]
    fn network_of_another_target_or_of_the_vpc_is_a_conflict() {
        let routes = [
            ("10.77.0.0/16", "local"),
            ("10.8.0.0/16", "i-1"),
            ("10.9.0.0/16", "pcx-1"),
            ("10.11.0.0/16", ""),
        ];
        let table = table("rtb-1", true, &[], &routes);
        let made = |network: &str, instance: &str| {
            let instance = Some(instance).filter(|id| !id.is_empty());
            is_made(&table, &network.parse().unwrap(), instance).map_err(|error| error.to_string())
        };
        assert_eq!(made("10.8.0.0/16", "i-1"), Ok(true));
        assert_eq!(made("10.10.0.0/16", "i-1"), Ok(false));
        // A network within another network has a route of its own.
        assert_eq!(made("10.9.1.0/24", "i-1"), Ok(false));
        for (network, instance, why) in [
            ("10.8.0.0/16", "i-2", "leads to i-1 already, in rtb-1"),
            ("10.8.0.0/16", "", "leads to i-1 already, in rtb-1"),
            ("10.9.0.0/16", "i-1", "leads to pcx-1 already, in rtb-1"),
            ("10.11.0.0/16", "", "leads to another target already, in rtb-1"),
            ("10.77.3.0/24", "i-1", "overlaps 10.77.0.0/16, a network of the VPC itself"),
            ("10.0.0.0/8", "i-1", "overlaps 10.77.0.0/16, a network of the VPC itself"),
        ] {
            assert_eq!(made(network, instance), Err(why.to_owned()), "{network} {instance}");
        }
    }
}
