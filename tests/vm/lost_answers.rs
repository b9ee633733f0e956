//! Answers of machines that are lost on their link. Requests of the pod to the node, over the pod's
//! network, show the effect of a call.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use kiyot_testkit::{Container, Kiyot, LIMIT, Node, Relay, cri, relay::Rate, wait_for, wait_until};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{pod, run, strong, strong_options};

/// The directories of the containers that the machine's containerd has.
const CONTAINERS: &str =
    "/proc/1/root/var/lib/kiyot-cell/private/containerd/io.containerd.grpc.v1.cri/containers";
/// Functions of a script: `tell` sends a word to the node and waits for the answer, `halt` does so
/// while the machine's containerd is stopped, so that no call is answered meanwhile.
const FUNCTIONS: &str = "node=$(ip route | awk '/^default/ { print $3 }'); \
                         tell() { wget -q -O /dev/null http://$node:$PORT/$1; }; \
                         halt() { kill -STOP $runtime; tell $1; kill -CONT $runtime; }; \
                         runtime=$(pidof containerd)";

/// The answer to each word.
const RESPONSE: &[u8] = b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n";

/// Words that a pod has sent to the node, in the order of their arrival.
struct Told {
    words: Arc<Mutex<Vec<String>>>,
    answers: Arc<Semaphore>,
    address: SocketAddr,
    _end: DropGuard,
}

impl Told {
    /// Listens on all addresses of the node.
    async fn start() -> Self {
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let words = Arc::<Mutex<Vec<String>>>::default();
        let answers = Arc::new(Semaphore::new(0));
        let (told, allowed) = (Arc::clone(&words), Arc::clone(&answers));
        let end = CancellationToken::new();
        tokio::spawn(end.clone().run_until_cancelled_owned(async move {
            loop {
                let (connection, _) = listener.accept().await.unwrap();
                let mut connection = BufReader::new(connection);
                let Some(word) = read(&mut connection).await else { continue };
                told.lock().unwrap().push(word);
                allowed.acquire().await.unwrap().forget();
                let _reset = connection.get_mut().write_all(RESPONSE).await;
            }
        }));
        Self { words, answers, address, _end: end.drop_guard() }
    }

    fn words(&self) -> Vec<String> {
        self.words.lock().unwrap().clone()
    }

    /// Waits until a word is the last that has arrived.
    async fn wait_for(&self, word: &str) {
        let is_last = || self.words().last().is_some_and(|last| last == word);
        wait_for(format!("the pod says {word}"), is_last).await;
    }

    /// Answers the last word, for which the pod waits.
    fn answer(&self) {
        self.answers.add_permits(1);
    }
}

/// Reads a request, and returns the word that it has for a path.
async fn read(connection: &mut BufReader<TcpStream>) -> Option<String> {
    let mut request = String::new();
    connection.read_line(&mut request).await.ok()?;
    // The client would be reset if a part of its request were unread.
    let mut header = String::new();
    while connection.read_line(&mut header).await.ok()? > "\r\n".len() {
        header.clear();
    }
    let path = request.split_whitespace().nth(1)?;
    Some(path.trim_start_matches('/').to_owned())
}

/// Verifies L3, X8, X12.
#[tokio::test]
#[ignore = "takes long without KVM; make test-vm"]
async fn calls_whose_answers_are_lost_on_the_link_of_a_machine_run_once() {
    let node = Node::start().await;
    let told = Told::start().await;
    let kiyot = Kiyot::start(&node, strong_options()).await;
    let link = Relay::before_gateway(&kiyot.state(), Rate::UNLIMITED);
    let mut kubelet = kiyot.kubelet().await;
    let port = told.address.port();
    // The first container sees the other container at its machine's containerd, at least once:
    // containerd may undo a creation without a waiting caller, and the daemon repeats it.
    let watch = format!(
        "PORT={port}; {FUNCTIONS}; until [ $(ls {CONTAINERS} | wc -l) = 2 ]; do sleep 0.05; done; \
         halt created; while :; do sleep 1; done"
    );
    let script = format!(
        "PORT={port}; {FUNCTIONS}; trap 'tell stopping; exit 7' TERM; halt started; echo up; \
         while :; do sleep 0.2; done"
    );
    let mut spec = strong(pod("cut", &watch).container(Container::script("second", &script)));
    let second = spec.containers.remove(1);
    let mut running = kubelet.run_pod(&spec).await.unwrap();

    let (mut caller, pod, container) = (kubelet.clone(), running.clone(), second.clone());
    let creating = tokio::spawn(async move { caller.create_container(&pod, &container, 0).await });
    told.wait_for("created").await;
    link.cut();
    told.answer();
    let first = creating.await.unwrap();
    // Like a kubelet, the test repeats the call.
    let created = wait_until("the container is created", LIMIT, async || {
        kubelet.create_container(&running, &second, 0).await.ok()
    })
    .await;
    first.inspect(|first| assert_eq!(first.id, created.id)).ok();
    running.containers.insert("second".to_owned(), created.clone());

    let (mut caller, id) = (kubelet.clone(), created.id.clone());
    let starting = tokio::spawn(async move { caller.start_container(&id).await });
    told.wait_for("started").await;
    link.cut();
    told.answer();
    let _answered_or_not = starting.await.unwrap();
    wait_until("the container reads running", LIMIT, async || {
        let status = kubelet.container_status(&created.id).await.ok()?;
        (status.state() == cri::ContainerState::ContainerRunning).then_some(())
    })
    .await;
    kubelet.start_container(&created.id).await.unwrap();
    kubelet.logged(&created, "up").await;

    let (mut caller, id) = (kubelet.clone(), created.id.clone());
    let grace = i64::try_from(LIMIT.as_secs()).unwrap();
    let stopping = tokio::spawn(async move { caller.stop_container(&id, grace).await });
    told.wait_for("stopping").await;
    link.cut();
    told.answer();
    let _answered_or_not = stopping.await.unwrap();
    let status = kubelet.exited(&created.id).await;
    assert_eq!(status.exit_code, 7, "the container was not killed: {status:?}");
    kubelet.stop_container(&created.id, grace).await.unwrap();

    assert_eq!(told.words(), ["created", "started", "stopping"]);
    assert_eq!(kubelet.containers().await.unwrap().len(), 2);
    assert_eq!(kubelet.log_lines(&created).len(), 1);
    let main = running.container("main").clone();
    assert_eq!(run(&mut kubelet, &main.id, &format!("ls {CONTAINERS} | wc -l")).await, "2\n");
    kubelet.stop_and_remove(&running).await.unwrap();
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}
