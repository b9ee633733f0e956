//! ModifyInstanceMetadataOptions, which the metadata service of the cloud obeys.

use super::{ApiError, ok};
use crate::{client::Reply, query::Query, shared::Shared, xml::Element};

/// Parameters with the fields that they change.
const FIELDS: [(&str, &str); 4] = [
    ("HttpTokens", "httpTokens"),
    ("HttpPutResponseHopLimit", "httpPutResponseHopLimit"),
    ("HttpEndpoint", "httpEndpoint"),
    ("InstanceMetadataTags", "instanceMetadataTags"),
];

/// Changes the options of an instance at once, and replies `pending` as EC2 does.
pub(super) fn modify(query: &Query, shared: &Shared) -> Result<Reply, ApiError> {
    let id = query.get("InstanceId");
    let mut state = shared.lock();
    let instance = state.instance(id).ok_or_else(|| {
        ApiError::client("MissingParameter", "The request must contain the parameter InstanceId")
    })?;
    if instance.state.is_ended() {
        let message = format!("The instance '{id}' is in the state '{}'.", instance.state.name());
        return Err(ApiError::client("IncorrectInstanceState", message));
    }
    for (parameter, field) in FIELDS {
        let value = query.get(parameter);
        for (own, before) in &mut instance.metadata_options {
            if own == field && !value.is_empty() {
                value.clone_into(before);
            }
        }
    }
    let mut options = vec![Element::text("state", "pending")];
    let given = instance.metadata_options.iter();
    options.extend(given.map(|(field, value)| Element::text(field, value.as_str())));
    let fields = vec![
        Element::text("requestId", "test-cloud"),
        Element::text("instanceId", id),
        Element::parent("instanceMetadataOptions", options),
    ];
    Ok(ok(&Element::response("ModifyInstanceMetadataOptionsResponse", fields)))
}
