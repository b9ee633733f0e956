//! User data of an instance, from which its agent boots.

use std::net::IpAddr;

use kiyot_link::bootstrap::{CellFile, GatewayAddress};

/// Upper bound on user data, in bytes (EC2's quota, before its base64 encoding).
const MAX_BYTES: usize = 16 * 1024;
/// Script for an image of a distribution.
const SCRIPT: &str = include_str!("user_data.sh");
/// Unit of systemd, which the script installs and a prebuilt image has.
const UNIT: &str = include_str!("../../../../config/kiyot-cell.service");

/// The form of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ImageForm {
    /// The image has the agent and its service.
    Prebuilt,
    /// The image is a distribution's.
    Stock,
}

/// Reason why the boot data of a cell can't become user data.
#[derive(Debug, thiserror::Error)]
pub(super) enum UserDataError {
    /// The boot data can't be encoded.
    #[error("boot data")]
    Json(#[from] serde_json::Error),
    /// The gateway has no TCP address.
    #[error("gateway {0}: is not on TCP; instances dial only TCP")]
    Gateway(GatewayAddress),
    /// The gateway serves no agent program.
    #[error("gateway serves no agent program (gateway.agent); an image without agent downloads it")]
    NoAgent,
    /// The user data is too long.
    #[error("user data of {0} bytes; allowed: at most {MAX_BYTES}")]
    TooLong(usize),
}

/// Returns the user data: the boot data for a prebuilt image, or a script that installs the agent
/// and starts it.
pub(super) fn render(file: &CellFile, form: ImageForm) -> Result<String, UserDataError> {
    let boot_data = serde_json::to_string(file)?;
    let user_data = match form {
        ImageForm::Prebuilt => boot_data,
        ImageForm::Stock => script(file, &boot_data)?,
    };
    if user_data.len() > MAX_BYTES {
        return Err(UserDataError::TooLong(user_data.len()));
    }
    Ok(user_data)
}

fn script(file: &CellFile, boot_data: &str) -> Result<String, UserDataError> {
    let GatewayAddress::Tcp(gateway) = &file.bootstrap.gateway else {
        return Err(UserDataError::Gateway(file.bootstrap.gateway.clone()));
    };
    let agent = file.bootstrap.agent.as_ref().ok_or(UserDataError::NoAgent)?;
    let address = match gateway.ip() {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => format!("[{address}]"),
    };
    let power_off = file.machine.as_ref().map(|machine| machine.power_off_after_secs);
    let values = [
        ("POWER_OFF_AFTER_SECS", power_off.unwrap_or_default().to_string()),
        ("CELL_FILE", boot_data.to_owned()),
        ("CA_PEM", agent.ca_pem.trim_end().to_owned()),
        ("AGENT_BYTES", agent.size_bytes.to_string()),
        ("PORT", gateway.port().to_string()),
        ("ADDRESS", address),
        ("CELL", file.bootstrap.cell.clone()),
        ("TOKEN", file.bootstrap.token.clone()),
        ("AGENT_SHA256", agent.sha256.clone()),
        ("UNIT", UNIT.trim_end().to_owned()),
    ];
    // The daemon makes all values, and no value contains the marker of another.
    let script = values.iter().fold(SCRIPT.to_owned(), |script, (name, value)| {
        script.replace(&format!("@{name}@"), value)
    });
    Ok(script)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use kiyot_link::bootstrap::{AgentPin, Bootstrap, Machine};

    use super::*;

    /// Returns boot data of about the greatest length that occurs.
    fn file() -> CellFile {
        CellFile {
            bootstrap: Bootstrap {
                cell: "cell-aaaaaaaaaaaa".to_owned(),
                gateway: GatewayAddress::Tcp("10.0.0.5:7700".parse().unwrap()),
                ca_sha256: "00".repeat(32),
                token: "open-sesame".to_owned(),
                orphan_timeout_secs: 900,
                agent: Some(AgentPin {
                    sha256: "11".repeat(32),
                    size_bytes: 12_345_678,
                    ca_pem: format!("-----BEGIN-----\n{}-----END-----\n", "a\n".repeat(1000)),
                }),
            },
            containerd: "containerd".into(),
            runc: "runc".into(),
            pause_image: "registry.k8s.io/pause:3.9".to_owned(),
            registry_config_dir: None,
            restrict_oom_score_adj: false,
            cri: Default::default(),
            machine: Some(Machine {
                pod_mac: None,
                link: None,
                power_off_after_secs: 1200,
                closed_addresses: super::super::METADATA_ADDRESSES.into(),
                node_networks: vec![("10.96.0.0".parse().unwrap(), 12)],
            }),
        }
    }

    #[test]
    fn prebuilt_image_gets_the_boot_data() {
        let user_data = render(&file(), ImageForm::Prebuilt).unwrap();
        assert_eq!(serde_json::from_str::<CellFile>(&user_data).unwrap(), file());
    }

    #[test]
    fn stock_image_gets_a_script_with_all_values() {
        let user_data = render(&file(), ImageForm::Stock).unwrap();
        let marker = user_data.split('@').skip(1).step_by(2).find(|text| {
            !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_')
        });
        assert_eq!(marker, None);
        let json = user_data.lines().find(|line| line.starts_with("{\"bootstrap\"")).unwrap();
        assert_eq!(serde_json::from_str::<CellFile>(json).unwrap(), file());
        assert!(user_data.contains("ExecStart=/usr/local/bin/kiyot-cell service"));
        let mut shell = Command::new("sh");
        let checked = shell.args(["-n", "-c", &user_data]).output().unwrap();
        assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    }

    #[test]
    fn script_resolves_an_ipv6_gateway_in_brackets() {
        let mut file = file();
        file.bootstrap.gateway = GatewayAddress::Tcp("[2001:db8::5]:7700".parse().unwrap());
        let user_data = render(&file, ImageForm::Stock).unwrap();
        assert!(user_data.contains("'gateway.kiyot.internal:7700:[2001:db8::5]'"), "{user_data}");
    }

    #[test]
    fn boot_data_that_no_instance_can_use_is_refused() {
        let error = |change: fn(&mut CellFile), form| {
            let mut file = file();
            change(&mut file);
            render(&file, form).unwrap_err().to_string()
        };
        let refused = error(|file| file.bootstrap.agent = None, ImageForm::Stock);
        assert!(refused.contains("gateway.agent"), "{refused}");
        let unix = |file: &mut CellFile| {
            file.bootstrap.gateway = GatewayAddress::Unix("/gateway.sock".into());
        };
        assert!(error(unix, ImageForm::Stock).contains("unix:/gateway.sock"));
        let long = |file: &mut CellFile| file.pause_image = "x".repeat(MAX_BYTES);
        assert!(error(long, ImageForm::Prebuilt).contains("allowed: at most 16384"));
    }
}
