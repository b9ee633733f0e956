//! GetProducts of AWS's price list, a service that moto lacks. Written after the API reference
//! ("AWS Price List Query API") and the products of its examples.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::ApiError;
use crate::{client::Reply, query::Query, shared::Shared};

/// The action.
pub(super) const ACTION: &str = "GetProducts";

/// The header `X-Amz-Target` of the action.
const TARGET: &str = "AWSPriceListService.GetProducts";

/// Most products of a page.
const MAX_PAGE_PRODUCTS: usize = 100;

/// The filters that the list of products supports, with their allowed values.
const FILTERS: [(&str, &str); 4] = [
    ("operatingSystem", "Linux"),
    ("tenancy", "Shared"),
    ("preInstalledSw", "NA"),
    ("capacitystatus", "Used"),
];

/// Returns the call of a JSON request; `None` unless it is GetProducts.
pub(super) fn query(target: &str, body: &[u8]) -> Option<Query> {
    let request: Value = (target == TARGET).then(|| serde_json::from_slice(body).ok())??;
    let mut parameters = BTreeMap::new();
    for key in ["ServiceCode", "FormatVersion", "NextToken"] {
        let text = request[key].as_str().map(|text| (key.to_owned(), text.to_owned()));
        parameters.extend(text);
    }
    let page = request["MaxResults"].as_u64();
    parameters.extend(page.map(|page| ("MaxResults".to_owned(), page.to_string())));
    for (index, filter) in request["Filters"].as_array().into_iter().flatten().enumerate() {
        (filter["Type"] == "TERM_MATCH").then_some(())?;
        for (from, to) in [("Field", "Name"), ("Value", "Value.1")] {
            let text = filter[from].as_str()?.to_owned();
            parameters.insert(format!("Filter.{}.{to}", index + 1), text);
        }
    }
    Some(Query { action: ACTION.to_owned(), parameters })
}

/// Returns a page of products.
pub(super) fn page(query: &Query, shared: &Shared) -> Result<Reply, ApiError> {
    if query.get("ServiceCode") != "AmazonEC2" {
        return Err(ApiError::client("InvalidParameterException", "unknown service code"));
    }
    let size = query.get("MaxResults").parse().unwrap_or(MAX_PAGE_PRODUCTS);
    if !(1..=MAX_PAGE_PRODUCTS).contains(&size) {
        return Err(ApiError::client("InvalidParameterException", "MaxResults is 1 to 100"));
    }
    let first: usize = match query.get("NextToken") {
        "" => 0,
        token => token.parse().map_err(|_| {
            ApiError::client("InvalidNextTokenException", "the pagination token is invalid")
        })?,
    };
    let region = query.filter("regionCode").unwrap_or_default();
    let region = region.first().copied().unwrap_or("us-east-1");
    let matches = FILTERS.iter().all(|(name, value)| {
        query.filter(name).is_none_or(|allowed| allowed.first() == Some(value))
    });
    let (prices, broken) = {
        let faults = &shared.lock().faults;
        (faults.prices.clone(), faults.broken_products)
    };
    let listed = shared.types.iter().filter(|_| matches).filter_map(|(name, found)| {
        let listed = found.price.map(|price| format!("{price:.10}"));
        Some((name, prices.get(name).cloned().or(listed)?))
    });
    let newer = prices.iter().filter(|(name, _)| matches && !shared.types.contains_key(*name));
    let priced: Vec<_> = listed.chain(newer.map(|(name, price)| (name, price.clone()))).collect();
    let texts: Vec<String> = (first..broken + priced.len())
        .take(size)
        .map(|number| match number.checked_sub(broken) {
            None => broken_product(number, region).to_string(),
            Some(at) => product(priced[at].0, region, &priced[at].1).to_string(),
        })
        .collect();
    let last = first.saturating_add(size);
    let mut answer = json!({ "FormatVersion": "aws_v1", "PriceList": texts });
    if last < broken + priced.len() {
        answer["NextToken"] = last.to_string().into();
    }
    Ok(Reply { status: 200, body: answer.to_string() })
}

/// Returns a product with its on-demand and a reserved term.
fn product(name: &str, region: &str, price: &str) -> Value {
    let sku = name.to_uppercase();
    let (term, rate) = (format!("{sku}.JRTCKXETXF"), format!("{sku}.JRTCKXETXF.6YS6EN2CT7"));
    let reserved = format!("{sku}.38NPMPTW36");
    json!({
        "product": {
            "productFamily": "Compute Instance",
            "attributes": {
                "instanceType": name,
                "regionCode": region,
                "operatingSystem": "Linux",
                "tenancy": "Shared",
                "preInstalledSw": "NA",
                "capacitystatus": "Used",
                "locationType": "AWS Region",
                "marketoption": "OnDemand",
                "operation": "RunInstances",
            },
            "sku": sku,
        },
        "serviceCode": "AmazonEC2",
        "terms": {
            "OnDemand": { term: {
                "priceDimensions": { &rate: {
                    "unit": "Hrs",
                    "beginRange": "0",
                    "endRange": "Inf",
                    "description": format!("${price} per On Demand Linux {name} Instance Hour"),
                    "appliesTo": [],
                    "rateCode": &rate,
                    "pricePerUnit": { "USD": price },
                } },
                "sku": sku,
                "effectiveDate": "2026-07-01T00:00:00Z",
                "offerTermCode": "JRTCKXETXF",
                "termAttributes": {},
            } },
            "Reserved": { reserved: {
                "termAttributes": { "LeaseContractLength": "3yr", "PurchaseOption": "No Upfront" },
            } },
        },
        "version": "20260720000000",
        "publicationDate": "2026-07-20T00:00:00Z",
    })
}

/// Returns an unusable product.
fn broken_product(number: usize, region: &str) -> Value {
    let name = format!("broken{number}.large");
    match number % 4 {
        0 => product(&name, region, "0.0000000000"),
        1 => product(&name, region, "a fortune"),
        2 => json!({ "product": { "attributes": {} } }),
        _ => Value::String("{".repeat(500)),
    }
}

/// Converts a reply to JSON, the form of this service's errors.
pub(super) fn reply(reply: Reply) -> Reply {
    let Some(code) = reply.error() else { return reply };
    let (status, code) = match code.as_str() {
        "RequestLimitExceeded" => (400, "ThrottlingException"),
        "UnauthorizedOperation" => (400, "AccessDeniedException"),
        "Unavailable" => (503, "ServiceUnavailable"),
        "InternalError" => (500, "InternalErrorException"),
        code => (reply.status, code),
    };
    let root = reply.root();
    let message = root.all("Message").first().map_or("", |message| message.text.as_str());
    let message = message.replace("ec2:", "pricing:");
    Reply { status, body: json!({ "__type": code, "Message": message }).to_string() }
}
