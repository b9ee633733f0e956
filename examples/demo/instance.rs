//! The instance of a pod, as EC2 and the daemon describe it.

use std::collections::BTreeMap;

use kiyot_testcloud::Cloud;
use serde_json::Value;

/// Returns lines with the instance of a cell: type and price, tags, and the steps of its start.
pub(crate) async fn lines(cloud: &Cloud, cell: &Value) -> Vec<String> {
    let instance = &cell["instance"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let id = text(&instance["id"]);
    let mut lines = vec![format!(
        "instance {id}: {} in {}, {}, {} an hour",
        text(&instance["type"]),
        text(&instance["zone"]),
        text(&instance["market"]),
        text(&instance["pricePerHour"])
    )];
    let filter = [("Filter.1.Name", "resource-id"), ("Filter.1.Value.1", &id)];
    let reply = cloud.call("DescribeTags", &filter).await.expect("the API answers");
    for tag in reply.root().items("tagSet") {
        lines.push(format!("tag {} = {}", tag.at("key"), tag.at("value")));
    }
    let steps = cell["start"].as_object().into_iter().flatten();
    let mut steps: Vec<_> = steps.map(|(step, millis)| (millis.as_u64(), step)).collect();
    steps.sort();
    let steps: Vec<_> = steps
        .into_iter()
        .map(|(millis, step)| {
            format!("{} {} ms", step.trim_end_matches("Ms"), millis.unwrap_or_default())
        })
        .collect();
    lines.push(format!("start: {}", steps.join(", ")));
    lines
}

/// Returns the calls of the API by action.
pub(crate) fn calls(cloud: &Cloud) -> String {
    let mut counts = BTreeMap::<String, usize>::new();
    for call in cloud.calls() {
        *counts.entry(call.action).or_default() += 1;
    }
    let counts: Vec<_> =
        counts.into_iter().map(|(action, count)| format!("{action} {count}")).collect();
    counts.join(", ")
}
