//! The calls of the class, with checked values. `abi` handles pointers; `core::validate::cpp` and `core::options::cpp` have the rules.

use std::collections::BTreeMap;
use std::time::Duration;

use llm_datadist_core::bindings::cpp;
use llm_datadist_core::bindings::{DataDist, End, PeerAddress, StatusCode};
use llm_datadist_core::{CacheId, Result};

use crate::failure;
use crate::objects::{Object, OpenEngine};

type Texts = BTreeMap<String, String>;

/// `Initialize`.
pub(crate) fn initialize(object: &Object, options: impl FnOnce() -> Result<Texts>) -> Result<()> {
    object.open(|| {
        let role = cpp::role(object.role())?;
        let options = cpp::options(role, object.cluster, &options()?)?;
        Ok(OpenEngine { engine: DataDist::open(options.config.clone())?, options })
    })
}

/// `SetRole`.
pub(crate) fn set_role(object: &Object, role: i32, options: &Texts) -> Result<()> {
    let open = object.engine()?;
    let to = cpp::role(role)?;
    let listen = cpp::set_role(&open.options, to, options, open.engine.listening())?;
    open.engine.switch_role(to, listen)?;
    object.set_role(role);
    Ok(())
}

/// `LinkLlmClusters`.
pub(crate) fn link(open: &OpenEngine, peers: &[PeerAddress], timeout: Duration) -> ClusterResults {
    let engine = &open.engine;
    let linked = if open.options.one_local {
        engine.link_clusters_from(peers, timeout)
    } else {
        engine.link_clusters(peers, timeout)
    };
    ClusterResults::new(linked)
}

/// `UnlinkLlmClusters`.
pub(crate) fn unlink(
    open: &OpenEngine,
    peers: &[PeerAddress],
    timeout: Duration,
    force: bool,
) -> ClusterResults {
    ClusterResults::new(open.engine.unlink_clusters(peers, timeout, force))
}

/// The results of a call for several clusters.
pub(crate) struct ClusterResults {
    /// The status of each cluster, in their order.
    pub(crate) statuses: Vec<u32>,
    /// The status of the last cluster that failed.
    pub(crate) whole: u32,
}

impl ClusterResults {
    fn new(results: Vec<Result<()>>) -> ClusterResults {
        let (mut reasons, mut whole) = (Vec::new(), StatusCode::Success);
        let mut status = |result: Result<()>| match result {
            Ok(()) => failure::status(StatusCode::Success),
            Err(error) => {
                reasons.push(error.original().to_string());
                whole = StatusCode::of_cpp(error.kind());
                failure::status(whole)
            }
        };
        let statuses = results.into_iter().map(&mut status).collect();
        if !reasons.is_empty() {
            failure::keep(&reasons.join("; "));
        }
        ClusterResults { statuses, whole: failure::status(whole) }
    }
}

/// Returns the cache that a structure names by its id. What the structure states otherwise must agree with it.
pub(crate) fn named(engine: &DataDist, id: i64, stated: cpp::Stated<'_>) -> Result<End> {
    let cache = engine.find(CacheId(id))?;
    cpp::stated(cache.layout(), cache.addrs(), stated)?;
    Ok(End::Loose(cache))
}
