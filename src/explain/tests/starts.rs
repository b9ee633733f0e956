//! Ranking by measured starts.

use super::*;

/// Verifies A38.
#[test]
fn running_daemon_ranks_by_measured_starts_and_notes_that_all_are_too_slow() {
    let rows = "instance_type,vcpus,memory_mib,architectures,on_demand_usd_per_hour\n\
                fast.big,4,16384,x86_64,0.4\nslow.small,2,8192,x86_64,0.1\n";
    let catalogue = Some(Arc::new(CatalogueFile::parse(rows.as_bytes()).unwrap().catalogue));
    let mut backends = running(Live { catalogue, ..Live::default() }, &[]);
    for _ in 0..3 {
        let starts = &mut backends.get_mut("milpa").unwrap().starts;
        starts.add("netns", "fast.big", Duration::from_millis(2500));
        starts.add("netns", "slow.small", Duration::from_secs(40));
    }
    let of = |within: &str, prices| {
        let asks = format!(
            "    pod.elotl.co/architecture: amd64\n    pod.elotl.co/start-within: {within}\n"
        );
        let (text, fine) = placed(OPT_IN, &asks, prices);
        assert!(fine, "{text}");
        text
    };
    let by_start = "ranking of all providers: fast.big (On-Demand) at $0.4000 an hour of netns, \
                    starts in 2.5s | slow.small (On-Demand) at $0.1000 an hour of netns, starts \
                    in 40.0s";
    let late = "note: no offering is known to start within 2s, the fastest in 2.5s";
    let text = of("10s", Prices::Live(&backends));
    assert!(text.contains("a start within 10s") && text.contains(by_start), "{text}");
    assert!(!text.contains("note: no offering"), "{text}");
    let text = of("2s", Prices::Live(&backends));
    assert!(text.contains(by_start) && text.contains(late), "{text}");
    let text = of("1m", Prices::Live(&backends));
    assert!(text.contains("ranking of all providers: slow.small"), "{text}");
    let text = of("1m", Prices::BuiltIn);
    assert!(text.contains("note: starts are measured by a running daemon"), "{text}");
}
