//! Writes the seeds of all targets to `corpus/<target>/`, where cargo-fuzz looks for them; with an
//! argument, beneath that directory.

use std::{fs, io, path::PathBuf};

fn main() -> io::Result<()> {
    let corpus = std::env::args_os()
        .nth(1)
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus"), PathBuf::from);
    for (name, _) in kiyot_fuzz::TARGETS {
        let dir = corpus.join(name);
        fs::create_dir_all(&dir)?;
        for (number, seed) in kiyot_fuzz::seeds::of(name).iter().enumerate() {
            fs::write(dir.join(format!("seed-{number}")), seed)?;
        }
    }
    Ok(())
}
