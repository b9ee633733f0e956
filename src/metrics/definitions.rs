//! All metrics.

use super::{Definition, Kind, Label};

const METHOD: Label = Label {
    name: "method",
    values: "methods of CRI v1 without the service; `unknown` for all others",
};
const BACKEND: Label = Label {
    name: "backend",
    values: "configured backends; `(all)` for calls that all of them answer, such as lists; \
             `(kiyot)` for calls that the daemon itself answers or refuses",
};
const INSTANCE_TYPE: Label = Label {
    name: "instance_type",
    values: "types of the catalogue; `other` after 400 combinations of labels",
};
const NAMESPACE: Label = Label {
    name: "namespace",
    values: "the first 50 namespaces with cells, `(pools)` for cells that no pod has, `other` for \
             the rest",
};
const OPERATION: Label = Label { name: "operation", values: "operations of the API" };
const OUTCOME_OF_API: Label = Label {
    name: "outcome",
    values: "`ok`, or the class of the error: `capacity`, `throttled`, `quota`, `auth`, `invalid`, \
             `not_found`, `transient`, `unanswered`",
};

const OPERATION_OF_KUBERNETES: Label = Label {
    name: "operation",
    values: "verb and resource as RBAC names them, such as `patch cells/status`",
};
const OUTCOME_OF_KUBERNETES: Label = Label {
    name: "outcome",
    values: "`ok`, or the class of the failure: `unreachable`, `timed_out`, `denied`, `not_found`, \
             `conflict`, `expired`, `throttled`, `invalid`, `server_error`",
};

/// Calls of the CRI socket.
pub const CRI_CALLS: Definition = Definition {
    name: "kiyot_cri_calls",
    kind: Kind::Counter,
    unit: None,
    help: "Calls of the CRI socket that have ended",
    labels: &[
        METHOD,
        BACKEND,
        Label {
            name: "code",
            values: "codes of gRPC; `CANCELLED` also if the caller left, `UNKNOWN` also for a \
                     response without a readable status",
        },
    ],
};
/// Durations of calls of the CRI socket.
pub const CRI_CALL_DURATION: Definition = Definition {
    name: "kiyot_cri_call_duration",
    kind: Kind::Histogram,
    unit: Some("seconds"),
    help: "Time from a call's head to the end of its response; GetContainerEvents lasts as long \
           as its stream",
    labels: &[METHOD, BACKEND],
};
/// Open calls of the CRI socket.
pub const CRI_CALLS_OPEN: Definition = Definition {
    name: "kiyot_cri_calls_open",
    kind: Kind::Gauge,
    unit: None,
    help: "Calls of the CRI socket that have not ended",
    labels: &[],
};
/// Cells by state.
pub const CELLS: Definition = Definition {
    name: "kiyot_cells",
    kind: Kind::Gauge,
    unit: None,
    help: "Cells whose end is not proven",
    labels: &[Label {
        name: "state",
        values: "`requested`, `launching`, `booting`, `idle`, `binding`, `bound`, `stopping`, \
                 `terminating`",
    }],
};
/// Launches of cells.
pub const LAUNCHES: Definition = Definition {
    name: "kiyot_launches",
    kind: Kind::Counter,
    unit: None,
    help: "Calls of the provider to launch a cell, with repeated calls and launches for warm \
           pools; a refused launch counts once for each refused offering",
    labels: &[
        Label { name: "provider", values: "`netns`, `qemu`, `ec2`, `sim`" },
        INSTANCE_TYPE,
        Label { name: "market", values: "`on-demand`, `spot`" },
        Label {
            name: "outcome",
            values: "`launched`, or the class of the error: `capacity`, `throttled`, `quota`, \
                     `auth`, `invalid`, `not_found`, `transient`, `unanswered`",
        },
    ],
};
/// Times of the steps of a cell's start.
pub const CELL_START: Definition = Definition {
    name: "kiyot_cell_start",
    kind: Kind::Histogram,
    unit: Some("seconds"),
    help: "Time until a step of a cell's start, since the cell was requested, or taken by its pod \
           from a warm pool",
    labels: &[
        Label {
            name: "step",
            values: "`launched`, `booted`, `enrolled`, `bound`, `image_ready`, `first_container`",
        },
        Label { name: "start", values: "`cold`, `warm`" },
    ],
};
/// Hits and misses of warm pools.
pub const POOL_TAKES: Definition = Definition {
    name: "kiyot_warm_pool_orders",
    kind: Kind::Counter,
    unit: None,
    help: "Cells for pods that a warm pool suits: taken from it, or launched as none was idle",
    labels: &[Label { name: "result", values: "`hit`, `miss`" }],
};
/// Cells of warm pools.
pub const POOL_CELLS: Definition = Definition {
    name: "kiyot_warm_pool_cells",
    kind: Kind::Gauge,
    unit: None,
    help: "Cells of all warm pools that no pod has taken",
    labels: &[Label { name: "state", values: "`idle`, `booting`" }],
};
/// Cells that warm pools should have.
pub const POOL_CELLS_WANTED: Definition = Definition {
    name: "kiyot_warm_pool_cells_wanted",
    kind: Kind::Gauge,
    unit: None,
    help: "Cells that all warm pools should have",
    labels: &[],
};
/// Cells by provider.
pub const PROVIDER_CELLS: Definition = Definition {
    name: "kiyot_provider_cells",
    kind: Kind::Gauge,
    unit: None,
    help: "Cells of a provider whose end is not proven, 0 included; a provider that was removed \
           from the configuration drains until its last cell has ended",
    labels: &[
        Label { name: "provider", values: "`netns`, `qemu`, `ec2`" },
        Label { name: "state", values: "`configured`, `draining`, `not configured`" },
    ],
};
/// Pods without a cell.
pub const ORDERS_WAITING: Definition = Definition {
    name: "kiyot_orders_waiting",
    kind: Kind::Gauge,
    unit: None,
    help: "Pods that wait in turn for the launch of a cell",
    labels: &[],
};
/// Limit of cells.
pub const CELLS_LIMIT: Definition = Definition {
    name: "kiyot_cells_limit",
    kind: Kind::Gauge,
    unit: None,
    help: "Limit of cells (max_cells)",
    labels: &[],
};
/// Cordon of cells.
pub const CORDONED: Definition = Definition {
    name: "kiyot_cordoned",
    kind: Kind::Gauge,
    unit: None,
    help: "1 while an operator has stopped launches of cells (milpactl cordon)",
    labels: &[],
};
/// Pauses of launches.
pub const LAUNCH_PAUSES: Definition = Definition {
    name: "kiyot_launch_pauses",
    kind: Kind::Counter,
    unit: None,
    help: "Pauses of launches with the same parameters in a zone, because their boots did not \
           enrol",
    labels: &[],
};
/// Booting cells.
pub const BOOTS: Definition = Definition {
    name: "kiyot_boots",
    kind: Kind::Gauge,
    unit: None,
    help: "Cells that boot",
    labels: &[],
};
/// Limit of booting cells.
pub const BOOTS_LIMIT: Definition = Definition {
    name: "kiyot_boots_limit",
    kind: Kind::Gauge,
    unit: None,
    help: "Limit of cells that boot (limits.boots); absent without a limit",
    labels: &[],
};
/// Limit of the price.
pub const PRICE_LIMIT: Definition = Definition {
    name: "kiyot_price_limit",
    kind: Kind::Gauge,
    unit: Some("dollars_per_hour"),
    help: "Limits of prices (limits.price_per_hour, limits.namespace_price_per_hour); absent \
           without a limit",
    labels: &[Label { name: "of", values: "`node`, `namespace`" }],
};
/// Price of cells.
pub const PRICE: Definition = Definition {
    name: "kiyot_cells_price",
    kind: Kind::Gauge,
    unit: Some("dollars_per_hour"),
    help: "Price of all cells of a namespace on this node",
    labels: &[NAMESPACE],
};
/// Cost of cells.
pub const COST: Definition = Definition {
    name: "kiyot_cells_cost",
    kind: Kind::Counter,
    unit: Some("dollars"),
    help: "Cost of the cells of a namespace on this node, ended cells and previous daemons \
           included",
    labels: &[NAMESPACE],
};
/// Bytes of the link.
pub const LINK_BYTES: Definition = Definition {
    name: "kiyot_link",
    kind: Kind::Counter,
    unit: Some("bytes"),
    help: "Bytes of all connections with cells, with TLS",
    labels: &[Label { name: "direction", values: "`received`, `sent`" }],
};
/// Bytes of logs.
pub const LOG_BYTES: Definition = Definition {
    name: "kiyot_logs",
    kind: Kind::Counter,
    unit: Some("bytes"),
    help: "Bytes of container logs of cells that were written to files of the node",
    labels: &[],
};
/// Bytes of volumes.
pub const VOLUME_BYTES: Definition = Definition {
    name: "kiyot_volumes",
    kind: Kind::Counter,
    unit: Some("bytes"),
    help: "Bytes of files of volumes that were sent to cells",
    labels: &[],
};
/// Bytes of images.
pub const IMAGE_BYTES: Definition = Definition {
    name: "kiyot_images",
    kind: Kind::Counter,
    unit: Some("bytes"),
    help: "Bytes of images that were copied from the node to cells",
    labels: &[],
};
/// Calls of a cloud's API.
pub const API_CALLS: Definition = Definition {
    name: "kiyot_api_calls",
    kind: Kind::Counter,
    unit: None,
    help: "Calls of the API of EC2",
    labels: &[OPERATION, OUTCOME_OF_API],
};
/// Time of calls of a cloud's API.
pub const API_CALL_DURATION: Definition = Definition {
    name: "kiyot_api_call_time",
    kind: Kind::Counter,
    unit: Some("seconds"),
    help: "Total time of calls of the API of EC2",
    labels: &[OPERATION, OUTCOME_OF_API],
};
/// Calls of the Kubernetes API.
pub const KUBERNETES_CALLS: Definition = Definition {
    name: "kiyot_kubernetes_calls",
    kind: Kind::Counter,
    unit: None,
    help: "Calls of the Kubernetes API; a watch counts when it begins",
    labels: &[OPERATION_OF_KUBERNETES, OUTCOME_OF_KUBERNETES],
};
/// Time of calls of the Kubernetes API.
pub const KUBERNETES_CALL_DURATION: Definition = Definition {
    name: "kiyot_kubernetes_call_time",
    kind: Kind::Counter,
    unit: Some("seconds"),
    help: "Total time of calls of the Kubernetes API",
    labels: &[OPERATION_OF_KUBERNETES, OUTCOME_OF_KUBERNETES],
};
/// Events of pods that are not reported.
pub const KUBERNETES_DROPPED_EVENTS: Definition = Definition {
    name: "kiyot_kubernetes_dropped_events",
    kind: Kind::Counter,
    unit: None,
    help: "Events of pods that were not reported: beyond their share, denied, or failed too often",
    labels: &[],
};
/// Declared capacity that is not applied.
pub const KUBERNETES_UNAPPLIED_CAPACITY: Definition = Definition {
    name: "kiyot_kubernetes_unapplied_capacity",
    kind: Kind::Gauge,
    unit: None,
    help: "Figures of the declared capacity that are higher than in the Node object",
    labels: &[],
};
/// Stop of further pods for cells.
pub const KUBERNETES_CELLS_EXHAUSTED: Definition = Definition {
    name: "kiyot_kubernetes_cells_exhausted",
    kind: Kind::Gauge,
    unit: None,
    help: "1 while the node takes no further pods for cells, because none can be launched",
    labels: &[],
};
/// Shares of budgets.
pub const BUDGET_SHARES: Definition = Definition {
    name: "kiyot_budget_shares",
    kind: Kind::Gauge,
    unit: Some("dollars_per_hour"),
    help: "Shares that this node has of all CellBudgets; absent without budgets",
    labels: &[],
};
/// Namespaces that wait for a larger share.
pub const BUDGET_WAITING: Definition = Definition {
    name: "kiyot_budget_namespaces_waiting",
    kind: Kind::Gauge,
    unit: None,
    help: "Namespaces with pods that wait for a larger share; absent without budgets",
    labels: &[],
};
/// Refusals by budgets.
pub const BUDGET_REFUSALS: Definition = Definition {
    name: "kiyot_budget_refusals",
    kind: Kind::Counter,
    unit: None,
    help: "Pods that got no cell within their CellBudgets, repeated calls included; the event \
           `NoCell` of the pod names the budget",
    labels: &[Label {
        name: "limit",
        values: "`hour`, `day`, `month`; `not_granted` and `not_known` if the Kubernetes API did \
                 not answer in time",
    }],
};
/// Age of the known budgets.
pub const BUDGET_READ_AGE: Definition = Definition {
    name: "kiyot_budget_read_age",
    kind: Kind::Gauge,
    unit: Some("seconds"),
    help: "Time since all CellBudgets were last known to be current, usually under 310; absent \
           before the first list",
    labels: &[],
};
/// Sweeps of entries.
pub const BUDGET_SWEEPS: Definition = Definition {
    name: "kiyot_budget_sweeps",
    kind: Kind::Counter,
    unit: None,
    help: "Entries of deleted nodes in CellBudgets, by what this node did with them",
    labels: &[Label {
        name: "outcome",
        values: "`swept` for a share that was given back, `removed` for an entry without a share, \
                 `failed` for a round of checks",
    }],
};
/// Build.
pub const BUILD: Definition = Definition {
    name: "kiyot_build",
    kind: Kind::Info,
    unit: None,
    help: "Build of the daemon",
    labels: &[
        Label { name: "version", values: "the version" },
        Label { name: "architecture", values: "`x86_64`, `aarch64`" },
    ],
};
/// Processor time.
pub const PROCESS_CPU: Definition = Definition {
    name: "process_cpu",
    kind: Kind::Counter,
    unit: Some("seconds"),
    help: "Processor time of the daemon",
    labels: &[],
};
/// Memory.
pub const PROCESS_MEMORY: Definition = Definition {
    name: "process_resident_memory",
    kind: Kind::Gauge,
    unit: Some("bytes"),
    help: "Resident memory of the daemon",
    labels: &[],
};
/// Time of the start.
pub const PROCESS_START: Definition = Definition {
    name: "process_start_time",
    kind: Kind::Gauge,
    unit: Some("seconds"),
    help: "Time of the daemon's start since 1970",
    labels: &[],
};
/// Open files.
pub const PROCESS_FDS: Definition = Definition {
    name: "process_open_fds",
    kind: Kind::Gauge,
    unit: None,
    help: "Open files of the daemon",
    labels: &[],
};
/// Limit of open files.
pub const PROCESS_MAX_FDS: Definition = Definition {
    name: "process_max_fds",
    kind: Kind::Gauge,
    unit: None,
    help: "Limit of open files of the daemon",
    labels: &[],
};

/// All definitions, in the order of the documentation.
pub const ALL: &[&Definition] = &[
    &CRI_CALLS,
    &CRI_CALL_DURATION,
    &CRI_CALLS_OPEN,
    &CELLS,
    &PROVIDER_CELLS,
    &CELLS_LIMIT,
    &CORDONED,
    &LAUNCHES,
    &LAUNCH_PAUSES,
    &CELL_START,
    &POOL_TAKES,
    &POOL_CELLS,
    &POOL_CELLS_WANTED,
    &ORDERS_WAITING,
    &BOOTS,
    &BOOTS_LIMIT,
    &PRICE,
    &PRICE_LIMIT,
    &COST,
    &LINK_BYTES,
    &LOG_BYTES,
    &VOLUME_BYTES,
    &IMAGE_BYTES,
    &API_CALLS,
    &API_CALL_DURATION,
    &KUBERNETES_CALLS,
    &KUBERNETES_CALL_DURATION,
    &KUBERNETES_DROPPED_EVENTS,
    &KUBERNETES_UNAPPLIED_CAPACITY,
    &KUBERNETES_CELLS_EXHAUSTED,
    &BUDGET_SHARES,
    &BUDGET_WAITING,
    &BUDGET_REFUSALS,
    &BUDGET_READ_AGE,
    &BUDGET_SWEEPS,
    &BUILD,
    &PROCESS_CPU,
    &PROCESS_MEMORY,
    &PROCESS_START,
    &PROCESS_FDS,
    &PROCESS_MAX_FDS,
];
