//! How a caller names a cache of a peer.

use std::fmt;
use std::sync::Arc;

use super::Name;

/// How a caller names a cache of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteCacheName {
    /// By a key, or by an id with a slot.
    Name(Name),
    /// By the name that its owner gave it. The call asks the owner for the id of the cache that has this name now.
    Text(Arc<str>),
}

impl RemoteCacheName {
    /// Returns the key or the id, unless the cache is named by a text.
    pub(crate) fn name(&self) -> Option<Name> {
        match self {
            RemoteCacheName::Name(name) => Some(*name),
            RemoteCacheName::Text(_) => None,
        }
    }

    /// Does the same as [`Name::without_slot`].
    pub(crate) fn without_slot(&self) -> (RemoteCacheName, Option<u32>) {
        match self {
            RemoteCacheName::Name(name) => {
                let (name, slot) = name.without_slot();
                (name.into(), slot)
            }
            RemoteCacheName::Text(_) => (self.clone(), None),
        }
    }
}

impl From<Name> for RemoteCacheName {
    fn from(name: Name) -> Self {
        RemoteCacheName::Name(name)
    }
}

impl From<Arc<str>> for RemoteCacheName {
    fn from(text: Arc<str>) -> Self {
        RemoteCacheName::Text(text)
    }
}

impl fmt::Display for RemoteCacheName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RemoteCacheName::Name(name) => name.fmt(f),
            RemoteCacheName::Text(text) => f.write_str(text),
        }
    }
}
