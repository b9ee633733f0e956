//! Clock jumps and clock skew: the link reconnects without an operator.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, SystemTime},
};

use kiyot::backends::milpa::{
    gateway::{Limits, ca::Ca},
    store::Store,
};
use kiyot_link::{bootstrap::Bootstrap, clock::Clock};
use kiyot_testkit::{Relay, wait_until};

use crate::{
    calls::echo,
    kit::{Endpoints, Fixture, LIMIT, RunningAgent, limits, start_gateway_with_clock},
};

const YEAR: i64 = 365 * 24 * 3600;

/// A clock with an offset from the true time, in seconds.
#[derive(Clone, Default)]
struct TestClock(Arc<AtomicI64>);

impl TestClock {
    fn with_offset(seconds: i64) -> Self {
        Self(Arc::new(AtomicI64::new(seconds)))
    }

    fn set_offset(&self, seconds: i64) {
        self.0.store(seconds, Ordering::SeqCst);
    }

    fn clock(&self) -> Clock {
        let own = self.clone();
        Clock::new(move || {
            let offset = Duration::from_secs(own.0.load(Ordering::SeqCst).unsigned_abs());
            let now = SystemTime::now();
            if own.0.load(Ordering::SeqCst) < 0 { now - offset } else { now + offset }
        })
    }
}

/// A gateway and an agent with separate clocks, and a relay between them.
struct Setup {
    fixture: Fixture,
    relay: Relay,
    agent: RunningAgent,
}

impl Setup {
    async fn start(gateway: &TestClock, agent: &TestClock) -> Self {
        Self::with_limits(limits(), gateway, agent).await
    }

    async fn with_limits(limits: Limits, gateway: &TestClock, agent: &TestClock) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let endpoints = Endpoints::unix(&dir);
        let fixture =
            Fixture::with_clock(gateway.clock(), dir, endpoints, limits, Ca::new().unwrap()).await;
        let relay = fixture.relay();
        let bootstrap = Bootstrap { gateway: relay.address.clone(), ..fixture.bootstrap() };
        let agent = RunningAgent::start_with_clock(agent.clock(), bootstrap, fixture.private_dir());
        echo(&fixture.link.bulk, "before").await;
        // Without a valid token, the agent can only use its key.
        fixture.admission.expire(&fixture.cell);
        Self { fixture, relay, agent }
    }

    /// Cuts the connections and waits until calls succeed again.
    async fn reconnects(&self, when: &str) {
        self.relay.cut();
        self.fixture.wait_unlinked().await;
        echo(&self.fixture.link.bulk, when).await;
        echo(&self.fixture.link.bulk, when).await;
        assert!(self.fixture.admission.alarms().is_empty());
    }

    /// Makes calls, after the certificate has expired, until the agent has opened a connection.
    async fn opens_a_connection(&self) {
        let opened = &self.agent.agent.bulk_connections;
        let before = opened.load(Ordering::SeqCst);
        wait_until("a connection after the end of the certificate", LIMIT, async || {
            echo(&self.fixture.link.bulk, "again").await;
            (opened.load(Ordering::SeqCst) > before).then_some(())
        })
        .await;
    }
}

/// Verifies L7.
#[tokio::test]
async fn clock_jump_ends_no_link_and_prevents_no_reconnect() {
    // On a node both clocks are the same; a virtual machine has its own.
    for (gateway, agent) in [(1, 0), (0, 1), (1, 1), (1, -1)] {
        let (gateway_clock, agent_clock) = (TestClock::default(), TestClock::default());
        let setup = Setup::start(&gateway_clock, &agent_clock).await;
        let linked_events = setup.fixture.admission.linked_events().len();
        for jump in [YEAR, 0, -YEAR, 30 * YEAR, 0] {
            gateway_clock.set_offset(jump * gateway);
            agent_clock.set_offset(jump * agent);
            if jump == YEAR {
                // An open connection is not affected.
                echo(&setup.fixture.link.bulk, "after a jump").await;
                assert_eq!(setup.fixture.admission.linked_events().len(), linked_events);
            }
            setup.reconnects(&format!("after a jump of {jump} s, by {gateway} and {agent}")).await;
        }
    }
}

/// Verifies L29.
#[tokio::test]
async fn certificate_that_expires_while_linked_is_renewed_for_the_next_call() {
    // Shorter than the polling interval of `wait_until`, so that calls find no connection.
    let idle = Duration::from_millis(1);
    // The agent's clock equals the gateway's, or stays before or after the validity of each
    // certificate.
    for (offset, factor) in [(0, 1), (0, 0), (-55 * YEAR, 0), (90 * YEAR, 0)] {
        let (gateway_clock, agent_clock) = (TestClock::default(), TestClock::with_offset(offset));
        let limits = Limits { bulk_idle: idle..=idle, ..limits() };
        let setup = Setup::with_limits(limits, &gateway_clock, &agent_clock).await;
        for years in 1..=3 {
            gateway_clock.set_offset(years * YEAR);
            agent_clock.set_offset(offset + years * YEAR * factor);
            setup.opens_a_connection().await;
        }
        let linked_events = setup.fixture.admission.linked_events();
        assert_eq!(linked_events, [Some(1)], "the control connection stays");
        assert!(setup.fixture.admission.alarms().is_empty());
    }
}

/// Verifies L29.
#[tokio::test]
async fn renewed_certificate_that_cannot_be_stored_is_used() {
    // Shorter than the polling interval of `wait_until`, so that calls find no connection.
    let idle = Duration::from_millis(1);
    let clock = TestClock::default();
    let limits = Limits { bulk_idle: idle..=idle, ..limits() };
    let setup = Setup::with_limits(limits, &clock, &clock).await;
    // The agent writes the certificate to this path before it replaces the old one. The directory
    // makes the write fail.
    let written = setup.fixture.private_dir().join("certificate.der.new");
    std::fs::create_dir(&written).unwrap();
    clock.set_offset(YEAR);
    setup.opens_a_connection().await;
    let linked_events = setup.fixture.admission.linked_events();
    assert_eq!(linked_events, [Some(1)], "the control connection stays");
    assert!(written.is_dir(), "the agent can't store the certificate");
}

/// Verifies L7.
#[tokio::test]
async fn clock_skew_from_the_start_prevents_no_link() {
    // A machine without a battery-backed clock starts in 1970.
    let since_1970 = i64::try_from(SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs()).unwrap();
    for (gateway, agent) in [(0, -since_1970), (0, 50 * YEAR), (-since_1970, 0), (50 * YEAR, 0)] {
        Setup::start(&TestClock::with_offset(gateway), &TestClock::with_offset(agent))
            .await
            .reconnects("again")
            .await;
    }
}

/// Verifies L7.
#[tokio::test]
async fn cells_reconnect_to_a_daemon_restarted_with_another_clock() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).await.unwrap();
    let endpoints = Endpoints::unix(&dir);
    let mut fixture =
        Fixture::with_ca(dir, endpoints.clone(), limits(), Ca::load_or_make(&store).await.unwrap())
            .await;
    let _agent = fixture.agent();
    echo(&fixture.link.bulk, "before").await;
    fixture.admission.expire(&fixture.cell);
    for jump in [YEAR, -YEAR, 30 * YEAR, 0] {
        fixture.gateway.shutdown().await;
        let ca = Ca::load_or_make(&store).await.unwrap();
        fixture.gateway = start_gateway_with_clock(
            TestClock::with_offset(jump).clock(),
            &fixture.admission,
            endpoints.clone(),
            limits(),
            ca,
        )
        .await;
        fixture.link = fixture.gateway.link(&fixture.cell);
        echo(&fixture.link.bulk, "after").await;
    }
    assert!(fixture.admission.alarms().is_empty());
}
