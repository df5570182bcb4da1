//! How a call names a peer's cache.

use crate::model::{ClusterId, Name, RemoteCacheName};

/// Name of a peer's cache or slot: a [`Name`], the text that its owner gave it (`Arc<str>`), or a [`RemoteCacheName`],
/// which is either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteName<N = Name> {
    /// The cluster that owns it.
    pub cluster: ClusterId,
    /// Its name at the owner.
    pub name: N,
}

impl<N: Into<RemoteCacheName>> RemoteName<N> {
    pub(super) fn of_any_form(self) -> RemoteName<RemoteCacheName> {
        RemoteName { cluster: self.cluster, name: self.name.into() }
    }
}
