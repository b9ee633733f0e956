//! Request of a launch: a pure function of its record.

use kiyot_engine::{
    placement::Market,
    provider::{ErrorClass, LaunchSpec, ProviderError},
    request::Architecture,
};
use kiyot_link::bootstrap::{CellFile, Machine};

use crate::{
    RunInstances,
    provider::{
        METADATA_ADDRESSES,
        parameters::Parameters,
        user_data::{self, ImageForm},
    },
};

/// The programs of the image.
const CONTAINERD: &str = "containerd";
/// See [`CONTAINERD`].
const RUNC: &str = "runc";

/// Returns the request of a launch of the first candidate. A replay has the same request, because
/// its record has the same parameters.
///
/// `architectures` are the architectures of the instance type; `is_burstable` tells whether it has
/// credits.
pub(super) fn request(
    spec: &LaunchSpec,
    token: &str,
    architectures: &[Architecture],
    is_burstable: bool,
) -> Result<RunInstances, ProviderError> {
    let parameters = Parameters::from_stored(&spec.parameters)?;
    let invalid = |what: String| ProviderError::without_cause(ErrorClass::Invalid, what);
    let offering = spec
        .offerings()
        .next()
        .ok_or_else(|| invalid(format!("launch of {}: no candidate", spec.cell)))?;
    let subnet = parameters.subnets.get(&offering.zone).ok_or_else(|| {
        invalid(format!("launch of {offering}: no subnet of the configuration is in its zone"))
    })?;
    let image = architectures.iter().find_map(|it| parameters.images.get(it)).ok_or_else(|| {
        invalid(format!("launch of {offering}: the image does not have its architecture"))
    })?;
    let form = if parameters.image_has_agent { ImageForm::Prebuilt } else { ImageForm::Stock };
    let user_data = user_data::render(&cell_file(spec, &parameters), form)
        .map_err(|error| ProviderError::new(ErrorClass::Invalid, "user data of the cell", error))?;
    Ok(RunInstances {
        client_token: token.to_owned(),
        image: image.id.clone(),
        root_device: image.root_device.clone(),
        instance_type: offering.instance_type.clone(),
        subnet: subnet.clone(),
        security_groups: parameters.security_groups.clone(),
        is_spot: offering.market == Market::Spot,
        public_address: parameters.public_address,
        instance_profile: parameters.instance_profile.clone(),
        key_name: parameters.key_name.clone(),
        volume_gib: parameters.volume_gib.max(image.root_gib.unwrap_or_default()),
        volume_type: parameters.volume_type,
        performance: parameters.performance,
        further_volumes: image.further_volumes.clone(),
        kms_key: parameters.kms_key.clone(),
        credits: is_burstable.then_some(parameters.credits),
        tags: spec.tags.clone(),
        user_data,
    })
}

/// Returns the boot data of a cell.
fn cell_file(spec: &LaunchSpec, parameters: &Parameters) -> CellFile {
    // A pod that requests an instance profile needs the metadata service.
    let closed_addresses = match parameters.instance_profile {
        Some(_) => Vec::new(),
        None => METADATA_ADDRESSES.into(),
    };
    CellFile {
        bootstrap: spec.bootstrap.clone(),
        containerd: CONTAINERD.into(),
        runc: RUNC.into(),
        pause_image: parameters.pause_image.clone(),
        registry_config_dir: None,
        restrict_oom_score_adj: false,
        cri: Default::default(),
        machine: Some(Machine {
            pod_mac: None,
            link: None,
            power_off_after_secs: parameters.power_off_after_secs,
            closed_addresses,
            node_networks: parameters
                .cluster_networks
                .iter()
                .map(|network| (network.address, network.prefix))
                .collect(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use crate::CpuCredits;
    use kiyot_link::bootstrap::{AgentPin, Bootstrap, GatewayAddress};

    use super::{super::parameters::tests::parameters, *};
    use kiyot_engine::{
        id::CellId,
        placement::{Accuracy, Candidate, Offering},
    };
    use kiyot_values::price::Price;

    fn spec(market: Market) -> LaunchSpec {
        let cell = CellId::mint().unwrap();
        let offering =
            Offering { instance_type: "t3.nano".into(), zone: "us-east-1a".into(), market };
        LaunchSpec {
            cell: cell.clone(),
            candidates: vec![Candidate { offering, price: Price::FREE, accuracy: Accuracy::Exact }],
            tags: [("kiyot:cell".to_owned(), cell.to_string())].into(),
            bootstrap: Bootstrap {
                cell: cell.to_string(),
                gateway: GatewayAddress::Tcp("10.0.0.5:7700".parse().unwrap()),
                ca_sha256: "00".repeat(32),
                token: "one-time".into(),
                orphan_timeout_secs: 900,
                agent: Some(AgentPin {
                    sha256: "11".repeat(32),
                    size_bytes: 1,
                    ca_pem: "pem".into(),
                }),
            },
            parameters: parameters().stored(),
        }
    }

    fn requested(spec: &LaunchSpec) -> Result<RunInstances, ProviderError> {
        request(spec, "token", &[Architecture::Amd64], true)
    }

    #[test]
    fn replay_has_the_request_of_the_record() {
        let spec = spec(Market::Spot);
        let request = requested(&spec).unwrap();
        assert_eq!(request, requested(&spec).unwrap());
        assert_eq!(
            (request.client_token.as_str(), request.subnet.as_str(), request.is_spot),
            ("token", "subnet-a", true)
        );
        assert_eq!(request.credits, Some(CpuCredits::Standard));
        assert_eq!(request.tags, spec.tags);
        assert!(!format!("{request:?}").contains("one-time"));
    }

    #[test]
    fn credits_are_for_burstable_types() {
        let spec = spec(Market::OnDemand);
        let request = request(&spec, "token", &[Architecture::Amd64], false).unwrap();
        assert_eq!((request.credits, request.is_spot), (None, false));
    }

    #[test]
    fn metadata_is_closed_to_pods_without_an_instance_profile() {
        let with = parameters();
        let without = Parameters { instance_profile: None, ..parameters() };
        let closed = |parameters| {
            let file = cell_file(&spec(Market::Spot), parameters);
            file.machine.unwrap().closed_addresses
        };
        assert_eq!(closed(&with), Vec::<std::net::IpAddr>::new());
        assert_eq!(closed(&without), METADATA_ADDRESSES);
    }

    #[test]
    fn zone_and_architecture_must_be_configured() {
        let mut elsewhere = spec(Market::OnDemand);
        elsewhere.candidates[0].offering.zone = "us-east-1f".into();
        assert!(requested(&elsewhere).unwrap_err().text().contains("us-east-1f"));
        let arm = request(&spec(Market::OnDemand), "token", &[Architecture::Arm64], true);
        assert_eq!(arm.unwrap_err().class, ErrorClass::Invalid);
    }
}
