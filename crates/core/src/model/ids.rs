//! Newtypes for the ids of clusters and caches.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The id of an engine among all engines that it links with. Every unsigned 64-bit number is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct ClusterId(pub u64);

/// The id of a cache in its engine: 1, 2, 3, … in order of allocation and registration, and never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CacheId(pub i64);

/// The cache, the tensor and the offset in bytes at which an address lies. Part of a message to peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are what the type describes")]
pub struct AddressLocation {
    pub cache: CacheId,
    pub tensor: u32,
    pub offset: u64,
}

impl fmt::Display for CacheId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
