//! Calls of `cloud_routes`, and the source/destination check, which must be off for
//! `cluster_networks`.

use std::collections::BTreeMap;

use crate::{
    CallError, DryRun, RouteTable, RouteTableFilter,
    provider::{
        cloud_routes::table_of,
        live_check::{LiveCheck, NO_INSTANCE, Outcome},
        terminations::NOT_FOUND,
    },
};

/// The check of the node's instance.
pub(super) const NODE: &str = "DescribeInstances (the node)";
/// The reason why an action of routes is not tried.
const NO_TABLES: &str = "it needs the route tables of the subnets";
/// The code of CreateRoute for a network that has a route.
const EXISTS: &str = "RouteAlreadyExists";
/// The code of DeleteRoute for a network without a route.
const NO_ROUTE: &str = "InvalidRoute.NotFound";

impl LiveCheck<'_> {
    /// Tries the calls for routes, on each route table that a launch can have. `own` is an
    /// instance of the node.
    pub(super) async fn routes(
        &mut self,
        subnets: Option<&BTreeMap<String, String>>,
        own: Option<&str>,
    ) {
        let tables = self.route_tables(subnets).await;
        let network = self.config.ec2.cloud_routes.first().map(ToString::to_string);
        let network = network.unwrap_or_default();
        if tables.is_empty() {
            for name in ["CreateRoute", "DeleteRoute"] {
                self.caller.skip(name, NO_TABLES);
            }
        }
        for table in tables {
            let create = DryRun::CreateRoute {
                table: table.clone(),
                network: network.clone(),
                instance: own.unwrap_or(NO_INSTANCE).to_owned(),
            };
            let delete = DryRun::DeleteRoute { table: table.clone(), network: network.clone() };
            for (action, call) in [("CreateRoute", create), ("DeleteRoute", delete)] {
                let name = format!("{action} ({table})");
                let tried = async {
                    match self.api.dry_run(&call).await {
                        Err(error) if is_permitted(&error, own.is_some()) => Ok(()),
                        tried => tried,
                    }
                };
                if self.caller.call(&name, tried).await.is_ok() {
                    self.caller.add(Outcome::Ok, &name, &format!("dry run for {network}"));
                }
            }
        }
    }

    /// Reads the route tables, and returns the ids of the subnets' tables.
    async fn route_tables(&mut self, subnets: Option<&BTreeMap<String, String>>) -> Vec<String> {
        const NAME: &str = "DescribeRouteTables";
        let filter = match &self.vpc {
            Some(vpc) => RouteTableFilter::Vpc(vpc.clone()),
            None => RouteTableFilter::Targets(vec![NO_INSTANCE.to_owned()]),
        };
        let Ok(listed) = self.caller.list(NAME, self.api.route_tables(&filter)).await else {
            return Vec::new();
        };
        let of_subnet = |subnet: &String| table_of(&listed, subnet).ok();
        let tables = subnets.into_iter().flat_map(|subnets| subnets.values());
        let tables = tables.filter_map(of_subnet).map(|table: &RouteTable| table.id.clone());
        let mut tables: Vec<String> = tables.collect();
        tables.sort_unstable();
        tables.dedup();
        let text = match tables.is_empty() {
            true => "no table of the subnets is known".to_owned(),
            false => format!("{} of the subnets", tables.join(", ")),
        };
        self.caller.add(Outcome::Ok, NAME, &text);
        tables
    }

    /// Warns if the node's instance drops packets between cells and `cluster_networks`.
    pub(super) fn source_dest_check(&mut self) {
        let Some(node) = &self.node else { return };
        let instance = &node.instance;
        let (outcome, state) = match node.has_source_dest_check {
            Some(false) => (Outcome::Ok, "off, as cluster_networks needs it"),
            Some(true) => (Outcome::Warning, "on: cells don't reach cluster_networks"),
            None => (Outcome::Warning, "not shown; it must be off for cluster_networks"),
        };
        let text = format!("the source/destination check of {instance} is {state}");
        self.caller.add(outcome, NODE, &text);
    }
}

/// Returns whether an error shows that the action is permitted: EC2 checks the permission before it
/// looks for the instance and the route.
fn is_permitted(error: &CallError, has_instance: bool) -> bool {
    match error.code() {
        Some(NOT_FOUND) => !has_instance,
        code => matches!(code, Some(EXISTS | NO_ROUTE)),
    }
}
