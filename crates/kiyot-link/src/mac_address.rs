//! Hardware addresses of network devices.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A hardware address of a device (IEEE 802 MAC-48). Its text has six bytes: `02:00:5e:00:53:01`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddress(pub [u8; 6]);

/// An error of parsing a hardware address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("invalid hardware address; allowed: six bytes such as \"02:00:5e:00:53:01\"")]
pub struct NotAMac;

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for MacAddress {
    type Err = NotAMac;

    fn from_str(text: &str) -> Result<Self, NotAMac> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let is_hex = |part: &&str| part.bytes().all(|byte| byte.is_ascii_hexdigit());
            let part = parts.next().filter(|part| part.len() == 2).filter(is_hex).ok_or(NotAMac)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| NotAMac)?;
        }
        if parts.next().is_some() { Err(NotAMac) } else { Ok(Self(bytes)) }
    }
}

impl TryFrom<String> for MacAddress {
    type Error = NotAMac;

    fn try_from(text: String) -> Result<Self, NotAMac> {
        text.parse()
    }
}

impl From<MacAddress> for String {
    fn from(mac: MacAddress) -> Self {
        mac.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn malformed_mac_is_refused() {
        for text in [
            "",
            "02:00:5e:00:53",
            "02:00:5e:00:53:01:02",
            "02:00:5e:00:53:1",
            "02:00:5e:00:53:+1",
            "02-00-5e-00-53-01",
        ] {
            assert_eq!(text.parse::<MacAddress>(), Err(NotAMac), "{text}");
        }
    }

    proptest! {
        #[test]
        fn mac_round_trips(bytes: [u8; 6]) {
            let mac = MacAddress(bytes);
            prop_assert_eq!(mac.to_string().parse(), Ok(mac));
        }
    }
}
