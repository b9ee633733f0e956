//! `get`: lists, and single objects.

use std::{
    collections::HashMap,
    io::{self, StdoutLock},
    time::Duration,
};

use futures::{Stream, StreamExt, stream};
use kiyot_proto::admin::{
    CatalogueOffering, Event, ListBackendsRequest, ListCellsRequest, ListEventsRequest,
    ListOfferingsRequest, ListPodsRequest, ListPoolsRequest, ListUsageRequest,
};
use serde_json::Value;

use super::{NO_SUCH_KIND, kinds, sought};
use crate::{
    age,
    cli::{Get, Kind, Listing},
    client::Client,
    error::Error,
    names::{self, Named},
    output::{Columns, Format, Item, Writer},
    selector::Selector,
};

/// The pause between two lists of a watch.
const WATCH_PERIOD: Duration = Duration::from_secs(1);

/// Parts of a list.
type Items = std::pin::Pin<Box<dyn Stream<Item = Result<Vec<Item>, Error>>>>;

pub(super) async fn run<F>(connect: impl Fn() -> F, get: Get) -> Result<(), Error>
where
    F: Future<Output = Result<Client, Error>>,
{
    if matches!(get.kind, Kind::Services | Kind::Secrets) {
        return Err(Error::Usage(NO_SUCH_KIND.to_owned()));
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
        // The first part with items decides the widths.
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

/// Returns the wanted items, in parts.
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
                    // A newer pod has the replaced pod's name. `get pod UID` shows the replaced
                    // pod.
                    let selected = selected.iter().filter(|pod| !pod.is_replaced);
                    let selected = selected.filter(|pod| selector.selects(&pod.labels));
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
            let mut events = events(client).await?;
            if !namespace.is_empty() {
                events.retain(|event| is_in(event, &namespace));
            }
            if let Some(name) = name {
                let full_name = event_name(client, get, &events, &name).await?;
                events.retain(|event| event.name == full_name);
            }
            Ok(of(events.iter().map(kinds::event).collect()))
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
        (Kind::Usage, name) => {
            let request = ListUsageRequest {};
            let parts = client.list(async |mut admin| admin.list_usage(request).await).await?;
            let types = sought::collected(parts.map(|part| part.map(|part| part.types))).await?;
            let items = types.iter().map(|usage| (&usage.instance_type, kinds::type_usage(usage)));
            named("usage", items, name)
        }
        (Kind::Backends, name) => {
            let request = ListBackendsRequest {};
            let list = client.call(async |mut admin| admin.list_backends(request).await).await?;
            let items = list.backends.iter().map(|it| (&it.name, kinds::backend(it)));
            named("backend", items, name)
        }
        (Kind::Offerings, name) => {
            let wanted = name.clone().unwrap_or_default();
            let mut found = offerings(client, wanted).await?;
            if let Some(name) = name.filter(|_| found.is_empty()) {
                found = offerings(client, String::new()).await?;
                let name_of = |entry: &CatalogueOffering| {
                    let name = entry.offering.clone().unwrap_or_default().instance_type;
                    (name.clone(), vec![name])
                };
                return Err(names::unknown("offering", found.iter().map(name_of), &name));
            }
            Ok(of(found.iter().map(kinds::offering).collect()))
        }
        (Kind::Pools, name) => {
            let request = ListPoolsRequest {};
            let list = client.call(async |mut admin| admin.list_pools(request).await).await?;
            let items = list.pools.iter().map(|it| (&it.name, kinds::pool(it)));
            named("pool", items, name)
        }
        (Kind::Services | Kind::Secrets, _) => Err(Error::Usage(NO_SUCH_KIND.to_owned())),
    }
}

/// Returns the items with a name, or all items. Fails if no item has the name.
fn named<'a>(
    kind: &str,
    items: impl Iterator<Item = (&'a String, Item)>,
    name: Option<String>,
) -> Result<Items, Error> {
    let items: Vec<_> = items.collect();
    let Some(name) = name else {
        return Ok(of(items.into_iter().map(|(_, item)| item).collect()));
    };
    // As `-o name` prints it.
    let prefix = format!("{kind}/");
    let wanted = name.strip_prefix(&prefix).unwrap_or(&name);
    let is_it = |(own, item): &&(&String, Item)| *own == wanted || item.name == name;
    let found: Vec<Item> = items.iter().filter(is_it).map(|(_, item)| item.clone()).collect();
    if found.is_empty() {
        let known = items.iter().map(|(own, _)| ((*own).clone(), vec![(*own).clone()]));
        return Err(names::unknown(kind, known, wanted));
    }
    Ok(of(found))
}

async fn offerings(
    client: &Client,
    instance_type: String,
) -> Result<Vec<CatalogueOffering>, Error> {
    let request = ListOfferingsRequest { instance_type };
    let parts = client.list(async |mut admin| admin.list_offerings(request).await).await?;
    sought::collected(parts.map(|part| part.map(|part| part.offerings))).await
}

async fn events(client: &Client) -> Result<Vec<Event>, Error> {
    let request = ListEventsRequest::default();
    let parts = client.list(async |mut admin| admin.list_events(request).await).await?;
    sought::collected(parts.map(|part| part.map(|part| part.events))).await
}

/// Returns whether an event is of a pod of a namespace.
fn is_in(event: &Event, namespace: &str) -> bool {
    event.kind == "Pod" && event.name.split_once('/').is_some_and(|(own, _)| own == namespace)
}

/// Returns the name in events that a name means. Names in events come first, because their pod or
/// cell may have ended.
async fn event_name(
    client: &Client,
    get: &Get,
    events: &[Event],
    name: &str,
) -> Result<String, Error> {
    let is_named = |event: &&Event| {
        event.name == name || event.name.split_once('/').is_some_and(|(_, own)| own == name)
    };
    let mut found: Vec<&str> =
        events.iter().filter(is_named).map(|event| event.name.as_str()).collect();
    found.sort_unstable();
    found.dedup();
    match found.as_slice() {
        [only] => return Ok((*only).to_owned()),
        [] => {}
        several => {
            let several = names::listed(several);
            return Err(Error::NotUnique(format!("event {name:?} is not unique: {several}")));
        }
    }
    match sought::pod(client, get.namespace.as_deref(), name).await {
        Ok(pod) => Ok(pod.full_name()),
        Err(Error::Name(unknown)) => match sought::cell(client, name).await {
            Ok(cell) => Ok(cell.id),
            Err(Error::Name(_)) => Err(Error::Name(unknown)),
            Err(error) => Err(error),
        },
        Err(error) => Err(error),
    }
}

fn single(item: Item) -> Items {
    of(vec![item])
}

fn of(items: Vec<Item>) -> Items {
    stream::iter([Ok(items)]).boxed_local()
}

/// Prints all items, and then each item that has changed, until it is interrupted.
async fn watch(client: &Client, get: &Get, selector: Option<Selector>) -> Result<(), Error> {
    let selector = selector.unwrap_or_default();
    let columns = columns(get.kind);
    let writer = Writer::new(get.listing.output, columns, !get.listing.no_headers, false);
    let mut writer = writer.with_documents();
    let has_objects = matches!(get.listing.output, Format::Json | Format::Yaml);
    let age = columns.names.iter().position(|name| *name == "AGE");
    // Keyed by name, and by number among items of the same name.
    let mut seen: HashMap<(String, usize), (Vec<String>, Value)> = HashMap::new();
    let mut is_first = true;
    loop {
        let mut list = match items(client, get, selector.clone()).await {
            // The object has ended while it was watched.
            Err(Error::Name(_)) if !is_first => return Ok(()),
            list => list?,
        };
        let mut changed = Vec::new();
        let mut now: HashMap<(String, usize), (Vec<String>, Value)> = HashMap::new();
        let mut numbers: HashMap<String, usize> = HashMap::new();
        while let Some(part) = list.next().await {
            for item in part? {
                let mut columns = item.columns.clone();
                age.and_then(|age| columns.get_mut(age)).map(String::clear).unwrap_or_default();
                let number = numbers.entry(item.name.clone()).or_default();
                let key = (item.name.clone(), *number);
                *number += 1;
                let object = if has_objects { item.object.clone() } else { Value::Null };
                let shown = (columns, object);
                if seen.get(&key) != Some(&shown) {
                    changed.push(item);
                }
                now.insert(key, shown);
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
