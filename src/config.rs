//! TOML as plain, validated, immutable data.
