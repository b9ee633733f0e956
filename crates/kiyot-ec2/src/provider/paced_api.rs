//! EC2's API with paced and counted calls.

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use kiyot_config::ImageFilter;
use kiyot_engine::provider::ErrorClass;
use tokio::time::Instant;

use crate::{
    CallError, DryRun, Ec2Api, Image, InstanceDescription, InstanceFilter, InstanceStateName,
    MetadataOptionsState, ProductPage, RouteTable, RouteTableFilter, RunInstances, SpotPrice,
    Subnet, TypeDescription, TypeInZone,
    provider::{
        error_codes::classify,
        pacing::{Action, Pacing},
    },
};

/// The counters of the calls.
pub trait Counter: fmt::Debug + Send + Sync {
    /// Counts a call by its operation, such as `RunInstances`, and its outcome: `ok` or the class
    /// of the error. Both are names from the code, so their number is bounded.
    fn called(&self, operation: &'static str, outcome: &'static str, duration: Duration);
}

/// API that makes each call at the pace of its action, and counts it by operation and outcome.
#[derive(Debug)]
pub struct PacedApi {
    api: Arc<dyn Ec2Api>,
    pacing: Pacing,
    counter: Arc<dyn Counter>,
}

impl PacedApi {
    /// Paces and counts the calls of an API.
    pub fn new(api: Arc<dyn Ec2Api>, counter: Arc<dyn Counter>) -> Arc<Self> {
        Arc::new(Self { api, pacing: Pacing::default(), counter })
    }

    async fn call<T>(
        &self,
        action: Action,
        operation: &'static str,
        call: impl Future<Output = Result<T, CallError>>,
    ) -> Result<T, CallError> {
        self.pacing.wait(action).await;
        let begun = Instant::now();
        let answered = call.await;
        let class = answered.as_ref().err().map(|error| classify(error).0);
        self.pacing.learn(action, class == Some(ErrorClass::Throttled));
        self.counter.called(operation, class.map_or("ok", ErrorClass::name), begun.elapsed());
        answered
    }
}

#[async_trait]
impl Ec2Api for PacedApi {
    async fn run_instances(
        &self,
        request: &RunInstances,
    ) -> Result<InstanceDescription, CallError> {
        self.call(Action::Launch, "RunInstances", self.api.run_instances(request)).await
    }

    async fn disable_metadata(&self, id: &str) -> Result<MetadataOptionsState, CallError> {
        self.call(Action::Metadata, "ModifyInstanceMetadataOptions", self.api.disable_metadata(id))
            .await
    }

    async fn describe_instances(
        &self,
        filter: &InstanceFilter,
    ) -> Result<Vec<InstanceDescription>, CallError> {
        self.call(Action::Describe, "DescribeInstances", self.api.describe_instances(filter)).await
    }

    async fn terminate_instances(
        &self,
        ids: &[String],
    ) -> Result<BTreeMap<String, InstanceStateName>, CallError> {
        self.call(Action::Terminate, "TerminateInstances", self.api.terminate_instances(ids)).await
    }

    async fn create_tags(
        &self,
        ids: &[String],
        tags: &BTreeMap<String, String>,
    ) -> Result<(), CallError> {
        self.call(Action::Tag, "CreateTags", self.api.create_tags(ids, tags)).await
    }

    async fn console_output(&self, id: &str, latest: bool) -> Result<String, CallError> {
        self.call(Action::Describe, "GetConsoleOutput", self.api.console_output(id, latest)).await
    }

    async fn types_in_zones(&self) -> Result<Vec<TypeInZone>, CallError> {
        self.call(Action::Describe, "DescribeInstanceTypeOfferings", self.api.types_in_zones())
            .await
    }

    async fn instance_types(&self, names: &[String]) -> Result<Vec<TypeDescription>, CallError> {
        self.call(Action::Describe, "DescribeInstanceTypes", self.api.instance_types(names)).await
    }

    async fn spot_prices(&self, zones: &[String]) -> Result<Vec<SpotPrice>, CallError> {
        self.call(Action::Describe, "DescribeSpotPriceHistory", self.api.spot_prices(zones)).await
    }

    async fn products(&self, page: Option<String>) -> Result<ProductPage, CallError> {
        self.call(Action::Prices, "GetProducts", self.api.products(page)).await
    }

    async fn subnets(&self, ids: &[String]) -> Result<Vec<Subnet>, CallError> {
        self.call(Action::Describe, "DescribeSubnets", self.api.subnets(ids)).await
    }

    async fn images(&self, filter: &ImageFilter) -> Result<Vec<Image>, CallError> {
        self.call(Action::Describe, "DescribeImages", self.api.images(filter)).await
    }

    async fn dry_run(&self, call: &DryRun) -> Result<(), CallError> {
        // Dry runs are not paced, because the daemon makes no dry run.
        self.api.dry_run(call).await
    }

    async fn route_tables(&self, filter: &RouteTableFilter) -> Result<Vec<RouteTable>, CallError> {
        self.call(Action::Describe, "DescribeRouteTables", self.api.route_tables(filter)).await
    }

    async fn create_route(
        &self,
        table: &str,
        network: &str,
        instance: &str,
    ) -> Result<(), CallError> {
        self.call(Action::Route, "CreateRoute", self.api.create_route(table, network, instance))
            .await
    }

    async fn delete_route(&self, table: &str, network: &str) -> Result<(), CallError> {
        self.call(Action::Route, "DeleteRoute", self.api.delete_route(table, network)).await
    }

    async fn disable_source_dest_check(&self, instance: &str) -> Result<(), CallError> {
        let call = self.api.disable_source_dest_check(instance);
        self.call(Action::Route, "ModifyInstanceAttribute", call).await
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, sync::Mutex};

    use super::*;
    use crate::provider::fake_api::FakeApi;

    /// Records the counted calls in order.
    #[derive(Debug, Default)]
    struct Counted(Mutex<Vec<(&'static str, &'static str)>>);

    impl Counter for Counted {
        fn called(&self, operation: &'static str, outcome: &'static str, _duration: Duration) {
            self.0.lock().unwrap().push((operation, outcome));
        }
    }

    #[tokio::test]
    async fn call_is_counted_by_operation_and_class_of_its_error() {
        let fake = FakeApi { known: BTreeSet::from(["i-1".to_owned()]), ..FakeApi::default() };
        let counted = Arc::new(Counted::default());
        let api = PacedApi::new(Arc::new(fake), Arc::clone(&counted) as _);
        for ids in [["i-1"], ["i-1"], ["i-2"]] {
            let _outcome = api.terminate_instances(&ids.map(str::to_owned)).await;
        }
        let terminate = |outcome| ("TerminateInstances", outcome);
        let expected = [terminate("ok"), terminate("ok"), terminate("not_found")];
        assert_eq!(*counted.0.lock().unwrap(), expected);
    }
}
