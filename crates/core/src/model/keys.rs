//! The names by which a cache can be found, and their equality.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{CacheId, GrantId};

/// The number for "no request" and "no prefix" in the public API. As a request id it marks an unused batch
/// slot.
pub const NO_ID: u64 = u64::MAX;

/// A key as the cache table stores it.
///
/// Requests, prefixes and blocks caches are three separate name spaces, each per model. The cluster id of a
/// public key names the owner of the cache, and is no part of the identity (contract §12.2). Messages to peers have keys, so the
/// order of the variants and fields is part of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the numbers of the public key")]
pub enum CacheKey {
    /// A batch slot, named by the request that it holds.
    Request { model: u64, id: u64 },
    /// A batch slot, named by the shared prefix that it holds.
    Prefix { model: u64, id: u64 },
    /// The blocks cache of a model.
    Blocks { model: u64 },
}

impl CacheKey {
    /// Returns the key for the numbers of the public API; `None` for a placeholder with neither request nor
    /// prefix. If both are given, the key is a prefix.
    pub fn new(req_id: u64, prefix_id: u64, model_id: u64) -> Option<CacheKey> {
        match (req_id, prefix_id) {
            (NO_ID, NO_ID) => None,
            (id, NO_ID) => Some(CacheKey::Request { model: model_id, id }),
            (_, id) => Some(CacheKey::Prefix { model: model_id, id }),
        }
    }
}

impl fmt::Display for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CacheKey::Request { model, id } => write!(f, "req_id {id} of model {model}"),
            CacheKey::Prefix { model, id } => write!(f, "prefix_id {id} of model {model}"),
            CacheKey::Blocks { model } => write!(f, "blocks of model {model}"),
        }
    }
}

/// The name of a cache in a request, in either direction: from a peer to this cluster, or from this cluster
/// to a peer. Part of messages to peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Name {
    /// A key.
    Key(CacheKey),
    /// A row of a cache, named by the cache id (`CacheKeyByIdAndIndex`).
    Row {
        /// Cache id.
        cache: CacheId,
        /// The batch slot; 0 for a blocks cache.
        row: u32,
    },
    /// The rows that a grant lends. Peers read under this name, and no peer writes.
    Grant(GrantId),
}

impl Name {
    /// Returns the name of a cache by its id. The row is 0 because such a name must have one.
    pub(crate) fn of_cache(cache: CacheId) -> Name {
        Name::Row { cache, row: 0 }
    }

    /// Returns the name of the whole cache, and the slot if the name has one.
    ///
    /// Where a slot is an argument of the call, and not part of the name, a slot that does not exist is an
    /// invalid argument (contract §7.14).
    pub(crate) fn without_slot(self) -> (Name, Option<u32>) {
        match self {
            Name::Row { cache, row } => (Name::Row { cache, row: 0 }, Some(row)),
            Name::Key(_) | Name::Grant(_) => (self, None),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Name::Key(key) => key.fmt(f),
            Name::Row { cache, row } => write!(f, "slot {row} of cache {cache}"),
            // The id of a grant is a secret.
            Name::Grant(_) => f.write_str("the blocks of a grant"),
        }
    }
}
