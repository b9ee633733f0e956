//! `port-forward`: local ports that lead to ports of a pod.

use std::{
    io::{self, Write},
    net::SocketAddr,
    path::Path,
    process::ExitCode,
    time::Duration,
};

use kiyot_proto::admin::PortForwardRequest;
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::sleep,
};

use super::{
    forwarder::Forwarder,
    sought,
    streams::{lost, unit},
};
use crate::{
    cli::PortForward,
    client::Client,
    error::Error,
    ports::{Address, Ports},
    signals::Ending,
    spdy::{Target, connect},
};

/// The protocol.
const PROTOCOL: &str = "portforward.k8s.io";
/// Pause after a failed accept, such as by EMFILE.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A local port, and the port of the pod to which it leads.
#[derive(Debug)]
struct Listening {
    listener: TcpListener,
    remote: u16,
}

pub(super) async fn run(
    socket: &Path,
    client: impl AsyncFnOnce() -> Result<Client, Error>,
    forward: PortForward,
) -> Result<ExitCode, Error> {
    let ports = forward.ports.iter().map(|ports| Ports::parse(ports));
    let ports: Vec<Ports> = ports.collect::<Result<_, _>>()?;
    let addresses = forward.address.iter().map(|address| Address::parse(address));
    let addresses = addresses.collect::<Result<Vec<_>, _>>()?.concat();
    let client = client().await?;
    let pod = sought::pod(&client, forward.namespace.as_deref(), &forward.name).await?;
    if let Some(name) = &forward.unit {
        unit(&pod, Some(name))?;
    }
    let mut listening = Vec::new();
    for ports in &ports {
        listening.extend(listen(*ports, &addresses).await?);
    }
    let request = PortForwardRequest {
        namespace: pod.namespace.clone(),
        pod: sought::text_of(&pod),
        ports: ports.iter().map(|ports| u32::from(ports.remote)).collect(),
    };
    let answer = client.call(async |mut admin| admin.port_forward(request).await).await?;
    // A forward may last for days: it holds no connection to the admin API.
    drop(client);
    let (sender, receiver) = connect(&Target::parse(&answer.url)?, PROTOCOL).await?;
    let mut ending = Ending::new()?;
    let forwarder = Forwarder::new(sender);
    for Listening { listener, remote } in &listening {
        writeln!(io::stdout(), "Forwarding from {} -> {remote}", listener.local_addr()?)?;
    }
    let mut accepting = JoinSet::new();
    for Listening { listener, remote } in listening {
        accepting.spawn(accept(listener, remote, forwarder.clone()));
    }
    tokio::select! {
        () = forwarder.dispatch(receiver) => Err(lost(socket, &pod).await),
        _ = ending.next() => Ok(ExitCode::SUCCESS),
    }
}

/// Listens on a port of all addresses. Any free port is the same for all.
async fn listen(ports: Ports, addresses: &[Address]) -> Result<Vec<Listening>, Error> {
    let mut listening = Vec::new();
    let mut port = ports.local;
    for address in addresses {
        let wanted = SocketAddr::new(address.ip, port);
        match TcpListener::bind(wanted).await {
            Ok(listener) => {
                port = listener.local_addr()?.port();
                listening.push(Listening { listener, remote: ports.remote });
            }
            Err(_) if address.is_optional => {}
            Err(error) => {
                return Err(Error::Failed(format!(
                    "can't listen on {wanted}: {error}; allowed: a free port, or :{} for any",
                    ports.remote
                )));
            }
        }
    }
    Ok(listening)
}

/// Forwards the connections of a listener.
async fn accept(listener: TcpListener, remote: u16, forwarder: Forwarder) {
    let mut connections = JoinSet::new();
    loop {
        let permit = forwarder.permit().await;
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            // Releases ended tasks.
            Some(_) = connections.join_next() => continue,
        };
        match accepted {
            Ok((stream, _)) => {
                let forwarder = forwarder.clone();
                connections.spawn(async move {
                    forward(&forwarder, stream, remote).await;
                    drop(permit);
                });
            }
            Err(error) => {
                super::forwarder::report(remote, &error.to_string()).await;
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn forward(forwarder: &Forwarder, stream: TcpStream, remote: u16) {
    if let Err(error) = forwarder.forward(stream, remote).await {
        super::forwarder::report(remote, &error.to_string()).await;
    }
}
