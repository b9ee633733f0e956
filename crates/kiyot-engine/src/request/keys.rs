//! Keys of annotations.

/// `kiyot`: the pod runs in a cell. Routing reads it, with the backends' declarations.
pub const TARGET_RUNTIME: &str = "kubernetes.io/target-runtime";
/// `On-Demand`, `Spot` or `Spot-Preferred`, in any case.
pub const LAUNCH_TYPE: &str = "pod.elotl.co/launch-type";
/// Boolean. Deprecated: [`LAUNCH_TYPE`].
pub const SPOT_INSTANCE: &str = "pod.elotl.co/spot-instance";
/// Instance type, or a glob of instance types.
pub const INSTANCE_TYPE: &str = "pod.elotl.co/instance-type";
/// Quantity of CPUs.
pub const CPU: &str = "pod.elotl.co/cpu";
/// Quantity of bytes.
pub const MEMORY: &str = "pod.elotl.co/memory";
/// Number of GPUs, with a manufacturer or a name.
pub const GPU: &str = "pod.elotl.co/gpu";
/// `amd64` or `arm64`.
pub const ARCHITECTURE: &str = "pod.elotl.co/architecture";
/// Dollars an hour, which bound the price at the choice of the instance.
pub const MAX_PRICE: &str = "pod.elotl.co/max-price";
/// Boolean.
pub const SUSTAINED_CPU: &str = "pod.elotl.co/sustained-cpu";
/// Quantity of bytes.
pub const VOLUME_SIZE: &str = "pod.elotl.co/volume-size";
/// Boolean.
pub const PRIVATE_IP_ONLY: &str = "pod.elotl.co/private-ip-only";
/// Security groups, separated by commas.
pub const SECURITY_GROUPS: &str = "pod.elotl.co/security-groups";
/// ARN.
pub const INSTANCE_PROFILE: &str = "pod.elotl.co/instance-profile";
/// Seconds; 0 is never.
pub const HEALTHY_TIMEOUT: &str = "pod.elotl.co/healthcheck-healthy-timeout";
/// CIDRs, separated by white space.
pub const CLOUD_ROUTE: &str = "pod.elotl.co/cloud-route";

/// `netns`, `qemu` or `ec2`.
pub const PROVIDER: &str = "pod.elotl.co/provider";
/// `machine` or `instance`.
pub const ISOLATION: &str = "pod.elotl.co/isolation";

/// Time within which the cell should start, such as `10s`.
pub const START_WITHIN: &str = "pod.elotl.co/start-within";

/// Keys that a [`CellRequest`](super::CellRequest) is read from.
pub const KEYS: [&str; 18] = [
    LAUNCH_TYPE,
    SPOT_INSTANCE,
    INSTANCE_TYPE,
    CPU,
    MEMORY,
    GPU,
    ARCHITECTURE,
    MAX_PRICE,
    SUSTAINED_CPU,
    VOLUME_SIZE,
    PRIVATE_IP_ONLY,
    SECURITY_GROUPS,
    INSTANCE_PROFILE,
    HEALTHY_TIMEOUT,
    CLOUD_ROUTE,
    PROVIDER,
    ISOLATION,
    START_WITHIN,
];

/// Prefix of all [`KEYS`].
pub const PREFIX: &str = "pod.elotl.co/";
