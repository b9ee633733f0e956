//! Updates of volumes by the kubelet while a pod in a cell uses them.

use std::fs;

use kiyot_testkit::{Container, Kiyot, LIMIT, Node, Pod, Source, wait_until};

use crate::cell::{
    WAIT, options, remove_and_assert_clean, run_script, streaming::wire::LinkProxy, wait_for_output,
};

/// Verifies D23.
#[tokio::test]
async fn reader_never_sees_a_partial_update() {
    const UPDATES: usize = 30;
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let names: Vec<String> = (0..6).map(|n| format!("key-{n}")).collect();
    // The files are sent in several parts.
    let files = |version: usize| {
        let content = format!("{version}\n")
            .into_bytes()
            .into_iter()
            .chain(std::iter::repeat_n(b'x', 150_000))
            .collect::<Vec<u8>>();
        names.iter().map(|name| (name.clone(), content.clone())).collect()
    };
    // While a directory is the target of `..data`, its content is complete and of a single version.
    // Each name is complete whenever it is read.
    let script = "last=; while :; do
        d=$(readlink /v/..data) || { echo BROKEN no data; continue; }
        if s=$(for k in 0 1 2 3 4 5; do head -n 1 /v/$d/key-$k || exit 1; \
        [ $(stat -c %s /v/$d/key-$k) -gt 150000 ] || exit 1; done 2>/dev/null); then
            set -- $s; [ \"$1$1$1$1$1$1\" = \"$1$2$3$4$5$6\" ] || echo BROKEN mixed $s; \
            [ \"$1\" = \"$last\" ] || { last=$1; echo version $1; }
        elif [ \"$(readlink /v/..data)\" = \"$d\" ]; then echo BROKEN part $s; fi; done";
    let spec = Pod::new("reader")
        .in_cell()
        .volume("v", Source::Projected(files(0)))
        .container(Container::script("main", script).mount("v", "/v"));
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").clone();
    kubelet.logged(&main, "version 0").await;
    for version in 1..=UPDATES {
        kubelet.update_volume(&spec, "v", &files(version));
        // Some updates arrive while the previous update is sent, others alone.
        if version % 3 == 0 {
            kubelet.logged(&main, &format!("version {version}")).await;
        }
    }
    kubelet.logged(&main, &format!("version {UPDATES}")).await;
    let broken: Vec<_> =
        kubelet.log_lines(&main).into_iter().filter(|line| line.text.contains("BROKEN")).collect();
    assert_eq!(broken, []);
    kubelet.stop_and_remove(&running).await.unwrap();
    assert_eq!(kiyot.cells(), Vec::<String>::new());
}

/// Verifies D24.
#[tokio::test]
async fn update_arrives_during_and_after_a_cut_connection() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let mut proxy = LinkProxy::start(&kiyot.state());
    let spec = Pod::new("cut-off")
        .in_cell()
        .volume("token", Source::Projected(Source::files(&[("token", "zero")])))
        .volume("settings", Source::ConfigMap(Source::files(&[("colour", "none")])))
        .container(
            Container::script("main", WAIT).mount("token", "/token").mount("settings", "/settings"),
        );
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").id.clone();
    let agents =
        || crate::cell::failures::faults::processes(&["kiyot-cell agent", &kiyot.cells()[0]]);
    let agent = agents();
    for (before, after) in [("one", "two"), ("three", "four")] {
        let ends = || kiyot.log().matches("control connection failed").count();
        let until_now = ends();
        drop(proxy);
        wait_until("the daemon logs the lost connection", LIMIT, async || {
            (ends() > until_now).then_some(())
        })
        .await;
        kubelet.update_volume(&spec, "token", &Source::files(&[("token", before)]));
        proxy = LinkProxy::start(&kiyot.state());
        wait_for_output(&mut kubelet, &main, "cat /token/token", before).await;
        // The reconnection finds the first update, before the next comparison of all volumes. An
        // inotify event reports the second update.
        kubelet.update_volume(&spec, "settings", &Source::files(&[("colour", after)]));
        wait_for_output(&mut kubelet, &main, "cat /settings/colour", after).await;
    }
    assert_eq!(agents(), agent, "the agent was not restarted");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D25.
#[tokio::test]
async fn sources_of_a_projected_volume_appear_change_and_disappear() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    // The sources are a service account token, a ConfigMap, downward API files, and an optional
    // Secret that is absent.
    let first = [
        ("token", "eyJ.first.token"),
        ("ca.crt", "a certificate"),
        ("namespace", "default"),
        ("pod/labels", "app=\"web\"\n"),
        ("pod/name", "projected"),
    ];
    let spec = Pod::new("projected")
        .in_cell()
        .volume("all", Source::Projected(Source::files(&first)))
        .container(Container::script("main", WAIT).mount("all", "/var/run/all"));
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").id.clone();
    let all = "cd /var/run/all; for f in $(find . -follow -type f ! -path './..*' | sort); \
        do echo \"$f $(cat $f)\"; done";
    assert_eq!(
        run_script(&mut kubelet, &main, all).await,
        "./ca.crt a certificate\n./namespace default\n./pod/labels app=\"web\"\n\
         ./pod/name projected\n./token eyJ.first.token\n"
    );
    // The kubelet renews a token after four fifths of its lifetime.
    let second = [
        ("token", "eyJ.second.token"),
        ("ca.crt", "a certificate"),
        ("namespace", "default"),
        ("pod/labels", "app=\"shop\"\n"),
        ("late/key", "come"),
    ];
    kubelet.update_volume(&spec, "all", &Source::files(&second));
    wait_for_output(
        &mut kubelet,
        &main,
        all,
        "./ca.crt a certificate\n./late/key come\n./namespace default\n\
         ./pod/labels app=\"shop\"\n./token eyJ.second.token\n",
    )
    .await;
    // No name leads to the old version.
    wait_for_output(
        &mut kubelet,
        &main,
        "cd /var/run/all; grep -rl first . ; ls -A | grep -c '^\\.\\.2'",
        "1\n",
    )
    .await;
    kubelet.update_volume(&spec, "all", &Source::files(&[("token", "eyJ.third.token")]));
    wait_for_output(&mut kubelet, &main, all, "./token eyJ.third.token\n").await;
    wait_for_output(&mut kubelet, &main, "cd /var/run/all; ls -A | grep -v '^\\.\\.'", "token\n")
        .await;
    assert_eq!(
        run_script(&mut kubelet, &main, "readlink /var/run/all/token").await,
        "..data/token\n"
    );
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D26.
#[tokio::test]
async fn volume_that_grew_over_the_limit_stays_and_is_logged() {
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let spec = Pod::new("grown")
        .in_cell()
        .volume("settings", Source::ConfigMap(Source::files(&[("colour", "blue")])))
        .container(Container::script("main", WAIT).mount("settings", "/settings"));
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").id.clone();
    kubelet.update_volume(&spec, "settings", &Source::files(&[("colour", "red")]));
    wait_for_output(&mut kubelet, &main, "cat /settings/colour", "red").await;
    let settings =
        kubelet.pod_directory(&spec.uid).join("volumes/kubernetes.io~configmap/settings");
    fs::File::create(settings.join("..data/large")).unwrap().set_len((64 << 20) + 1).unwrap();
    kiyot_testkit::output("touch", &[&settings.display().to_string()]).unwrap();
    wait_until("the refusal is logged", LIMIT, async || {
        kiyot.log().contains("volume unreadable on the node, copy retained").then_some(())
    })
    .await;
    assert_eq!(run_script(&mut kubelet, &main, "cat /settings/colour").await, "red");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}

/// Verifies D40.
#[tokio::test]
async fn updates_arrive_before_all_volumes_are_compared() {
    // All volumes are compared each minute. If only the comparison found the updates, they would
    // miss the deadline.
    const UPDATES: usize = 4;
    let node = Node::start().await;
    let kiyot = Kiyot::start(&node, options()).await;
    let mut kubelet = kiyot.kubelet().await;
    let content = |n: usize| Source::files(&[("version", &n.to_string())]);
    let volumes = ["settings", "key", "token", "about"];
    let spec = Pod::new("prompt")
        .in_cell()
        .volume("settings", Source::ConfigMap(content(0)))
        .volume("key", Source::Secret(content(0)))
        .volume("token", Source::Projected(content(0)))
        .volume("about", Source::DownwardApi(content(0)))
        .container(volumes.iter().fold(Container::script("main", WAIT), |main, name| {
            main.mount(name, &format!("/{name}"))
        }));
    let running = kubelet.run_pod(&spec).await.unwrap();
    let main = running.container("main").id.clone();
    let all = async {
        for n in 1..=UPDATES {
            let volume = volumes[n % volumes.len()];
            kubelet.update_volume(&spec, volume, &content(n));
            wait_for_output(&mut kubelet, &main, &format!("cat /{volume}/version"), &n.to_string())
                .await;
        }
    };
    tokio::time::timeout(LIMIT, all).await.expect("updates arrive before the next comparison");
    remove_and_assert_clean(&mut kubelet, &kiyot, &running).await;
}
