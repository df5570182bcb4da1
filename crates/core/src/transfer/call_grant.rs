//! A grant, as one call uses it.

use std::sync::{Arc, OnceLock};

use crate::model::GrantToken;
use crate::session::OpenedGrant;

/// A grant that a pull uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantUse {
    /// The token of the grant.
    pub token: GrantToken,
    /// Whether this is the last pull under the grant, so that its owner may end it.
    pub done: bool,
}

/// The grant of one call.
pub(crate) struct CallGrant {
    pub(super) given: GrantUse,
    /// Set before the first attempt.
    pub(super) opened: OnceLock<Arc<OpenedGrant>>,
}

impl CallGrant {
    pub(crate) fn new(given: GrantUse) -> Arc<CallGrant> {
        Arc::new(CallGrant { given, opened: OnceLock::new() })
    }
}
