//! Server of the control connection: decodes the gateway's messages, calls the agent's service, and
//! sends its replies, each in a single message.

use std::{io, time::Duration};

use futures::{
    StreamExt, TryStreamExt,
    stream::{self, BoxStream},
};
use kiyot_link::{
    frames::Frames,
    keepalive::{Keepalive, KeepaliveAction},
};
use kiyot_proto::{
    bounds::MAX_CONTROL_FRAME_BYTES,
    cell::{
        Event, FromCell, Ping, Pong, ToCell, WatchEnd, WatchEvent, WatchRequest,
        agent_client::AgentClient, from_cell, to_cell,
    },
};
use prost::Message;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};
use tonic::Status;

use super::Serve;

/// Errors that end a control connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum ControlError {
    #[error("control connection")]
    Io(#[from] io::Error),
    #[error("invalid message from the gateway")]
    Decode(#[from] prost::DecodeError),
    #[error("call to the agent's service")]
    Answer(#[from] Status),
    #[error("keepalive timeout: no message and no pong received")]
    KeepaliveTimeout,
    #[error("write timeout after {} s", .0.as_secs())]
    WriteTimeout(Duration),
}

/// The gateway's current watch.
struct Watch {
    id: u64,
    events: BoxStream<'static, Result<Event, Status>>,
    /// True while the gateway waits for an event.
    wanted: bool,
}

/// Serves a control connection until it ends. Calls `on_accepted` after `Hello`.
pub(super) async fn serve<I, S>(
    io: I,
    service: S,
    on_accepted: impl FnOnce(),
) -> Result<(), ControlError>
where
    I: AsyncRead + AsyncWrite + Unpin,
    S: Serve,
{
    let mut frames = Frames::new(io, MAX_CONTROL_FRAME_BYTES);
    let mut agent = AgentClient::new(service).max_decoding_message_size(MAX_CONTROL_FRAME_BYTES);
    let mut keepalive = Keepalive::agent();
    let mut on_accepted = Some(on_accepted);
    let mut watch: Option<Watch> = None;
    loop {
        let message = tokio::select! {
            received = frames.next() => {
                let Some(received) = received? else { return Ok(()) };
                keepalive.received();
                match ToCell::decode(received)?.message {
                    Some(to_cell::Message::Hello(hello)) => {
                        let reply = agent.hello(hello).await?.into_inner();
                        if let Some(on_accepted) = on_accepted.take() {
                            on_accepted();
                        }
                        from_cell::Message::Hello(reply)
                    }
                    Some(to_cell::Message::OpenBulk(request)) => {
                        agent.open_bulk(request).await?;
                        continue;
                    }
                    Some(to_cell::Message::Measure(request)) => {
                        agent.measure(request).await?;
                        continue;
                    }
                    Some(to_cell::Message::Next(next)) => {
                        match &mut watch {
                            Some(watch) if watch.id == next.watch => watch.wanted = true,
                            _ => {
                                let events = events(agent.clone());
                                watch = Some(Watch { id: next.watch, events, wanted: true });
                            }
                        }
                        continue;
                    }
                    Some(to_cell::Message::Ping(_)) => from_cell::Message::Pong(Pong {}),
                    Some(to_cell::Message::Pong(_)) | None => continue,
                }
            }
            message = next(&mut watch) => message,
            action = keepalive.next_action() => match action {
                KeepaliveAction::Ping => from_cell::Message::Ping(Ping {}),
                KeepaliveAction::Close => return Err(ControlError::KeepaliveTimeout),
            },
        };
        let message = FromCell { message: Some(message) }.encode_to_vec();
        timeout(keepalive.timeout(), frames.send(&message))
            .await
            .map_err(|_| ControlError::WriteTimeout(keepalive.timeout()))??;
    }
}

/// Starts a watch of the agent's service.
fn events<S: Serve>(mut agent: AgentClient<S>) -> BoxStream<'static, Result<Event, Status>> {
    stream::once(async move { agent.watch(WatchRequest {}).await.map(tonic::Response::into_inner) })
        .try_flatten()
        .boxed()
}

/// Returns the next event or the end of the watch. Pending while the gateway waits for no event.
async fn next(current: &mut Option<Watch>) -> from_cell::Message {
    let Some(watch) = current.as_mut().filter(|watch| watch.wanted) else {
        return std::future::pending().await;
    };
    let event = watch.events.next().await;
    watch.wanted = false;
    let id = watch.id;
    match event {
        Some(Ok(event)) => from_cell::Message::Event(WatchEvent { watch: id, event: Some(event) }),
        Some(Err(status)) => {
            watch.events = stream::empty().boxed();
            from_cell::Message::End(WatchEnd {
                watch: id,
                code: status.code().into(),
                message: status.message().to_owned(),
            })
        }
        None => from_cell::Message::End(WatchEnd { watch: id, code: 0, message: String::new() }),
    }
}
