//! Tests of the choice and its catalogues.

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use kiyot_config::{Ec2, MilpaBackend, ProviderKind};
use kiyot_proto::cri;
use kiyot_values::{price::Price, quantity::Quantity};
use proptest::{collection::vec, prelude::*};

use crate::{
    placement::{
        Accuracy, Amount, Candidate, Catalogue, CatalogueError, CatalogueFile, Choice, Defaults,
        LaunchRefusal::{self, Offerings, Zone},
        MAX_CANDIDATES, Market, Needs, NoFit, Offering, Reason, Refusal, Refusals, RefusedQuota,
        Requested, Rules, Size, Source, fit, misses, rank, rank_further, rank_refused,
    },
    request::{Architecture, CellRequest, GpuRequest, InstanceType as TypeChoice, LaunchType},
};

mod brute_force;

static EC2: LazyLock<Catalogue> = LazyLock::new(|| CatalogueFile::built_in().catalogue);

fn of_quota(quota: RefusedQuota) -> LaunchRefusal {
    LaunchRefusal::Quota { quota: quota.into(), offerings: Vec::new() }
}

static RULES: LazyLock<Rules> = LazyLock::new(|| Rules {
    defaults: Defaults { architecture: Architecture::Amd64, ..Defaults::default() },
    ..Rules::default()
});

/// Returns the needs of a pod with these annotations, each without its prefix.
fn annotated(annotations: &[(&str, &str)]) -> Needs {
    let mut request = CellRequest::default();
    for (key, value) in annotations {
        let quantity = || value.parse::<Quantity>().unwrap();
        match *key {
            "architecture" => request.architecture = Architecture::named(value),
            "cpu" => request.milli_cpus = Some(quantity().milli()),
            "gpu" => {
                let (count, name) = value.split_once(' ').unwrap_or((value, ""));
                let name = Some(name.to_owned()).filter(|name| !name.is_empty());
                request.gpu = Some(GpuRequest { count: count.parse().unwrap(), name });
            }
            "instance-type" if value.contains(['*', '?']) => {
                request.instance_type = Some(TypeChoice::Glob((*value).to_owned()));
            }
            "instance-type" => request.instance_type = Some(TypeChoice::Exact((*value).to_owned())),
            "launch-type" => {
                let types = [LaunchType::OnDemand, LaunchType::Spot, LaunchType::SpotPreferred];
                let named = |of: &LaunchType| of.to_string().eq_ignore_ascii_case(value);
                request.launch_type = types.into_iter().find(named).unwrap();
            }
            "max-price" => request.max_price = Some(value.parse().unwrap()),
            "memory" => request.memory_bytes = Some(quantity().units()),
            "sustained-cpu" => request.sustained_cpu = value.parse().unwrap(),
            _ => panic!("{key}"),
        }
    }
    Needs::new(&request, &Requested::default(), &RULES.defaults)
}

/// Returns the request of a sandbox with these resources.
fn requested(
    resources: cri::LinuxContainerResources,
    overhead: Option<cri::LinuxContainerResources>,
) -> Requested {
    let linux =
        cri::LinuxPodSandboxConfig { resources: Some(resources), overhead, ..Default::default() };
    Requested::of_sandbox(&cri::PodSandboxConfig { linux: Some(linux), ..Default::default() })
}

fn candidates(needs: &Needs) -> Vec<String> {
    let ranked = rank(&EC2, needs, &RULES, &());
    ranked.iter().map(|candidate| candidate.offering.to_string()).collect()
}

fn first(annotations: &[(&str, &str)]) -> Option<String> {
    candidates(&annotated(annotations)).into_iter().next()
}

/// Verifies A8.
#[test]
fn built_in_catalogue_has_every_row() {
    let file = CatalogueFile::built_in();
    assert_eq!((file.catalogue.entries().len(), file.set_aside), (1239, vec![]));
}

/// Verifies A10.
#[test]
fn cheapest_offering_that_fits_is_first() {
    for (annotations, expected) in [
        (&[][..], "t3a.micro (On-Demand)"),
        (&[("launch-type", "Spot")], "t3a.micro (Spot)"),
        (&[("architecture", "arm64")], "t4g.micro (On-Demand)"),
        (&[("architecture", "arm64"), ("memory", "300Mi")], "t4g.nano (On-Demand)"),
        // Burstable types have a baseline of 0.6 CPUs.
        (&[("cpu", "2"), ("memory", "1Gi")], "c6a.large (On-Demand)"),
        (&[("cpu", "2"), ("memory", "1Gi"), ("sustained-cpu", "true")], "c6a.large (On-Demand)"),
        // 0.1 vCPU above its baseline costs less than the 0.3 of t3a.micro.
        (&[("cpu", "500m"), ("sustained-cpu", "true")], "t3a.small (On-Demand)"),
        // 0.35 vCPU above its baseline at $0.04, and not $0.05, cost less than c6g.medium.
        (
            &[
                ("architecture", "arm64"),
                ("cpu", "750m"),
                ("memory", "1Gi"),
                ("sustained-cpu", "true"),
            ],
            "t4g.small (On-Demand)",
        ),
        (&[("gpu", "1")], "g4ad.xlarge (On-Demand)"),
        (&[("gpu", "1 nvidia")], "g4dn.xlarge (On-Demand)"),
        (&[("gpu", "1 l4")], "g6.xlarge (On-Demand)"),
        (&[("instance-type", "c5*")], "c5a.large (On-Demand)"),
        (&[("instance-type", "m5.large")], "m5.large (On-Demand)"),
        (&[("instance-type", "*.metal"), ("architecture", "arm64")], "a1.metal (On-Demand)"),
    ] {
        assert_eq!(first(annotations).as_deref(), Some(expected), "{annotations:?}");
    }
}

/// Verifies A10.
#[test]
fn preferred_market_ranks_first() {
    let needs = annotated(&[("launch-type", "spot-preferred")]);
    let ranked = rank(&EC2, &needs, &RULES, &());
    let (spot, on_demand) = ranked.split_at(MAX_CANDIDATES / 2);
    assert!(spot.iter().all(|candidate| candidate.offering.market == Market::Spot));
    // The file has no spot prices.
    assert!(spot.iter().all(|candidate| candidate.accuracy == Accuracy::AtMost));
    assert!(on_demand.iter().all(|candidate| candidate.offering.market == Market::OnDemand));
    assert_eq!(on_demand.len(), MAX_CANDIDATES / 2);
}

/// Verifies A10, A25.
#[test]
fn spot_offering_not_cheaper_than_on_demand_is_dropped_if_both_markets_fit() {
    let header = "instance_type,vcpus,memory_mib,architectures,usage_classes,\
                  on_demand_usd_per_hour,spot_usd_per_hour\n";
    let rows = [("a", "0.10", "0.03"), ("b", "0.20", "0.10"), ("c", "0.30", "0.15")];
    let rows = rows.into_iter().chain([("d", "0.40", "")]);
    let row = |(name, on_demand, spot)| {
        format!("{name},2,4096,x86_64,on-demand|spot,{on_demand},{spot}\n")
    };
    let text = header.to_owned() + &rows.map(row).collect::<String>();
    let catalogue = CatalogueFile::parse(text.as_bytes()).unwrap().catalogue;
    let spot = |catalogue: &Catalogue, launch_type: &str, refusals: &Refusals| {
        let needs = annotated(&[("launch-type", launch_type)]);
        let ranked = rank(catalogue, &needs, &RULES, &refusals.at(Duration::ZERO));
        let (spot, on_demand): (Vec<_>, Vec<_>) =
            ranked.into_iter().partition(|it| it.offering.market == Market::Spot);
        let names: String = spot.into_iter().map(|it| it.offering.instance_type).collect();
        (names, on_demand.len())
    };
    let both = |refusals: &Refusals| spot(&catalogue, "Spot-Preferred", refusals);
    let offering = |name: &str| Offering {
        instance_type: name.into(),
        zone: String::new(),
        market: Market::OnDemand,
    };
    let refusal = Refusal { until: Duration::from_secs(180), reason: "full".into() };
    let mut refusals = Refusals::default();
    // The spot price of d is unknown, and at most the on-demand price.
    assert_eq!(both(&refusals), ("ad".to_owned(), 4));
    refusals.add(&Offerings(vec![offering("a")]), Duration::ZERO, &refusal);
    assert_eq!(both(&refusals), ("abcd".to_owned(), 3));
    // The offerings for a pool, or for a later pod.
    let needs = annotated(&[("launch-type", "Spot-Preferred")]);
    let further = rank_further(&catalogue, &needs, &RULES);
    let names: String = further.into_iter().map(|it| it.offering.instance_type).collect();
    assert_eq!((names.as_str(), rank_refused(&catalogue, &needs, &RULES).len()), ("bc", 8));
    let types = ["a", "b", "c", "d"].map(str::to_owned).into();
    let quota = RefusedQuota { market: Market::OnDemand, types };
    let mut full = Refusals::default();
    full.add(&of_quota(quota), Duration::ZERO, &refusal);
    assert_eq!(both(&full), ("abcd".to_owned(), 0));
    // With one market, and with estimated prices.
    let none = Refusals::default();
    assert_eq!(spot(&catalogue, "Spot", &none), ("abcd".to_owned(), 0));
    let estimated = catalogue.clone().with_estimates();
    assert_eq!(spot(&estimated, "Spot-Preferred", &none), ("abcd".to_owned(), 4));
}

/// Verifies A21.
#[test]
fn further_offerings_of_a_pool_are_many() {
    let further = |launch_type: &str| {
        rank_further(&EC2, &annotated(&[("launch-type", launch_type)]), &RULES).len()
    };
    assert_eq!(["On-Demand", "Spot", "Spot-Preferred"].map(further), [256; 3]);
}

/// Verifies A11.
#[test]
fn exact_type_overrides_requests_but_not_annotations() {
    let requested = requested(
        cri::LinuxContainerResources {
            memory_limit_in_bytes: 64 << 30,
            cpu_shares: 32 * 1024,
            ..Default::default()
        },
        None,
    );
    let needs = |annotations: &[(&str, &str)]| {
        let needs = annotated(annotations);
        Needs {
            milli_cpus: requested.milli_cpus.unwrap(),
            memory_mib: match needs.memory_mib.source {
                Source::Annotation => needs.memory_mib,
                _ => requested.memory_mib.unwrap(),
            },
            ..needs
        }
    };
    assert_eq!(candidates(&needs(&[("instance-type", "t3.nano")])), ["t3.nano (On-Demand)"]);
    let contradiction = needs(&[("instance-type", "t3.nano"), ("memory", "1Gi")]);
    assert!(candidates(&contradiction).is_empty());
    let more_cpus = annotated(&[("instance-type", "t3.nano"), ("cpu", "4")]);
    assert!(candidates(&more_cpus).is_empty());
    let nearest = misses(&EC2, &contradiction, &RULES, None, 1).remove(0);
    assert_eq!(nearest.instance_type.name, "t3.nano");
    let text = nearest.reasons[0].to_string();
    assert_eq!(text, "has 459 MiB for processes, and 1024 + 96 for the cell is needed");
}

/// Verifies A12.
#[test]
fn request_that_nothing_fits_has_three_near_misses() {
    for (annotations, expected) in [
        (
            &[("max-price", "0.001")][..],
            "t3a.micro costs $0.0094 an hour, and $0.0010 is the highest allowed",
        ),
        (&[("gpu", "1 t5")], "g4ad.xlarge has 1 GPU of AMD Radeon Pro V520 (needed: 1 GPU (t5))"),
        (&[("instance-type", "m5.largee")], "m5.large is not m5.largee"),
        (
            &[("instance-type", "t2.nano"), ("launch-type", "Spot")],
            "t2.nano is not offered as Spot",
        ),
    ] {
        let needs = annotated(annotations);
        assert!(candidates(&needs).is_empty(), "{annotations:?}");
        let near = misses(&EC2, &needs, &RULES, None, 3);
        let shown: Vec<String> = near.iter().map(ToString::to_string).collect();
        assert_eq!((shown.len(), shown[0].as_str()), (3, expected), "{shown:?}");
    }
}

#[test]
fn excluded_types_are_not_chosen() {
    let rules = Rules { exclude: vec![TypeChoice::Glob("t*".into())], ..RULES.clone() };
    let ranked = rank(&EC2, &annotated(&[]), &rules, &());
    assert!(ranked.iter().all(|candidate| !candidate.offering.instance_type.starts_with('t')));
    let exact = annotated(&[("instance-type", "t3.micro")]);
    assert_eq!(rank(&EC2, &exact, &rules, &()), []);
}

/// Verifies A12, A26.
#[test]
fn offering_outside_the_configured_zones_is_a_miss_with_a_reason() {
    let row = "instance_type,vcpus,memory_mib,architectures,on_demand_usd_per_hour,zones\n";
    let rows =
        "near,2,4096,x86_64,0.2,a|b\nfar,2,4096,x86_64,0.1,c\nsomewhere,2,4096,x86_64,0.1,\n";
    let catalogue = CatalogueFile::parse([row, rows].concat().as_bytes()).unwrap().catalogue;
    let of_zones = |zones: &[&str]| {
        let zones = zones.iter().map(|zone| (*zone).to_owned()).collect();
        let rules = Rules { zones, ..RULES.clone() };
        let ranked = rank(&catalogue, &annotated(&[]), &rules, &());
        let names = ranked.iter().map(|candidate| candidate.offering.to_string());
        (names.collect::<Vec<_>>(), NoFit::new(&catalogue, &annotated(&[]), &rules).to_string())
    };
    let (names, left_out) = of_zones(&["b", "d"]);
    assert_eq!(names, ["near in b (On-Demand)"]);
    assert!(left_out.contains("far is not offered in zone b or d"), "{left_out}");
    assert!(left_out.contains("somewhere has no known zone, and zone b or d"), "{left_out}");
    assert_eq!(of_zones(&["d"]).0, Vec::<String>::new());
    assert_eq!(of_zones(&[]).0.len(), 4);
}

/// Verifies A12, A26.
#[test]
fn architecture_without_an_image_of_cells_fits_nothing_and_the_error_names_it() {
    let other = match Architecture::of_node() {
        Architecture::Amd64 => Architecture::Arm64,
        Architecture::Arm64 => Architecture::Amd64,
    };
    let node = Catalogue::any_size(offering_of_no_catalogue());
    for catalogue in [node, EC2.clone().with_images(vec![Architecture::of_node()])] {
        let of = |architecture| Needs { architecture, ..annotated(&[]) };
        assert!(!rank(&catalogue, &of(Architecture::of_node()), &RULES, &()).is_empty());
        assert_eq!(rank(&catalogue, &of(other), &RULES, &()), []);
        let error = NoFit::new(&catalogue, &of(other), &RULES).to_string();
        let (has, needed) = (Architecture::of_node(), other);
        let expected = format!("cells have an image for {has}, and {needed} is needed");
        assert!(error.ends_with(&expected), "{error}");
        let choice = Choice {
            needs: Arc::new(of(other)),
            rules: Arc::new(RULES.clone()),
            catalogue: Arc::new(catalogue.clone()),
        };
        let all: Vec<Offering> = catalogue.offerings().collect();
        assert!(all.iter().all(|of| choice.suited(&Candidate::free(of.clone())).is_none()));
    }
}

#[test]
fn provider_without_types_fits_every_pod() {
    let offering =
        Offering { instance_type: "vm".into(), zone: "node".into(), market: Market::OnDemand };
    let catalogue = Catalogue::any_size(offering.clone());
    let architecture = Architecture::of_node();
    let needs = annotated(&[("launch-type", "Spot"), ("memory", "1Ti"), ("gpu", "8")]);
    let needs = Needs { architecture, ..needs };
    let only = Candidate { offering, price: Price::FREE, accuracy: Accuracy::Exact };
    assert_eq!(rank(&catalogue, &needs, &RULES, &()), [only]);
}

/// A node of four CPUs and 8 GiB that makes instances of any size.
fn sized_catalogue() -> Catalogue {
    Catalogue::sized("node", "node", Size::within(4, 8191), Architecture::Amd64)
}

#[test]
fn instance_has_the_size_of_its_pod() {
    let name = |pairs: &[(&str, &str)]| {
        let ranked = rank(&sized_catalogue(), &annotated(pairs), &RULES, &());
        ranked.into_iter().map(|candidate| candidate.offering.instance_type).collect::<Vec<_>>()
    };
    assert_eq!(name(&[]), ["1cpu-704mib"]);
    assert_eq!(name(&[("cpu", "1001m"), ("memory", "1Gi")]), ["2cpu-1216mib"]);
    assert_eq!(name(&[("cpu", "4"), ("memory", "7Gi")]), ["4cpu-7552mib"]);
    // The provider has no types, markets and prices.
    assert_eq!(name(&[("instance-type", "t3.micro"), ("launch-type", "Spot")]), ["1cpu-704mib"]);
}

#[test]
fn pod_larger_than_the_node_fits_no_size() {
    let refused = |pairs: &[(&str, &str)]| {
        let (catalogue, needs) = (sized_catalogue(), annotated(pairs));
        assert_eq!(rank(&catalogue, &needs, &RULES, &()), [], "{pairs:?}");
        NoFit::new(&catalogue, &needs, &RULES).to_string()
    };
    assert!(refused(&[("cpu", "4001m")]).contains("node has 4 CPU, and 4.001 is needed"));
    assert!(refused(&[("memory", "8Gi")]).contains("node has 7884 MiB for processes"));
    assert!(refused(&[("gpu", "1")]).contains("node has no GPU"));
}

#[test]
fn running_size_suits_only_pods_within_it() {
    let suits = |size: &str, pairs: &[(&str, &str)]| {
        let choice = Choice {
            catalogue: Arc::new(sized_catalogue()),
            needs: Arc::new(annotated(pairs)),
            rules: Arc::new(RULES.clone()),
        };
        let offering =
            Offering { instance_type: size.into(), zone: "node".into(), market: Market::OnDemand };
        choice.suited(&Candidate::free(offering)).is_some()
    };
    assert!(suits("1cpu-704mib", &[]));
    assert!(suits("2cpu-1216mib", &[("cpu", "2"), ("memory", "1Gi"), ("launch-type", "Spot")]));
    assert!(!suits("1cpu-1216mib", &[("cpu", "2"), ("memory", "1Gi")]));
    assert!(!suits("2cpu-704mib", &[("cpu", "2"), ("memory", "1Gi")]));
    assert!(!suits("netns", &[]));
}

proptest! {
    #[test]
    fn pod_fits_its_size_but_no_smaller_size(milli in 0_u64..1_000_000, memory in 0_u64..1 << 40) {
        let amount = |value| Amount { value, source: Source::Limits };
        let needs = Needs {
            milli_cpus: amount(milli),
            memory_mib: amount(memory),
            ..Needs::default()
        };
        let size = Size::of(&needs);
        prop_assert_eq!(Size::parse(&size.to_string()), Some(size));
        let fits = |size: Size| {
            fit::fits(&size.instance_type("any".into(), needs.architecture), &needs, &RULES)
        };
        prop_assert!(fits(size));
        let less_memory = Size { memory_mib: size.memory_mib.saturating_sub(64), ..size };
        prop_assert!(!fits(less_memory));
        let fewer_cpus = Size { cpus: size.cpus - 1, ..size };
        prop_assert!(size.cpus == 1 || !fits(fewer_cpus));
    }
}

/// Verifies A9.
#[test]
fn needs_have_the_size_of_the_cri_request() {
    let of = |period, quota, shares, memory, overhead| {
        let resources = cri::LinuxContainerResources {
            cpu_period: period,
            cpu_quota: quota,
            cpu_shares: shares,
            memory_limit_in_bytes: memory,
            ..Default::default()
        };
        let overhead =
            cri::LinuxContainerResources { memory_limit_in_bytes: overhead, ..Default::default() };
        let requested = requested(resources, Some(overhead));
        let needs = Needs::new(&CellRequest::default(), &requested, &RULES.defaults);
        let pair = |amount: Amount| (amount.value, amount.source);
        (pair(needs.milli_cpus), pair(needs.memory_mib), needs.overhead_mib)
    };
    let (limits, requests, default) = (Source::Limits, Source::Requests, Source::Default);
    // A pod without requests: the kubelet sends the least shares and a period.
    assert_eq!(of(100_000, 0, 2, 0, 0), ((0, default), (512, default), 96));
    assert_eq!(of(100_000, 0, 102, 0, 0), ((100, requests), (512, default), 96));
    assert_eq!(of(100_000, 150_000, 102, 1 << 30, 0), ((1500, limits), (1024, limits), 96));
    assert_eq!(of(100_000, 50_000, 2048, 1, 0), ((2000, requests), (1, limits), 96));
    assert_eq!(of(0, 50_000, 0, -1, 300 << 20), ((0, default), (512, default), 300));
    assert_eq!(of(-1, i64::MAX, i64::MAX, i64::MAX, i64::MIN).2, 96);
}

/// Verifies A9.
#[test]
fn annotated_memory_is_rounded_up_to_mib() {
    let memory = |bytes| {
        let request = CellRequest { memory_bytes: Some(bytes), ..CellRequest::default() };
        Needs::new(&request, &Requested::default(), &RULES.defaults).memory_mib.value
    };
    assert_eq!([1, 1 << 20, (1 << 20) + 1].map(memory), [1, 1, 2]);
}

/// Verifies V107.
#[test]
fn pod_of_350_mib_fits_a_t3_nano_only_if_the_system_leaves_the_memory() {
    let request = CellRequest {
        instance_type: Some(TypeChoice::Glob("t3.*".into())),
        memory_bytes: Some(350 << 20),
        architecture: Some(Architecture::Amd64),
        ..CellRequest::default()
    };
    let of = |provider, keys: fn(&mut Ec2)| {
        let mut config = MilpaBackend::default();
        keys(&mut config.ec2);
        let rules = Rules::of(&config, provider);
        let needs = Needs::new(&request, &Requested::default(), &rules.defaults);
        let first = rank(&EC2, &needs, &rules, &()).remove(0);
        let cheaper = misses(&EC2, &needs, &rules, Some(first.price), 9);
        let left_out = cheaper.iter().map(ToString::to_string).collect::<Vec<_>>();
        (first.offering.instance_type.to_string(), left_out)
    };
    let nano = || ("t3.nano".to_owned(), Vec::new());
    let micro = |overhead: u64| {
        let reason =
            format!("has 459 MiB for processes, and 350 + {overhead} for the cell is needed");
        ("t3.micro".to_owned(), vec![format!("t3.nano {reason}")])
    };
    assert_eq!(of(ProviderKind::Netns, |_| {}), nano());
    assert_eq!(of(ProviderKind::Ec2, |_| {}), micro(256));
    assert_eq!(of(ProviderKind::Ec2, |ec2| ec2.image_has_agent = true), micro(192));
    assert_eq!(of(ProviderKind::Ec2, |ec2| ec2.memory_overhead = Some(109 << 20)), nano());
    assert_eq!(of(ProviderKind::Ec2, |ec2| ec2.memory_overhead = Some(110 << 20)), micro(110));
}

/// Verifies V108.
#[test]
fn named_type_with_less_memory_than_the_system_needs_is_refused() {
    let named = |overhead_mib| {
        let instance_type = Some(TypeChoice::Exact("t3.nano".into()));
        let request = CellRequest { instance_type, ..CellRequest::default() };
        let defaults = Defaults { overhead_mib, ..RULES.defaults };
        let needs = Needs::new(&request, &Requested::default(), &defaults);
        let ranked = rank(&EC2, &needs, &RULES, &());
        ranked.is_empty().then(|| NoFit::new(&EC2, &needs, &RULES).to_string())
    };
    // An exact type overrides the pod's larger request of memory.
    assert_eq!(named(459), None);
    let refusal = named(460).unwrap();
    let expected = "t3.nano has 459 MiB for processes, and the cell alone needs 460";
    assert!(refusal.contains(expected), "{refusal}");
}

/// Verifies A8.
#[test]
fn broken_rows_are_set_aside_with_their_line() {
    let header = "instance_type,vcpus,memory_mib,architectures,burstable,baseline_vcpus,gpus,\
                  usage_classes,on_demand_usd_per_hour,zones,spot_usd_per_hour\n";
    let wide = format!("wide,2,4096,x86_64,,,,,0.1,{},", ["z"; 33].join("|"));
    let rows = [
        ("good,2,4096,arm64|x86_64,,,,on-demand|spot,0.1,a|b,0.03", None),
        ("good,2,4096,x86_64,,,,,0.1,,", Some("repeats line 2")),
        ("b d,2,4096,x86_64,,,,,0.1,,", Some("instance_type")),
        ("none,0,4096,x86_64,,,,,0.1,,", Some("vcpus")),
        ("much,2,99999999999999,x86_64,,,,,0.1,,", Some("memory_mib")),
        ("old,2,4096,i386,,,,,0.1,,", Some("architectures")),
        ("burst,2,4096,x86_64,True,,,,0.1,,", Some("baseline_vcpus")),
        ("maybe,2,4096,x86_64,yes,,,,0.1,,", Some("burstable")),
        ("gpus,2,4096,x86_64,,,-1,,0.1,,", Some("gpus")),
        ("paid,2,4096,x86_64,,,,,-0.1,,", Some("on_demand_usd_per_hour = \"-0.1\" is invalid")),
        ("zones,2,4096,x86_64,,,,,0.1,a||b,", Some("zones")),
        (&*wide, Some("zones = ")),
        ("short,2", Some("fields")),
        ("unpriced,2,4096,x86_64,,,,,,,", None),
    ];
    let text: String = rows.iter().map(|(row, _)| format!("{row}\n")).collect();
    let file = CatalogueFile::parse(format!("{header}{text}").as_bytes()).unwrap();
    let broken: Vec<_> = rows
        .iter()
        .enumerate()
        .filter_map(|(index, (_, reason))| reason.map(|reason| (index as u64 + 2, reason)))
        .collect();
    assert_eq!(file.set_aside.len(), broken.len(), "{:?}", file.set_aside);
    for (row, (line, reason)) in file.set_aside.iter().zip(broken) {
        assert_eq!(row.line, line);
        assert!(row.reason.contains(reason), "{row}");
    }
    let good = file.catalogue.named("good").unwrap();
    let offers: Vec<_> = good
        .offers
        .iter()
        .map(|offer| {
            (
                offer.zone.as_str(),
                offer.market,
                offer.price.micros(),
                offer.accuracy == Accuracy::AtMost,
            )
        })
        .collect();
    assert_eq!(
        offers,
        [
            ("a", Market::OnDemand, 100_000, false),
            ("a", Market::Spot, 30_000, false),
            ("b", Market::OnDemand, 100_000, false),
            ("b", Market::Spot, 30_000, false),
        ]
    );
    assert_eq!(file.catalogue.named("unpriced").unwrap().offers, []);
}

#[test]
fn unusable_files_are_refused() {
    let parse = |text: &[u8]| CatalogueFile::parse(text).unwrap_err();
    assert_eq!(parse(b""), CatalogueError::NoColumn("instance_type"));
    assert_eq!(parse(b"instance_type,vcpus\n"), CatalogueError::NoColumn("memory_mib"));
    let header = b"instance_type,vcpus,memory_mib,architectures\n";
    assert_eq!(parse(header), CatalogueError::Empty(None));
    let row = [&header[..], b"a,1,x,arm64\n"].concat();
    let text = parse(&row).to_string();
    assert!(text.contains("no instance type that can be used; line 2: memory_mib"), "{text}");
    assert_eq!(parse(&vec![b'a'; 17 << 20]), CatalogueError::TooLarge(17 << 20));
}

/// Verifies A13.
#[test]
fn refused_offering_is_avoided_until_its_time() {
    let needs = annotated(&[]);
    let rules = &*RULES;
    let mut refusals = Refusals::default();
    let at = Duration::from_secs;
    let all = rank(&EC2, &needs, rules, &refusals.at(at(0)));
    let first = Offerings(vec![all[0].offering.clone()]);
    refusals.add(&first, at(10), &Refusal { until: at(190), reason: "full".into() });
    assert_eq!(rank(&EC2, &needs, rules, &refusals.at(at(189)))[0], all[1]);
    assert_eq!(rank(&EC2, &needs, rules, &refusals.at(at(190)))[0], all[0]);
    let (first, refusal) = refusals.first_end([&all[1].offering, &all[0].offering]).unwrap();
    assert_eq!((first, refusal.until), (&all[0].offering, at(190)));
    // The type is still available in the other market.
    let spot = annotated(&[("launch-type", "Spot")]);
    let first = &rank(&EC2, &spot, rules, &refusals.at(at(20)))[0];
    assert_eq!(first.offering.instance_type, all[0].offering.instance_type);
}

/// Verifies V62.
#[test]
fn refused_zone_is_avoided_for_every_type_and_market_until_its_time() {
    let needs = annotated(&[]);
    let rules = &*RULES;
    let mut refusals = Refusals::default();
    let at = Duration::from_secs;
    let all = rank(&EC2, &needs, rules, &());
    let zone = &all[0].offering.zone;
    refusals.add(&Zone(zone.clone()), at(10), &Refusal { until: at(190), reason: "full".into() });
    let left = rank(&EC2, &needs, rules, &refusals.at(at(189)));
    let expected: Vec<_> = all.iter().filter(|it| it.offering.zone != *zone).cloned().collect();
    assert_eq!(left, expected);
    assert_eq!(rank(&EC2, &needs, rules, &refusals.at(at(190))), all);
    let (_, refusal) = refusals.first_end([&all[0].offering]).unwrap();
    assert_eq!((refusal.until, &*refusal.reason), (at(190), "full"));
}

/// Verifies A13.
#[test]
fn full_quota_drops_its_offerings_without_dearer_replacements() {
    let needs = annotated(&[]);
    let rules = &*RULES;
    let mut refusals = Refusals::default();
    let at = Duration::from_secs;
    let all = rank(&EC2, &needs, rules, &());
    let types = all[1..].iter().map(|candidate| candidate.offering.instance_type.clone());
    let quota = RefusedQuota { market: Market::OnDemand, types: types.collect() };
    refusals.add(&of_quota(quota), at(10), &Refusal { until: at(190), reason: "full".into() });
    assert_eq!(rank(&EC2, &needs, rules, &refusals.at(at(189))), all[..1]);
    assert_eq!(rank(&EC2, &needs, rules, &refusals.at(at(190))), all);
    let (first, refusal) = refusals.first_end([&all[0].offering, &all[3].offering]).unwrap();
    assert_eq!((first, &*refusal.reason), (&all[3].offering, "full"));
    // Another market has a quota of its own.
    let spot = annotated(&[("launch-type", "Spot")]);
    assert_eq!(rank(&EC2, &spot, rules, &refusals.at(at(20))).len(), MAX_CANDIDATES);
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_parsed_without_panic(text in vec(any::<u8>(), 0..400)) {
        let _ = CatalogueFile::parse(&text);
    }

    #[test]
    fn arbitrary_rows_are_parsed_without_panic(
        rows in vec("[a-z.]{0,4},[-0-9.]{0,6},[0-9]{0,30},(arm64|x86_64|)", 0..6),
    ) {
        let text = format!("instance_type,vcpus,memory_mib,architectures\n{}", rows.join("\n"));
        let _ = CatalogueFile::parse(text.as_bytes());
    }

    #[test]
    fn arbitrary_sizes_of_a_request_do_not_overflow(
        period in any::<i64>(),
        quota in any::<i64>(),
        shares in any::<i64>(),
        memory in any::<i64>(),
    ) {
        let resources = cri::LinuxContainerResources {
            cpu_period: period,
            cpu_quota: quota,
            cpu_shares: shares,
            memory_limit_in_bytes: memory,
            ..Default::default()
        };
        let requested = requested(resources, None);
        let needs = Needs::new(&CellRequest::default(), &requested, &RULES.defaults);
        let _ = rank(&EC2, &needs, &RULES, &());
        let _ = misses(&EC2, &needs, &RULES, None, 3);
    }
}

/// Each reason counts in the distance.
#[test]
fn nearer_types_are_named_first() {
    let needs = annotated(&[("memory", "64Ti")]);
    let near = misses(&EC2, &needs, &RULES, None, 3);
    let memories: Vec<u64> = near.iter().map(|miss| miss.instance_type.memory_mib).collect();
    assert!(memories.is_sorted_by(|one, other| one >= other), "{memories:?}");
    assert!(matches!(near[0].reasons[..], [Reason::Memory(..)]), "{near:?}");
}

fn offering_of_no_catalogue() -> Offering {
    Offering { instance_type: "gone".into(), zone: String::new(), market: Market::OnDemand }
}
