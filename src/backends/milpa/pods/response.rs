//! What the kubelet is answered of a pod, from the records: what it sent, as it sent it, and only
//! states, times and exit codes from the cell.

use kiyot_proto::{cri, store};

/// A sandbox's entry in a list.
pub(crate) fn sandbox_item(meta: &store::SandboxMeta, ready: bool) -> cri::PodSandbox {
    let config = meta.config.clone().unwrap_or_default();
    cri::PodSandbox {
        id: meta.id.clone(),
        metadata: config.metadata,
        state: sandbox_state(ready).into(),
        created_at: meta.created_unix_nanos,
        labels: config.labels,
        annotations: config.annotations,
        runtime_handler: meta.runtime_handler.clone(),
    }
}

/// A sandbox's status.
///
/// The kubelet compares the network mode with the pod's, and takes a sandbox without an address for
/// a broken one (util.PodSandboxChanged): both are the pod's here, whatever the cell's containerd
/// was told. As with containerd, one that has stopped has no address.
pub(crate) fn sandbox_status(meta: &store::SandboxMeta, ready: bool) -> cri::PodSandboxStatus {
    let config = meta.config.clone().unwrap_or_default();
    let addresses: &[String] = if ready { &meta.addresses } else { &[] };
    let options = config
        .linux
        .and_then(|linux| linux.security_context)
        .and_then(|context| context.namespace_options);
    cri::PodSandboxStatus {
        id: meta.id.clone(),
        metadata: config.metadata,
        state: sandbox_state(ready).into(),
        created_at: meta.created_unix_nanos,
        network: Some(cri::PodSandboxNetworkStatus {
            ip: addresses.first().cloned().unwrap_or_default(),
            additional_ips: addresses
                .iter()
                .skip(1)
                .map(|ip| cri::PodIp { ip: ip.clone() })
                .collect(),
        }),
        linux: Some(cri::LinuxPodSandboxStatus { namespaces: Some(cri::Namespace { options }) }),
        labels: config.labels,
        annotations: config.annotations,
        runtime_handler: meta.runtime_handler.clone(),
    }
}

const fn sandbox_state(ready: bool) -> cri::PodSandboxState {
    if ready { cri::PodSandboxState::SandboxReady } else { cri::PodSandboxState::SandboxNotready }
}

/// A container's entry in a list.
pub(crate) fn container_item(
    meta: &store::ContainerMeta,
    state: cri::ContainerState,
) -> cri::Container {
    let config = meta.config.clone().unwrap_or_default();
    cri::Container {
        id: meta.id.clone(),
        pod_sandbox_id: meta.sandbox.clone(),
        metadata: config.metadata,
        image: config.image,
        image_ref: meta.image_id.clone(),
        state: state.into(),
        created_at: meta.created_unix_nanos,
        labels: config.labels,
        annotations: config.annotations,
        image_id: meta.image_id.clone(),
    }
}

/// A container's status. `told` is what the cell's containerd says last: of it only the resources,
/// the user and the signal are taken.
///
/// `image.image` is the pod's own word for the image, `image_ref` the digest by which the cell
/// knows it, `image_id` what `PullImage` and `ImageStatus` answered.
pub(crate) fn container_status(
    meta: &store::ContainerMeta,
    status: &store::ContainerStatus,
    told: cri::ContainerStatus,
) -> cri::ContainerStatus {
    let config = meta.config.clone().unwrap_or_default();
    let mut image = config.image.unwrap_or_default();
    if !image.user_specified_image.is_empty() {
        image.image.clone_from(&image.user_specified_image);
    }
    cri::ContainerStatus {
        id: meta.id.clone(),
        metadata: config.metadata,
        state: status.state,
        created_at: meta.created_unix_nanos,
        started_at: status.started_unix_nanos,
        finished_at: status.finished_unix_nanos,
        exit_code: status.exit_code,
        image: Some(image),
        image_ref: meta.image_ref.clone(),
        reason: status.reason.clone(),
        message: status.message.clone(),
        labels: config.labels,
        annotations: config.annotations,
        mounts: config.mounts,
        log_path: meta.log_path.clone(),
        resources: told.resources,
        image_id: meta.image_id.clone(),
        user: told.user,
        stop_signal: told.stop_signal,
    }
}
