//! Policy of the node's role, and its part with given actions.

use std::collections::BTreeSet;

use kiyot_config::{self as config, NAME_TAG, OWN_TAG_PREFIX};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The policy; docs/ec2.md has the purpose of each right.
const POLICY: &str = include_str!("../../../../../config/iam-policy.json");
/// The statement for cells with an instance profile.
const PASS_ROLE: &str = include_str!("../../../../../config/iam-pass-role.json");
/// The statement for an account without the role of spot instances.
const SPOT_ROLE: &str = include_str!("../../../../../config/iam-spot-role.json");
/// The statements for cloud routes.
const CLOUD_ROUTES: &str = include_str!("../../../../../config/iam-cloud-routes.json");
/// The place of the keys of tags in a condition.
const TAG_KEYS: &str = "/ForAllValues:StringLike/aws:TagKeys";
/// The service to which the role of an instance profile is passed, outside of China.
const EC2_SERVICE: &str = "\"ec2.amazonaws.com\"";
/// Begins the action in EC2's message about a denied call.
const MARK: &str = "not authorized to perform: ";

/// A policy of IAM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Policy {
    version: String,
    statement: Vec<Statement>,
}

/// A statement, with its keys in the order of the documentation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Statement {
    sid: String,
    effect: String,
    action: Actions,
    resource: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    condition: Option<Value>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Actions {
    One(String),
    Several(Vec<String>),
}

impl Actions {
    /// Returns the actions that are wanted; `None` if no action is wanted.
    fn of(self, wanted: &BTreeSet<String>) -> Option<Self> {
        match self {
            Self::One(action) => wanted.contains(&action).then_some(Self::One(action)),
            Self::Several(mut actions) => {
                actions.retain(|action| wanted.contains(action));
                match actions.len() {
                    0 => None,
                    1 => actions.pop().map(Self::One),
                    _ => Some(Self::Several(actions)),
                }
            }
        }
    }
}

/// Values of the policy's placeholders that the configuration has.
#[derive(Debug, Clone, Default)]
pub(super) struct Values {
    region: String,
    cluster: String,
    /// The keys of tags, or patterns of keys.
    tag_keys: Vec<String>,
}

impl Values {
    pub(super) fn of(config: &config::Ec2, cluster: &str) -> Self {
        let own = [NAME_TAG.to_owned(), format!("{OWN_TAG_PREFIX}*")].into_iter();
        let tag_keys = own.chain(config.tags.keys().cloned()).chain(config.label_tags.clone());
        let (region, cluster) = (config.region.clone(), cluster.to_owned());
        Self { region, cluster, tag_keys: tag_keys.collect() }
    }

    /// Sets the values in a policy.
    fn set(&self, statement: &mut Statement) {
        let keys = statement.condition.as_mut().and_then(|it| it.pointer_mut(TAG_KEYS));
        if let Some(keys) = keys {
            *keys = Value::from(self.tag_keys.clone());
        }
    }

    /// Sets the values in the text of a policy.
    fn fill(&self, json: &str) -> String {
        let Self { region, cluster, .. } = self;
        let (partition, service) = match region.as_str() {
            china if china.starts_with("cn-") => ("arn:aws-cn:", "\"ec2.amazonaws.com.cn\""),
            gov if gov.starts_with("us-gov-") => ("arn:aws-us-gov:", EC2_SERVICE),
            _ => ("arn:aws:", EC2_SERVICE),
        };
        let json = json.replace("arn:aws:", partition).replace(EC2_SERVICE, service);
        json.replace("REGION", region).replace("CLUSTER", cluster)
    }
}

/// Returns the part of the policy with these actions, as JSON. Actions that the policy lacks are
/// listed below it.
pub(super) fn part(actions: &BTreeSet<String>, values: &Values) -> String {
    let read = serde_json::from_str(POLICY).and_then(|policy: Policy| {
        let mut others: Vec<Statement> = serde_json::from_str(CLOUD_ROUTES)?;
        others.push(serde_json::from_str(PASS_ROLE)?);
        others.push(serde_json::from_str(SPOT_ROLE)?);
        Ok((policy, others))
    });
    let (policy, others) = match read {
        Ok(read) => read,
        // A test parses both files; as a fallback only the actions are listed.
        Err(_) => return names(actions.iter()),
    };
    let statements = policy.statement.into_iter().chain(others);
    let statement: Vec<Statement> = statements
        .filter_map(|statement| {
            let action = statement.action.of(actions)?;
            let mut wanted = Statement { action, ..statement };
            values.set(&mut wanted);
            Some(wanted)
        })
        .collect();
    let is_known = |action: &&String| {
        let wanted = BTreeSet::from([(*action).clone()]);
        statement.iter().any(|statement| statement.action.clone().of(&wanted).is_some())
    };
    let unknown: Vec<&String> = actions.iter().filter(|action| !is_known(action)).collect();
    let policy = Policy { version: policy.version, statement };
    let json = serde_json::to_string_pretty(&policy).unwrap_or_default();
    let json = values.fill(&json);
    match unknown.is_empty() {
        true => json,
        false => format!("{json}\nAlso: {}", names(unknown.into_iter())),
    }
}

fn names<'a>(actions: impl Iterator<Item = &'a String>) -> String {
    actions.map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// Returns the action that EC2's message about a denied call names, such as `iam:PassRole`.
pub(super) fn denied_action(message: &str) -> Option<String> {
    let (_, rest) = message.split_once(MARK)?;
    let action = rest.split(|char: char| char.is_whitespace() || char == ',').next()?;
    let action = action.trim_end_matches('.');
    let (service, name) = action.split_once(':')?;
    let is_word = |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_alphanumeric());
    (is_word(service) && is_word(name)).then(|| action.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(actions: &[&str]) -> BTreeSet<String> {
        actions.iter().map(|action| (*action).to_owned()).collect()
    }

    fn sids(text: &str) -> Vec<String> {
        let policy: Policy = serde_json::from_str(text).unwrap();
        policy.statement.into_iter().map(|statement| statement.sid).collect()
    }

    #[test]
    fn every_action_of_the_policies_is_documented() {
        let page = include_str!("../../../../../docs/ec2.md");
        let policy: Policy = serde_json::from_str(POLICY).unwrap();
        let routes: Vec<Statement> = serde_json::from_str(CLOUD_ROUTES).unwrap();
        let others: [Statement; 2] =
            [PASS_ROLE, SPOT_ROLE].map(|text| serde_json::from_str(text).unwrap());
        for statement in policy.statement.into_iter().chain(routes).chain(others) {
            let actions = match statement.action {
                Actions::One(action) => vec![action],
                Actions::Several(actions) => actions,
            };
            for action in actions {
                assert!(page.contains(&format!("`{action}`")), "docs/ec2.md lacks {action}");
            }
        }
    }

    fn values(region: &str) -> Values {
        let ec2 = config::Ec2 { region: region.into(), ..config::Ec2::default() };
        Values::of(&ec2, "production")
    }

    /// Verifies V99.
    #[test]
    fn part_pins_the_keys_of_the_configured_tags_and_labels() {
        let keys = |text: &str| {
            let policy: Policy = serde_json::from_str(text).unwrap();
            let all = policy.statement.into_iter();
            let keys = all.map(|it| it.condition.unwrap().pointer(TAG_KEYS).unwrap().clone());
            keys.collect::<Vec<_>>()
        };
        let text = part(&set(&["ec2:CreateTags"]), &values("us-east-1"));
        let default = serde_json::json!(["Name", "kiyot:*", "app", "run", "app.kubernetes.io/*"]);
        assert_eq!(keys(&text), [default.clone(), default]);
        let mut ec2 = config::Ec2 { label_tags: vec!["tier".into()], ..config::Ec2::default() };
        ec2.tags.insert("team".into(), "shop".into());
        let text = part(&set(&["ec2:CreateTags"]), &Values::of(&ec2, "c"));
        let own = serde_json::json!(["Name", "kiyot:*", "team", "tier"]);
        assert_eq!(keys(&text), [own.clone(), own]);
    }

    /// Verifies V99.
    #[test]
    fn part_has_the_partition_of_the_region() {
        for (region, arn, service) in [
            ("eu-west-1", "\"arn:aws:iam::", "\"ec2.amazonaws.com\""),
            ("cn-north-1", "\"arn:aws-cn:iam::", "\"ec2.amazonaws.com.cn\""),
            ("us-gov-west-1", "\"arn:aws-us-gov:iam::", "\"ec2.amazonaws.com\""),
        ] {
            let text = part(&set(&["iam:PassRole"]), &values(region));
            assert!(text.contains(arn) && text.contains(service), "{text}");
        }
    }

    #[test]
    fn part_has_only_the_wanted_actions() {
        let policy: Policy = serde_json::from_str(POLICY).unwrap();
        let part = |actions: &[&str]| part(&set(actions), &values("eu-west-1"));
        let text = part(&["ec2:DescribeImages"]);
        assert_eq!(sids(&text), ["Read"]);
        assert!(text.contains("\"Action\": \"ec2:DescribeImages\""), "{text}");
        let text = part(&["ec2:RunInstances"]);
        assert_eq!(sids(&text), ["LaunchTagged", "LaunchWith"]);
        assert!(text.contains("arn:aws:ec2:eu-west-1:ACCOUNT:subnet/*"), "{text}");
        assert!(text.contains("\"aws:RequestTag/kiyot:cluster\": \"production\""), "{text}");
        assert_eq!(sids(&part(&["ec2:CreateTags"])), ["TagAtLaunch", "TagOwn"]);
        assert_eq!(sids(&part(&["iam:PassRole"])), ["PassRole"]);
        assert_eq!(sids(&part(&["ec2:DeleteRoute"])), ["CloudRoutes"]);
        let all: Vec<String> = policy
            .statement
            .iter()
            .flat_map(|statement| match statement.action.clone() {
                Actions::One(action) => vec![action],
                Actions::Several(actions) => actions,
            })
            .collect();
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let whole: Policy = serde_json::from_str(&part(&all)).unwrap();
        assert_eq!(whole.statement.len(), policy.statement.len());
    }

    #[test]
    fn unknown_action_is_named_beneath_the_policy() {
        let text = part(&set(&["kms:CreateGrant"]), &Values::default());
        assert!(text.ends_with("Also: kms:CreateGrant"), "{text}");
    }

    #[test]
    fn action_is_read_from_the_message_of_ec2() {
        let found = |text: &str| denied_action(text);
        let text = "You are not authorized to perform this operation. User: arn:aws:iam::1:user/u \
                    is not authorized to perform: ec2:RunInstances on resource: arn:aws:ec2:…";
        assert_eq!(found(text).as_deref(), Some("ec2:RunInstances"));
        assert_eq!(found("You are not authorized to perform this operation."), None);
        assert_eq!(found("is not authorized to perform: \"];x y"), None);
    }
}
