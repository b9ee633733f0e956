//! Generates the code of `proto/` at build time; nothing generated is committed.

use std::{env, error::Error, path::PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../../proto");
    println!("cargo:rerun-if-changed={}", root.display());
    let files = ["cri/v1/runtime.proto", "cell/v1/cell.proto", "store/v1/store.proto"]
        .map(|file| root.join(file));
    tonic_prost_build::configure()
        .bytes(".kiyot")
        .codec_path("crate::codec::Codec")
        .file_descriptor_set_path(out.join("descriptors.bin"))
        .compile_protos(&files, &[root])?;
    Ok(())
}
