//! What pulls and pushes do beside moving bytes.

use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result, ensure};
use crate::model::{GrantUse, Verify};
use crate::plan::Side;
use crate::session;

/// What a pull or push does beside moving bytes.
#[derive(Clone, Debug, Default)]
pub struct CallExtras {
    /// The notification that the peer gets at its end.
    pub notify: Option<Vec<u8>>,
    /// The grant under which it pulls. Groups have one for each part instead.
    pub grant: Option<GrantUse>,
    /// How thoroughly it checks the bytes that it has moved; as the engine is configured if `None`.
    pub verify: Option<Verify>,
    /// Whether rows move as they are, whatever KV layouts the two caches have.
    pub raw_layout: bool,
}

/// Refuses a grant in a push: grants are for readers.
pub(super) fn no_grant_in_push(local_side: Side, grant: Option<GrantUse>) -> Result<()> {
    ensure(grant.is_none() || local_side == Side::Destination, || {
        Error::new(ErrorKind::InvalidArgument, "a push takes no grant")
    })
}

/// Checks a notification that a call delivers.
pub(super) fn checked_notification(notify: Option<Vec<u8>>) -> Result<Option<Arc<Vec<u8>>>> {
    if let Some(message) = &notify {
        session::check_notification(message)?;
    }
    Ok(notify.map(Arc::new))
}
