//! Methods of CRI v1.

use std::fmt;

macro_rules! methods {
    ($($(#[$doc:meta])* $name:ident $service:literal;)*) => {
        /// A method of CRI v1.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Method {
            $(#[doc = concat!("`/runtime.v1.", $service, "/", stringify!($name), "`")] $name,)*
        }

        impl Method {
            /// All methods.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Returns the `:path` of the method's requests.
            pub const fn path(self) -> &'static str {
                match self {
                    $(Self::$name => concat!("/runtime.v1.", $service, "/", stringify!($name)),)*
                }
            }

            /// Returns the method of a `:path`; `None` if this version of CRI has no such method.
            pub fn from_path(path: &str) -> Option<Self> {
                match path {
                    $(concat!("/runtime.v1.", $service, "/", stringify!($name)) => {
                        Some(Self::$name)
                    })*
                    _ => None,
                }
            }

            /// Returns the method's name without the service.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                }
            }
        }
    };
}

methods! {
    Version "RuntimeService";
    RunPodSandbox "RuntimeService";
    StopPodSandbox "RuntimeService";
    RemovePodSandbox "RuntimeService";
    PodSandboxStatus "RuntimeService";
    ListPodSandbox "RuntimeService";
    StreamPodSandboxes "RuntimeService";
    CreateContainer "RuntimeService";
    StartContainer "RuntimeService";
    StopContainer "RuntimeService";
    RemoveContainer "RuntimeService";
    ListContainers "RuntimeService";
    StreamContainers "RuntimeService";
    ContainerStatus "RuntimeService";
    UpdateContainerResources "RuntimeService";
    ReopenContainerLog "RuntimeService";
    ExecSync "RuntimeService";
    Exec "RuntimeService";
    Attach "RuntimeService";
    PortForward "RuntimeService";
    ContainerStats "RuntimeService";
    ListContainerStats "RuntimeService";
    StreamContainerStats "RuntimeService";
    PodSandboxStats "RuntimeService";
    ListPodSandboxStats "RuntimeService";
    StreamPodSandboxStats "RuntimeService";
    UpdateRuntimeConfig "RuntimeService";
    Status "RuntimeService";
    CheckpointContainer "RuntimeService";
    CheckpointPod "RuntimeService";
    RestorePod "RuntimeService";
    GetContainerEvents "RuntimeService";
    ListMetricDescriptors "RuntimeService";
    ListPodSandboxMetrics "RuntimeService";
    StreamPodSandboxMetrics "RuntimeService";
    RuntimeConfig "RuntimeService";
    UpdatePodSandboxResources "RuntimeService";
    ListImages "ImageService";
    StreamImages "ImageService";
    ImageStatus "ImageService";
    PullImage "ImageService";
    RemoveImage "ImageService";
    ImageFsInfo "ImageService";
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_of_each_method_names_that_method() {
        for &method in Method::ALL {
            assert_eq!(Method::from_path(method.path()), Some(method));
        }
        assert_eq!(Method::from_path("/runtime.v1.RuntimeService/Levitate"), None);
    }
}
