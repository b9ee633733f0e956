//! Time of the choice of an offering: all instance types of EC2's region us-east-1, each in six
//! zones and two markets.

use std::time::{Duration, Instant};

use kiyot::annotations;
use kiyot_engine::placement::{
    Catalogue, CatalogueFile, Entry, Needs, NoFit, Offer, Requested, Rules, rank,
};

/// Zones of each type.
const ZONES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
/// Measured choices of each kind of pod.
const CHOICES: usize = 2000;

/// Kinds of pods, with their annotations.
const PODS: [(&str, &[(&str, &str)]); 6] = [
    ("without annotations", &[]),
    ("spot-preferred", &[("launch-type", "Spot-Preferred")]),
    ("a glob", &[("instance-type", "c5*")]),
    ("an exact type", &[("instance-type", "c5.large")]),
    ("2 CPUs, sustained", &[("cpu", "2"), ("sustained-cpu", "true")]),
    ("fits nothing", &[("max-price", "0.0001")]),
];

/// Chooses offerings for pods of several kinds, and prints a table of the times.
pub(crate) fn measure() {
    let catalogue = in_zones(&CatalogueFile::built_in().catalogue);
    let (types, offers) = (catalogue.entries().len(), catalogue.offerings().count());
    println!("\n{types} instance types with {offers} offerings");
    println!("\n| choice for a pod | candidates | p50 us | p99 us |");
    println!("| --- | --- | --- | --- |");
    for (name, annotations) in PODS {
        let needs = needs(annotations);
        let rules = Rules::default();
        let mut candidates = 0;
        let mut times: Vec<Duration> = (0..CHOICES)
            .map(|_| {
                let began = Instant::now();
                candidates = rank(&catalogue, &needs, &rules, &()).len();
                if candidates == 0 {
                    NoFit::new(&catalogue, &needs, &rules);
                }
                began.elapsed()
            })
            .collect();
        times.sort_unstable();
        let at = |part: usize| times[CHOICES * part / 100].as_nanos() as f64 / 1000.0;
        println!("| {name} | {candidates} | {:.1} | {:.1} |", at(50), at(99));
    }
}

fn needs(annotations: &[(&str, &str)]) -> Needs {
    let annotations: Vec<(String, String)> = annotations
        .iter()
        .map(|(key, value)| (format!("pod.elotl.co/{key}"), (*value).to_owned()))
        .collect();
    let pairs = annotations.iter().map(|(key, value)| (key, value));
    let request = annotations::parse(pairs).expect("the annotations are valid");
    Needs::new(&request, &Requested::default(), &Rules::default().defaults)
}

/// Returns a catalogue with the offers of each type in every zone.
fn in_zones(catalogue: &Catalogue) -> Catalogue {
    let of_entry = |entry: &Entry| {
        let offers = entry
            .offers
            .iter()
            .flat_map(|offer| ZONES.map(|zone| Offer { zone: zone.to_owned(), ..offer.clone() }));
        Entry::new(entry.instance_type.clone(), offers.collect())
    };
    Catalogue::new(catalogue.entries().iter().map(of_entry).collect())
}
