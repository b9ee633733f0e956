//! The methods of the API.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use futures::{StreamExt, stream, stream::BoxStream};
use kiyot_engine::id::CellId;
use kiyot_proto::admin::{self, admin_server::Admin};
use kiyot_values::{error_chain::error_chain, glob::matches};
use tokio::sync::OwnedSemaphorePermit;
use tonic::{Request, Response, Status};

use super::{
    access::Access,
    connection_limits::ConnectionLimits,
    deadlines::{END_OF_CELL, SHORT, within},
    dump, lists,
    node_log::{NodeLog, Part, Wanted},
    parts::Parts,
};
use crate::{
    backends::milpa::{Milpa, inventory::PodKey},
    blocking::blocking,
};

/// The offerings of a response.
const PART_OFFERINGS: usize = 256;
/// The longest glob of instance types, in bytes: it is matched with each offering.
const MAX_GLOB_BYTES: usize = 255;
/// The pause between two reads at the end of a followed log.
const FOLLOW_PAUSE: Duration = Duration::from_millis(250);

/// The stream of a method's responses.
type Responses<T> = BoxStream<'static, Result<T, Status>>;

/// The service of a connection.
#[derive(Debug, Clone)]
pub(super) struct AdminService {
    pub(super) parts: Arc<Parts>,
    pub(super) access: Access,
    /// Limits of all connections.
    pub(super) limits: Arc<ConnectionLimits>,
}

impl AdminService {
    /// Returns the pods of each backend that match a request.
    fn pod_keys(&self, namespace: &str, name: &str) -> Vec<(Arc<Milpa>, Vec<PodKey>)> {
        let keys = |milpa: &Arc<Milpa>| {
            let keys = milpa.inventory().find(namespace, name);
            (Arc::clone(milpa), keys)
        };
        self.parts.milpas.iter().map(keys).collect()
    }

    /// Returns the cells of each backend whose id begins with a text.
    fn cell_ids(&self, name: &str) -> Vec<(Arc<Milpa>, Vec<CellId>)> {
        let ids = |milpa: &Arc<Milpa>| {
            let mut ids = milpa.inventory().cell_ids();
            ids.retain(|id| id.as_str().starts_with(name));
            (Arc::clone(milpa), ids)
        };
        self.parts.milpas.iter().map(ids).collect()
    }

    /// Stops or permits launches of cells. Returns the number of cells, which keep running.
    async fn set_cordoned(&self, is_cordoned: bool) -> Result<u32, Status> {
        let mut all = 0;
        for milpa in &self.parts.milpas {
            let cells = milpa.inventory().cordon(is_cordoned).await;
            all += cells.map_err(|error| Status::internal(error_chain(&error)))?;
        }
        Ok(u32::try_from(all).unwrap_or(u32::MAX))
    }
}

#[async_trait]
impl Admin for AdminService {
    type ListPodsStream = Responses<admin::ListPodsResponse>;
    type ListCellsStream = Responses<admin::ListCellsResponse>;
    type ListEventsStream = Responses<admin::ListEventsResponse>;
    type ListUsageStream = Responses<admin::ListUsageResponse>;
    type ListOfferingsStream = Responses<admin::ListOfferingsResponse>;
    type ReadLogStream = Responses<admin::ReadLogResponse>;
    type DumpStream = Responses<admin::DumpResponse>;

    async fn version(
        &self,
        _request: Request<admin::VersionRequest>,
    ) -> Result<Response<admin::VersionResponse>, Status> {
        Ok(Response::new(self.parts.version()))
    }

    async fn list_pods(
        &self,
        request: Request<admin::ListPodsRequest>,
    ) -> Result<Response<Self::ListPodsStream>, Status> {
        let admin::ListPodsRequest { namespace, name } = request.into_inner();
        let keys = self.pod_keys(&namespace, &name);
        let access = self.access;
        let pods = lists::parts(keys, move |milpa, keys: &[PodKey]| {
            let pods = milpa.inventory().pods(keys).into_iter();
            admin::ListPodsResponse { pods: pods.map(|pod| access.shown_pod(pod)).collect() }
        });
        Ok(Response::new(pods.boxed()))
    }

    async fn list_cells(
        &self,
        request: Request<admin::ListCellsRequest>,
    ) -> Result<Response<Self::ListCellsStream>, Status> {
        let ids = self.cell_ids(&request.into_inner().name);
        let access = self.access;
        let cells = lists::parts(ids, move |milpa, ids: &[CellId]| {
            let cells = milpa.inventory().cells(ids).into_iter();
            admin::ListCellsResponse { cells: cells.map(|cell| access.shown_cell(cell)).collect() }
        });
        Ok(Response::new(cells.boxed()))
    }

    async fn list_events(
        &self,
        request: Request<admin::ListEventsRequest>,
    ) -> Result<Response<Self::ListEventsStream>, Status> {
        let admin::ListEventsRequest { name, follow } = request.into_inner();
        let is_wanted = move |event: &admin::Event| name.is_empty() || event.name == name;
        let (mut all, mut following) = (Vec::new(), Vec::new());
        for milpa in &self.parts.milpas {
            let (events, new) = milpa.inventory().events();
            all.extend(events.into_iter().filter(&is_wanted));
            following.push(new);
        }
        let all = stream::once(async move { Ok(admin::ListEventsResponse { events: all }) });
        if !follow {
            return Ok(Response::new(all.boxed()));
        }
        let new = stream::select_all(following).filter_map(move |event| {
            let wanted =
                is_wanted(&event).then(|| admin::ListEventsResponse { events: vec![event] });
            async move { wanted.map(Ok) }
        });
        Ok(Response::new(all.chain(new).boxed()))
    }

    async fn list_usage(
        &self,
        _request: Request<admin::ListUsageRequest>,
    ) -> Result<Response<Self::ListUsageStream>, Status> {
        let costs = self.parts.milpas.iter().map(|milpa| {
            let (types, namespaces) = milpa.inventory().costs();
            Ok(admin::ListUsageResponse { types, namespaces, pods: Vec::new() })
        });
        let costs: Vec<_> = costs.collect();
        let keys = self.pod_keys("", "");
        let pods = lists::parts(keys, |milpa, keys: &[PodKey]| admin::ListUsageResponse {
            pods: milpa.inventory().usage(keys),
            ..Default::default()
        });
        Ok(Response::new(stream::iter(costs).chain(pods).boxed()))
    }

    async fn list_backends(
        &self,
        _request: Request<admin::ListBackendsRequest>,
    ) -> Result<Response<admin::ListBackendsResponse>, Status> {
        Ok(Response::new(admin::ListBackendsResponse { backends: self.parts.backends() }))
    }

    async fn list_offerings(
        &self,
        request: Request<admin::ListOfferingsRequest>,
    ) -> Result<Response<Self::ListOfferingsStream>, Status> {
        let wanted = request.into_inner().instance_type;
        if wanted.len() > MAX_GLOB_BYTES {
            let error =
                format!("instance type of {} bytes; allowed: {MAX_GLOB_BYTES}", wanted.len());
            return Err(Status::invalid_argument(error));
        }
        let mut offerings = within(SHORT, "ListOfferings", self.parts.offerings()).await?;
        offerings.retain(|entry| {
            let offering = entry.offering.as_ref();
            wanted.is_empty() || offering.is_some_and(|it| matches(&wanted, &it.instance_type))
        });
        let parts: Vec<_> = offerings
            .chunks(PART_OFFERINGS)
            .map(|part| Ok(admin::ListOfferingsResponse { offerings: part.to_vec() }))
            .collect();
        Ok(Response::new(stream::iter(parts).boxed()))
    }

    async fn list_pools(
        &self,
        _request: Request<admin::ListPoolsRequest>,
    ) -> Result<Response<admin::ListPoolsResponse>, Status> {
        Ok(Response::new(admin::ListPoolsResponse { pools: self.parts.pools() }))
    }

    async fn plan(
        &self,
        request: Request<admin::PlanRequest>,
    ) -> Result<Response<admin::PlanResponse>, Status> {
        let planned = Box::pin(self.parts.plan(request.into_inner()));
        within(SHORT, "Plan", planned).await.map(Response::new)
    }

    async fn read_log(
        &self,
        request: Request<admin::ReadLogRequest>,
    ) -> Result<Response<Self::ReadLogStream>, Status> {
        self.access.check("ReadLog")?;
        let request = request.into_inner();
        if let Ok((milpa, cell)) = self.parts.find_cell(&request.pod) {
            check_console(&request)?;
            let console = async {
                let console = milpa.inventory().console(&cell).await;
                console.map_err(|error| Status::unavailable(error.text()))
            };
            let console = within(SHORT, "ReadLog", console).await?;
            let text = last_lines(&console, request.lines).to_owned().into();
            let response = admin::ReadLogResponse { stdout: text, ..Default::default() };
            return Ok(Response::new(stream::iter([Ok(response)]).boxed()));
        }
        let (milpa, key) = self.parts.find_pod(&request.namespace, &request.pod)?;
        let unit = milpa.inventory().unit(&key, &request.unit);
        let unit = unit.map_err(|error| Status::not_found(error.to_string()))?;
        let wanted = Wanted { lines: request.lines, since_unix_nanos: request.since_unix_nanos };
        let followed = request.follow.then(|| self.limits.follow()).transpose()?;
        let path = unit.path.clone();
        let opened = blocking(move || NodeLog::open(&path, wanted)).await;
        let log = opened.map_err(|error| {
            Status::not_found(format!("log {} of {}: {error}", unit.path.display(), key.name()))
        })?;
        let reading = Reading {
            log: Some(log),
            milpa: Arc::clone(milpa),
            container: unit.container,
            followed,
        };
        Ok(Response::new(reading.responses().boxed()))
    }

    async fn exec(
        &self,
        request: Request<admin::ExecRequest>,
    ) -> Result<Response<admin::StreamingUrl>, Status> {
        self.access.check("Exec")?;
        let url = within(SHORT, "Exec", self.parts.exec(request.into_inner())).await?;
        Ok(Response::new(admin::StreamingUrl { url }))
    }

    async fn attach(
        &self,
        request: Request<admin::AttachRequest>,
    ) -> Result<Response<admin::StreamingUrl>, Status> {
        self.access.check("Attach")?;
        let url = within(SHORT, "Attach", self.parts.attach(request.into_inner())).await?;
        Ok(Response::new(admin::StreamingUrl { url }))
    }

    async fn port_forward(
        &self,
        request: Request<admin::PortForwardRequest>,
    ) -> Result<Response<admin::StreamingUrl>, Status> {
        self.access.check("PortForward")?;
        let forwarded = self.parts.port_forward(request.into_inner());
        let url = within(SHORT, "PortForward", forwarded).await?;
        Ok(Response::new(admin::StreamingUrl { url }))
    }

    async fn cordon(
        &self,
        _request: Request<admin::CordonRequest>,
    ) -> Result<Response<admin::CordonResponse>, Status> {
        self.access.check("Cordon")?;
        let cells = within(SHORT, "Cordon", self.set_cordoned(true)).await?;
        Ok(Response::new(admin::CordonResponse { cells }))
    }

    async fn uncordon(
        &self,
        _request: Request<admin::UncordonRequest>,
    ) -> Result<Response<admin::UncordonResponse>, Status> {
        self.access.check("Uncordon")?;
        within(SHORT, "Uncordon", self.set_cordoned(false)).await?;
        Ok(Response::new(admin::UncordonResponse {}))
    }

    async fn end_cell(
        &self,
        request: Request<admin::EndCellRequest>,
    ) -> Result<Response<admin::EndCellResponse>, Status> {
        self.access.check("EndCell")?;
        let (milpa, cell) = self.parts.find_cell(&request.into_inner().cell)?;
        tracing::warn!(%cell, "cell ended by an operator");
        let ending = async {
            let ended = milpa.inventory().end_cell(&cell).await;
            ended.map_err(|error| Status::unavailable(error_chain(&error)))
        };
        within(END_OF_CELL, "EndCell", ending).await?;
        Ok(Response::new(admin::EndCellResponse {}))
    }

    async fn dump(
        &self,
        _request: Request<admin::DumpRequest>,
    ) -> Result<Response<Self::DumpStream>, Status> {
        self.access.check("Dump")?;
        let responses = dump::responses(Arc::clone(&self.parts));
        let responses = responses.map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(responses.boxed()))
    }
}

/// Fails with INVALID_ARGUMENT if a request selects a part of a console that can't be
/// distinguished: its lines have neither times nor containers, and it is read once.
fn check_console(request: &admin::ReadLogRequest) -> Result<(), Status> {
    let wanted = [
        (request.follow, "can't be followed (-f)"),
        (request.since_unix_nanos != 0, "has no times (--since)"),
        (!request.unit.is_empty(), "has no units (-u)"),
    ];
    match wanted.into_iter().find(|(is_wanted, _)| *is_wanted) {
        Some((_, why)) => Err(Status::invalid_argument(format!(
            "the console of cell {} {why}; allowed: --lines, or the log of its pod",
            request.pod
        ))),
        None => Ok(()),
    }
}

/// A log that is read.
struct Reading {
    /// `None` once all is read.
    log: Option<NodeLog>,
    milpa: Arc<Milpa>,
    container: String,
    /// The permit to follow the log; `None` to end with its current end.
    followed: Option<OwnedSemaphorePermit>,
}

impl Reading {
    fn responses(self) -> impl futures::Stream<Item = Result<admin::ReadLogResponse, Status>> {
        let read = stream::unfold(self, |mut reading| async move {
            let parts = reading.next_parts().await?;
            Some((stream::iter(parts), reading))
        });
        read.flatten()
    }

    /// Returns the next part of the log; `None` at its end.
    async fn next_parts(&mut self) -> Option<Vec<Result<admin::ReadLogResponse, Status>>> {
        loop {
            let mut log = self.log.take()?;
            // Checked before the read: if the log was whole then, the read gets all of it.
            let is_whole =
                self.followed.is_none() || self.milpa.inventory().has_whole_log(&self.container);
            let read = blocking(move || log.next_part().map(|parts| (log, parts))).await;
            match read {
                Ok((log, Some(parts))) => {
                    self.log = Some(log);
                    return Some(parts.into_iter().map(|part: Part| Ok(part.into())).collect());
                }
                Ok((_, None)) if is_whole => return None,
                Ok((log, None)) => {
                    self.log = Some(log);
                    tokio::time::sleep(FOLLOW_PAUSE).await;
                }
                Err(error) => {
                    return Some(vec![Err(Status::internal(format!("log not read: {error}")))]);
                }
            }
        }
    }
}

fn last_lines(text: &str, lines: Option<u64>) -> &str {
    let Some(lines) = lines.and_then(|lines| usize::try_from(lines).ok()) else { return text };
    let ends = text.trim_end_matches('\n').rmatch_indices('\n');
    let begin = ends.map(|(at, _)| at + 1).nth(lines.saturating_sub(1));
    if lines == 0 { "" } else { &text[begin.unwrap_or_default()..] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_part_of_a_console_is_refused() {
        let request = |follow, since_unix_nanos, unit: &str| admin::ReadLogRequest {
            pod: "cell-a".to_owned(),
            follow,
            since_unix_nanos,
            unit: unit.to_owned(),
            lines: Some(5),
            ..Default::default()
        };
        assert!(check_console(&request(false, 0, "")).is_ok());
        for (request, part) in [
            (request(true, 0, ""), "-f"),
            (request(false, 1, ""), "--since"),
            (request(false, 0, "main"), "-u"),
        ] {
            let refused = check_console(&request).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::InvalidArgument);
            for part in [part, "cell-a", "allowed: --lines"] {
                assert!(refused.message().contains(part), "{part}: {}", refused.message());
            }
        }
    }

    #[test]
    fn last_lines_of_a_console_are_cut_at_line_ends() {
        let text = "one\ntwo\nthree\n";
        for (lines, expected) in [
            (None, text),
            (Some(0), ""),
            (Some(1), "three\n"),
            (Some(2), "two\nthree\n"),
            (Some(3), text),
            (Some(9), text),
        ] {
            assert_eq!(last_lines(text, lines), expected, "{lines:?}");
        }
    }
}
