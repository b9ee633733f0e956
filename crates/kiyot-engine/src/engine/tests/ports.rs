use super::*;
use crate::{
    provider::{HostPort, Protocol},
    request::CellRequest,
};

fn port(number: u16) -> HostPort {
    HostPort { protocol: Protocol::Tcp, host_ip: None, host_port: number, container_port: 80 }
}

/// Returns the wishes of a pod with these ports.
fn with_ports(pod: &str, numbers: &[u16]) -> Wanted {
    let ports = numbers.iter().copied().map(port).collect();
    Wanted { key: key(pod), ports, ..Wanted::default() }
}

/// Orders a cell for a pod.
fn ordered(engine: &mut Engine, wanted: Wanted) -> (CellId, Arc<Launch>) {
    let wanted = Arc::new(wanted);
    let (_, effects) = engine.order(OrderSpec { wanted, ..spec("") }, at(1));
    let launch = effects.into_iter().find_map(|(cell, effect)| match effect {
        Effect::Launch(launch) => Some((cell.unwrap(), launch)),
        _ => None,
    });
    launch.unwrap()
}

fn bind(engine: &mut Engine, cell: &CellId, launch: &Launch) {
    engine.handle(Event::Launched(cell.clone(), Ok(launched_as("i-1", cell))), at(1));
    redeem(engine, cell, launch, at(1)).unwrap();
    engine.handle(Event::Connected(cell.clone()), at(1));
    let addresses = vec!["10.0.0.7".parse().unwrap()];
    let attached = Attached { addresses, ..Attached::default() };
    engine.handle(Event::Attached(cell.clone(), Ok(attached)), at(1));
}

/// Verifies V50.
#[test]
fn host_port_is_taken_from_the_order_of_its_pod_until_its_cell_is_released() {
    let mut engine = engine(capabilities::CLOUD);
    let (cell, launch) = ordered(&mut engine, with_ports("first", &[1]));
    let taken = |engine: &Engine| engine.taken_port(&with_ports("second", &[2, 1]));
    let owner = taken(&engine).unwrap().to_string();
    assert!(owner.contains("hostPort 1/tcp is taken by pod default/first"), "{owner}");
    assert!(owner.contains(cell.as_str()), "{owner}");
    // A retry for the pod itself joins its order.
    assert_eq!(engine.taken_port(&with_ports("first", &[1])), None);
    assert_eq!(engine.taken_port(&with_ports("second", &[2])), None);
    bind(&mut engine, &cell, &launch);
    assert!(engine.orders.is_empty());
    assert!(taken(&engine).is_some());
    let reason = "stopped".into();
    engine.handle(Event::Terminate { cell: cell.clone(), reason }, at(2));
    engine.handle(Event::ShutDown(cell.clone(), true), at(2));
    assert!(taken(&engine).is_some(), "{:?}", engine.cells[&cell].state);
    engine.handle(Event::Detached(cell.clone(), Ok(())), at(2));
    assert_eq!(taken(&engine), None, "{:?}", engine.cells[&cell].state);
    assert!(engine.cells.contains_key(&cell), "its instance has not ended");
}

/// Verifies V50, V51.
#[test]
fn host_port_of_a_recovered_pod_is_taken_and_restored() {
    let record = stored(CellPhase::Bound);
    let cell = CellId::parse(&record.id).unwrap();
    let ports =
        PodPorts { pod: "default/first".into(), ports: vec![port(1)], networks: Vec::new() };
    let sandbox = JournalSandbox {
        id: "sandbox".into(),
        cell: cell.to_string(),
        pod_uid: "first".into(),
        ports: Some(Box::new(ports)),
        created_unix_nanos: 1,
    };
    let journal = Journal {
        cells: vec![(cell.to_string(), record)],
        sandboxes: vec![sandbox],
        ..Journal::default()
    };
    let seams = Box::new(Counting::default());
    let (engine, ..) = Engine::recover(config(), only(capabilities::CLOUD), seams, journal, at(9));
    let taken = engine.taken_port(&with_ports("second", &[1])).unwrap();
    assert_eq!((taken.pod.as_str(), taken.cell.as_ref()), ("default/first", Some(&cell)));
    let held = engine.held(ONLY);
    assert_eq!(held.len(), 1, "{held:?}");
    assert_eq!(held[0].ports, [port(1)]);
    assert_eq!(held[0].addresses, ["10.0.0.7".parse::<std::net::IpAddr>().unwrap()]);
}

/// Verifies V51.
#[test]
fn recovered_pod_without_host_ports_is_restored_for_its_services() {
    let (engine, _) = recovered(stored(CellPhase::Bound), true, at(9));
    let held = engine.held(ONLY);
    assert_eq!(held.len(), 1, "{held:?}");
    assert_eq!((&held[0].instance, held[0].ports.len()), (&InstanceId("i".into()), 0));
}

/// Verifies V50.
#[test]
fn host_port_of_a_failed_attachment_on_the_node_is_taken_until_the_end_of_its_cell() {
    let mut engine = engine(capabilities::LOCAL);
    let (cell, launch) = ordered(&mut engine, with_ports("first", &[1]));
    engine.handle(Event::Launched(cell.clone(), Ok(launched_as("i-1", &cell))), at(1));
    redeem(&mut engine, &cell, &launch, at(1)).unwrap();
    engine.handle(Event::Connected(cell.clone()), at(1));
    let failed = || ProviderError::without_cause(ErrorClass::Transient, "busy");
    engine.handle(Event::Attached(cell.clone(), Err(failed())), at(2));
    let taken = |engine: &Engine| engine.taken_port(&with_ports("second", &[1]));
    for (outcome, is_taken) in [(Err(failed()), true), (Ok(Termination::Confirmed), false)] {
        let (cell, console) = (cell.clone(), String::new());
        engine.handle(Event::Terminated { cell, outcome, console }, at(3));
        // A failed end answers the order, and the cell may hold parts of the node.
        assert!(engine.orders.is_empty());
        assert_eq!(taken(&engine).is_some(), is_taken);
    }
}

/// Verifies V63.
#[test]
fn network_is_taken_from_the_order_of_its_pod_until_its_route_is_removed() {
    let mut engine = engine(capabilities::CLOUD);
    let routed = |pod: &str, networks: &[&str]| {
        let cloud_routes = networks.iter().map(|network| network.parse().unwrap()).collect();
        let request = CellRequest { cloud_routes, ..CellRequest::default() };
        Wanted { key: key(pod), request, ..Wanted::default() }
    };
    let first = routed("first", &["10.9.0.0/16", "10.8.0.0/16"]);
    let (cell, launch) = ordered(&mut engine, first);
    let wanted = ["10.8.0.0/16"];
    let taken = |engine: &Engine| engine.taken_port(&routed("second", &wanted));
    let owner = taken(&engine).unwrap().to_string();
    assert!(owner.contains("cloud-route 10.8.0.0/16 is taken by pod default/first"), "{owner}");
    assert_eq!(engine.taken_port(&routed("first", &wanted)), None);
    assert_eq!(engine.taken_port(&routed("second", &["10.8.1.0/24"])), None);
    bind(&mut engine, &cell, &launch);
    assert!(taken(&engine).is_some());
    engine.handle(Event::Terminate { cell: cell.clone(), reason: "stopped".into() }, at(2));
    engine.handle(Event::ShutDown(cell.clone(), true), at(2));
    assert!(taken(&engine).is_some(), "{:?}", engine.cells[&cell].state);
    engine.handle(Event::Detached(cell.clone(), Ok(())), at(2));
    assert_eq!(taken(&engine), None, "{:?}", engine.cells[&cell].state);
}
