//! Instances, as EC2 describes them.

use std::{collections::BTreeMap, fmt, net::IpAddr, time::Duration};

/// Bounds the code of a reason, in bytes.
const MAX_CODE_BYTES: usize = 100;
/// Bounds the message of a reason, in characters.
const MAX_MESSAGE_CHARS: usize = 300;

/// Reason for the last change of an instance's state (`StateReason`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateReason {
    /// The code, such as `Client.VolumeLimitExceeded`.
    pub code: String,
    /// EC2's message, bounded and without control characters. Often it begins with the code.
    pub message: String,
}

impl StateReason {
    /// Returns a reason; `None` without a valid code.
    pub fn new(code: &str, message: &str) -> Option<Self> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        let is_valid = (1..=MAX_CODE_BYTES).contains(&code.len()) && code.bytes().all(fits);
        let plain = message.chars().map(|char| if char.is_control() { ' ' } else { char });
        let message: String = plain.take(MAX_MESSAGE_CHARS).collect();
        is_valid.then(|| Self { code: code.to_owned(), message: message.trim().to_owned() })
    }
}

impl fmt::Display for StateReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.message.starts_with(&self.code) {
            return f.write_str(&self.message);
        }
        match self.message.as_str() {
            "" => f.write_str(&self.code),
            message => write!(f, "{}: {message}", self.code),
        }
    }
}

/// An instance (`Instance` of the API).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceDescription {
    /// The id, such as `i-0123456789abcdef0`.
    pub id: String,
    /// The client token of its launch.
    pub client_token: Option<String>,
    /// The instance type.
    pub instance_type: String,
    /// The availability zone.
    pub zone: String,
    /// True if it is a spot instance (`InstanceLifecycle`).
    pub is_spot: bool,
    /// The state.
    pub state: InstanceStateName,
    /// The reason for its state.
    pub reason: Option<StateReason>,
    /// The subnet, until it is terminated.
    pub subnet: Option<String>,
    /// The VPC, until it is terminated.
    pub vpc: Option<String>,
    /// The source/destination check of its first interface (`SourceDestCheck`): true if it is on,
    /// `None` if it is not shown.
    pub has_source_dest_check: Option<bool>,
    /// The options of its metadata service, if they are shown.
    pub metadata: Option<MetadataOptions>,
    /// The private address, until it is terminated.
    pub private_address: Option<IpAddr>,
    /// The public address.
    pub public_address: Option<IpAddr>,
    /// The name of the private address in the VPC's DNS (`PrivateDnsName`).
    pub private_name: Option<String>,
    /// The name of the public address (`PublicDnsName`).
    pub public_name: Option<String>,
    /// The time of its launch since 1970 (`LaunchTime`).
    pub launched: Option<Duration>,
    /// The ids of its volumes; absent in the answer to a launch.
    pub volumes: Vec<String>,
    /// The ids of its network interfaces.
    pub interfaces: Vec<String>,
    /// The tags.
    pub tags: BTreeMap<String, String>,
}

/// The options of an instance's metadata service (`MetadataOptions`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MetadataOptions {
    /// True if the service answers (`HttpEndpoint`).
    pub is_enabled: bool,
    /// True if the service requires version 2 (`HttpTokens`).
    pub requires_tokens: bool,
    /// The hop limit of responses with a token (`HttpPutResponseHopLimit`).
    pub hop_limit: i32,
}

/// The state of an instance (`InstanceState.Name`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstanceStateName {
    /// Being launched, or starting again.
    Pending,
    /// Running.
    Running,
    /// Being terminated.
    ShuttingDown,
    /// Terminated.
    Terminated,
    /// Being stopped.
    Stopping,
    /// Stopped: it can be started again.
    Stopped,
}

impl InstanceStateName {
    /// Returns the state with a name of the API.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "pending" => Self::Pending,
            "running" => Self::Running,
            "shutting-down" => Self::ShuttingDown,
            "terminated" => Self::Terminated,
            "stopping" => Self::Stopping,
            "stopped" => Self::Stopped,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_is_shown_with_its_code_once() {
        let shown = |code, message| StateReason::new(code, message).unwrap().to_string();
        let code = "Client.VolumeLimitExceeded";
        let text = "Client.VolumeLimitExceeded: Volume limit exceeded";
        assert_eq!(shown(code, text), text);
        assert_eq!(shown(code, "Volume limit exceeded"), text);
        assert_eq!(shown(code, ""), code);
    }

    #[test]
    fn reason_is_bounded_and_without_control_characters() {
        let reason = StateReason::new("Client.A", &format!("a\n\u{1b}[31m{}", "ä".repeat(5000)));
        let message = reason.unwrap().message;
        assert_eq!(message.chars().count(), MAX_MESSAGE_CHARS);
        assert!(message.starts_with("a  [31mä"), "{message}");
        let long = "A".repeat(MAX_CODE_BYTES + 1);
        for code in ["", "a b", "a\nb", "ä", &long] {
            assert_eq!(StateReason::new(code, "x"), None, "{code:?}");
        }
    }
}
