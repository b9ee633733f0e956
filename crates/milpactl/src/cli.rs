//! Arguments.

use std::path::PathBuf;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use crate::output::Format;

/// Default path of the socket.
const DEFAULT_SOCKET: &str = "/run/kiyot/admin.sock";

/// Examples and exit codes, for the help.
const AFTER_HELP: &str = "\
Examples:
  milpactl get pods -o wide          pods in cells, with their instances
  milpactl describe pod web          why it waits or failed, its timeline, price and events
  milpactl logs web -f               its log; with the id of a cell, the agent's
  milpactl exec -it web -- sh        a shell in it
  milpactl plan -f pod.yaml          where a pod would go, and its price
  milpactl drain --end               ends all cells; `milpactl uncordon` permits them again

Exit codes: 0; 1 failure; 64 wrong arguments; 66 unknown or ambiguous name; 69 no daemon answers; \
    76 the daemon is of another version; 77 not permitted; else exec has the code of its command.";

/// Order of the option that all verbs have, in the help: after a verb's own options.
const LAST: usize = 900;

/// Shows pods in cells and their instances, and controls them.
#[derive(Debug, Parser)]
#[command(name = "milpactl", version, arg_required_else_help = true, after_help = AFTER_HELP)]
pub(crate) struct Arguments {
    /// Socket of the daemon (`admin.listen`).
    #[arg(
        long,
        global = true,
        env = "MILPACTL_SOCKET",
        default_value = DEFAULT_SOCKET,
        value_name = "PATH",
        display_order = LAST
    )]
    pub(crate) socket: PathBuf,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Prints the version of the daemon.
    Version,
    /// Lists pods, cells (nodes), events, metrics, usage, backends, offerings or pools.
    Get(Get),
    /// Prints everything about a pod or a cell.
    Describe(Describe),
    /// Prints the log of a unit (container) of a pod, or the end of the console of a cell.
    Logs(Logs),
    /// Explains where the pods of Kubernetes manifests would go, and what they would cost.
    Plan(Plan),
    /// Creates pods of Kubernetes manifests as static pods of the kubelet, without the API server.
    Create(Create),
    /// Removes static pods that `create` made; the kubelet ends them.
    Delete(Delete),
    /// Runs a command in a unit (container) of a pod; milpactl exits with its exit code.
    Exec(Exec),
    /// Attaches to the streams of a unit (container) of a pod.
    Attach(Attach),
    /// Forwards local ports to ports of a pod, until the pod ends.
    PortForward(PortForward),
    /// Stops launches of cells, also after a restart of the daemon, and ends cells of warm pools.
    Cordon,
    /// Permits launches of cells again, after `cordon` or `drain`.
    Uncordon,
    /// Stops launches of cells until `uncordon`, and waits for the end of running cells.
    Drain(Drain),
    /// Shows the warm pools with their idle and booting cells.
    Pool(Listing),
    /// Shows cells with their usage, prices and start times.
    Top(Top),
    /// Collects a support bundle without secrets.
    Dump(Dump),
    /// Prints a script of completions for a shell.
    Completion {
        /// The shell.
        #[arg(value_name = "bash|elvish|fish|powershell|zsh")]
        shell: Shell,
    },
    /// Prints the manual page, or writes a page for each verb.
    Man {
        /// The directory for `milpactl.1`, `milpactl-get.1` and so on. Without it, one page of all
        /// verbs goes to the standard output.
        directory: Option<PathBuf>,
    },
    /// Names the alternative: kiyot has no such objects.
    #[command(hide = true, aliases = ["apply", "run"])]
    Deploy(Rest),
    /// Names the alternative: kiyot has no such objects.
    #[command(hide = true)]
    Update(Rest),
}

/// Arguments that are ignored.
#[derive(Debug, Args)]
pub(crate) struct Rest {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    _rest: Vec<String>,
}

/// A kind of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// Pods in cells.
    #[value(alias = "pod", alias = "po")]
    Pods,
    /// Cells; the original called them nodes.
    #[value(alias = "cell", alias = "node", alias = "nodes", alias = "cl")]
    Cells,
    /// Recent events of pods and cells.
    #[value(alias = "event", alias = "ev")]
    Events,
    /// CPU, memory and disk of pods.
    Metrics,
    /// Hours and cost by instance type.
    #[value(alias = "usages")]
    Usage,
    /// Backends with their limits.
    #[value(alias = "backend")]
    Backends,
    /// Instance types with prices.
    #[value(alias = "offering")]
    Offerings,
    /// Warm pools.
    #[value(alias = "pool")]
    Pools,
    /// Names the alternative.
    #[value(hide = true, alias = "service")]
    Services,
    /// Names the alternative.
    #[value(hide = true, alias = "secret")]
    Secrets,
}

/// Form of a list.
#[derive(Debug, Args)]
pub(crate) struct Listing {
    /// Format of the output.
    #[arg(short, long, value_enum, default_value_t)]
    pub(crate) output: Format,
    /// Leaves out the line of column names.
    #[arg(long)]
    pub(crate) no_headers: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Get {
    /// The kind.
    #[arg(value_enum, value_name = "pods|cells|events|metrics|usage|backends|offerings|pools")]
    pub(crate) kind: Kind,
    /// A name, or the prefix of an id; an instance type or a glob of offerings; by default all.
    pub(crate) name: Option<String>,
    /// Namespace of pods and their events; by default all.
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    /// Labels of pods, such as `app=web,tier in (a,b),!canary`.
    #[arg(short = 'l', long)]
    pub(crate) selector: Option<String>,
    /// Prints objects again when they change.
    #[arg(short, long)]
    pub(crate) watch: bool,
    #[command(flatten)]
    pub(crate) listing: Listing,
}

/// A kind that can be described.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Described {
    /// A pod in a cell.
    #[value(alias = "pods", alias = "po")]
    Pod,
    /// A cell.
    #[value(alias = "cells", alias = "node", alias = "cl")]
    Cell,
}

#[derive(Debug, Args)]
pub(crate) struct Describe {
    /// The kind.
    #[arg(value_enum, value_name = "pod|cell")]
    pub(crate) kind: Described,
    /// The name, or the prefix of an id.
    pub(crate) name: String,
    /// Namespace of the pod.
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Logs {
    /// A pod or a cell.
    pub(crate) name: String,
    /// The unit (container); by default the pod's first that is not an init container.
    #[arg(short, long, visible_alias = "container")]
    pub(crate) unit: Option<String>,
    /// Namespace of the pod.
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    /// Follows the log until the unit has ended.
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// The last lines only.
    #[arg(long, visible_alias = "tail", value_name = "NUMBER")]
    pub(crate) lines: Option<u64>,
    /// Lines since a time, such as `10m` ago or `2026-01-31T10:00:00Z`.
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<String>,
}

/// A unit of a pod, and the local streams that it gets.
#[derive(Debug, Args)]
pub(crate) struct UnitStreams {
    /// Passes the standard input.
    #[arg(short = 'i', long)]
    pub(crate) stdin: bool,
    /// Uses a terminal; with -i only.
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// The unit (container); by default the pod's first.
    #[arg(short, long, visible_short_alias = 'c', visible_alias = "container")]
    pub(crate) unit: Option<String>,
    /// Namespace of the pod.
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Exec {
    /// A pod.
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) streams: UnitStreams,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    pub(crate) command: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Attach {
    /// A pod.
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) streams: UnitStreams,
}

#[derive(Debug, Args)]
pub(crate) struct PortForward {
    /// A pod.
    pub(crate) name: String,
    /// Ports as REMOTE, LOCAL:REMOTE, or :REMOTE for any free local port.
    #[arg(required = true)]
    pub(crate) ports: Vec<String>,
    /// Local addresses, separated by commas; localhost is 127.0.0.1 and, if available, ::1.
    #[arg(long, value_delimiter = ',', default_value = "localhost")]
    pub(crate) address: Vec<String>,
    /// A unit (container) of the pod. All of them have the same ports.
    #[arg(short, long, visible_short_alias = 'c', visible_alias = "container")]
    pub(crate) unit: Option<String>,
    /// Namespace of the pod.
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Plan {
    /// A manifest with Pods or workloads: a file, a directory, or `-` for the standard input.
    #[arg(short, long, required = true, value_name = "FILE")]
    pub(crate) filename: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Create {
    /// A manifest with only Pods: a file, a directory, or `-` for the standard input.
    #[arg(short, long, required = true, value_name = "FILE")]
    pub(crate) filename: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) directory: StaticPods,
}

/// The directory of static pods.
#[derive(Debug, Args)]
pub(crate) struct StaticPods {
    /// Directory of the kubelet's static pods; by default `staticPodPath` of
    /// /var/lib/kubelet/config.yaml.
    #[arg(long, env = "MILPACTL_STATIC_POD_PATH", value_name = "DIRECTORY")]
    pub(crate) static_pod_path: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).multiple(true).args(["pods", "filename"]))]
pub(crate) struct Delete {
    /// Pods: a name of the manifest, or namespace/name.
    pub(crate) pods: Vec<String>,
    /// The pods of a manifest: a file, a directory, or `-` for the standard input.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) filename: Vec<PathBuf>,
    /// Namespace of the pods; by default "default".
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    #[command(flatten)]
    pub(crate) directory: StaticPods,
}

#[derive(Debug, Args)]
pub(crate) struct Drain {
    /// Ends running cells, instead of waiting for the end of their pods.
    #[arg(long)]
    pub(crate) end: bool,
    /// Time for the whole drain, such as `90s` or `10m`.
    #[arg(long, default_value = "10m", value_name = "DURATION")]
    pub(crate) timeout: String,
}

#[derive(Debug, Args)]
pub(crate) struct Top {
    /// Refreshes every two seconds until it is interrupted. The default on a terminal.
    #[arg(long, overrides_with = "once")]
    pub(crate) watch: bool,
    /// Prints once. The default without a terminal.
    #[arg(long)]
    pub(crate) once: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Dump {
    /// The parts.
    #[arg(value_enum, value_name = "all")]
    pub(crate) parts: DumpParts,
    /// Writes a tar archive of the texts. Without it, the texts go to the standard output.
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DumpParts {
    /// Everything.
    All,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parsed(line: &str) -> Verb {
        Arguments::try_parse_from(line.split(' ')).unwrap().verb
    }

    #[test]
    fn arguments_are_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn forms_of_the_original_are_read() {
        let Verb::Get(get) = parsed("milpactl get pod web -ojson -n shop") else { panic!() };
        assert_eq!((get.kind, get.listing.output), (Kind::Pods, Format::Json));
        assert_eq!((get.name.as_deref(), get.namespace.as_deref()), (Some("web"), Some("shop")));
        let Verb::Get(get) = parsed("milpactl get nodes") else { panic!() };
        assert_eq!(get.kind, Kind::Cells);
        let Verb::Logs(logs) = parsed("milpactl logs web -u main -f --lines 5") else { panic!() };
        assert_eq!((logs.unit.as_deref(), logs.follow, logs.lines), (Some("main"), true, Some(5)));
        let Verb::Exec(exec) = parsed("milpactl exec -it web -u main -- sh -c ls") else {
            panic!()
        };
        assert!(exec.streams.stdin && exec.streams.tty);
        assert_eq!(exec.command, ["sh", "-c", "ls"]);
        let Verb::Attach(attach) = parsed("milpactl attach web -c main") else { panic!() };
        assert_eq!(attach.streams.unit.as_deref(), Some("main"));
        let Verb::PortForward(forward) = parsed("milpactl port-forward web 80 :81") else {
            panic!()
        };
        assert_eq!((forward.ports.len(), forward.address), (2, vec!["localhost".to_owned()]));
        let Verb::PortForward(forward) = parsed("milpactl port-forward web 80 -u main") else {
            panic!()
        };
        assert_eq!((forward.ports.len(), forward.unit.as_deref()), (1, Some("main")));
        assert!(matches!(parsed("milpactl deploy -f x.yaml"), Verb::Deploy(_)));
    }
}
