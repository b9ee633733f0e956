//! Pods that milpactl creates, and that the daemon runs without a kubelet.

use std::{os::unix::fs::symlink, path::PathBuf};

use futures::StreamExt;
use kiyot_proto::admin::{self, admin_client::AdminClient};
use kiyot_testkit::{
    Access, Kiyot, Kubelet, LIMIT, Node, Registry, RunningPod, cri, image::BUSYBOX_IMAGE,
    wait_until,
};
use tokio::time::{Duration, Instant, sleep_until, timeout};
use tonic::{Code, transport::Channel};

use super::{
    admin::{admin, cells, events, log, log_of, pods},
    node_mounts::{link_state_dir, mounts_beneath},
    options, pod,
    registries::{image_with_word, with_mirrors},
    remove_and_assert_clean,
    volume_contents::files_with,
};

pub(super) fn created(text: &str) -> admin::CreatePodsRequest {
    let file = admin::ManifestFile { name: "pods.yaml".to_owned(), text: text.to_owned() };
    admin::CreatePodsRequest { files: vec![file], backend: String::new() }
}

pub(super) fn deleted(name: &str, grace: i64) -> admin::DeletePodRequest {
    let (namespace, name) = (String::new(), name.to_owned());
    admin::DeletePodRequest { namespace, name, grace_seconds: Some(grace) }
}

/// Waits until the only pod satisfies a condition, and returns it.
async fn pod_that(
    client: &mut AdminClient<Channel>,
    what: &str,
    condition: impl Fn(&admin::Pod) -> bool,
) -> admin::Pod {
    wait_until(format!("the pod {what}"), LIMIT, async || {
        let listed = pods(client).await;
        listed.into_iter().find(|pod| condition(pod))
    })
    .await
}

/// Returns the request for the log of a pod's container `main`.
fn log_of_main(pod: &str) -> admin::ReadLogRequest {
    admin::ReadLogRequest { unit: "main".to_owned(), ..log_of(pod) }
}

/// Waits until the log of a pod's container `main` has a text, and returns all of it.
async fn log_with(client: &AdminClient<Channel>, pod: &str, text: &str) -> String {
    wait_until(format!("{text} is in the log of {pod}"), LIMIT, async || {
        let (log, _) = log(&mut client.clone(), log_of_main(pod)).await;
        log.contains(text).then_some(log)
    })
    .await
}

/// Returns true if a pod's container `main` runs.
fn has_main(pod: &admin::Pod) -> bool {
    let is_running = |unit: &admin::Unit| unit.state() == admin::UnitState::UnitRunning;
    pod.units.iter().any(|unit| unit.name == "main" && is_running(unit))
}

/// Returns the manifest of a pod with a script, a ConfigMap and a Secret.
pub(super) fn manifest(name: &str, policy: &str, script: &str) -> String {
    format!(
        "kind: ConfigMap\napiVersion: v1\nmetadata: {{name: settings}}\n\
         data: {{word: sesame}}\n---\n\
         kind: Secret\napiVersion: v1\nmetadata: {{name: key}}\n\
         stringData: {{token: hush}}\n---\n\
         kind: Pod\napiVersion: v1\nmetadata: {{name: {name}, labels: {{app: alone}}}}\n\
         spec:\n  restartPolicy: {policy}\n  terminationGracePeriodSeconds: 5\n\
         \x20 volumes:\n  - {{name: settings, configMap: {{name: settings}}}}\n\
         \x20 - {{name: key, secret: {{secretName: key}}}}\n  - {{name: shared, emptyDir: {{}}}}\n\
         \x20 initContainers:\n  - name: first\n    image: {BUSYBOX_IMAGE}\n\
         \x20   command: [sh, -c, \"echo begun > /shared/file\"]\n\
         \x20   volumeMounts: [{{name: shared, mountPath: /shared}}]\n\
         \x20 containers:\n  - name: main\n    image: {BUSYBOX_IMAGE}\n\
         \x20   env:\n    - {{name: WORD, value: $(OTHER)x}}\n\
         \x20   - {{name: TOKEN, valueFrom: {{secretKeyRef: {{name: key, key: token}}}}}}\n\
         \x20   - {{name: OWN_UID, valueFrom: {{fieldRef: {{fieldPath: metadata.uid}}}}}}\n\
         \x20   command: [sh, -c, \"{script}\"]\n\
         \x20   volumeMounts:\n    - {{name: settings, mountPath: /settings}}\n\
         \x20   - {{name: key, mountPath: /key}}\n    - {{name: shared, mountPath: /shared}}\n"
    )
}

/// Asserts that the lists of a kubelet have its own pod and no other.
async fn assert_sees_alone(kubelet: &mut Kubelet, own: &RunningPod) {
    let listed = kubelet.sandboxes().await.unwrap();
    assert_eq!(listed.iter().map(|it| &it.id).collect::<Vec<_>>(), [&own.sandbox]);
    let listed = kubelet.containers().await.unwrap();
    assert_eq!(listed.iter().map(|it| &it.id).collect::<Vec<_>>(), [&own.container("main").id]);
    let stats = cri::ListPodSandboxStatsRequest::default();
    let stats = kubelet.runtime.list_pod_sandbox_stats(stats).await.unwrap().into_inner().stats;
    assert!(stats.iter().all(|it| it.attributes.as_ref().unwrap().id == own.sandbox), "{stats:?}");
}

/// Verifies O40, O41.
#[tokio::test]
async fn standalone_pod_runs_through_restarts_and_no_list_of_the_kubelet_has_it() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut client = admin(&kiyot).await;
    let script = "cat /settings/word /key/token /shared/file; echo $TOKEN $OWN_UID; echo ready; \
                  while [ ! -e /tmp/stop ]; do sleep 0.1; done; exit 3";
    let answer = client.create_pods(created(&manifest("alone", "Always", script))).await;
    let answer = answer.unwrap().into_inner().pods;
    assert_eq!((answer.len(), answer[0].name.as_str()), (1, "alone"));
    let running = pod_that(&mut client, "runs its container", has_main).await;
    assert_eq!((&running.uid, running.is_standalone), (&answer[0].uid, true));
    let main = |pod: &admin::Pod| pod.units.iter().find(|it| it.name == "main").unwrap().clone();
    let logged = format!("sesamehushbegun\nhush {}\nready\n", running.uid);
    assert_eq!(log_with(&client, "alone", "ready").await, logged);

    // The kubelet sees its own pod alone.
    let mut kubelet = kiyot.kubelet().await;
    let own = kubelet.run_pod(&pod("own", "sleep 1000")).await.unwrap();
    assert_sees_alone(&mut kubelet, &own).await;

    // A killed daemon goes on with the pod, and restarts its container with all that it had.
    kiyot.kill9();
    kiyot.start_again().await;
    let mut client = admin(&kiyot).await;
    let same = pod_that(&mut client, "is known", has_main).await;
    let same = pods(&mut client).await.into_iter().find(|pod| pod.uid == same.uid).unwrap();
    assert_eq!(main(&same).container, main(&running).container);
    let mut kubelet = kiyot.kubelet().await;
    assert_sees_alone(&mut kubelet, &own).await;
    wait_until("its cell is connected", LIMIT, async || {
        kubelet.exec_sync(&main(&same).container, &["touch", "/tmp/stop"]).await.ok()
    })
    .await;
    let restarted = |pod: &admin::Pod| {
        has_main(pod) && pod.units.iter().any(|unit| unit.name == "main" && unit.restarts == 1)
    };
    pod_that(&mut client, "has restarted its container", restarted).await;
    assert_sees_alone(&mut kubelet, &own).await;
    assert_eq!(log_with(&client, "alone", "ready").await, logged);

    // Nothing that an operator reads has the secret.
    let dump = client.dump(admin::DumpRequest {}).await.unwrap().into_inner();
    let parts: Vec<_> = dump.map(|part| part.unwrap().content).collect().await;
    let dump = String::from_utf8_lossy(&parts.concat()).into_owned();
    assert!(dump.contains("alone") && !dump.contains("hush"), "{dump}");
    assert!(!kiyot.log().contains("hush"), "{}", kiyot.log());

    let refused = client.create_pods(created(&manifest("alone", "Always", script))).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), Code::AlreadyExists, "{refused:?}");
    let refused = client.delete_pod(deleted("own", 1)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    assert!(refused.message().contains("kubectl delete"), "{refused:?}");

    client.delete_pod(deleted("alone", 0)).await.unwrap();
    let left: Vec<_> = pods(&mut client).await.into_iter().map(|pod| pod.name).collect();
    assert_eq!(left, ["own"]);
    assert_eq!(cells(&mut client).await.len(), 1);
    let directories =
        [kiyot.state().join("standalone/pods"), kiyot.state().join("standalone/logs")];
    for directory in directories {
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0, "{}", directory.display());
    }
    remove_and_assert_clean(&mut kubelet, &kiyot, &own).await;
}

/// Verifies O42.
#[tokio::test]
async fn standalone_pod_that_completes_gives_its_cell_back_and_keeps_its_log() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut client = admin(&kiyot).await;
    let text = manifest("job", "Never", "cat /settings/word");
    client.create_pods(created(&text)).await.unwrap();
    let succeeded = |pod: &admin::Pod| pod.phase() == admin::PodPhase::Succeeded;
    pod_that(&mut client, "has succeeded", succeeded).await;
    wait_until("its cell has ended", LIMIT, async || kiyot.cells().is_empty().then_some(())).await;
    assert_eq!(log(&mut client, log_of_main("job")).await.0, "sesame");
    let statuses: Vec<_> = events(&mut client).await.into_iter().map(|it| it.status).collect();
    for status in ["Created", "Completed"] {
        assert!(statuses.iter().any(|it| it == status), "{status} is not in {statuses:?}");
    }
    client.delete_pod(deleted("job", 0)).await.unwrap();
    assert_eq!(pods(&mut client).await, Vec::new());
}

/// Verifies O40, O43.
#[tokio::test]
async fn standalone_pod_that_cannot_run_says_why_and_can_be_deleted() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut client = admin(&kiyot).await;
    let good = manifest("good", "Never", "true");
    let twice = |number: usize| format!("{}---\n{good}", good.split("---\n").nth(number).unwrap());
    for (text, expected) in [
        ("kind: Pod\nmetadata: {name: half}\nspec:\n  contain".to_owned(), "pods.yaml"),
        (format!("{good}---\n{}", good.rsplit("---\n").next().unwrap()), "two pods default/good"),
        (twice(0), "is another ConfigMap default/settings; allowed: one"),
        (twice(1), "is another Secret default/key; allowed: one"),
        (
            good.replace("labels:", "annotations: {pod.elotl.co/launch-typ: Spot}, labels:"),
            "launch-typ",
        ),
        (good.replace("restartPolicy", "hostPID: true\n  restartPolicy"), "PID"),
        ("x".repeat(1024 * 1024 + 1), "allowed: 1048576 bytes"),
    ] {
        let refused = client.create_pods(created(&text)).await.unwrap_err();
        assert!(refused.message().contains(expected), "{expected}: {refused:?}");
    }
    assert_eq!(pods(&mut client).await, Vec::new(), "all of a manifest or none");

    // Its image does not exist: it is tried again until it is deleted.
    let text = good.replace(BUSYBOX_IMAGE, "127.0.0.1:1/absent:1");
    client.create_pods(created(&text)).await.unwrap();
    let says_why = |pod: &admin::Pod| pod.message.contains("127.0.0.1:1/absent:1");
    let waiting = pod_that(&mut client, "says why it waits", says_why).await;
    let waits = |unit: &admin::Unit| {
        assert_eq!(unit.state(), admin::UnitState::UnitWaiting, "{unit:?}");
        (unit.name.clone(), unit.reason.clone(), unit.start_failure)
    };
    let expected = [("first", "ErrImagePull", true), ("main", "ContainerCreating", false)];
    let expected = expected.map(|(name, reason, fails)| (name.into(), reason.into(), fails));
    assert_eq!(waiting.units.iter().map(waits).collect::<Vec<_>>(), expected);
    let why = &waiting.units[0].message;
    assert!(why.starts_with("Error pulling image for unit first: "), "{why}");
    assert!(why.contains("127.0.0.1:1/absent:1"), "{why}");
    let refused = client.read_log(log_of_main("good")).await.unwrap_err();
    assert!(refused.message().contains("main of pod default/good is not created"), "{refused:?}");
    client.delete_pod(deleted("good", 0)).await.unwrap();
    assert_eq!((pods(&mut client).await, kiyot.cells()), (Vec::new(), Vec::new()));
    let refused = client.delete_pod(deleted("good", 0)).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound, "{refused:?}");
}

/// Verifies O44.
#[tokio::test]
async fn standalone_pod_pulls_with_the_secrets_that_it_names_and_by_the_policy_of_its_containers() {
    let node = Node::start().await;
    let registry = Registry::start(&node, Access::Basic("violet".to_owned(), "sesame".to_owned()));
    let (image, _) = registry.image("violet/app:1", &image_with_word("opened"));
    let host = image.split('/').next().unwrap();
    let kiyot = Kiyot::start(&node, with_mirrors(&node)).await;
    let mut client = admin(&kiyot).await;
    let manifest = |auths: &str, policy: &str| {
        format!(
            "kind: Secret\napiVersion: v1\nmetadata: {{name: login}}\n\
             type: kubernetes.io/dockerconfigjson\n\
             stringData:\n  .dockerconfigjson: '{{\"auths\": {{{auths}}}}}'\n---\n\
             kind: Pod\napiVersion: v1\nmetadata: {{name: private}}\nspec:\n\
             \x20 imagePullSecrets: [{{name: login}}]\n  terminationGracePeriodSeconds: 1\n\
             \x20 containers:\n  - {{name: main, image: \"{image}\", imagePullPolicy: {policy}}}\n"
        )
    };
    let broken = manifest("\"r\": {\"auth\": \"c2VzYW1l\"}", "Always");
    let refused = client.create_pods(created(&broken)).await.unwrap_err();
    assert!(refused.message().contains("imagePullSecrets[0].name"), "{refused:?}");
    assert!(!refused.message().contains("c2VzYW1l"), "{refused:?}");

    // The narrower place is tried first, and its password is wrong.
    let login = |place: &str, password: &str| {
        format!("\"{place}\": {{\"username\": \"violet\", \"password\": \"{password}\"}}")
    };
    let auths =
        format!("{}, {}", login(&format!("{host}/violet"), "open-up"), login(host, "sesame"));
    client.create_pods(created(&manifest(&auths, "Never"))).await.unwrap();
    let says_why = |pod: &admin::Pod| pod.message.contains("imagePullPolicy is Never");
    pod_that(&mut client, "says why it waits", says_why).await;
    client.delete_pod(deleted("private", 0)).await.unwrap();
    assert_eq!(registry.asked(), Vec::<String>::new(), "nothing was pulled");
    client.create_pods(created(&manifest(&auths, "Always"))).await.unwrap();
    let running = pod_that(&mut client, "runs", has_main).await;
    assert_eq!(running.image_pull_secrets, ["login"]);
    assert_eq!(log_with(&client, "private", "opened").await, "opened\n");
    let dump = client.dump(admin::DumpRequest {}).await.unwrap().into_inner();
    let parts: Vec<_> = dump.map(|part| part.unwrap().content).collect().await;
    let (dump, log) = (String::from_utf8_lossy(&parts.concat()).into_owned(), kiyot.log());
    for secret in ["sesame", "open-up"] {
        assert!(!dump.contains(secret) && !log.contains(secret), "{secret} is shown");
    }
    client.delete_pod(deleted("private", 0)).await.unwrap();
}

/// Verifies O40, O43.
#[tokio::test]
async fn standalone_pod_moves_to_another_cell_when_its_cell_ends_and_is_deleted_while_it_starts() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut client = admin(&kiyot).await;
    let text = manifest("moves", "Always", "trap 'exit 0' TERM; while :; do sleep 0.1; done");
    client.create_pods(created(&text)).await.unwrap();
    let first = pod_that(&mut client, "runs", has_main).await;
    client.end_cell(admin::EndCellRequest { cell: first.cell.clone() }).await.unwrap();
    let moved = |pod: &admin::Pod| has_main(pod) && pod.cell != first.cell;
    let second = pod_that(&mut client, "runs in another cell", moved).await;
    assert_eq!((&second.uid, second.attempt), (&first.uid, 1));
    let unit = second.units.iter().find(|unit| unit.name == "main").unwrap();
    assert_eq!(unit.restarts, 1, "the log of the first run stays");
    client.delete_pod(deleted("moves", 5)).await.unwrap();

    client.create_pods(created(&text)).await.unwrap();
    client.delete_pod(deleted("moves", 0)).await.unwrap();
    assert_eq!((pods(&mut client).await, kiyot.cells()), (Vec::new(), Vec::new()));
}

/// Returns the names in a directory beneath that of the logs of the only standalone pod, sorted.
fn logs_of(kiyot: &Kiyot<'_>, container: &str) -> Vec<String> {
    let logs = std::fs::read_dir(kiyot.state().join("standalone/logs")).unwrap();
    let of_pod = logs.map(|pod| pod.unwrap().path().join(container));
    let files = of_pod.flat_map(|dir| std::fs::read_dir(dir).into_iter().flatten());
    let mut names: Vec<_> =
        files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Verifies O40, O43, O45.
#[tokio::test]
async fn container_that_can_not_start_keeps_no_other_from_its_restarts_and_old_runs_are_removed() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut client = admin(&kiyot).await;
    let text = format!(
        "kind: Pod\napiVersion: v1\nmetadata: {{name: half}}\nspec:\n\
         \x20 terminationGracePeriodSeconds: 1\n  containers:\n\
         \x20 - {{name: bad, image: \"127.0.0.1:1/absent:1\"}}\n\
         \x20 - {{name: main, image: {BUSYBOX_IMAGE}, command: [sh, -c, \"echo run; exit 3\"]}}\n"
    );
    client.create_pods(created(&text)).await.unwrap();
    let ended_again = |pod: &admin::Pod| {
        let has_ended = |unit: &admin::Unit| unit.restarts == 2 && unit.exit_code == 3;
        pod.units.iter().any(|unit| unit.name == "main" && has_ended(unit))
    };
    let pod = pod_that(&mut client, "has ended for the third time", ended_again).await;
    assert!(pod.message.starts_with("container bad: "), "{}", pod.message);
    assert!(pod.message.contains("127.0.0.1:1/absent:1"), "{}", pod.message);
    assert_eq!((pod.restart_policy.as_str(), pod.default_unit.as_str()), ("Always", "main"));
    wait_until("the last run alone is left", LIMIT, async || {
        (logs_of(&kiyot, "main") == ["2.log"]).then_some(())
    })
    .await;
    assert_eq!(log_with(&client, "half", "run").await, "run\n");
    client.delete_pod(deleted(&pod.uid, 0)).await.unwrap();
    assert_eq!((pods(&mut client).await, kiyot.cells()), (Vec::new(), Vec::new()));
}

/// Verifies O40.
#[tokio::test]
async fn restarted_daemon_goes_on_with_the_pauses_of_a_container_that_fails() {
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut client = admin(&kiyot).await;
    client.create_pods(created(&manifest("fails", "Always", "exit 3"))).await.unwrap();
    let main_of = |pod: &admin::Pod| pod.units.iter().find(|it| it.name == "main").cloned();
    let run = |restarts: u32| {
        move |pod: &admin::Pod| {
            let has_ended =
                |unit: admin::Unit| unit.restarts == restarts && unit.finished_unix_nanos > 0;
            main_of(pod).is_some_and(has_ended)
        }
    };
    let second = main_of(&pod_that(&mut client, "has ended twice", run(1)).await).unwrap();
    kiyot.kill9();
    kiyot.start_again().await;
    let mut client = admin(&kiyot).await;
    let third = main_of(&pod_that(&mut client, "has ended thrice", run(2)).await).unwrap();
    // The first restart is at once, and the second after the kubelet's first pause.
    let pause = third.started_unix_nanos - second.finished_unix_nanos;
    assert!(pause >= 10_000_000_000, "{pause} ns between {second:?} and {third:?}");
    client.delete_pod(deleted("fails", 0)).await.unwrap();
}

/// Verifies O46.
#[tokio::test]
async fn volumes_of_a_standalone_pod_are_those_that_a_kubelet_makes() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut client = admin(&kiyot).await;
    let script = "cat /word; echo; grep ' /mem tmpfs' /proc/mounts | grep -o 'size=[0-9]*k'; \
                  echo x > /part/file && cat /disk/a/b/file; \
                  stat -L -c '%g %a' /disk /mem /settings/word; \
                  dd if=/dev/zero of=/mem/big bs=1M count=2 2>/dev/null || echo full; \
                  echo ready; sleep 1000";
    let text = format!(
        "kind: ConfigMap\napiVersion: v1\nmetadata: {{name: settings}}\n\
         data: {{word: sesame}}\n---\n\
         kind: Pod\napiVersion: v1\nmetadata: {{name: volumes}}\nspec:\n\
         \x20 terminationGracePeriodSeconds: 1\n\
         \x20 securityContext: {{fsGroup: 2000, runAsUser: 1000}}\n\
         \x20 volumes:\n  - {{name: settings, configMap: {{name: settings, defaultMode: 256}}}}\n\
         \x20 - {{name: mem, emptyDir: {{medium: Memory, sizeLimit: 1Mi}}}}\n\
         \x20 - {{name: disk, emptyDir: {{sizeLimit: 1Gi}}}}\n\
         \x20 containers:\n  - name: main\n    image: {BUSYBOX_IMAGE}\n\
         \x20   command: [sh, -c, \"{script}\"]\n\
         \x20   volumeMounts:\n    - {{name: settings, mountPath: /word, subPath: word}}\n\
         \x20   - {{name: settings, mountPath: /settings}}\n\
         \x20   - {{name: mem, mountPath: /mem}}\n    - {{name: disk, mountPath: /disk}}\n\
         \x20   - {{name: disk, mountPath: /part, subPath: a/b}}\n"
    );
    let answer = client.create_pods(created(&text)).await.unwrap().into_inner();
    let warnings = answer.pods.into_iter().flat_map(|pod| pod.warnings).collect::<Vec<_>>();
    let expected = "volume \"disk\": sizeLimit has no effect";
    assert!(warnings.len() == 1 && warnings[0].starts_with(expected), "{warnings:?}");
    pod_that(&mut client, "runs", has_main).await;
    let log = log_with(&client, "volumes", "ready").await;
    let expected = "sesame\nsize=1024k\nx\n2000 2777\n2000 2777\n2000 440\nfull\nready\n";
    assert_eq!(log, expected);
    client.delete_pod(deleted("volumes", 0)).await.unwrap();
    let directory = kiyot.state().join("standalone/pods");
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0, "{}", directory.display());
}

/// Verifies D10, O46.
#[tokio::test]
async fn secret_of_a_standalone_pod_is_on_no_disk_but_in_its_record() {
    const SECRET: &str = "an-utterly-private-word";
    let node = Node::start().await;
    // An operator has moved the state directory, and that of standalone pods.
    let standalone = node.directory().canonicalize().unwrap().join("standalone");
    std::fs::create_dir(&standalone).unwrap();
    symlink(&standalone, link_state_dir(&node).join("standalone")).unwrap();
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut client = admin(&kiyot).await;
    let script = "cat /keys/word /part | wc -c; echo ready; \
                  while [ ! -e /tmp/stop ]; do sleep 0.1; done";
    let text = format!(
        "kind: Secret\napiVersion: v1\nmetadata: {{name: key}}\n\
         stringData: {{word: {SECRET}}}\n---\n\
         kind: Pod\napiVersion: v1\nmetadata: {{name: hushed}}\nspec:\n\
         \x20 terminationGracePeriodSeconds: 1\n\
         \x20 volumes:\n  - {{name: keys, secret: {{secretName: key}}}}\n\
         \x20 containers:\n  - name: main\n    image: {BUSYBOX_IMAGE}\n\
         \x20   command: [sh, -c, \"{script}\"]\n\
         \x20   volumeMounts:\n    - {{name: keys, mountPath: /keys}}\n\
         \x20   - {{name: keys, mountPath: /part, subPath: word}}\n"
    );
    let is_on_no_disk = || {
        let files = files_with(node.directory(), SECRET.as_bytes());
        assert!(files.iter().all(|file| file.ends_with("/store.redb")), "{files:?}");
    };
    let of_secret = || {
        let mounts = mounts_beneath(&standalone).into_iter();
        mounts.filter(|point| point.ends_with("kubernetes.io~secret/keys")).count()
    };
    client.create_pods(created(&text)).await.unwrap();
    pod_that(&mut client, "runs", has_main).await;
    let logged = format!("{}\nready\n", 2 * SECRET.len());
    assert_eq!(log_with(&client, "hushed", "ready").await, logged);
    assert_eq!(of_secret(), 1);
    is_on_no_disk();

    // A restarted daemon keeps the mount.
    kiyot.kill9();
    kiyot.start_again().await;
    assert_eq!(of_secret(), 1);
    // After a start of the node the mounts are absent, and an earlier daemon had files in place of
    // them.
    kiyot.kill9();
    kiyot_linux::unmount_beneath(&standalone).unwrap();
    let pods = std::fs::read_dir(standalone.join("pods")).unwrap();
    let pod_dir = pods.map(|pod| pod.unwrap().path()).next().unwrap();
    std::fs::write(pod_dir.join("volumes/kubernetes.io~secret/keys/word"), SECRET).unwrap();
    kiyot.start_again().await;
    let mut client = admin(&kiyot).await;
    wait_until("the Secret is in memory again", LIMIT, async || (of_secret() == 1).then_some(()))
        .await;
    // The files are written again from the record: the next run mounts a part of them.
    let running = pod_that(&mut client, "is known", has_main).await;
    let main = running.units.iter().find(|it| it.name == "main").unwrap().container.clone();
    let mut kubelet = kiyot.kubelet().await;
    wait_until("its cell is connected", LIMIT, async || {
        kubelet.exec_sync(&main, &["touch", "/tmp/stop"]).await.ok()
    })
    .await;
    let restarted = |pod: &admin::Pod| {
        has_main(pod) && pod.units.iter().any(|unit| unit.name == "main" && unit.restarts == 1)
    };
    pod_that(&mut client, "has restarted its container", restarted).await;
    assert_eq!(log_with(&client, "hushed", "ready").await, logged);
    assert_eq!(of_secret(), 1);
    is_on_no_disk();
    assert!(!kiyot.log().contains(SECRET), "{}", kiyot.log());

    client.delete_pod(deleted("hushed", 0)).await.unwrap();
    assert_eq!(mounts_beneath(&standalone), Vec::<PathBuf>::new());
    is_on_no_disk();
}

/// Verifies O47.
#[tokio::test]
async fn standalone_pod_ends_at_its_deadline_and_is_listed_with_its_labels_before() {
    /// Time to start a pod on a busy machine.
    const DEADLINE: Duration = Duration::from_secs(40);
    let node = Node::start().await;
    let mut kiyot = Kiyot::start(&node, options()).await;
    let mut client = admin(&kiyot).await;
    client.cordon(admin::CordonRequest {}).await.unwrap();
    let text =
        manifest("brief", "Always", "trap 'exit 0' TERM; echo on; while :; do sleep 0.1; done");
    let deadline = format!("activeDeadlineSeconds: {}\n  restartPolicy", DEADLINE.as_secs());
    let text = text.replace("restartPolicy", &deadline);
    client.create_pods(created(&text)).await.unwrap();
    let begun = Instant::now();
    let listed = pods(&mut client).await;
    assert_eq!(listed[0].labels.get("app").map(String::as_str), Some("alone"), "{listed:?}");
    client.uncordon(admin::UncordonRequest {}).await.unwrap();
    let running = pod_that(&mut client, "runs", has_main).await;
    let inits: Vec<_> = running.units.iter().map(|it| (it.name.as_str(), it.is_init)).collect();
    assert_eq!(inits, [("first", true), ("main", false)]);
    // Of the container that is no init container.
    log_with(&client, "brief", "on").await;
    kiyot.kill9();
    sleep_until(begun + DEADLINE).await;
    kiyot.start_again().await;
    let restarted = Instant::now();
    let mut client = admin(&kiyot).await;
    let is_over = |pod: &admin::Pod| {
        pod.phase() == admin::PodPhase::Failed && pod.message.starts_with("DeadlineExceeded")
    };
    pod_that(&mut client, "has failed", is_over).await;
    assert!(restarted.elapsed() < DEADLINE, "it is counted from the pod's creation");
    wait_until("its cell has ended", LIMIT, async || kiyot.cells().is_empty().then_some(())).await;
    assert_eq!(log(&mut client, log_of("brief")).await.0, "on\n");
    kiyot.kill9();
    kiyot.start_again().await;
    let mut client = admin(&kiyot).await;
    pod_that(&mut client, "has still failed", is_over).await;
    assert_eq!(kiyot.cells(), Vec::<String>::new());
    client.delete_pod(deleted("brief", 0)).await.unwrap();
}

/// Verifies O43.
#[tokio::test]
async fn later_delete_with_a_shorter_grace_period_ends_a_pod_sooner() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut client = admin(&kiyot).await;
    let script = "trap 'echo asked' TERM; echo ready; while :; do sleep 0.1; done";
    client.create_pods(created(&manifest("slow", "Always", script))).await.unwrap();
    pod_that(&mut client, "runs its container", has_main).await;
    log_with(&client, "slow", "ready").await;
    let mut first = client.clone();
    let first = tokio::spawn(async move { first.delete_pod(deleted("slow", 3600)).await });
    log_with(&client, "slow", "asked").await;
    let second = timeout(LIMIT, client.delete_pod(deleted("slow", 0))).await;
    second.expect("the pod has not ended").unwrap();
    first.await.unwrap().unwrap();
    assert_eq!(pods(&mut client).await, Vec::new());
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}
