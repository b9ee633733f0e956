use std::time::Duration;

use kiyot_link::channel::LONGEST_MESSAGE;
use kiyot_proto::{
    bounds::CONTROL_FRAME,
    cell::{Snapshot, WatchEnd, WatchEvent, event},
};
use tokio::{
    io::{AsyncWriteExt, DuplexStream, duplex},
    task::JoinHandle,
    time::sleep,
};

use super::*;

/// A connection, and the agent's end of it.
struct Scene {
    control: Control,
    line: Line,
    carried: JoinHandle<Result<(), Broken>>,
    agent: Frames<DuplexStream>,
}

impl Scene {
    fn new() -> Self {
        let (near, far) = duplex(64 * 1024);
        let (control, line) =
            (Control::new("a test's"), Line::new(HelloReply::default(), &CancellationToken::new()));
        control
            .offer(Offer {
                connection: line.clone(),
                incarnation: String::new(),
                generation: 1,
                arrival: 1,
            })
            .unwrap();
        let own = line.clone();
        let carried =
            tokio::spawn(async move { own.carry(&mut Frames::new(near, CONTROL_FRAME)).await });
        Self { control, line, carried, agent: Frames::new(far, CONTROL_FRAME) }
    }

    async fn says(&mut self, message: from_cell::Message) {
        self.agent.send(&FromCell { message: Some(message) }.encode_to_vec()).await.unwrap();
    }

    async fn hears(&mut self) -> to_cell::Message {
        ToCell::decode(self.agent.next().await.unwrap().unwrap()).unwrap().message.unwrap()
    }
}

fn event_of(watch: u64, id: &str) -> from_cell::Message {
    from_cell::Message::Event(WatchEvent {
        watch,
        event: Some(Event { event: Some(event::Event::ContainerGone(id.to_owned())) }),
    })
}

fn end_of(watch: u64, code: Code) -> from_cell::Message {
    from_cell::Message::End(WatchEnd { watch, code: code.into(), message: "so it is".to_owned() })
}

fn wanted(watch: u64) -> to_cell::Message {
    to_cell::Message::Next(NextEvent { watch })
}

/// Verifies L10.
#[tokio::test]
async fn an_event_comes_when_it_is_wanted_and_to_whom() {
    let mut scene = Scene::new();
    let mut first = scene.control.watch().await.unwrap();
    let got = tokio::spawn(async move { (first.next().await.unwrap().unwrap().event, first) });
    assert_eq!(scene.hears().await, wanted(1));
    scene.says(event_of(7, "nobody's")).await;
    scene.says(event_of(1, "one")).await;
    let (event, mut first) = got.await.unwrap();
    assert_eq!(event, Some(event::Event::ContainerGone("one".to_owned())));

    let mut second = scene.control.watch().await.unwrap();
    let got =
        tokio::spawn(
            async move { (second.next().await, second.next().await, second.next().await) },
        );
    assert_eq!(scene.hears().await, wanted(2));
    scene.says(event_of(1, "late")).await;
    scene.says(from_cell::Message::Event(WatchEvent { watch: 2, event: None })).await;
    assert_eq!(scene.hears().await, wanted(2));
    scene.says(end_of(2, Code::NotFound)).await;
    assert_eq!(scene.hears().await, wanted(2));
    scene.says(end_of(2, Code::Ok)).await;
    let (nothing, failed, ended) = got.await.unwrap();
    assert_eq!(nothing.unwrap(), None);
    let failed = failed.unwrap_err();
    assert_eq!((failed.code(), failed.message()), (Code::NotFound, "so it is"));
    assert_eq!(ended.unwrap(), None);

    let mut talks = scene.control.watch().await.unwrap();
    let talks = tokio::spawn(async move { talks.next().await });
    assert_eq!(scene.hears().await, wanted(3));
    scene
        .says(from_cell::Message::End(WatchEnd {
            watch: 3,
            code: Code::Unknown.into(),
            message: "\u{e4}".repeat(5_000),
        }))
        .await;
    let told = talks.await.unwrap().unwrap_err();
    assert!(told.message().len() <= LONGEST_MESSAGE, "no more of it goes to the log");

    // The first watch waits, and then another begins.
    let waits = tokio::spawn(async move { first.next().await });
    assert_eq!(scene.hears().await, wanted(1));
    let mut third = scene.control.watch().await.unwrap();
    let third = tokio::spawn(async move { third.next().await });
    assert_eq!(scene.hears().await, wanted(4));
    assert_eq!(waits.await.unwrap().unwrap_err().code(), Code::Aborted);
    scene
        .says(from_cell::Message::Event(WatchEvent {
            watch: 4,
            event: Some(Event { event: Some(event::Event::Snapshot(Snapshot::default())) }),
        }))
        .await;
    assert!(third.await.unwrap().unwrap().is_some());
}

#[tokio::test]
async fn all_wishes_are_told() {
    let mut scene = Scene::new();
    let mut events = scene.control.watch().await.unwrap();
    let _waits = tokio::spawn(async move { events.next().await });
    assert_eq!(scene.hears().await, wanted(1));
    scene.control.open_bulk(Duration::ZERO).await.unwrap();
    assert_eq!(scene.hears().await, to_cell::Message::OpenBulk(OpenBulkRequest {}));
    // At once, before either is seen.
    let mut events = scene.control.watch().await.unwrap();
    scene.control.open_bulk(Duration::ZERO).await.unwrap();
    let _waits = tokio::spawn(async move { events.next().await });
    let mut heard = [scene.hears().await, scene.hears().await];
    heard.sort_by_key(|message| matches!(message, to_cell::Message::Next(_)));
    assert_eq!(heard, [to_cell::Message::OpenBulk(OpenBulkRequest {}), wanted(2)]);
    // All three at once, and the same one twice.
    let mut events = scene.control.watch().await.unwrap();
    scene.control.measure(Duration::from_secs(5));
    scene.control.measure(Duration::from_secs(80));
    scene.control.open_bulk(Duration::ZERO).await.unwrap();
    let _waits = tokio::spawn(async move { events.next().await });
    let heard = [scene.hears().await, scene.hears().await, scene.hears().await];
    let measure = to_cell::Message::Measure(MeasureRequest { seconds: 80 });
    assert_eq!(heard, [to_cell::Message::OpenBulk(OpenBulkRequest {}), measure, wanted(3)]);
    // To nobody.
    scene.control.withdraw(&scene.line);
    scene.control.measure(Duration::from_secs(5));
}

#[tokio::test]
async fn who_waits_is_told_of_the_end() {
    for cut in [true, false] {
        let mut scene = Scene::new();
        let mut events = scene.control.watch().await.unwrap();
        let waits = tokio::spawn(async move { (events.next().await, events) });
        assert_eq!(scene.hears().await, wanted(1));
        if cut {
            scene.line.cut();
            scene.carried.await.unwrap().unwrap();
        } else {
            drop(scene.agent);
            assert!(matches!(scene.carried.await.unwrap(), Err(Broken::Ended)));
        }
        let (ended, mut events) = waits.await.unwrap();
        assert_eq!(ended.unwrap_err().code(), Code::Unavailable);
        assert_eq!(
            events.next().await.unwrap_err().code(),
            Code::Unavailable,
            "and who asks later"
        );
        assert!(scene.line.has_ended());
    }
}

/// Verifies L10.
#[tokio::test(start_paused = true)]
async fn a_quiet_connection_stays_for_as_long_as_pings_are_answered() {
    let mut scene = Scene::new();
    let quiet = sleep(Duration::from_secs(3600));
    tokio::pin!(quiet);
    let mut pings = 0;
    loop {
        tokio::select! {
            () = &mut quiet => break,
            message = scene.agent.next() => {
                assert_eq!(ToCell::decode(message.unwrap().unwrap()).unwrap().message, Some(to_cell::Message::Ping(Ping {})));
                pings += 1;
                let pong = from_cell::Message::Pong(Pong {});
                scene.agent.send(&FromCell { message: Some(pong) }.encode_to_vec()).await.unwrap();
            }
        }
    }
    assert!(pings > 100 && !scene.line.has_ended());
    scene.says(from_cell::Message::Ping(Ping {})).await;
    while scene.hears().await != to_cell::Message::Pong(Pong {}) {}
    // From now on nothing is said.
    let silent = Instant::now();
    assert!(matches!(scene.carried.await.unwrap(), Err(Broken::Silent)));
    assert!(
        silent.elapsed() <= Duration::from_secs(21),
        "by the clock of this test, which goes as it says"
    );
}

/// Verifies Y81.
#[tokio::test]
async fn nonsense_ends_it() {
    let mut scene = Scene::new();
    scene.agent.send(&[0xff; 9]).await.unwrap();
    assert!(matches!(scene.carried.await.unwrap(), Err(Broken::Refused(_))));
    let (near, mut far) = duplex(64);
    far.write_all(&u32::MAX.to_be_bytes()).await.unwrap();
    let carried = Line::new(HelloReply::default(), &CancellationToken::new())
        .carry(&mut Frames::new(near, CONTROL_FRAME))
        .await;
    assert!(matches!(carried, Err(Broken::Io(_))));
}

/// Verifies Y81.
#[tokio::test]
async fn the_agent_says_first_who_it_is() {
    let hello =
        from_cell::Message::Hello(HelloReply { cell: "it".to_owned(), ..HelloReply::default() });
    for (first, cell) in [(hello, Some("it")), (from_cell::Message::Pong(Pong {}), None)] {
        let (near, far) = duplex(1024);
        let mut far = Frames::new(far, CONTROL_FRAME);
        far.send(&FromCell { message: Some(first) }.encode_to_vec()).await.unwrap();
        let greeted =
            Line::greet(&mut Frames::new(near, CONTROL_FRAME), HelloRequest::default()).await;
        assert_eq!(greeted.ok().map(|hello| hello.cell).as_deref(), cell);
    }
}

/// Verifies L8, Y82.
#[tokio::test]
async fn messages_out_of_turn_change_nothing() {
    let mut scene = Scene::new();
    let hello = || from_cell::Message::Hello(HelloReply::default());
    let out_of_turn = || {
        [
            // Again, before it is asked for, of a watch that has ended or never was, and nothing.
            Some(hello()),
            Some(from_cell::Message::Pong(Pong {})),
            Some(event_of(0, "unasked")),
            Some(event_of(1, "unasked")),
            Some(event_of(u64::MAX, "unasked")),
            Some(end_of(0, Code::Ok)),
            Some(end_of(1, Code::Unknown)),
            Some(end_of(9, Code::Unknown)),
            None,
        ]
    };
    for message in out_of_turn() {
        scene.agent.send(&FromCell { message }.encode_to_vec()).await.unwrap();
    }
    // Answered in turn, so all before it was taken.
    scene.says(from_cell::Message::Ping(Ping {})).await;
    assert_eq!(scene.hears().await, to_cell::Message::Pong(Pong {}));
    let mut events = scene.control.watch().await.unwrap();
    for id in ["one", "other"] {
        let next = tokio::spawn(async move { (events.next().await, events) });
        assert_eq!(scene.hears().await, wanted(1));
        scene.says(event_of(1, id)).await;
        // Twice: only the first was wanted.
        scene.says(event_of(1, "twice")).await;
        scene.says(end_of(1, Code::Unknown)).await;
        let (event, again) = next.await.unwrap();
        let event = event.unwrap().unwrap().event;
        assert_eq!(event, Some(event::Event::ContainerGone(id.to_owned())));
        events = again;
        scene.says(from_cell::Message::Ping(Ping {})).await;
        assert_eq!(scene.hears().await, to_cell::Message::Pong(Pong {}));
    }
    assert!(!scene.line.has_ended());
}
