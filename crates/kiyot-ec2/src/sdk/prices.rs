//! Client of the price list.

use aws_config::{Region, SdkConfig};
use aws_sdk_pricing::{
    Client as Sdk,
    config::{
        ConfigBag, Intercept, RuntimeComponents,
        interceptors::BeforeDeserializationInterceptorContextMut,
    },
    error::BoxError,
    types::{Filter, FilterType},
};
use aws_smithy_types::body::SdkBody;
use http_body_util::Limited;

use super::error::call_error;
use crate::{CallError, ProductPage};

/// The products of a page, the most that the price list accepts.
const PAGE_PRODUCTS: i32 = 100;
/// Bounds the response with a page, in bytes: ten times the size of a hundred products with all
/// terms.
const MAX_PAGE_BYTES: usize = 16 * 1024 * 1024;

/// Returns a client of the price list of a region.
pub(super) fn client(config: &SdkConfig, region: &str, endpoint_url: Option<&str>) -> Sdk {
    let mut builder = aws_sdk_pricing::config::Builder::from(config)
        .region(Region::new(endpoint_region(region)))
        .interceptor(BoundedAnswer);
    if let Some(url) = endpoint_url {
        builder = builder.endpoint_url(url);
    }
    Sdk::from_conf(builder.build())
}

/// Returns the nearest region whose endpoint has the price list of this region.
fn endpoint_region(region: &str) -> &'static str {
    match region.split('-').next().unwrap_or_default() {
        "cn" => "cn-northwest-1",
        "ap" | "me" => "ap-south-1",
        "eu" | "af" | "il" => "eu-central-1",
        _ => "us-east-1",
    }
}

/// Returns a page of the on-demand products of Linux in a region (GetProducts).
pub(super) async fn products(
    sdk: &Sdk,
    region: &str,
    page: Option<String>,
) -> Result<ProductPage, CallError> {
    const NAME: &str = "GetProducts";
    let filters = [
        ("regionCode", region),
        ("operatingSystem", "Linux"),
        ("tenancy", "Shared"),
        ("preInstalledSw", "NA"),
        ("capacitystatus", "Used"),
    ];
    let filters = filters.into_iter().filter_map(|(field, value)| {
        let filter = Filter::builder().r#type(FilterType::TermMatch).field(field).value(value);
        // A filter with these three fields is complete.
        filter.build().ok()
    });
    let call = sdk
        .get_products()
        .service_code("AmazonEC2")
        .format_version("aws_v1")
        .set_filters(Some(filters.collect()))
        .max_results(PAGE_PRODUCTS)
        .set_next_token(page);
    let output = call.send().await.map_err(|error| call_error(NAME, error))?;
    let next = output.next_token.filter(|token| !token.is_empty());
    Ok(ProductPage { products: output.price_list.unwrap_or_default(), next })
}

/// Bounds the bytes of responses.
#[derive(Debug)]
struct BoundedAnswer;

impl Intercept for BoundedAnswer {
    fn name(&self) -> &'static str {
        "BoundedAnswer"
    }

    fn modify_before_deserialization(
        &self,
        context: &mut BeforeDeserializationInterceptorContextMut<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let body = context.response_mut().body_mut();
        let answer = std::mem::replace(body, SdkBody::taken());
        *body = SdkBody::from_body_1_x(Limited::new(answer, MAX_PAGE_BYTES));
        Ok(())
    }
}
