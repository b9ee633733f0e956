use std::time::Duration;

use kiyot_link::channel::MAX_MESSAGE_BYTES;
use kiyot_proto::{
    bounds::MAX_CONTROL_FRAME_BYTES,
    cell::{Snapshot, WatchEnd, WatchEvent, event},
};
use tokio::{
    io::{AsyncWriteExt, DuplexStream, duplex},
    task::JoinHandle,
    time::sleep,
};

use super::*;

/// A control connection between a gateway's task and a test that plays the agent.
struct Fixture {
    control: ControlChannel,
    connection: ControlConnection,
    task: JoinHandle<Result<(), ControlError>>,
    agent: Frames<DuplexStream>,
}

impl Fixture {
    fn new() -> Self {
        Self::of_cell(&Arc::default())
    }

    /// Returns another connection of a cell.
    fn of_cell(rate: &Arc<MessageRate>) -> Self {
        let (near, far) = duplex(64 * 1024);
        let (control, connection) = (
            ControlChannel::new("test"),
            ControlConnection::new(HelloReply::default(), &CancellationToken::new()),
        );
        control
            .offer(Offer {
                connection: connection.clone(),
                incarnation: String::new(),
                generation: 1,
                sequence: 1,
            })
            .unwrap();
        let (own, rate) = (connection.clone(), Arc::clone(rate));
        let task = tokio::spawn(async move {
            own.run(&mut Frames::new(near, MAX_CONTROL_FRAME_BYTES), &rate).await
        });
        Self { control, connection, task, agent: Frames::new(far, MAX_CONTROL_FRAME_BYTES) }
    }

    async fn send(&mut self, message: from_cell::Message) {
        self.agent.send(&FromCell { message: Some(message) }.encode_to_vec()).await.unwrap();
    }

    async fn receive(&mut self) -> to_cell::Message {
        ToCell::decode(self.agent.next().await.unwrap().unwrap()).unwrap().message.unwrap()
    }
}

fn event_message(watch: u64, id: &str) -> from_cell::Message {
    from_cell::Message::Event(WatchEvent {
        watch,
        event: Some(Event { event: Some(event::Event::ContainerGone(id.to_owned())) }),
    })
}

fn end_message(watch: u64, code: Code) -> from_cell::Message {
    from_cell::Message::End(WatchEnd {
        watch,
        code: code.into(),
        message: "no such watch".to_owned(),
    })
}

fn next_request(watch: u64) -> to_cell::Message {
    to_cell::Message::Next(NextEvent { watch })
}

/// Verifies L10.
#[tokio::test]
async fn event_is_delivered_on_request_to_its_own_watch() {
    let mut fixture = Fixture::new();
    let mut first = fixture.control.watch().await.unwrap();
    let got = tokio::spawn(async move { (first.next().await.unwrap().unwrap().event, first) });
    assert_eq!(fixture.receive().await, next_request(1));
    fixture.send(event_message(7, "of another watch")).await;
    fixture.send(event_message(1, "first")).await;
    let (event, mut first) = got.await.unwrap();
    assert_eq!(event, Some(event::Event::ContainerGone("first".to_owned())));

    let mut second = fixture.control.watch().await.unwrap();
    let got =
        tokio::spawn(
            async move { (second.next().await, second.next().await, second.next().await) },
        );
    assert_eq!(fixture.receive().await, next_request(2));
    fixture.send(event_message(1, "late")).await;
    fixture.send(from_cell::Message::Event(WatchEvent { watch: 2, event: None })).await;
    assert_eq!(fixture.receive().await, next_request(2));
    fixture.send(end_message(2, Code::NotFound)).await;
    assert_eq!(fixture.receive().await, next_request(2));
    fixture.send(end_message(2, Code::Ok)).await;
    let (empty, failed, ended) = got.await.unwrap();
    assert_eq!(empty.unwrap(), None);
    let failed = failed.unwrap_err();
    assert_eq!((failed.code(), failed.message()), (Code::NotFound, "no such watch"));
    assert_eq!(ended.unwrap(), None);

    let mut verbose = fixture.control.watch().await.unwrap();
    let verbose = tokio::spawn(async move { verbose.next().await });
    assert_eq!(fixture.receive().await, next_request(3));
    fixture
        .send(from_cell::Message::End(WatchEnd {
            watch: 3,
            code: Code::Unknown.into(),
            message: "\u{e4}".repeat(5_000),
        }))
        .await;
    let status = verbose.await.unwrap().unwrap_err();
    assert!(status.message().len() <= MAX_MESSAGE_BYTES, "the message is truncated");

    // Another watch starts while the first watch waits.
    let waits = tokio::spawn(async move { first.next().await });
    assert_eq!(fixture.receive().await, next_request(1));
    let mut third = fixture.control.watch().await.unwrap();
    let third = tokio::spawn(async move { third.next().await });
    assert_eq!(fixture.receive().await, next_request(4));
    assert_eq!(waits.await.unwrap().unwrap_err().code(), Code::Aborted);
    fixture
        .send(from_cell::Message::Event(WatchEvent {
            watch: 4,
            event: Some(Event { event: Some(event::Event::Snapshot(Snapshot::default())) }),
        }))
        .await;
    assert!(third.await.unwrap().unwrap().is_some());
}

/// Verifies L27.
#[tokio::test(start_paused = true)]
async fn flood_over_several_connections_waits_for_the_rate_of_its_cell() {
    const CONNECTIONS: u64 = 5;
    const PINGS: u64 = 1000;
    const AT_ONCE: u64 = 2000;
    let (begun, rate) = (Instant::now(), Arc::default());
    for _ in 0..CONNECTIONS {
        let mut fixture = Fixture::of_cell(&rate);
        for _ in 0..PINGS {
            fixture.send(from_cell::Message::Ping(Ping {})).await;
            assert_eq!(fixture.receive().await, to_cell::Message::Pong(Pong {}));
        }
    }
    let waited = begun.elapsed();
    assert!(waited >= Duration::from_millis(CONNECTIONS * PINGS - AT_ONCE - 1), "{waited:?}");
}

#[tokio::test]
async fn pending_requests_of_each_kind_are_all_sent() {
    let mut fixture = Fixture::new();
    let mut events = fixture.control.watch().await.unwrap();
    let _waits = tokio::spawn(async move { events.next().await });
    assert_eq!(fixture.receive().await, next_request(1));
    fixture.control.open_bulk(Duration::ZERO).await.unwrap();
    assert_eq!(fixture.receive().await, to_cell::Message::OpenBulk(OpenBulkRequest {}));
    // Two requests before the connection's task runs.
    let mut events = fixture.control.watch().await.unwrap();
    fixture.control.open_bulk(Duration::ZERO).await.unwrap();
    let _waits = tokio::spawn(async move { events.next().await });
    let mut heard = [fixture.receive().await, fixture.receive().await];
    heard.sort_by_key(|message| matches!(message, to_cell::Message::Next(_)));
    assert_eq!(heard, [to_cell::Message::OpenBulk(OpenBulkRequest {}), next_request(2)]);
    // Three requests before the task runs, the same kind twice.
    let mut events = fixture.control.watch().await.unwrap();
    fixture.control.measure(Duration::from_secs(5));
    fixture.control.measure(Duration::from_secs(80));
    fixture.control.open_bulk(Duration::ZERO).await.unwrap();
    let _waits = tokio::spawn(async move { events.next().await });
    let heard = [fixture.receive().await, fixture.receive().await, fixture.receive().await];
    let measure = to_cell::Message::Measure(MeasureRequest { seconds: 80 });
    assert_eq!(heard, [to_cell::Message::OpenBulk(OpenBulkRequest {}), measure, next_request(3)]);
    // Without a connection.
    fixture.control.withdraw(&fixture.connection);
    fixture.control.measure(Duration::from_secs(5));
}

#[tokio::test]
async fn end_of_the_connection_fails_waiting_and_later_calls() {
    for cut in [true, false] {
        let mut fixture = Fixture::new();
        let mut events = fixture.control.watch().await.unwrap();
        let waits = tokio::spawn(async move { (events.next().await, events) });
        assert_eq!(fixture.receive().await, next_request(1));
        if cut {
            fixture.connection.abort();
            fixture.task.await.unwrap().unwrap();
        } else {
            drop(fixture.agent);
            assert!(matches!(fixture.task.await.unwrap(), Err(ControlError::Closed)));
        }
        let (ended, mut events) = waits.await.unwrap();
        assert_eq!(ended.unwrap_err().code(), Code::Unavailable);
        assert_eq!(
            events.next().await.unwrap_err().code(),
            Code::Unavailable,
            "a call after the end"
        );
        assert!(fixture.connection.has_ended());
    }
}

/// Verifies L10.
#[tokio::test(start_paused = true)]
async fn idle_connection_lasts_while_pings_are_answered() {
    let mut fixture = Fixture::new();
    let idle = sleep(Duration::from_secs(3600));
    tokio::pin!(idle);
    let mut pings = 0;
    loop {
        tokio::select! {
            () = &mut idle => break,
            message = fixture.agent.next() => {
                let message = ToCell::decode(message.unwrap().unwrap()).unwrap().message;
                assert_eq!(message, Some(to_cell::Message::Ping(Ping {})));
                pings += 1;
                let pong = from_cell::Message::Pong(Pong {});
                let pong = FromCell { message: Some(pong) }.encode_to_vec();
                fixture.agent.send(&pong).await.unwrap();
            }
        }
    }
    assert!(pings > 100 && !fixture.connection.has_ended());
    fixture.send(from_cell::Message::Ping(Ping {})).await;
    while fixture.receive().await != to_cell::Message::Pong(Pong {}) {}
    // From now on, no ping is answered.
    let last_sent = Instant::now();
    assert!(matches!(fixture.task.await.unwrap(), Err(ControlError::KeepaliveTimeout)));
    assert!(last_sent.elapsed() <= Duration::from_secs(21), "by tokio's paused clock");
}

/// Verifies Y81.
#[tokio::test]
async fn malformed_message_ends_the_connection() {
    let mut fixture = Fixture::new();
    fixture.agent.send(&[0xff; 9]).await.unwrap();
    assert!(matches!(fixture.task.await.unwrap(), Err(ControlError::Message(_))));
    let (near, mut far) = duplex(64);
    far.write_all(&u32::MAX.to_be_bytes()).await.unwrap();
    let ended = ControlConnection::new(HelloReply::default(), &CancellationToken::new())
        .run(&mut Frames::new(near, MAX_CONTROL_FRAME_BYTES), &MessageRate::default())
        .await;
    assert!(matches!(ended, Err(ControlError::Io(_))));
}

/// Verifies Y81.
#[tokio::test]
async fn first_message_other_than_hello_is_refused() {
    let hello =
        from_cell::Message::Hello(HelloReply { cell: "cell".to_owned(), ..HelloReply::default() });
    for (first, cell) in [(hello, Some("cell")), (from_cell::Message::Pong(Pong {}), None)] {
        let (near, far) = duplex(1024);
        let mut far = Frames::new(far, MAX_CONTROL_FRAME_BYTES);
        far.send(&FromCell { message: Some(first) }.encode_to_vec()).await.unwrap();
        let reply = ControlConnection::exchange_hello(
            &mut Frames::new(near, MAX_CONTROL_FRAME_BYTES),
            HelloRequest::default(),
        )
        .await;
        assert_eq!(reply.ok().map(|hello| hello.cell).as_deref(), cell);
    }
}

/// Verifies L8, Y82.
#[tokio::test]
async fn unsolicited_messages_are_ignored() {
    let mut fixture = Fixture::new();
    let hello = || from_cell::Message::Hello(HelloReply::default());
    let unsolicited = || {
        [
            // A second Hello, a Pong without a ping, events without a watch, and an empty message.
            Some(hello()),
            Some(from_cell::Message::Pong(Pong {})),
            Some(event_message(0, "unsolicited")),
            Some(event_message(1, "unsolicited")),
            Some(event_message(u64::MAX, "unsolicited")),
            Some(end_message(0, Code::Ok)),
            Some(end_message(1, Code::Unknown)),
            Some(end_message(9, Code::Unknown)),
            None,
        ]
    };
    for message in unsolicited() {
        fixture.agent.send(&FromCell { message }.encode_to_vec()).await.unwrap();
    }
    // The answer to a ping shows that all earlier messages were handled.
    fixture.send(from_cell::Message::Ping(Ping {})).await;
    assert_eq!(fixture.receive().await, to_cell::Message::Pong(Pong {}));
    let mut events = fixture.control.watch().await.unwrap();
    for id in ["first", "second"] {
        let next = tokio::spawn(async move { (events.next().await, events) });
        assert_eq!(fixture.receive().await, next_request(1));
        fixture.send(event_message(1, id)).await;
        // A single request: the second event is ignored.
        fixture.send(event_message(1, "twice")).await;
        fixture.send(end_message(1, Code::Unknown)).await;
        let (event, again) = next.await.unwrap();
        let event = event.unwrap().unwrap().event;
        assert_eq!(event, Some(event::Event::ContainerGone(id.to_owned())));
        events = again;
        fixture.send(from_cell::Message::Ping(Ping {})).await;
        assert_eq!(fixture.receive().await, to_cell::Message::Pong(Pong {}));
    }
    assert!(!fixture.connection.has_ended());
}
