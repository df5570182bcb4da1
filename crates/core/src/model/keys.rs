//! The names a cache can be found by, and their equality.
//!
//! Not for: what a key points to (`table`).

use std::fmt;

use super::CacheId;

/// "No request" and "no prefix" in the public API; as a request id it marks an unused batch slot.
pub const NO_ID: u64 = u64::MAX;

/// A key as the table knows it. Requests, prefixes and blocks are three name spaces, each per model; the cluster id of
/// a public key says who owns the cache and is no part of its identity (contract §12.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CacheKey {
    /// One batch slot, by the request it holds.
    Request {
        /// Model.
        model: u64,
        /// Request.
        id: u64,
    },
    /// One batch slot, by the shared prefix it holds.
    Prefix {
        /// Model.
        model: u64,
        /// Prefix.
        id: u64,
    },
    /// The blocks cache of a model.
    Blocks {
        /// Model.
        model: u64,
    },
}

impl CacheKey {
    /// The key of the public numbers, or `None` for a placeholder (no request and no prefix).
    #[must_use]
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

/// How a peer names a cache of ours, or we one of theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Name {
    /// By a key.
    Key(CacheKey),
    /// One row of a cache by its id (`CacheKeyByIdAndIndex`).
    Row {
        /// The cache.
        cache: CacheId,
        /// The batch slot; 0 for a blocks cache.
        row: u32,
    },
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Name::Key(key) => key.fmt(f),
            Name::Row { cache, row } => write!(f, "slot {row} of cache {cache}"),
        }
    }
}
