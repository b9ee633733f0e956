//! Results and errors of CNI plugins.

use std::{fmt::Write, net::IpAddr};

use serde::Deserialize;
use serde_json::Value;

/// Bounds the addresses of a pod.
const MAX_ADDRESSES: usize = 16;
/// Bounds the kept part of a plugin's error message, in bytes.
const MAX_MESSAGE_BYTES: usize = 2000;

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    interfaces: Vec<Interface>,
    #[serde(default)]
    ips: Vec<Ip>,
}

#[derive(Deserialize)]
struct Interface {
    name: String,
    #[serde(default)]
    sandbox: String,
}

#[derive(Deserialize)]
struct Ip {
    address: String,
    interface: Option<usize>,
}

#[derive(Deserialize)]
struct PluginError {
    code: Option<u64>,
    #[serde(default)]
    msg: String,
    #[serde(default)]
    details: String,
}

impl Ip {
    /// Returns the address, and the prefix length of its subnet if the text has it; `None` if the
    /// text is not an address, or its prefix is too long.
    fn parsed(&self) -> Option<(IpAddr, Option<u8>)> {
        let (address, prefix) = self
            .address
            .split_once('/')
            .map_or((self.address.as_str(), None), |(address, prefix)| (address, Some(prefix)));
        let address: IpAddr = address.parse().ok()?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        // `u8::from_str` accepts "+8".
        let bits = |text: &str| {
            text.parse::<u8>()
                .ok()
                .filter(|bits| *bits <= most && text.bytes().all(|byte| byte.is_ascii_digit()))
        };
        match prefix {
            Some(text) => Some((address, Some(bits(text)?))),
            None => Some((address, None)),
        }
    }
}

/// Returns the subnets of a result, as address and prefix in the form of `iptables`. [`addresses`]
/// has checked the result.
pub(super) fn subnets(result: &Value) -> Vec<String> {
    let ips = Answer::deserialize(result).map(|answer| answer.ips).unwrap_or_default();
    let subnet = |ip: &Ip| match ip.parsed()? {
        (address, Some(bits)) => Some(format!("{address}/{bits}")),
        (_, None) => None,
    };
    ips.iter().filter_map(subnet).collect()
}

/// Returns the addresses of the pod's device, IPv4 first, in containerd's order.
pub(super) fn addresses(result: &Value, device: &str) -> Result<Vec<IpAddr>, String> {
    let answer = Answer::deserialize(result).map_err(|error| error.to_string())?;
    let mut addresses = Vec::new();
    for ip in &answer.ips {
        let of_pod = match ip.interface {
            None => true,
            Some(index) => {
                let interface = answer.interfaces.get(index).ok_or_else(|| {
                    format!("address {} is of interface {index}, which is not listed", ip.address)
                })?;
                interface.name == device && !interface.sandbox.is_empty()
            }
        };
        if of_pod {
            let (address, _) =
                ip.parsed().ok_or_else(|| format!("{:?} is not an address", ip.address))?;
            addresses.push(address);
        }
    }
    if addresses.is_empty() {
        return Err(format!("it has no address for {device}"));
    }
    if addresses.len() > MAX_ADDRESSES {
        return Err(format!("it has {} addresses; allowed are {MAX_ADDRESSES}", addresses.len()));
    }
    addresses.sort_by_key(IpAddr::is_ipv6);
    Ok(addresses)
}

/// Returns the message of a plugin's error; `None` without a message.
pub(super) fn refusal(output: &[u8]) -> Option<String> {
    let refusal: PluginError = serde_json::from_slice(output).ok()?;
    let mut words = refusal.msg;
    if !refusal.details.is_empty() {
        let _ = write!(words, ": {}", refusal.details);
    }
    if let Some(code) = refusal.code {
        let _ = write!(words, " (code {code})");
    }
    (!words.is_empty()).then(|| words.chars().take(MAX_MESSAGE_BYTES).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn of(result: &Value) -> Result<Vec<String>, String> {
        addresses(result, "eth0")
            .map(|addresses| addresses.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn addresses_are_in_containerds_order() {
        let bridge = json!({"cniVersion": "1.0.0",
        "interfaces": [
            {"name": "cni0", "mac": "x"},
            {"name": "veth1"},
            {"name": "eth0", "sandbox": "/run/netns/x"}
        ],
        "ips": [
            {"interface": 2, "address": "fd00::5/64"},
            {"interface": 2, "address": "10.1.0.5/24", "gateway": "10.1.0.1"},
            {"interface": 0, "address": "10.1.0.1/24"}
        ]});
        assert_eq!(of(&bridge).unwrap(), ["10.1.0.5", "fd00::5"]);
        let old =
            json!({"cniVersion": "0.3.1", "ips": [{"version": "4", "address": "10.1.0.6/24"}]});
        assert_eq!(of(&old).unwrap(), ["10.1.0.6"]);
    }

    #[test]
    fn subnets_have_the_form_of_iptables() {
        let addresses = [
            "10.1.0.5/24",
            "10.1.0.6",
            "fd00::5/64",
            "10.1.0.7/033",
            "10.1.0.8/+8",
            "10.1.0.9/24 -j ACCEPT",
        ];
        let ips: Vec<Value> = addresses.iter().map(|address| json!({"address": address})).collect();
        assert_eq!(subnets(&json!({"ips": ips})), ["10.1.0.5/24", "fd00::5/64"]);
    }

    #[test]
    fn invalid_result_is_refused() {
        for result in [
            json!({}),
            json!([]),
            json!({"ips": []}),
            json!({"ips": [{"address": "here"}]}),
            json!({"ips": [{"address": "10.0.0.1/33"}]}),
            json!({"ips": [{"address": "10.0.0.1/+8"}]}),
            json!({"ips": [{"address": "fd00::1/129"}]}),
            json!({"ips": [{"address": "10.0.0.1/8", "interface": 3}]}),
            json!({"ips": [{"address": "10.0.0.1/8", "interface": -1}]}),
            json!({"ips": vec![json!({"address": "10.0.0.1/8"}); 17]}),
        ] {
            assert!(of(&result).is_err(), "{result}");
        }
    }

    #[test]
    fn plugin_error_has_its_message() {
        assert_eq!(
            refusal(br#"{"cniVersion":"1.0.0","code":7,"msg":"no","details":"none left"}"#)
                .unwrap(),
            "no: none left (code 7)"
        );
        assert_eq!(refusal(b"panic"), None);
        // Without a message, the caller reports the exit status and the output.
        assert_eq!(refusal(b"{}"), None);
    }

    proptest! {
        #[test]
        fn output_of_any_bytes_is_accepted(output in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = refusal(&output);
        }
    }
}
