# Cargo does the work; here is what is to be done before and after it. Nothing here needs root but through scripts/setup and scripts/runner.

export CARGO_INCREMENTAL ?= 0
export CARGO_TERM_COLOR ?= never
export PATH := $(PATH):$(HOME)/.cargo/bin

.PHONY: demo test test-node soak bench fmt lint deny clean

# Runs the pods of examples/, one on the node and one in a cell.
demo:
	@scripts/setup
	@cargo build --quiet --workspace --bins --example demo
	@cargo run --quiet --example demo

# All that must hold before a change goes in. Ends with "N passed, N failed".
test: lint
	@scripts/count cargo test --workspace --no-fail-fast

# Every test on a real node, a virtual machine that QEMU emulates: half an hour. `make test` has the short ones.
test-node:
	@scripts/setup
	cargo test --workspace --no-run
	@scripts/count cargo test --test node -- --include-ignored

# Runs pods of random shape under random kills for so many seconds, and sees that nothing is left. SECONDS=7200 SEED=random
soak:
	@scripts/setup
	@cargo build --quiet --workspace --bins
	SOAK_SECONDS=$(SECONDS) SEED=$(SEED) cargo test --test soak -- --include-ignored --nocapture pods_of_random_shape

# Compares kiyot with other forwarders, and measures how long a cell takes. ARGS="--parts calls --rounds 3 --only direct,kiyot"
bench:
	@scripts/setup bench
	cargo build --release --workspace --bins
	cargo bench --bench cri -- $(ARGS)

fmt:
	cargo fmt --all

lint:
	@scripts/setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --workspace --no-deps --lib

# Licences, sources, banned crates and advisories of all dependencies.
deny:
	@command -v cargo-deny > /dev/null || cargo install --locked --quiet cargo-deny
	cargo deny check

clean:
	cargo clean
