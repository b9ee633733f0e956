//! Temporary credentials of the role in the host's instance profile, issued by the metadata
//! service.
//!
//! [EC2's guide](https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/iam-roles-for-amazon-ec2.html)

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use jiff::{Timestamp, Unit};

use crate::proxy::Caller;

/// Directory of roles, relative to `/latest/meta-data/`.
const DIRECTORY: &str = "iam/security-credentials/";
/// The name of the role.
const NAME: &str = "node";
/// Begin of the ids of temporary keys
/// (<https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html>).
const TEMPORARY: &str = "ASIA";

/// A temporary key.
#[derive(Debug, Clone)]
pub struct RoleKey {
    /// The id, which begins with `ASIA`.
    pub id: String,
    /// The secret key.
    pub secret: String,
    /// The session token.
    pub token: String,
    /// Validity from each issue.
    pub lifetime: Duration,
}

/// The role: the key that it issues, and the tokens and expiries of issued keys.
#[derive(Debug, Default)]
pub(crate) struct Role {
    pub(crate) key: Option<RoleKey>,
    issued: BTreeMap<String, (String, SystemTime)>,
}

impl Role {
    /// Returns the content of a path relative to `/latest/meta-data/`, and records issued keys.
    pub(crate) fn value(&mut self, path: &str) -> Option<String> {
        let key = self.key.as_ref()?;
        match path.strip_prefix(DIRECTORY)? {
            "" => Some(NAME.to_owned()),
            NAME => {
                let end = SystemTime::now() + key.lifetime;
                self.issued.insert(key.id.clone(), (key.token.clone(), end));
                let document = serde_json::json!({
                    "Code": "Success",
                    "Type": "AWS-HMAC",
                    "LastUpdated": text(SystemTime::now())?,
                    "AccessKeyId": key.id,
                    "SecretAccessKey": key.secret,
                    "Token": key.token,
                    "Expiration": text(end)?,
                });
                Some(document.to_string())
            }
            _ => None,
        }
    }

    /// Returns whether a call's key is valid. A temporary key must have been issued, come with its
    /// token and not have expired.
    pub(crate) fn accepts(&self, caller: &Caller) -> bool {
        let id = caller.key_id();
        let issued = self.issued.get(id);
        !id.starts_with(TEMPORARY)
            || issued.is_some_and(|(token, end)| {
                caller.token.as_ref() == Some(token) && SystemTime::now() < *end
            })
    }
}

/// Returns a time in the service's format, in seconds.
fn text(time: SystemTime) -> Option<String> {
    let time = Timestamp::try_from(time).ok()?.round(Unit::Second).ok()?;
    Some(time.to_string())
}
