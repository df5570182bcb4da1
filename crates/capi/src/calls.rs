//! One function for each call of the class: checked values → the core.
//!
//! Not for: pointers (`abi`), or any rule (`core::validate::cpp`).

use std::collections::BTreeMap;
use std::time::Duration;

use llm_datadist_core::bindings::cpp;
use llm_datadist_core::{Adopted, CacheId, DataDist, End, PeerAddress, Result, StatusCode};

use crate::door::{self, Door, Open};

type Texts = BTreeMap<String, String>;

/// `Initialize`.
pub(crate) fn initialize(door: &Door, options: impl FnOnce() -> Result<Texts>) -> Result<()> {
    door.open(|| {
        let role = cpp::role(door.role())?;
        let options = cpp::options(role, door.cluster, &options()?)?;
        Ok(Open { engine: DataDist::open(options.config.clone())?, options })
    })
}

/// `SetRole`.
pub(crate) fn set_role(door: &Door, role: i32, given: &Texts) -> Result<()> {
    let open = door.engine()?;
    let to = cpp::role(role)?;
    let listen = cpp::set_role(&open.options, to, given, open.engine.listening())?;
    open.engine.switch_role(to, listen)?;
    door.set_role(role);
    Ok(())
}

/// `LinkLlmClusters`: the status of each, and that of the last that failed.
pub(crate) fn link(open: &Open, peers: &[PeerAddress], timeout: Duration) -> Outcome {
    let engine = &open.engine;
    let linked = if open.options.one_local {
        engine.link_clusters_from(peers, timeout)
    } else {
        engine.link_clusters(peers, timeout)
    };
    Outcome::new(linked)
}

/// `UnlinkLlmClusters`.
pub(crate) fn unlink(open: &Open, peers: &[PeerAddress], timeout: Duration, force: bool) -> Outcome {
    Outcome::new(open.engine.unlink_clusters(peers, timeout, force))
}

/// What became of each cluster of a call.
pub(crate) struct Outcome {
    /// One status for each, in order.
    pub(crate) statuses: Vec<u32>,
    /// That of the last that failed.
    pub(crate) whole: u32,
}

impl Outcome {
    fn new(results: Vec<Result<()>>) -> Outcome {
        let (mut reasons, mut whole) = (Vec::new(), StatusCode::Success);
        let mut status = |result: Result<()>| match result {
            Ok(()) => door::status(StatusCode::Success),
            Err(error) => {
                reasons.push(error.to_string());
                whole = StatusCode::of_cpp(error.kind());
                door::status(whole)
            }
        };
        let statuses = results.into_iter().map(&mut status).collect();
        if !reasons.is_empty() {
            door::keep(&reasons.join("; "));
        }
        Outcome { statuses, whole: door::status(whole) }
    }
}

/// `RegisterKvCache`. Peers may reach it: the class has no other use for it.
pub(crate) fn register(engine: &DataDist, adopted: Adopted) -> Result<CacheId> {
    engine.register(adopted, &[], Some(true)).map(|cache| cache.id())
}

/// A cache that a structure names by its id, which must not say anything else of it.
pub(crate) fn named(engine: &DataDist, id: i64, given: cpp::Stated<'_>) -> Result<End> {
    let cache = engine.find(CacheId(id))?;
    cpp::stated(cache.side(), cache.addrs(), given)?;
    Ok(End::Loose(cache))
}
