//! Misspelt keys, and the known keys that they mean.
//!
//! A pod with a misspelt key would silently get another instance than its author wants.

use super::KEYS;

/// Limit on the wrong letters of a misspelt key.
const MAX_WRONG_LETTERS: usize = 2;

/// Returns the known key that an unknown key means: the known key with the fewest wrong letters
/// (substituted, added, absent, or swapped with the next), at most two and less than half of its
/// name. Case is ignored. The work is bounded for keys of any length.
pub(super) fn meant_by(key: &str) -> Option<&'static str> {
    if KEYS.contains(&key) {
        return None;
    }
    let likely = KEYS.into_iter().filter_map(|known| {
        let wrong = wrong_letters(known, key)?;
        let name = known.rsplit('/').next().unwrap_or(known);
        (2 * wrong < name.len()).then_some((wrong, known))
    });
    likely.min_by_key(|(wrong, _)| *wrong).map(|(_, known)| known)
}

/// Returns the number of wrong letters, unless there are more than [`MAX_WRONG_LETTERS`].
fn wrong_letters(known: &str, key: &str) -> Option<usize> {
    // Bounds the work.
    if known.len().abs_diff(key.len()) > MAX_WRONG_LETTERS {
        return None;
    }
    let wrong = strsim::osa_distance(&known.to_ascii_lowercase(), &key.to_ascii_lowercase());
    (wrong <= MAX_WRONG_LETTERS).then_some(wrong)
}

#[cfg(test)]
mod tests {
    use proptest::{prelude::*, sample::select};

    use super::*;
    use crate::annotations::{
        ARCHITECTURE, CPU, GPU, INSTANCE_TYPE, LAUNCH_TYPE, MEMORY, SPOT_INSTANCE,
    };

    /// Verifies A6.
    #[test]
    fn misspelt_keys_mean_known_ones() {
        for (key, known) in [
            ("pod.elotl.co/launch-typ", LAUNCH_TYPE),
            ("pod.elotl.co/lunch-type", LAUNCH_TYPE),
            ("pod.elotl.co/launchtype", LAUNCH_TYPE),
            ("pod.elotl.co/launch_types", LAUNCH_TYPE),
            ("pod.elotl.co/Launch-Type", LAUNCH_TYPE),
            ("pod.elotl.co/isntance-tpye", INSTANCE_TYPE),
            ("pod.elotl.co/instance-types", INSTANCE_TYPE),
            ("pods.elotl.co/launch-type", LAUNCH_TYPE),
            ("pod.elotl.io/launch-type", LAUNCH_TYPE),
            ("pod.elotl.com/cpu", CPU),
            ("pod.eltol.co/spot-instance", SPOT_INSTANCE),
            ("pod.elotl.co.launch-type", LAUNCH_TYPE),
            ("pod.elotl.co/cpus", CPU),
            ("pod.elotl.co/cup", CPU),
            ("pod.elotl.co/CPU", CPU),
            ("pod.elotl.co/gpus", GPU),
            ("pod.elotl.co/mem0ry", MEMORY),
            ("pod.elotl.co/architectur\u{e9}", ARCHITECTURE),
        ] {
            assert_eq!(meant_by(key), Some(known), "{key}");
        }
    }

    /// Verifies A6.
    #[test]
    fn other_keys_mean_no_known_key() {
        let long = "x".repeat(1 << 20);
        for key in KEYS.into_iter().chain([
            "",
            "/",
            "pod.elotl.co/",
            "pod.elotl.co/foo",
            "pod.elotl.co/cp-x",
            "pod.elotl.co/zone",
            "pods.elotl.com/launch-typ",
            "launch-type",
            "kubernetes.io/target-runtime",
            "example.org/launch-type",
            &long,
        ]) {
            assert_eq!(meant_by(key), None, "{key}");
        }
    }

    #[test]
    fn known_keys_are_further_apart_than_misspelt_ones_except_cpu_and_gpu() {
        for one in KEYS {
            for other in KEYS.into_iter().filter(|other| *other != one) {
                let close = wrong_letters(one, other).is_some();
                assert_eq!(close, [one, other].iter().all(|key| [CPU, GPU].contains(key)));
            }
        }
    }

    proptest! {
        /// Verifies A6.
        #[test]
        fn key_with_one_wrong_letter_means_a_known_one(
            known in select(&KEYS[..]),
            at in any::<prop::sample::Index>(),
            letter in "[a-z0-9./-]",
            change in 0..3,
        ) {
            let at = at.index(known.len());
            let (before, after) = known.split_at(at);
            let key = match change {
                0 => format!("{before}{}", &after[1..]),
                1 => format!("{before}{letter}{after}"),
                _ => format!("{before}{letter}{}", &after[1..]),
            };
            let meant = meant_by(&key);
            // `gpu` and `cpu` differ in one letter.
            let fits = meant.is_some_and(|meant| {
                meant == known || [meant, known].iter().all(|key| [CPU, GPU].contains(key))
            });
            prop_assert!(fits || KEYS.contains(&&*key), "{} {:?}", key, meant);
        }
    }
}
