//! Links on demand, and what the program tells its peers about itself.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::DataDist;
use super::links::link_failed;
use crate::cache::CallRows;
use crate::error::{Error, Result};
use crate::events::Transfer;
use crate::model::ClusterId;
use crate::session::check_metadata;
use crate::stats::Op;
use crate::transfer::{CallPurpose, Execution, LaneKey};
use crate::validate;

/// The optional arguments of [`DataDist::ensure_link`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EnsureOptions {
    /// The cluster that must answer. Without it, any cluster may.
    pub cluster: Option<ClusterId>,
    /// The metadata for the peer, instead of that of [`DataDist::set_metadata`].
    pub metadata: Option<Vec<u8>>,
}

/// Number of groups of addresses. Calls of one group share lanes, so that silent addresses delay few others.
const GROUPS: u8 = 16;

/// Returns the key of the lanes that dial an address.
fn lanes_of(address: &SocketAddr) -> u8 {
    let mut hasher = DefaultHasher::new();
    address.hash(&mut hasher);
    hasher.finish().to_le_bytes()[0] % GROUPS
}

impl DataDist {
    /// Starts to link to the engine that listens at `address`, unless there is a link to it, and returns at once. The
    /// result of the [`Transfer`] is its [`peer`](Transfer::peer). A link that exists is a success, whichever side made it
    /// and by which call. While nobody listens at the address, the call tries again until `limit` has passed. If both sides
    /// link to each other at once, one link is made, and both calls succeed.
    ///
    /// Returns `Err` for invalid arguments, and `Err(Busy)` as [`Operation::start`](super::Operation::start) does.
    pub fn ensure_link(
        &self,
        address: SocketAddr,
        limit: Duration,
        options: EnsureOptions,
    ) -> Result<Arc<Transfer>> {
        let deadline = self.limited(Instant::now(), Some(limit));
        validate::peer_port(address)?;
        if options.cluster == Some(self.resources.config.cluster) {
            let cluster = self.resources.config.cluster;
            return Err(Error::argument("cluster_id", cluster, "another cluster; this one needs no link"));
        }
        options.metadata.as_deref().map_or(Ok(()), check_metadata)?;
        let link = self.links.on_demand(address, options.cluster, options.metadata.map(Arc::new));
        let work = move |execution: &Arc<Execution>, deadline| {
            let peer = link.make(&|| execution.transfer().commit(), deadline).map_err(link_failed)?;
            execution.transfer().set_peer(peer);
            Ok(0)
        };
        let (op, lanes) = (Op::Link, LaneKey::Links(lanes_of(&address)));
        let dials = Some(Box::new((address, options.cluster)));
        let purpose = CallPurpose { op, lanes, deadline, outgoing: None, dials, event: true };
        self.calls.start(purpose, CallRows::of_all(Vec::new())?, Box::new(work))
    }

    /// Sets the metadata that the peers of later links get, whichever side makes them. Returns
    /// `Err(InvalidArgument)` if it is too long.
    pub fn set_metadata(&self, metadata: Vec<u8>) -> Result<()> {
        check_metadata(&metadata)?;
        self.links.set_metadata(metadata);
        Ok(())
    }
}
