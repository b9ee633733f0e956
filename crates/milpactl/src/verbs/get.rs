//! `get`: lists, and single objects.

use std::{
    collections::HashMap,
    io::{self, StdoutLock},
    time::Duration,
};

use futures::{Stream, StreamExt, stream};
use kiyot_proto::admin::{
    ListBackendsRequest, ListCellsRequest, ListEventsRequest, ListOfferingsRequest,
    ListPodsRequest, ListPoolsRequest, ListUsageRequest,
};

use super::{INSTEAD, kinds, sought};
use crate::{
    age,
    cli::{Get, Kind, Listing},
    client::Client,
    error::Error,
    output::{Columns, Format, Item, Writer},
    selector::Selector,
};

/// The pause between two looks of a watch.
const WATCH_PERIOD: Duration = Duration::from_secs(1);

/// Parts of a list.
type Items = std::pin::Pin<Box<dyn Stream<Item = Result<Vec<Item>, Error>>>>;

pub(super) async fn run<F>(connect: impl Fn() -> F, get: Get) -> Result<(), Error>
where
    F: Future<Output = Result<Client, Error>>,
{
    if matches!(get.kind, Kind::Services | Kind::Secrets) {
        return Err(Error::Usage(INSTEAD.to_owned()));
    }
    let selector = get.selector.as_deref().map(Selector::parse).transpose();
    let selector = selector.map_err(Error::Usage)?;
    if selector.is_some() && get.kind != Kind::Pods {
        return Err(Error::Usage("only pods have labels; allowed: get pods -l".to_owned()));
    }
    let client = connect().await?;
    if get.watch {
        return watch(&client, &get, selector).await;
    }
    let items = items(&client, &get, selector.unwrap_or_default()).await?;
    write(items, columns(get.kind), &get.listing, get.name.is_some()).await
}

/// Lists the warm pools.
pub(super) async fn pools(client: &Client, listing: Listing) -> Result<(), Error> {
    let get = Get {
        kind: Kind::Pools,
        name: None,
        namespace: None,
        selector: None,
        watch: false,
        listing,
    };
    let items = items(client, &get, Selector::default()).await?;
    write(items, kinds::POOLS, &get.listing, false).await
}

async fn write(
    mut items: Items,
    columns: Columns,
    listing: &Listing,
    is_single: bool,
) -> Result<(), Error> {
    let mut writer = Writer::new(listing.output, columns, !listing.no_headers, is_single);
    let mut is_empty = true;
    while let Some(part) = items.next().await {
        let part = part?;
        // The widths are those of the first part with items.
        if !part.is_empty() {
            is_empty = false;
            writer.add(part, &mut io::stdout())?;
        }
    }
    if is_empty {
        writer.add(Vec::new(), &mut io::stdout())?;
    }
    writer.finish(&mut io::stdout())
}

fn columns(kind: Kind) -> Columns {
    match kind {
        Kind::Pods => kinds::PODS,
        Kind::Cells => kinds::CELLS,
        Kind::Events => kinds::EVENTS,
        Kind::Metrics => kinds::METRICS,
        Kind::Backends => kinds::BACKENDS,
        Kind::Offerings => kinds::OFFERINGS,
        Kind::Pools => kinds::POOLS,
        Kind::Usage | Kind::Services | Kind::Secrets => kinds::USAGE,
    }
}

/// Returns the items that are wanted, in parts.
async fn items(client: &Client, get: &Get, selector: Selector) -> Result<Items, Error> {
    let now = age::now();
    let name = get.name.clone();
    let namespace = get.namespace.clone().unwrap_or_default();
    match (get.kind, name) {
        (Kind::Pods, Some(name)) => {
            let pod = sought::pod(client, get.namespace.as_deref(), &name).await?;
            Ok(single(kinds::pod(&pod, now)))
        }
        (Kind::Pods, None) => {
            let request = ListPodsRequest { namespace, name: String::new() };
            let parts = client.list(async |mut admin| admin.list_pods(request).await).await?;
            Ok(parts
                .map(move |part| {
                    let selected = part?.pods;
                    let selected = selected.iter().filter(|pod| selector.selects(&pod.labels));
                    Ok(selected.map(|pod| kinds::pod(pod, now)).collect())
                })
                .boxed_local())
        }
        (Kind::Cells, Some(name)) => {
            Ok(single(kinds::cell(&sought::cell(client, &name).await?, now)))
        }
        (Kind::Cells, None) => {
            let request = ListCellsRequest::default();
            let parts = client.list(async |mut admin| admin.list_cells(request).await).await?;
            let item = move |cell: &_| kinds::cell(cell, now);
            Ok(parts.map(move |part| Ok(part?.cells.iter().map(item).collect())).boxed_local())
        }
        (Kind::Events, name) => {
            let request = ListEventsRequest { name: name.unwrap_or_default(), follow: false };
            let parts = client.list(async |mut admin| admin.list_events(request).await).await?;
            let parts = parts.map(|part| Ok(part?.events.iter().map(kinds::event).collect()));
            Ok(parts.boxed_local())
        }
        (Kind::Metrics, name) => {
            let wanted = match name {
                Some(name) => Some(sought::pod(client, get.namespace.as_deref(), &name).await?),
                None => None,
            };
            let request = ListUsageRequest {};
            let parts = client.list(async |mut admin| admin.list_usage(request).await).await?;
            Ok(parts
                .map(move |part| {
                    let usages = part?.pods;
                    let is_wanted = |usage: &&kiyot_proto::admin::PodUsage| match &wanted {
                        Some(pod) => (&pod.namespace, &pod.name) == (&usage.namespace, &usage.name),
                        None => namespace.is_empty() || usage.namespace == namespace,
                    };
                    Ok(usages.iter().filter(is_wanted).map(kinds::pod_usage).collect())
                })
                .boxed_local())
        }
        (Kind::Usage, _) => {
            let request = ListUsageRequest {};
            let parts = client.list(async |mut admin| admin.list_usage(request).await).await?;
            let parts = parts.map(|part| Ok(part?.types.iter().map(kinds::type_usage).collect()));
            Ok(parts.boxed_local())
        }
        (Kind::Backends, _) => {
            let request = ListBackendsRequest {};
            let list = client.call(async |mut admin| admin.list_backends(request).await).await?;
            Ok(of(list.backends.iter().map(kinds::backend).collect()))
        }
        (Kind::Offerings, name) => {
            let request = ListOfferingsRequest { instance_type: name.unwrap_or_default() };
            let parts = client.list(async |mut admin| admin.list_offerings(request).await).await?;
            let parts = parts.map(|part| Ok(part?.offerings.iter().map(kinds::offering).collect()));
            Ok(parts.boxed_local())
        }
        (Kind::Pools, _) => {
            let request = ListPoolsRequest {};
            let list = client.call(async |mut admin| admin.list_pools(request).await).await?;
            Ok(of(list.pools.iter().map(kinds::pool).collect()))
        }
        (Kind::Services | Kind::Secrets, _) => Err(Error::Usage(INSTEAD.to_owned())),
    }
}

fn single(item: Item) -> Items {
    of(vec![item])
}

fn of(items: Vec<Item>) -> Items {
    stream::iter([Ok(items)]).boxed_local()
}

/// Prints all items, and again those that have changed, until it is interrupted.
async fn watch(client: &Client, get: &Get, selector: Option<Selector>) -> Result<(), Error> {
    if matches!(get.listing.output, Format::Json | Format::Yaml) {
        let rule = "--watch prints lines; allowed: -o table, wide or name";
        return Err(Error::Usage(rule.to_owned()));
    }
    let selector = selector.unwrap_or_default();
    let columns = columns(get.kind);
    let mut writer = Writer::new(get.listing.output, columns, !get.listing.no_headers, false);
    let age = columns.names.iter().position(|name| *name == "AGE");
    let mut seen: HashMap<String, Vec<String>> = HashMap::new();
    let mut is_first = true;
    loop {
        let mut list = match items(client, get, selector.clone()).await {
            // It has ended while it was watched.
            Err(Error::Name(_)) if !is_first => return Ok(()),
            list => list?,
        };
        let mut changed = Vec::new();
        let mut now: HashMap<String, Vec<String>> = HashMap::new();
        while let Some(part) = list.next().await {
            for item in part? {
                let mut columns = item.columns.clone();
                age.and_then(|age| columns.get_mut(age)).map(String::clear).unwrap_or_default();
                if seen.get(&item.name) != Some(&columns) {
                    changed.push(item.clone());
                }
                now.insert(item.name, columns);
            }
        }
        seen = now;
        if is_first || !changed.is_empty() {
            writer.add(changed, &mut stdout())?;
        }
        is_first = false;
        tokio::time::sleep(WATCH_PERIOD).await;
    }
}

fn stdout() -> StdoutLock<'static> {
    io::stdout().lock()
}
