//! Instances as the API shows them.

use std::{collections::BTreeMap, time::Instant};

use crate::{volume::Volume, vpc::Port};

/// State of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Launched or started, not yet booted.
    Pending,
    /// Booted.
    Running,
    /// The end was requested.
    ShuttingDown,
    /// Ended, finally.
    Terminated,
    /// The stop was requested.
    Stopping,
    /// Stopped; it can be started again.
    Stopped,
}

impl State {
    /// Returns EC2's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Running => "running",
            Self::ShuttingDown => "shutting-down",
            Self::Terminated => "terminated",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
        }
    }

    /// Returns EC2's code.
    pub fn code(self) -> u8 {
        match self {
            Self::Pending => 0,
            Self::Running => 16,
            Self::ShuttingDown => 32,
            Self::Terminated => 48,
            Self::Stopping => 64,
            Self::Stopped => 80,
        }
    }

    /// Returns whether the instance has ended or is about to end.
    pub fn is_ended(self) -> bool {
        matches!(self, Self::ShuttingDown | Self::Terminated)
    }
}

/// An instance, including the parts of its launch that moto ignores.
#[derive(Debug, Clone)]
pub struct Instance {
    /// Instance id.
    pub id: String,
    /// State at the last update.
    pub state: State,
    /// Primary private address.
    pub address: String,
    /// Secondary private addresses.
    pub secondary_addresses: Vec<String>,
    /// MAC address of the interface.
    pub mac: String,
    /// Subnet id.
    pub subnet: String,
    /// Ids of the security groups.
    pub groups: Vec<String>,
    /// True if the source/destination check is on.
    pub is_checked: bool,
    /// Availability zone.
    pub zone: String,
    /// Instance type.
    pub instance_type: String,
    /// Set for the spot market.
    pub spot: bool,
    /// True if a shutdown stops the instance instead of ending it.
    pub stops_on_shutdown: bool,
    /// Client token of the launch; empty: none.
    pub client_token: String,
    /// Tags given at the launch.
    pub tags: BTreeMap<String, String>,
    /// User-data of the launch, in base64.
    pub user_data: String,
    /// Fields of `MetadataOptions` with their values.
    pub metadata_options: Vec<(String, String)>,
    /// Name or ARN of the instance profile; empty: none.
    pub instance_profile: String,
    /// Volumes of the launch.
    pub volumes: Vec<Volume>,
    /// Code and message of the state's reason.
    pub reason: (String, String),
    /// Number of boots. User-data runs at the first.
    pub boots: u32,
    /// Time of the launch.
    pub launched: Instant,
    /// Time from which the API shows the instance; `None`: never.
    pub(crate) visible: Option<Instant>,
    /// Time at which a transitional state ends; `None`: never.
    pub(crate) settles: Option<Instant>,
    /// Set while a namespace must boot or end before the state may change.
    pub(crate) held: bool,
    /// Set while a namespace exists or is being made.
    pub(crate) booting: bool,
    /// Set when moto has terminated the instance. moto terminates an instance only once.
    pub(crate) is_removed: bool,
}

impl Instance {
    /// Changes to the next state if its time has come.
    pub(crate) fn settle(&mut self, now: Instant) {
        if self.held || self.settles.is_none_or(|time| time > now) {
            return;
        }
        self.state = match self.state {
            State::Pending => State::Running,
            State::ShuttingDown => State::Terminated,
            State::Stopping => State::Stopped,
            settled => settled,
        };
    }

    /// Begins the end of the instance, unless it has begun.
    pub(crate) fn end(&mut self, settles: Option<Instant>, boots: bool, code: &str, message: &str) {
        if self.state.is_ended() {
            return;
        }
        self.settles = settles;
        // A stopped instance has no namespace that must end.
        self.held = self.booting || self.state == State::Pending && boots;
        self.state = State::ShuttingDown;
        self.set_reason(code, message);
    }

    pub(crate) fn set_reason(&mut self, code: &str, message: &str) {
        self.reason = (code.to_owned(), format!("{code}: {message}"));
    }

    /// Returns the private addresses, the primary address first.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = &str> {
        [&self.address].into_iter().chain(&self.secondary_addresses).map(String::as_str)
    }

    /// Returns the port of the instance.
    pub(crate) fn port(&self, link: &str, bridge: &str) -> Port {
        Port {
            link: link.to_owned(),
            mac: self.mac.clone(),
            bridge: bridge.to_owned(),
            addresses: self.addresses().map(str::to_owned).collect(),
            is_checked: self.is_checked,
            groups: self.groups.clone(),
        }
    }

    /// Returns whether the API shows the instance.
    pub(crate) fn is_visible(&self, now: Instant) -> bool {
        self.visible.is_some_and(|time| time <= now)
    }
}
