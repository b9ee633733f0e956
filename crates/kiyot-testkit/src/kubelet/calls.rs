//! The calls of a kubelet, with its deadlines.

use std::time::Duration;

use tonic::{Request, Status};

use super::{Container, Kubelet, Pod, RunningContainer, RunningPod};
use crate::{LIMIT, allowed, cri, wait_until};

/// The kubelet's `runtimeRequestTimeout`.
const TIMEOUT: Duration = Duration::from_secs(120);

/// What ExecSync gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecOutput {
    /// What it wrote to its standard output.
    pub stdout: String,
    /// What it wrote to its standard error.
    pub stderr: String,
    /// How it ended.
    pub code: i32,
}

/// One line of a log file in CRI's format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// RFC 3339 with nanoseconds.
    pub time: String,
    /// `stdout` or `stderr`.
    pub stream: String,
    /// Is it a whole line (`F`) or the first part of one (`P`)?
    pub whole: bool,
    /// What was written.
    pub text: String,
}

impl LogLine {
    /// The whole lines of a file. Half a line at its end is still being written and left out.
    ///
    /// # Panics
    /// When a line isn't in the format.
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

/// A request with the kubelet's usual deadline.
fn timed<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(allowed(TIMEOUT));
    request
}

impl Kubelet {
    /// RunPodSandbox; gives the sandbox's id. The kubelet waits twice its usual time.
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
        request.set_timeout(allowed(TIMEOUT * 2));
        Ok(self.runtime.run_pod_sandbox(request).await?.into_inner().pod_sandbox_id)
    }

    /// PodSandboxStatus.
    pub async fn sandbox_status(&mut self, sandbox: &str) -> Result<cri::PodSandboxStatus, Status> {
        let request = timed(cri::PodSandboxStatusRequest {
            pod_sandbox_id: sandbox.to_owned(),
            verbose: false,
        });
        let response = self.runtime.pod_sandbox_status(request).await?.into_inner();
        response.status.ok_or_else(|| Status::internal("the answer has no status"))
    }

    /// ListPodSandbox without a filter, as PLEG asks each second.
    pub async fn sandboxes(&mut self) -> Result<Vec<cri::PodSandbox>, Status> {
        Ok(self
            .runtime
            .list_pod_sandbox(timed(cri::ListPodSandboxRequest::default()))
            .await?
            .into_inner()
            .items)
    }

    /// ListContainers without a filter, as PLEG asks each second.
    pub async fn containers(&mut self) -> Result<Vec<cri::Container>, Status> {
        Ok(self
            .runtime
            .list_containers(timed(cri::ListContainersRequest::default()))
            .await?
            .into_inner()
            .containers)
    }

    /// Makes an image present as the kubelet does with the policy IfNotPresent: ImageStatus with
    /// the pod's annotations, then PullImage. Gives the reference to create the container with.
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

    /// ImageStatus with the pod's annotations; `None` if the image is not there for this pod.
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
        let request = timed(cri::ImageStatusRequest { image: Some(image), verbose: false });
        taken(self.image.image_status(request).await?.into_inner())
    }

    /// ImageStatus as the kubelet asks for the user of an image: for no pod.
    pub async fn image_of_nobody(&mut self, image: &str) -> Result<Option<cri::Image>, Status> {
        let image = cri::ImageSpec { image: image.to_owned(), ..Default::default() };
        let request = timed(cri::ImageStatusRequest { image: Some(image), verbose: false });
        taken(self.image.image_status(request).await?.into_inner())
    }

    /// PullImage for a pod whose sandbox runs. Gives the reference to create containers with. The
    /// kubelet waits for it without an end.
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
            sandbox_config: Some(self.current(pod, config)),
        };
        Ok(self.image.pull_image(request).await?.into_inner().image_ref)
    }

    /// Returns the sandbox's config as the kubelet makes it anew for each call, with the annotations
    /// of now.
    fn current(&self, pod: &Pod, config: &cri::PodSandboxConfig) -> cri::PodSandboxConfig {
        cri::PodSandboxConfig { annotations: self.annotations(pod), ..config.clone() }
    }

    /// Makes the image present, then CreateContainer.
    pub async fn create_container(
        &mut self,
        pod: &RunningPod,
        container: &Container,
        attempt: u32,
    ) -> Result<RunningContainer, Status> {
        Box::pin(self.create_container_with(pod, container, attempt, |_| {})).await
    }

    /// As [`create_container`](Self::create_container), with a config that is changed first.
    pub async fn create_container_with(
        &mut self,
        pod: &RunningPod,
        container: &Container,
        attempt: u32,
        change: impl FnOnce(&mut cri::ContainerConfig),
    ) -> Result<RunningContainer, Status> {
        // The messages are large: boxed, the futures of tests stay small.
        let image = Box::pin(self.ensure_image(&pod.spec, &pod.config, &container.image)).await?;
        let mut created = self.container_config(pod, container, attempt, image);
        change(&mut created.config);
        let request = timed(cri::CreateContainerRequest {
            pod_sandbox_id: pod.sandbox.clone(),
            config: Some(created.config.clone()),
            sandbox_config: Some(self.current(&pod.spec, &pod.config)),
        });
        created.id =
            Box::pin(self.runtime.create_container(request)).await?.into_inner().container_id;
        Ok(created)
    }

    /// StartContainer.
    pub async fn start_container(&mut self, container: &str) -> Result<(), Status> {
        self.runtime
            .start_container(timed(cri::StartContainerRequest {
                container_id: container.to_owned(),
            }))
            .await?;
        Ok(())
    }

    /// StopContainer, with so many seconds of grace.
    pub async fn stop_container(&mut self, container: &str, grace: i64) -> Result<(), Status> {
        self.runtime
            .stop_container(timed(cri::StopContainerRequest {
                container_id: container.to_owned(),
                timeout: grace,
            }))
            .await?;
        Ok(())
    }

    /// ContainerStatus.
    pub async fn container_status(
        &mut self,
        container: &str,
    ) -> Result<cri::ContainerStatus, Status> {
        let request = timed(cri::ContainerStatusRequest {
            container_id: container.to_owned(),
            verbose: false,
        });
        let response = self.runtime.container_status(request).await?.into_inner();
        response.status.ok_or_else(|| Status::internal("the answer has no status"))
    }

    /// Waits until a container has exited and gives its last status.
    pub async fn exited(&mut self, container: &str) -> cri::ContainerStatus {
        wait_until(format!("the container {container} has exited"), LIMIT, async || {
            let status = self.container_status(container).await.ok()?;
            (status.state() == cri::ContainerState::ContainerExited).then_some(status)
        })
        .await
    }

    /// ExecSync of a program with its arguments.
    pub async fn exec_sync(
        &mut self,
        container: &str,
        command: &[&str],
    ) -> Result<ExecOutput, Status> {
        let cmd = command.iter().map(|word| (*word).to_owned()).collect();
        // As a probe with a time limit of its own: the program's, and behind it the call's.
        let timeout = i64::try_from(LIMIT.as_secs()).unwrap_or(i64::MAX);
        let request =
            timed(cri::ExecSyncRequest { container_id: container.to_owned(), cmd, timeout });
        let response = self.runtime.exec_sync(request).await?.into_inner();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(ExecOutput {
            stdout: text(&response.stdout),
            stderr: text(&response.stderr),
            code: response.exit_code,
        })
    }
}

/// Returns the image of an answer. A kubelet takes none without an id or a size (cri-client,
/// ImageStatus).
fn taken(answer: cri::ImageStatusResponse) -> Result<Option<cri::Image>, Status> {
    match answer.image {
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
    fn only_whole_lines_of_a_log_count() {
        let lines = LogLine::parse_all(b"2026-01-02T03:04:05.000000000Z stdout F a line\n2026-01-02T03:04:05.000000001Z stderr P part\n2026-01");
        assert_eq!(lines.len(), 2);
        assert_eq!((lines[0].text.as_str(), lines[0].whole), ("a line", true));
        assert_eq!((lines[1].stream.as_str(), lines[1].whole), ("stderr", false));
    }
}
