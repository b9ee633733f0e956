//! Clocks that jump, and clocks that differ: the link comes back without a hand.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, SystemTime},
};

use kiyot::backends::milpa::{gateway::ca::Ca, store::Store};
use kiyot_link::bootstrap::GatewayAddress;
use kiyot_link::{bootstrap::Bootstrap, clock::Clock};

use crate::{
    calls::echo,
    kit::{Fixture, Running, Wire, limits, start_gateway_by},
};

const YEAR: i64 = 365 * 24 * 3600;

/// A clock that is set, in seconds before or after the true time.
#[derive(Clone, Default)]
struct Set(Arc<AtomicI64>);

impl Set {
    fn by(seconds: i64) -> Self {
        Self(Arc::new(AtomicI64::new(seconds)))
    }

    fn to(&self, seconds: i64) {
        self.0.store(seconds, Ordering::SeqCst);
    }

    fn clock(&self) -> Clock {
        let set = self.clone();
        Clock::new(move || {
            let by = Duration::from_secs(set.0.load(Ordering::SeqCst).unsigned_abs());
            let now = SystemTime::now();
            if set.0.load(Ordering::SeqCst) < 0 { now - by } else { now + by }
        })
    }
}

/// A gateway and an agent with clocks of their own, and a wire between them.
struct World {
    fixture: Fixture,
    wire: Wire,
    _agent: Running,
}

impl World {
    async fn start(gateway: &Set, agent: &Set) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listen = GatewayAddress::Unix(dir.path().join("gateway.sock"));
        let fixture = Fixture::by(gateway.clock(), dir, listen, limits(), Ca::new().unwrap()).await;
        let wire = Wire::start(fixture.dir.path().join("wire.sock"), fixture.gateway.address());
        let bootstrap = Bootstrap { gateway: wire.address.clone(), ..fixture.bootstrap() };
        let agent = Running::start_by(agent.clock(), bootstrap, fixture.private_dir());
        echo(&fixture.link.bulk, "before").await;
        // From here on no token helps: the key alone must do.
        fixture.admission.expire(&fixture.cell);
        Self { fixture, wire, _agent: agent }
    }

    /// The wire is cut, and the link comes back.
    async fn comes_back(&self, when: &str) {
        self.wire.cut();
        self.fixture.unlinked().await;
        echo(&self.fixture.link.bulk, when).await;
        echo(&self.fixture.link.bulk, when).await;
        assert!(self.fixture.admission.alarms().is_empty());
    }
}

/// Verifies L7.
#[tokio::test]
async fn a_clock_that_jumps_cuts_no_link_and_keeps_none_from_coming_back() {
    // Which of the two is set: on a node both are one.
    for (gateway, agent) in [(1, 0), (0, 1), (1, 1), (1, -1)] {
        let (gateways, agents) = (Set::default(), Set::default());
        let world = World::start(&gateways, &agents).await;
        let news = world.fixture.admission.news().len();
        for jump in [YEAR, 0, -YEAR, 30 * YEAR, 0] {
            gateways.to(jump * gateway);
            agents.to(jump * agent);
            if jump == YEAR {
                // What is connected stays connected.
                echo(&world.fixture.link.bulk, "after a jump").await;
                assert_eq!(world.fixture.admission.news().len(), news);
            }
            world.comes_back(&format!("after a jump of {jump} s, by {gateway} and {agent}")).await;
        }
    }
}

/// Verifies L7.
#[tokio::test]
async fn clocks_that_differ_from_the_beginning_don_t_matter() {
    // 1970 is where a machine without a battery begins.
    let since_1970 = i64::try_from(SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs()).unwrap();
    for (gateway, agent) in [(0, -since_1970), (0, 50 * YEAR), (-since_1970, 0), (50 * YEAR, 0)] {
        World::start(&Set::by(gateway), &Set::by(agent)).await.comes_back("again").await;
    }
}

/// Verifies L7.
#[tokio::test]
async fn a_daemon_that_starts_by_another_clock_gets_its_cells_back() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).await.unwrap();
    let listen = GatewayAddress::Unix(dir.path().join("gateway.sock"));
    let mut fixture =
        Fixture::at(dir, listen.clone(), limits(), Ca::load_or_make(&store).await.unwrap()).await;
    let _agent = fixture.agent();
    echo(&fixture.link.bulk, "before").await;
    fixture.admission.expire(&fixture.cell);
    for jump in [YEAR, -YEAR, 30 * YEAR, 0] {
        fixture.gateway.shutdown().await;
        let ca = Ca::load_or_make(&store).await.unwrap();
        fixture.gateway = start_gateway_by(
            Set::by(jump).clock(),
            &fixture.admission,
            listen.clone(),
            limits(),
            ca,
        )
        .await;
        fixture.link = fixture.gateway.link(&fixture.cell);
        echo(&fixture.link.bulk, "after").await;
    }
    assert!(fixture.admission.alarms().is_empty());
}
