# Commands around cargo. Only scripts/setup and scripts/runner use root.

export CARGO_INCREMENTAL ?= 0
export CARGO_TERM_COLOR ?= never
export PATH := $(PATH):$(HOME)/.cargo/bin

# src/main.rs has the commit, so that a new commit links the daemon again but recompiles no library.
ifndef KIYOT_GIT_COMMIT
KIYOT_GIT_COMMIT := $(shell scripts/git-commit)
endif
export KIYOT_GIT_COMMIT

LINTING_COMPILER := $(CURDIR)/scripts/linting-compiler

.PHONY: build cell-image demo demo-ec2 demo-shell demo-vm quick test test-node test-vm soak bench bench-ec2 fmt lint lint-default deny clean

# Builds the programs of a node in target/release/, with the provider "ec2": FEATURES=otel
build:
	cargo build --release --workspace --bins --features "ec2 $(FEATURES)"

# Runs the pods of examples/, on the node and in a cell.
demo:
	@scripts/setup
	@cargo build --workspace --bins --example demo
	@cargo run --quiet --example demo

# The same, with a shell for milpactl while the pods run: make demo-shell < examples/tour.sh
demo-shell:
	@scripts/setup
	@cargo build --workspace --bins --example demo
	@DEMO_SHELL=1 cargo run --quiet --example demo

# The same with the cell in a virtual machine, which has a kernel of its own.
demo-vm: cell-image
	@cargo build --workspace --bins --example demo
	@PROVIDER=qemu cargo run --quiet --example demo

# The same with instances of EC2 in a test cloud on this machine. AWS's SDK takes minutes to build, once.
demo-ec2:
	@scripts/setup cloud
	@cargo build --workspace --bins --features ec2 --example demo
	@PROVIDER=ec2 cargo run --quiet --features ec2 --example demo

# Builds the image of cells with a kernel of their own in target/cell-image/, if its inputs have changed.
cell-image:
	@scripts/setup vm
	@scripts/cell-image target/cell-image

# Checks the tree, and runs the unit tests of the crates that differ from main, without the simulated days.
quick: export CARGO_INCREMENTAL = 1
quick:
	@scripts/quick

# Checks everything that must hold before a change is merged. Ends with "N passed, N failed". Crates are compiled with
# Clippy's lints and rustdoc's, once for all.
test: cell-image
	@scripts/setup test
	cargo fmt --all --check
	RUSTC_WORKSPACE_WRAPPER=$(LINTING_COMPILER) cargo test --workspace --features ec2,otel --all-targets --no-run
	@RUSTC_WORKSPACE_WRAPPER=$(LINTING_COMPILER) scripts/count scripts/side-by-side --workspace --features ec2,otel

# Runs all tests of a real node, a VM in QEMU, in half an hour, and the user data of EC2 on a stock Debian. `make test`
# includes the short ones.
test-node:
	@scripts/setup test
	cargo test --workspace --features ec2 --no-run
	@scripts/count cargo test --features ec2 --test node -- --include-ignored

# Runs all tests of cells in virtual machines, one after the other, in ten minutes without KVM. `make test` includes the
# short ones.
test-vm: cell-image
	cargo build --workspace --bins
	cargo test --test vm --test infra --no-run
	@scripts/count sh -c 'code=0; \
		cargo test --test vm -- --include-ignored --test-threads 1 || code=1; \
		cargo test --test infra -- --ignored --test-threads 1 conformance::of_qemu_agents || code=1; \
		exit $$code'

# Runs random pods under random kills, and checks that nothing is left: SECONDS=7200 SEED=random
soak:
	@scripts/setup
	@cargo build --quiet --workspace --bins
	SOAK_SECONDS=$(SECONDS) SEED=$(SEED) cargo test --test soak -- --nocapture pods_of_random_shape

# Runs the benchmarks: ARGS="--parts calls --rounds 3 --only direct,kiyot"
bench:
	@scripts/setup vm cloud bench
	cargo build --release --workspace --bins
	cargo bench --bench cri -- $(ARGS)

# The same of instances of EC2, in a test cloud on this machine: ARGS="--together 50 --density 1000"
bench-ec2:
	@scripts/setup cloud
	cargo build --release --workspace --bins --features ec2
	cargo bench --bench cri --features ec2 -- --parts instances,ec2-density $(ARGS)

fmt:
	cargo fmt --all

lint: lint-default
	cargo clippy --workspace --all-targets --features ec2,otel -- -D warnings

# Without AWS's SDK.
lint-default:
	@scripts/setup
	cargo fmt --all --check
	cargo clippy --workspace --lib --bins -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --workspace --no-deps --lib

# Checks licences, sources, banned crates and advisories of the dependencies of all members.
deny:
	@command -v cargo-deny > /dev/null || cargo install --locked --quiet cargo-deny
	cargo deny --workspace check

clean:
	cargo clean
