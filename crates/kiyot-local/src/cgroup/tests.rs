use crate::cgroup::*;

const HYBRID: &[u8] = b"\
30 24 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:5 - cgroup2 cgroup2 rw,nsdelegate
32 30 0:28 / /sys/fs/cgroup/systemd rw,nosuid shared:6 - cgroup cgroup rw,xattr,name=systemd
33 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:7 - cgroup cgroup rw,cpu,cpuacct
34 30 0:30 /docker/abc /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer
35 30 0:30 / /elsewhere/freezer rw - cgroup cgroup rw,freezer
36 24 0:31 / /a\\040place rw - cgroup cgroup rw,pids
";

const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

#[test]
fn mounted_hierarchies_of_both_versions_are_found() {
    let found = parse_hierarchies(HYBRID);
    let points: Vec<_> =
        found.iter().map(|hierarchy| hierarchy.mount.display().to_string()).collect();
    assert_eq!(
        points,
        [
            "/sys/fs/cgroup/unified",
            "/sys/fs/cgroup/systemd",
            "/sys/fs/cgroup/cpu,cpuacct",
            "/sys/fs/cgroup/freezer",
            "/a place"
        ]
    );
    assert!(found[0].is_v2() && !found[1].is_v2());
    assert_eq!(found[2].controllers, ["cpu", "cpuacct"]);
    let only_v2 = parse_hierarchies(
        b"31 30 0:27 / /sys/fs/cgroup rw,nosuid shared:5 - cgroup2 cgroup2 \
          rw,nsdelegate,memory_recursiveprot\n",
    );
    assert_eq!(only_v2.len(), 1);
}

#[test]
fn container_cgroup_is_distinguished_from_its_pods() {
    let hierarchies = parse_hierarchies(HYBRID);
    let text = format!(
        "5:cpu,cpuacct:/kubepods/burstable/pod1-2/{ID}\n\
         4:freezer:/docker/abc/kubepods/pod1-2/{ID}/nested\n\
         3:pids:/kiyot/cell-a\n\
         1:name=systemd:/../outside/{ID}\n\
         0::/kubepods.slice/kubepods-pod1_2.slice/cri-containerd-{ID}.scope\n\
         bad line\n"
    );
    let dirs: Vec<_> = container_dirs(&hierarchies, text.as_bytes())
        .iter()
        .map(|dir| dir.display().to_string())
        .collect();
    assert_eq!(
        dirs,
        [
            format!("/sys/fs/cgroup/cpu,cpuacct/kubepods/burstable/pod1-2/{ID}"),
            format!("/sys/fs/cgroup/freezer/kubepods/pod1-2/{ID}"),
            format!(
                "/sys/fs/cgroup/unified/kubepods.slice/kubepods-pod1_2.slice/\
                 cri-containerd-{ID}.scope"
            ),
        ]
    );
}

/// Verifies N16.
#[test]
fn cgroup_line_of_any_bytes_hides_no_other_line() {
    let hierarchies = parse_hierarchies(HYBRID);
    let text = [b"3:pids:/\xff\xfe\n".as_slice(), format!("0::/a/{ID}\n").as_bytes()].concat();
    let expected = PathBuf::from(format!("/sys/fs/cgroup/unified/a/{ID}"));
    assert_eq!(container_dirs(&hierarchies, &text), [expected]);
}

fn played(dir: &Path) -> Vec<Hierarchy> {
    vec![Hierarchy::played(dir, &["pids"])]
}

#[test]
fn leftovers_of_a_pod_are_found_with_either_cgroup_driver() {
    let root = tempfile::tempdir().unwrap();
    let hierarchies = played(root.path());
    let (left, kept) =
        (format!("kubepods/besteffort/pod12-34/{ID}"), format!("kubepods/besteffort/pod99/{ID}"));
    let slice = format!("kubepods.slice/kubepods-pod12_34.slice/cri-containerd-{ID}.scope");
    let (parent, shared) = (
        "kubepods.slice/kubepods-pod12_34.slice/kiyot".to_owned(),
        "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod12_34.slice/kiyot",
    );
    let nested = format!("{parent}/{ID}");
    fs::create_dir_all(root.path().join(shared).join("a-cgroup-of-another-attempt")).unwrap();
    let (other, elsewhere) = ("f".repeat(64), format!("a/parent/of/ones/own/{}", "f".repeat(64)));
    for dir in [&left, &kept, &slice, &nested, &elsewhere] {
        fs::create_dir_all(root.path().join(dir)).unwrap();
    }
    let containers = |uid: &str, ids: &[&String]| Containers {
        pod_uid: Some(uid.to_owned()).filter(|uid| !uid.is_empty()),
        ids: ids.iter().map(|id| (*id).clone()).collect(),
    };
    assert_eq!(
        containers("", &[&other]).anywhere(&hierarchies),
        [root.path().join(&elsewhere)].into()
    );
    let found = containers("12-34", &[&other]).anywhere(&hierarchies);
    assert_eq!(
        found,
        [&*slice, &left, &nested, &parent, shared, &elsewhere]
            .map(|dir| root.path().join(dir))
            .into()
    );
    remove_containers(&found).unwrap();
    assert!(!root.path().join(&parent).exists() && root.path().join(shared).exists());
    assert!(!root.path().join(&left).exists() && root.path().join(&kept).exists());
    assert!(
        root.path().join("kubepods/besteffort/pod12-34").exists(),
        "the pod's own cgroup belongs to the kubelet"
    );
    assert!(containers("", &[]).anywhere(&hierarchies).is_empty());
    remove_containers(&found).unwrap();
}

#[test]
fn leftovers_in_the_parent_of_the_pod_are_found() {
    let root = tempfile::tempdir().unwrap();
    let hierarchies = played(root.path());
    let slice = "kubepods.slice/kubepods-pod12_34.slice";
    let (own, neighbour) = ("e".repeat(64), "f".repeat(64));
    for dir in [
        format!("kubepods/pod12-34/{ID}"),
        format!("{slice}/kiyot/{ID}"),
        format!("shared/{own}"),
        format!("shared/{neighbour}"),
        format!("shared/kiyot/{own}"),
    ] {
        fs::create_dir_all(root.path().join(dir)).unwrap();
    }
    let containers = Containers { pod_uid: Some("12-34".into()), ids: [own.clone()].into() };
    let within = |parent: &str| containers.within(&hierarchies, parent);
    let expected = |dirs: &[String]| Some(dirs.iter().map(|dir| root.path().join(dir)).collect());
    // All cgroups in the pod's own are the pod's, with either driver.
    assert_eq!(within("/kubepods/pod12-34"), expected(&[format!("kubepods/pod12-34/{ID}")]));
    assert_eq!(
        within(&format!("/{slice}/")),
        expected(&[format!("{slice}/kiyot"), format!("{slice}/kiyot/{ID}")])
    );
    // A parent of several pods has containers of others.
    assert_eq!(
        within("/shared"),
        expected(&[format!("shared/{own}"), format!("shared/kiyot/{own}")])
    );
    assert_eq!(within("/absent"), expected(&[]));
    for parent in ["", "/", "/a/../b"] {
        assert_eq!(within(parent), None, "{parent:?}");
    }
}

#[test]
fn processes_in_cgroups_of_a_cell_belong_to_it() {
    let root = tempfile::tempdir().unwrap();
    let hierarchies = played(root.path());
    assert!(processes(&hierarchies, "cell-a").unwrap().is_empty(), "absent cgroup");
    make(&hierarchies, "cell-a").unwrap();
    let own = root.path().join(name("cell-a"));
    fs::create_dir_all(own.join("deeper")).unwrap();
    fs::create_dir_all(root.path().join(name("cell-b"))).unwrap();
    fs::write(own.join("cgroup.procs"), "17\n0\n18\n").unwrap();
    fs::write(own.join("deeper/cgroup.procs"), "19\n").unwrap();
    fs::write(root.path().join(name("cell-b")).join("cgroup.procs"), "20\n").unwrap();
    assert_eq!(processes(&hierarchies, "cell-a").unwrap(), [17, 18, 19].into());
}

#[test]
fn removal_of_the_last_cell_removes_nested_cgroups_and_the_parent() {
    let root = tempfile::tempdir().unwrap();
    let hierarchies = played(root.path());
    make(&hierarchies, "cell-a").unwrap();
    make(&hierarchies, "cell-a").unwrap();
    make(&hierarchies, "cell-b").unwrap();
    fs::create_dir_all(root.path().join(name("cell-a")).join("system.slice/deep")).unwrap();
    remove(&hierarchies, "cell-a").unwrap();
    assert!(
        !root.path().join(name("cell-a")).exists() && root.path().join(name("cell-b")).exists()
    );
    remove(&hierarchies, "cell-b").unwrap();
    remove(&hierarchies, "cell-b").unwrap();
    assert_eq!(children(root.path()).count(), 0);
}

#[test]
fn cgroup_parent_that_leads_outside_is_refused() {
    let deep = "/a".repeat(MAX_DEPTH + 1);
    for parent in ["", "/", "//", "/kubepods/../../etc", "..", "/./..", &deep] {
        assert_eq!(relative(parent), None, "{parent:?}");
    }
    assert_eq!(relative("kubepods/pod1/"), RelPath::parse("kubepods/pod1").ok());
}
