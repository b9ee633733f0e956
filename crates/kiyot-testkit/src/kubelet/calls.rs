//! CRI calls of a kubelet, with its deadlines.

use std::time::Duration;

use tonic::{Request, Status};

use super::{Container, Kubelet, Pod, RunningContainer, RunningPod};
use crate::{LIMIT, allowed, cri, wait_until};

/// The kubelet's `runtimeRequestTimeout`.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);

/// Output of an ExecSync.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecOutput {
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Exit code.
    pub code: i32,
}

/// A line of a log file in the CRI format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// Timestamp, RFC 3339 with nanoseconds.
    pub time: String,
    /// `stdout` or `stderr`.
    pub stream: String,
    /// True for a full line (`F`), false for a partial line (`P`).
    pub whole: bool,
    /// Content without the line end.
    pub text: String,
}

impl LogLine {
    /// Parses the complete lines of a file. Drops an unfinished last line.
    ///
    /// # Panics
    /// If a line is malformed.
    pub fn parse_all(file: &[u8]) -> Vec<Self> {
        let end = file.iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
        let text = String::from_utf8_lossy(&file[..end]).into_owned();
        text.lines()
            .map(|line| {
                Self::parse(line).unwrap_or_else(|| panic!("not a line of a CRI log: {line:?}"))
            })
            .collect()
    }

    fn parse(line: &str) -> Option<Self> {
        let mut parts = line.splitn(4, ' ');
        let (time, stream, tags, text) =
            (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let good = time.contains('T')
            && matches!(stream, "stdout" | "stderr")
            && matches!(tags, "F" | "P");
        good.then(|| Self {
            time: time.to_owned(),
            stream: stream.to_owned(),
            whole: tags == "F",
            text: text.to_owned(),
        })
    }
}

/// Returns a request with the kubelet's usual deadline.
fn with_deadline<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(allowed(REQUEST_TIMEOUT));
    request
}

impl Kubelet {
    /// Calls RunPodSandbox with the kubelet's deadline, twice the usual, and returns the sandbox's
    /// id.
    pub async fn run_sandbox(
        &mut self,
        config: &cri::PodSandboxConfig,
        runtime_handler: &str,
    ) -> Result<String, Status> {
        let message = cri::RunPodSandboxRequest {
            config: Some(config.clone()),
            runtime_handler: runtime_handler.to_owned(),
        };
        let mut request = Request::new(message);
        request.set_timeout(allowed(REQUEST_TIMEOUT * 2));
        Ok(self.runtime.run_pod_sandbox(request).await?.into_inner().pod_sandbox_id)
    }

    /// Calls PodSandboxStatus.
    pub async fn sandbox_status(&mut self, sandbox: &str) -> Result<cri::PodSandboxStatus, Status> {
        let request = with_deadline(cri::PodSandboxStatusRequest {
            pod_sandbox_id: sandbox.to_owned(),
            verbose: false,
        });
        let response = self.runtime.pod_sandbox_status(request).await?.into_inner();
        response.status.ok_or_else(|| Status::internal("the response has no status"))
    }

    /// Returns the account of a pod's cell, as `crictl inspectp` shows it; `None` for a pod on the
    /// node.
    pub async fn cell_account(
        &mut self,
        sandbox: &str,
    ) -> Result<Option<serde_json::Value>, Status> {
        let request = with_deadline(cri::PodSandboxStatusRequest {
            pod_sandbox_id: sandbox.to_owned(),
            verbose: true,
        });
        let info = self.runtime.pod_sandbox_status(request).await?.into_inner().info;
        let account = info.get("info").and_then(|info| serde_json::from_str(info).ok());
        Ok(account.filter(|account: &serde_json::Value| account.get("cell").is_some()))
    }

    /// Calls ListPodSandbox without a filter, as PLEG does each second.
    pub async fn sandboxes(&mut self) -> Result<Vec<cri::PodSandbox>, Status> {
        Ok(self
            .runtime
            .list_pod_sandbox(with_deadline(cri::ListPodSandboxRequest::default()))
            .await?
            .into_inner()
            .items)
    }

    /// Calls ListContainers without a filter, as PLEG does each second.
    pub async fn containers(&mut self) -> Result<Vec<cri::Container>, Status> {
        Ok(self
            .runtime
            .list_containers(with_deadline(cri::ListContainersRequest::default()))
            .await?
            .into_inner()
            .containers)
    }

    /// Makes an image present as the kubelet does with the policy IfNotPresent: calls ImageStatus
    /// with the pod's annotations, then PullImage. Returns the reference for CreateContainer.
    pub async fn ensure_image(
        &mut self,
        pod: &Pod,
        config: &cri::PodSandboxConfig,
        image: &str,
    ) -> Result<String, Status> {
        if let Some(found) = self.image_status(pod, image).await? {
            return Ok(found.id);
        }
        self.pull(pod, config, image, None).await
    }

    /// Calls ImageStatus with the pod's annotations. Returns `None` if the image is absent for this
    /// pod.
    pub async fn image_status(
        &mut self,
        pod: &Pod,
        image: &str,
    ) -> Result<Option<cri::Image>, Status> {
        let image = cri::ImageSpec {
            image: image.to_owned(),
            annotations: self.annotations(pod),
            ..Default::default()
        };
        let request = with_deadline(cri::ImageStatusRequest { image: Some(image), verbose: false });
        validated(self.image.image_status(request).await?.into_inner())
    }

    /// Calls ImageStatus without a pod, as the kubelet does to learn the user of an image.
    pub async fn image_status_without_pod(
        &mut self,
        image: &str,
    ) -> Result<Option<cri::Image>, Status> {
        let image = cri::ImageSpec { image: image.to_owned(), ..Default::default() };
        let request = with_deadline(cri::ImageStatusRequest { image: Some(image), verbose: false });
        validated(self.image.image_status(request).await?.into_inner())
    }

    /// Calls PullImage for a pod with a running sandbox, without a deadline, as the kubelet does.
    /// Returns the reference for CreateContainer.
    pub async fn pull(
        &mut self,
        pod: &Pod,
        config: &cri::PodSandboxConfig,
        image: &str,
        auth: Option<cri::AuthConfig>,
    ) -> Result<String, Status> {
        let image = cri::ImageSpec {
            image: image.to_owned(),
            annotations: self.annotations(pod),
            ..Default::default()
        };
        let request = cri::PullImageRequest {
            image: Some(image),
            auth,
            sandbox_config: Some(self.current_config(pod, config)),
        };
        Ok(self.image.pull_image(request).await?.into_inner().image_ref)
    }

    /// Returns the sandbox's config with the current annotations, which the kubelet sends in each
    /// call.
    fn current_config(&self, pod: &Pod, config: &cri::PodSandboxConfig) -> cri::PodSandboxConfig {
        cri::PodSandboxConfig { annotations: self.annotations(pod), ..config.clone() }
    }

    /// Makes the image present, and calls CreateContainer.
    pub async fn create_container(
        &mut self,
        pod: &RunningPod,
        container: &Container,
        attempt: u32,
    ) -> Result<RunningContainer, Status> {
        Box::pin(self.create_container_with(pod, container, attempt, |_| {})).await
    }

    /// Acts as [`create_container`](Self::create_container), with a changed config.
    pub async fn create_container_with(
        &mut self,
        pod: &RunningPod,
        container: &Container,
        attempt: u32,
        change: impl FnOnce(&mut cri::ContainerConfig),
    ) -> Result<RunningContainer, Status> {
        // Boxed because messages are large, to keep the futures of tests small.
        let image = Box::pin(self.ensure_image(&pod.spec, &pod.config, &container.image)).await?;
        let mut created = self.container_config(pod, container, attempt, image);
        change(&mut created.config);
        let request = with_deadline(cri::CreateContainerRequest {
            pod_sandbox_id: pod.sandbox.clone(),
            config: Some(created.config.clone()),
            sandbox_config: Some(self.current_config(&pod.spec, &pod.config)),
        });
        created.id =
            Box::pin(self.runtime.create_container(request)).await?.into_inner().container_id;
        Ok(created)
    }

    /// Calls StartContainer.
    pub async fn start_container(&mut self, container: &str) -> Result<(), Status> {
        self.runtime
            .start_container(with_deadline(cri::StartContainerRequest {
                container_id: container.to_owned(),
            }))
            .await?;
        Ok(())
    }

    /// Calls StopContainer with a grace period in seconds.
    pub async fn stop_container(&mut self, container: &str, grace: i64) -> Result<(), Status> {
        self.runtime
            .stop_container(with_deadline(cri::StopContainerRequest {
                container_id: container.to_owned(),
                timeout: grace,
            }))
            .await?;
        Ok(())
    }

    /// Calls ContainerStatus.
    pub async fn container_status(
        &mut self,
        container: &str,
    ) -> Result<cri::ContainerStatus, Status> {
        let request = with_deadline(cri::ContainerStatusRequest {
            container_id: container.to_owned(),
            verbose: false,
        });
        let response = self.runtime.container_status(request).await?.into_inner();
        response.status.ok_or_else(|| Status::internal("the response has no status"))
    }

    /// Waits until a container has exited, and returns its status.
    pub async fn exited(&mut self, container: &str) -> cri::ContainerStatus {
        wait_until(format!("the container {container} has exited"), LIMIT, async || {
            let status = self.container_status(container).await.ok()?;
            (status.state() == cri::ContainerState::ContainerExited).then_some(status)
        })
        .await
    }

    /// Calls ExecSync.
    pub async fn exec_sync(
        &mut self,
        container: &str,
        command: &[&str],
    ) -> Result<ExecOutput, Status> {
        let cmd = command.iter().map(|word| (*word).to_owned()).collect();
        // The program's timeout, which a probe sets, is shorter than the call's deadline.
        let timeout = i64::try_from(LIMIT.as_secs()).unwrap_or(i64::MAX);
        let request = with_deadline(cri::ExecSyncRequest {
            container_id: container.to_owned(),
            cmd,
            timeout,
        });
        let response = self.runtime.exec_sync(request).await?.into_inner();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(ExecOutput {
            stdout: text(&response.stdout),
            stderr: text(&response.stderr),
            code: response.exit_code,
        })
    }
}

/// Returns the image of a response. A kubelet rejects an image without an id or a size (cri-client,
/// ImageStatus).
fn validated(response: cri::ImageStatusResponse) -> Result<Option<cri::Image>, Status> {
    match response.image {
        Some(image) if image.id.is_empty() || image.size == 0 => {
            Err(Status::internal(format!("id or size of the image {image:?} is not set")))
        }
        image => Ok(image),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_with_an_unfinished_line_parses_to_its_complete_lines() {
        let lines = LogLine::parse_all(
            b"2026-01-02T03:04:05.000000000Z stdout F a line\n\
              2026-01-02T03:04:05.000000001Z stderr P part\n\
              2026-01",
        );
        assert_eq!(lines.len(), 2);
        assert_eq!((lines[0].text.as_str(), lines[0].whole), ("a line", true));
        assert_eq!((lines[1].stream.as_str(), lines[1].whole), ("stderr", false));
    }
}
