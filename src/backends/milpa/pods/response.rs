//! CRI responses from records: the kubelet reads what it sent. Only states, times and exit codes
//! are from the cell.

use kiyot_proto::{cri, store};

/// Returns a sandbox's list entry.
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

/// Returns a sandbox's status.
///
/// The kubelet compares the network mode with the pod's, and treats a sandbox without an address as
/// broken (util.PodSandboxChanged). So both values are the pod's here, never the cell's. As in
/// containerd, a stopped sandbox has no address.
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

/// Returns a container's list entry.
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

/// Returns a container's status. Resources, user and stop signal are from the last status that the
/// cell has `reported`.
///
/// `image.image` is the pod's reference of the image, `image_ref` its digest in the cell, and
/// `image_id` the id in the responses of `PullImage` and `ImageStatus`.
pub(crate) fn container_status(
    meta: &store::ContainerMeta,
    status: &store::ContainerStatus,
    reported: cri::ContainerStatus,
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
        resources: reported.resources,
        image_id: meta.image_id.clone(),
        user: reported.user,
        stop_signal: reported.stop_signal,
    }
}
