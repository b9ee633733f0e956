//! Ten nodes that race for a budget, with crashes, lost and late answers, and lost disks.

use std::{
    collections::BTreeMap,
    future::poll_fn,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::Duration,
};

use fastrand::Rng;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::budgets::{OrderWish, Places, RecordedShare};

const NODES: usize = 10;
const LIMIT: u64 = 12;
const UID: &str = "u";

fn name(number: usize) -> String {
    format!("node-{number}")
}

fn key() -> BudgetKey {
    BudgetKey { namespace: "web".to_owned(), name: "cells".to_owned() }
}

/// A call that has not arrived. Its response may be lost meanwhile, and it may arrive after its
/// caller has crashed.
#[derive(Debug)]
struct OnTheWay {
    number: usize,
    /// The patch; `None` for a read.
    patch: Option<Value>,
}

/// A node. A crash loses its memory, but not its cells.
#[derive(Debug, Default, Clone)]
struct PlayedNode {
    /// The share that launches use.
    usable: u64,
    disk: Option<u64>,
    cells: Vec<u64>,
    /// The prices of cells that have lost their record.
    strays: Vec<u64>,
    orders: Vec<u64>,
}

impl PlayedNode {
    fn held(&self) -> u64 {
        self.cells.iter().sum()
    }

    /// Launches the orders that its share allows.
    fn launch(&mut self) {
        while let Some(price) = self.orders.pop() {
            if self.held() + price > self.usable {
                return self.orders.push(price);
            }
            self.cells.push(price);
        }
    }
}

#[derive(Debug, Default)]
struct World {
    object: Value,
    version: u64,
    on_the_way: Vec<OnTheWay>,
    calls: usize,
    answers: BTreeMap<usize, Result<CellBudget, Failure>>,
    nodes: Vec<PlayedNode>,
    /// True if the next records fail.
    is_disk_full: bool,
}

impl World {
    fn new() -> Self {
        let metadata = json!({
            "namespace": "web", "name": "cells", "uid": UID, "resourceVersion": "0",
        });
        let spec = json!({ "dollarsPerHour": format!("0.{LIMIT:06}") });
        Self {
            object: json!({ "metadata": metadata, "spec": spec }),
            nodes: vec![PlayedNode::default(); NODES],
            ..Self::default()
        }
    }

    fn budget(&self) -> CellBudget {
        serde_json::from_value(self.object.clone()).unwrap()
    }

    /// Returns the nodes with their shares.
    fn shares(&self) -> impl Iterator<Item = (&str, u64)> {
        let shares = self.object["status"]["shares"].as_array().into_iter().flatten();
        shares
            .map(|share| (share["node"].as_str().unwrap(), share["hourlyMicros"].as_u64().unwrap()))
    }

    fn reserved(&self) -> u64 {
        self.shares().map(|(_, share)| share).sum()
    }

    /// Returns the price of all running cells, and the sum of the shares.
    fn sums(&self) -> (u64, u64) {
        (self.runs(), self.reserved())
    }

    /// Returns whether each node uses at most its share in the API server, whatever arrives late.
    fn are_shares_covered(&self) -> bool {
        let own = |number| {
            let own = self.shares().find(|(node, _)| *node == name(number));
            own.map_or(0, |(_, share)| share)
        };
        self.nodes
            .iter()
            .zip(0..)
            .all(|(node, number)| node.usable == 0 || node.usable <= own(number))
    }

    fn runs(&self) -> u64 {
        self.nodes.iter().map(|node| node.held() + node.strays.iter().sum::<u64>()).sum()
    }

    /// Carries out a call like the API server.
    fn carry_out(&mut self, patch: Option<&Value>) -> Result<CellBudget, Failure> {
        let Some(patch) = patch else { return Ok(self.budget()) };
        let versions = [patch, &self.object].map(|it| &it["metadata"]["resourceVersion"]);
        if !versions[0].is_null() && versions[0] != versions[1] {
            return Err(Failure::Conflict(String::new()));
        }
        let (before, object) = (self.reserved(), self.object.clone());
        self.object["status"] = patch["status"].clone();
        if self.reserved() > before.max(LIMIT) {
            self.object = object;
            return Err(Failure::Invalid("shares exceed dollarsPerHour".to_owned()));
        }
        // A patch without a change makes no new version.
        if self.object != object {
            self.version += 1;
            self.object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        }
        Ok(self.budget())
    }
}

#[derive(Debug, Clone)]
struct Node {
    number: usize,
    world: Arc<Mutex<World>>,
}

impl Node {
    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn call(&self, patch: Option<Value>) -> Result<CellBudget, Failure> {
        let number = {
            let mut world = self.world();
            world.calls += 1;
            let number = world.calls;
            world.on_the_way.push(OnTheWay { number, patch });
            number
        };
        poll_fn(|_| self.world().answers.remove(&number).map_or(Poll::Pending, Poll::Ready)).await
    }
}

/// Waits until the next poll. Before it, the node may crash.
async fn step() {
    let mut was_polled = false;
    let wait = poll_fn(|_| {
        if std::mem::replace(&mut was_polled, true) { Poll::Ready(()) } else { Poll::Pending }
    });
    wait.await;
}

#[async_trait]
impl Api for Node {
    async fn get(&self, _key: &BudgetKey) -> Result<CellBudget, Failure> {
        self.call(None).await
    }

    async fn patch(&self, _key: &BudgetKey, patch: Value) -> Result<CellBudget, Failure> {
        self.call(Some(patch)).await
    }
}

#[async_trait]
impl ShareHolder for Node {
    async fn recorded(&self) -> Result<Vec<RecordedShare>, String> {
        Ok(Vec::new())
    }

    async fn record(&self, share: RecordedShare) -> Result<(), String> {
        let share = share.hourly_micros;
        step().await;
        if self.world().is_disk_full {
            return Err("no space left".to_owned());
        }
        self.world().nodes[self.number].disk = (share > 0).then_some(share);
        step().await;
        Ok(())
    }

    async fn asked(&self) {}

    fn wishes(&self) -> BTreeMap<String, Wish> {
        BTreeMap::new()
    }

    fn places(&self) -> Option<Places> {
        None
    }

    async fn has_instances_of(&self, _node: &str, _place: &str) -> Result<bool, String> {
        Ok(false)
    }

    fn counts_all_instances(&self) -> bool {
        self.world().nodes[self.number].strays.is_empty()
    }

    fn show(&self, _key: &BudgetKey, _amounts: Amounts) {}

    fn remove(&self, _key: &BudgetKey) {}

    fn set_known(&self, _are_known: bool) {}

    fn lower(&self, _key: &BudgetKey, share: u64, most: u64) -> u64 {
        let node = &mut self.world().nodes[self.number];
        node.usable = node.usable.min(share.max(node.held())).min(most);
        node.usable
    }

    fn grant(&self, _key: &BudgetKey, share: u64) {
        let node = &mut self.world().nodes[self.number];
        assert_eq!(node.disk, Some(share), "an unrecorded share is not used");
        node.usable = share;
    }

    fn refuse(&self, _orders: Vec<String>) {}
}

type Settling = Pin<Box<dyn Future<Output = (Ledger, Result<Settled, SettleError>)> + Send>>;

/// A daemon of a node: its ledger between writes, or its current write.
enum Daemon {
    Idle(Ledger),
    Writing(Settling),
}

impl Daemon {
    /// Returns the daemon that starts on a node.
    fn start(node: &Node) -> Self {
        let mut world = node.world();
        let played = &mut world.nodes[node.number];
        let ledger = Ledger::new(UID.to_owned());
        let Some(share) = played.disk else {
            played.usable = 0;
            return Self::Idle(ledger);
        };
        played.usable = share;
        Self::Idle(Ledger { usable: share, recorded: share, is_own: true, ..ledger })
    }

    fn write(ledger: Ledger, node: &Node, is_patient: bool) -> Self {
        let played = node.world().nodes[node.number].clone();
        let order =
            |price: &u64| OrderWish { id: String::new(), cheapest: *price, dearest: *price };
        let orders = played.orders.iter().map(order).collect();
        let wish = Wish { held: played.held(), orders, ..Wish::default() };
        let (node, mut ledger) = (node.clone(), ledger);
        Self::Writing(Box::pin(async move {
            let name = name(node.number);
            let (parts, subject) = ((&node as _, &node as _), (name.as_str(), &key()));
            let writing = Writing { wish: &wish, is_patient, reports: false, places: None };
            let settled = settle(parts, subject, &mut ledger, writing).await;
            (ledger, settled)
        }))
    }

    /// Polls once. Returns the outcome of a finished write.
    fn go_on(&mut self, node: &Node, is_patient: bool) -> Option<Result<Settled, SettleError>> {
        match self {
            Self::Idle(ledger) => {
                *self = Self::write(ledger.clone(), node, is_patient);
                None
            }
            Self::Writing(writing) => {
                let mut context = Context::from_waker(Waker::noop());
                let Poll::Ready((ledger, settled)) = writing.as_mut().poll(&mut context) else {
                    return None;
                };
                *self = Self::Idle(ledger);
                Some(settled)
            }
        }
    }
}

/// Plays a random event.
fn happen(rng: &mut Rng, world: &Arc<Mutex<World>>, daemons: &mut [Daemon]) {
    let number = rng.usize(..NODES);
    let node = Node { number, world: Arc::clone(world) };
    let lost = || Err(Failure::TimedOut(Duration::ZERO));
    let take = |rng: &mut Rng| {
        let mut world = node.world();
        let calls = world.on_the_way.len();
        (calls > 0).then(|| world.on_the_way.swap_remove(rng.usize(..calls)))
    };
    match rng.u8(..100) {
        0..40 => drop(daemons[number].go_on(&node, rng.bool())),
        40..62 => {
            if let Some(OnTheWay { number, patch }) = take(rng) {
                let mut world = node.world();
                let answer = world.carry_out(patch.as_ref());
                world.answers.insert(number, if rng.u8(..5) == 0 { lost() } else { answer });
            }
        }
        // The caller gives up, and the call arrives later.
        62..66 => {
            if let Some(call) = take(rng) {
                let mut world = node.world();
                world.answers.insert(call.number, lost());
                world.on_the_way.push(call);
            }
        }
        66..70 => {
            if let Some(call) = take(rng) {
                node.world().answers.insert(call.number, lost());
            }
        }
        70..74 => daemons[number] = Daemon::start(&node),
        74 => {
            {
                let played = &mut node.world().nodes[number];
                played.disk = None;
                let cells = std::mem::take(&mut played.cells);
                played.strays.extend(cells);
            }
            daemons[number] = Daemon::start(&node);
        }
        75..80 => {
            let played = &mut node.world().nodes[number];
            played.strays.pop();
        }
        80 => node.world().is_disk_full ^= true,
        81..90 => {
            let played = &mut node.world().nodes[number];
            if !played.cells.is_empty() {
                played.cells.swap_remove(rng.usize(..played.cells.len()));
            }
        }
        _ => {
            let played = &mut node.world().nodes[number];
            if played.orders.len() < 3 {
                played.orders.push(rng.u64(1..=4));
            }
        }
    }
    node.world().nodes[number].launch();
}

/// Lets all calls arrive, and all nodes write until nothing changes.
fn calm(world: &Arc<Mutex<World>>, daemons: &mut [Daemon]) {
    for _ in 0..30 * NODES {
        for (number, daemon) in daemons.iter_mut().enumerate() {
            let node = Node { number, world: Arc::clone(world) };
            drop(daemon.go_on(&node, false));
            let mut locked = node.world();
            for OnTheWay { number, patch } in std::mem::take(&mut locked.on_the_way) {
                let answer = locked.carry_out(patch.as_ref());
                locked.answers.insert(number, answer);
            }
            locked.nodes[number].launch();
        }
    }
}

/// Returns a node whose shrinking share has not arrived at the API server, which has more than the
/// node uses. The response is lost, or the daemon crashes.
fn shrinking(crashes: bool) -> (Node, Daemon, OnTheWay) {
    let world = Arc::new(Mutex::new(World::new()));
    let node = Node { number: 0, world: Arc::clone(&world) };
    let mut daemons = [Daemon::start(&node)];
    node.world().nodes[0].orders.push(LIMIT);
    calm(&world, &mut daemons);
    node.world().nodes[0].cells.clear();
    let [mut daemon] = daemons;
    let late = loop {
        drop(daemon.go_on(&node, false));
        let mut world = node.world();
        match world.on_the_way.pop() {
            Some(call) if call.patch.is_some() => break call,
            Some(call) => {
                let answer = world.carry_out(None);
                world.answers.insert(call.number, answer);
            }
            None => {}
        }
    };
    if crashes {
        daemon = Daemon::start(&node);
    } else {
        let lost = Failure::TimedOut(Duration::ZERO);
        node.world().answers.insert(late.number, Err(lost.clone()));
        let outcome = daemon.go_on(&node, false);
        assert_eq!(outcome, Some(Err(SettleError::Api(lost))));
    }
    let (usable, reserved) = (node.world().nodes[0].usable, LIMIT);
    assert_eq!((usable, node.world().reserved()), (0, reserved));
    (node, daemon, late)
}

/// Verifies K22.
#[test]
fn late_patch_takes_no_used_share() {
    for (crashes, is_first) in [(false, false), (false, true), (true, false), (true, true)] {
        let (node, mut daemon, late) = shrinking(crashes);
        // The node needs the share that the API server still has.
        node.world().nodes[0].orders.push(LIMIT);
        let mut late = Some(late.patch);
        let outcome = loop {
            if let Some(outcome) = daemon.go_on(&node, true) {
                break outcome;
            }
            let mut world = node.world();
            let Some(call) = world.on_the_way.pop() else { continue };
            if call.patch.is_some() {
                assert_eq!(world.nodes[0].usable, 0, "a share that was only read is not granted");
                if is_first && let Some(late) = late.take() {
                    world.carry_out(late.as_ref()).unwrap();
                }
            }
            let answer = world.carry_out(call.patch.as_ref());
            world.answers.insert(call.number, answer);
        };
        if let Some(late) = late {
            let arrived = node.world().carry_out(late.as_ref());
            assert_eq!(arrived, Err(Failure::Conflict(String::new())));
        }
        let expected = if is_first {
            (Settled::Conflict, 0)
        } else {
            let amounts = Amounts { limit: Some(LIMIT), own: Some(LIMIT), ..Amounts::default() };
            (Settled::Done(amounts), LIMIT)
        };
        let world = node.world();
        assert_eq!((outcome, world.nodes[0].usable), (Ok(expected.0), expected.1));
        assert!(world.are_shares_covered());
    }
}

proptest! {
    /// Verifies K21, K22.
    #[test]
    fn nodes_that_race_for_the_last_dollar_never_exceed_the_limit(seed: u64) {
        let mut rng = Rng::with_seed(seed);
        let world = Arc::new(Mutex::new(World::new()));
        let node = |number| Node { number, world: Arc::clone(&world) };
        let mut daemons: Vec<Daemon> = (0..NODES).map(|it| Daemon::start(&node(it))).collect();
        for _ in 0..1000 {
            happen(&mut rng, &world, &mut daemons);
            let (runs, reserved) = node(0).world().sums();
            prop_assert!(runs <= LIMIT && reserved <= LIMIT, "{runs} run, {reserved} reserved");
            prop_assert!(node(0).world().are_shares_covered());
        }
        // Without further failures, unused shares are given back.
        {
            let mut world = world.lock().unwrap();
            world.is_disk_full = false;
            for node in &mut world.nodes {
                node.orders.clear();
                node.strays.clear();
            }
        }
        calm(&world, &mut daemons);
        let (runs, reserved) = node(0).world().sums();
        prop_assert_eq!(runs, reserved);
        // Then a node gets the rest.
        let rest = LIMIT - runs;
        let number = rng.usize(..NODES);
        if rest > 0 {
            node(number).world().nodes[number].orders.push(rest);
        }
        calm(&world, &mut daemons);
        prop_assert_eq!(node(0).world().sums(), (LIMIT, LIMIT));
    }
}
