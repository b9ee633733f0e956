//! The control connection: the agent's service is asked here for what the gateway wants, and
//! answers in single messages.

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

/// Why a control connection ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum ControlError {
    #[error("the connection")]
    Io(#[from] io::Error),
    #[error("a message of the gateway can't be read")]
    Unreadable(#[from] prost::DecodeError),
    #[error("the agent's own answer")]
    Answer(#[from] Status),
    #[error("nothing has been heard, and no answer has come to a ping")]
    Silent,
    #[error("what was sent was not taken within {} s", .0.as_secs())]
    Stuck(Duration),
}

/// A watch of the gateway's.
struct Watch {
    number: u64,
    events: BoxStream<'static, Result<Event, Status>>,
    /// The gateway waits for an event.
    wanted: bool,
}

/// Serves a control connection until it ends. `called` is told when the gateway has let it in.
pub(super) async fn serve<I, S>(
    io: I,
    service: S,
    called: impl FnOnce(),
) -> Result<(), ControlError>
where
    I: AsyncRead + AsyncWrite + Unpin,
    S: Serve,
{
    let mut frames = Frames::new(io, MAX_CONTROL_FRAME_BYTES);
    let mut agent = AgentClient::new(service).max_decoding_message_size(MAX_CONTROL_FRAME_BYTES);
    let mut keepalive = Keepalive::agent();
    let mut called = Some(called);
    let mut watch: Option<Watch> = None;
    loop {
        let message = tokio::select! {
            heard = frames.next() => {
                let Some(heard) = heard? else { return Ok(()) };
                keepalive.received();
                match ToCell::decode(heard)?.message {
                    Some(to_cell::Message::Hello(hello)) => {
                        let reply = agent.hello(hello).await?.into_inner();
                        if let Some(called) = called.take() {
                            called();
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
                            Some(watch) if watch.number == next.watch => watch.wanted = true,
                            _ => watch = Some(Watch { number: next.watch, events: events(agent.clone()), wanted: true }),
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
                KeepaliveAction::Close => return Err(ControlError::Silent),
            },
        };
        let message = FromCell { message: Some(message) }.encode_to_vec();
        timeout(keepalive.timeout(), frames.send(&message))
            .await
            .map_err(|_| ControlError::Stuck(keepalive.timeout()))??;
    }
}

/// A new watch of the agent's service.
fn events<S: Serve>(mut agent: AgentClient<S>) -> BoxStream<'static, Result<Event, Status>> {
    stream::once(async move { agent.watch(WatchRequest {}).await.map(tonic::Response::into_inner) })
        .try_flatten()
        .boxed()
}

/// The next event that the gateway waits for, or the end of its watch; forever if it waits for
/// none.
async fn next(current: &mut Option<Watch>) -> from_cell::Message {
    let Some(watch) = current.as_mut().filter(|watch| watch.wanted) else {
        return std::future::pending().await;
    };
    let event = watch.events.next().await;
    watch.wanted = false;
    let number = watch.number;
    match event {
        Some(Ok(event)) => {
            from_cell::Message::Event(WatchEvent { watch: number, event: Some(event) })
        }
        Some(Err(status)) => {
            watch.events = stream::empty().boxed();
            from_cell::Message::End(WatchEnd {
                watch: number,
                code: status.code().into(),
                message: status.message().to_owned(),
            })
        }
        None => {
            from_cell::Message::End(WatchEnd { watch: number, code: 0, message: String::new() })
        }
    }
}
