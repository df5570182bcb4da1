//! Conversion of the arguments and results of links, in the order of the contract (§6.5 to §6.9).
//!
//! Rules about addresses and members are in `core::validate` and `core::session`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use llm_datadist_core::bindings::validate;
use llm_datadist_core::bindings::{CommStatus, DataDist, PeerAddress, StatusCode};
use llm_datadist_core::{ClusterId, Error, ErrorKind, Result};
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use crate::arguments::{IntArg, TextArg};
use crate::convert::{self, Any, inner_only_support, int, is_int, not_int, only_support, shown, text};
use crate::error::{Codes, invalid, raise};
use crate::python_types::PythonTypes;

arguments! {
    /// A list or tuple of `LLMClusterInfo`.
    ClustersArg;
    /// The rank of each cluster of a communicator: a dict.
    RanksArg;
}

/// Reads a timeout: milliseconds above 0.
pub(crate) fn timeout(value: IntArg<'_, '_>) -> PyResult<Duration> {
    let millis: i32 = value.int("timeout")?;
    match u64::try_from(millis) {
        Ok(millis @ 1..) => Ok(Duration::from_millis(millis)),
        _ => Err(invalid(value.py(), "timeout", millis, "above 0, in milliseconds")),
    }
}

/// The clusters of a link call: objects of the class `LLMClusterInfo`.
pub(crate) struct ClusterInfos<'py>(Vec<Any<'py>>);

impl<'py> ClustersArg<'_, 'py> {
    /// The clusters, each of which must be an `LLMClusterInfo`.
    pub(crate) fn infos(self) -> PyResult<ClusterInfos<'py>> {
        let infos = convert::listed("clusters", &self.0, raise)?;
        let class = &PythonTypes::get(self.py())?.cluster_info;
        for (at, info) in infos.iter().enumerate() {
            if !convert::instance(info, class)? {
                return Err(inner_only_support("clusters", at, "['LLMClusterInfo']", info));
            }
        }
        Ok(ClusterInfos(infos))
    }
}

impl ClusterInfos<'_> {
    /// Checks that every cluster has a local address (contract §6.8, row 5).
    pub(crate) fn local_given(&self) -> PyResult<()> {
        for info in &self.0 {
            if info.getattr(intern!(info.py(), "_local_ip_info_list"))?.is_empty()? {
                let text = "local_ip_info_list is empty; append_local_ip_info was not called, and no llm.LocalCommRes given";
                return Err(raise(info.py(), &Error::new(ErrorKind::InvalidArgument, text)));
            }
        }
        Ok(())
    }

    /// Returns the addresses of the clusters.
    pub(crate) fn peers(&self) -> PyResult<Vec<PeerAddress>> {
        let id = |info: &Any<'_>| {
            int("remote_cluster_id", &info.getattr(intern!(info.py(), "_remote_cluster_id"))?).map(ClusterId)
        };
        let ids: Vec<ClusterId> = self.0.iter().map(id).collect::<PyResult<_>>()?;
        let peer = |(cluster, info): (ClusterId, &Any<'_>)| {
            let py = info.py();
            let remote =
                addresses("remote_ip_info_list", &info.getattr(intern!(py, "_remote_ip_info_list"))?)?;
            let local = addresses("local_ip_info_list", &info.getattr(intern!(py, "_local_ip_info_list"))?)?;
            Ok(PeerAddress { cluster, remote, local })
        };
        ids.into_iter().zip(&self.0).map(peer).collect()
    }
}

fn addresses(name: &str, list: &Any<'_>) -> PyResult<Vec<SocketAddr>> {
    let list = list.cast::<PyList>().map_err(|_| only_support(name, "['list']", list))?;
    let address = |(at, item): (usize, Any<'_>)| {
        let pair = item.extract::<(Any<'_>, Any<'_>)>();
        let (ip, port) = pair.map_err(|_| inner_only_support(name, at, "['tuple']", &item))?;
        Ok(SocketAddr::new(ip_address(&ip)?, int("port", &port)?))
    };
    list.iter().enumerate().map(address).collect()
}

/// Reads a little-endian IPv4 address, or the text of an address (contract §4.1).
fn ip_address(value: &Any<'_>) -> PyResult<IpAddr> {
    if value.is_instance_of::<PyString>() {
        let parsed = text("ip", value)?.parse();
        return parsed
            .map_err(|_| PyRuntimeError::new_err(format!("ip={} must be an IP address", shown(value))));
    }
    Ok(IpAddr::V4(Ipv4Addr::from(int::<u32>("ip", value)?.to_le_bytes())))
}

/// Links to all of `peers`. With `one_local`, each must have exactly one local address (contract §6.8).
pub(crate) fn link(
    engine: &DataDist,
    peers: &[PeerAddress],
    timeout: Duration,
    one_local: bool,
) -> Vec<Result<()>> {
    let fits = |peer: &PeerAddress| {
        let checked = validate::one_address("len(local_ip_info_list)", peer.local.len(), "local");
        checked.map_err(|error| error.with("cluster", peer.cluster))
    };
    let fits = |peer: &PeerAddress| if one_local { fits(peer) } else { Ok(()) };
    each(peers, fits, |peers| engine.link_clusters(peers, timeout))
}

/// Ends the links to all of `peers`. With `strict`, a peer without a link is an error (contract §9.3).
pub(crate) fn unlink(
    engine: &DataDist,
    peers: &[PeerAddress],
    timeout: Duration,
    force: bool,
    strict: bool,
) -> Vec<Result<()>> {
    let linked = if strict { engine.stats().links } else { Vec::new() };
    let is_linked = |peer: &PeerAddress| {
        if !strict || linked.iter().any(|link| link.cluster == peer.cluster) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::NotLinked, format!("there is no link to cluster {}", peer.cluster)))
    };
    each(peers, is_linked, |peers| engine.unlink_clusters(peers, timeout, force))
}

/// Calls `call` with those of `peers` that pass the check. Returns one result for each peer, in order.
fn each(
    peers: &[PeerAddress],
    check: impl Fn(&PeerAddress) -> Result<()>,
    call: impl FnOnce(&[PeerAddress]) -> Vec<Result<()>>,
) -> Vec<Result<()>> {
    let checked: Vec<_> = peers.iter().map(check).collect();
    let legal = peers.iter().zip(&checked).filter(|(_, checked)| checked.is_ok());
    let legal: Vec<_> = legal.map(|(peer, _)| peer.clone()).collect();
    let mut called = call(&legal).into_iter();
    checked.into_iter().map(|checked| checked.and_then(|()| called.next().unwrap_or(Ok(())))).collect()
}

/// Returns the part of the engine that links by rank tables, which not every backend has (contract §6.12).
pub(crate) fn by_rank(engine: &DataDist) -> Result<&DataDist> {
    if engine.config().links.both_ways {
        let text = "llm.TransferBackend=hixl does not support rank-table links; use link_clusters";
        return Err(Error::new(ErrorKind::NotEnabled, text));
    }
    Ok(engine)
}

/// Returns the number of a `RegisterMemStatus`.
pub(crate) const fn status_number(status: CommStatus) -> i64 {
    match status {
        CommStatus::Ready => 0,
        CommStatus::Preparing => 1,
        CommStatus::Failed => 2,
    }
}

/// Returns the status code of every result, and logs the reason of each failure (contract §6.8).
pub(crate) fn codes<'py>(
    py: Python<'py>,
    results: &[Result<()>],
    codes_of: Codes,
) -> PyResult<Bound<'py, PyList>> {
    let types = PythonTypes::get(py)?;
    let codes = PyList::empty(py);
    for result in results {
        let code = match result {
            Ok(()) => StatusCode::Success,
            Err(error) => {
                types.log_error.call1(py, (error.original().to_string(),))?;
                codes_of(error.kind())
            }
        };
        codes.append(types.status(code))?;
    }
    Ok(codes)
}

/// The arguments of `link` (contract §6.5).
pub(crate) struct Membership {
    /// `comm_name`.
    pub(crate) name: String,
    /// `cluster_rank_info`, in its order.
    pub(crate) clusters: Vec<(ClusterId, u32)>,
    /// `rank_table`.
    pub(crate) rank_table: String,
}

impl Membership {
    /// Rows 2 to 10, and the rule that this cluster must be a member.
    pub(crate) fn new(
        own: ClusterId,
        comm_name: TextArg<'_, '_>,
        cluster_rank_info: RanksArg<'_, '_>,
        rank_table: TextArg<'_, '_>,
    ) -> PyResult<Self> {
        let checked = |result: Result<()>| result.map_err(|error| raise(comm_name.py(), &error));
        let name = comm_name.text("comm_name")?;
        checked(validate::rank_table::comm_name(&name))?;
        let clusters = cluster_rank_info.members()?;
        rank_table.typed("rank_table")?;
        checked(validate::rank_table::members(&name, &clusters, own))?;
        let rank_table = rank_table.text("rank_table")?;
        Ok(Membership { name, clusters, rank_table })
    }
}

impl RanksArg<'_, '_> {
    /// `{cluster id: rank}`, in its order.
    fn members(self) -> PyResult<Vec<(ClusterId, u32)>> {
        const NAME: &str = "cluster_rank_info";
        convert::not_none(NAME, &self.0)?;
        let dict = self.0.cast::<PyDict>().map_err(|_| only_support(NAME, "['dict']", &self.0))?;
        // The loops run no Python code, so the dict cannot change.
        for (cluster, rank) in dict.iter() {
            for (part, number) in [("key", cluster), ("value", rank)] {
                if !is_int(&number) {
                    return Err(not_int(format_args!("{NAME} dict {part}"), &number));
                }
            }
        }
        validate::rank_table::max_members(dict.len()).map_err(|error| raise(self.py(), &error))?;
        let member = |(cluster, rank): (Any<'_>, Any<'_>)| {
            let cluster = ClusterId(int("cluster_rank_info dict key", &cluster)?);
            Ok((cluster, int("cluster_rank_info dict value", &rank)?))
        };
        dict.iter().map(member).collect()
    }
}

/// Reads the address at which to listen from now on; `None` for no listener.
pub(crate) fn listen(value: Option<&Bound<'_, PyString>>) -> PyResult<Option<SocketAddr>> {
    let Some(value) = value else { return Ok(None) };
    let given = text("llm.listenIpInfo", value)?;
    validate::socket_address("llm.listenIpInfo", &given).map(Some).map_err(|error| raise(value.py(), &error))
}
