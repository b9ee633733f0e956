//! Seeded random choices.

use std::time::SystemTime;

/// The seed without `SEED` in the environment.
const DEFAULT_SEED: u64 = 20_261_122;

/// A seeded xorshift64 generator. The same seed makes the same choices.
#[derive(Debug, Clone)]
pub struct SeededRng(u64);

impl SeededRng {
    /// Creates the generator of this run's [`seed`].
    pub fn new() -> Self {
        Self::of(seed())
    }

    /// Creates the generator of a seed.
    pub fn of(seed: u64) -> Self {
        // Adjacent seeds make unrelated sequences.
        Self(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns the next number below a bound. The bound must not be 0.
    pub fn next(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % below
    }

    /// Returns an element of a slice.
    ///
    /// # Panics
    /// If the slice is empty.
    pub fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::try_from(self.next(all.len() as u64)).unwrap_or(0)]
    }

    /// Returns whether an event with probability 1 / `many` happens.
    pub fn one_in(&mut self, many: u64) -> bool {
        self.next(many) == 0
    }
}

impl Default for SeededRng {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns and prints the seed of this run: `SEED` in the environment (a number or `random`), or a
/// constant.
///
/// # Panics
/// If `SEED` is neither a number nor `random`.
pub fn seed() -> u64 {
    let seed = match std::env::var("SEED").as_deref() {
        Ok("random") => SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(DEFAULT_SEED, |now| u64::try_from(now.as_micros()).unwrap_or(DEFAULT_SEED)),
        Ok("") | Err(_) => DEFAULT_SEED,
        Ok(seed) => seed.parse().expect("SEED is a number or `random`"),
    };
    eprintln!("SEED={seed}");
    seed
}
