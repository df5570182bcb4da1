//! A pull or push whose arguments were checked. It needs only a link.

use std::sync::Arc;

use super::async_call::Execution;
use super::call::Call;
use crate::cache::{Cache, RowUse};
use crate::error::Result;
use crate::model::{ClusterId, Deadline, GrantUse, Name, Verify};
use crate::resources::Resources;
use crate::session::Link;
use crate::validate::{CheckedPull, CheckedPush, PullRows, PushRows};

/// What moves, and in which direction.
pub(crate) enum PeerMoves {
    Pull(CheckedPull<PullRows>),
    Push(CheckedPush<PushRows>),
}

impl PeerMoves {
    /// Returns the rows of the local cache that are used.
    pub(crate) fn local_rows(&self) -> Result<RowUse> {
        Ok(match self {
            PeerMoves::Pull(checked) => RowUse { writes: checked.rows().local_rows()?, ..RowUse::default() },
            PeerMoves::Push(checked) => RowUse { reads: checked.rows().local_rows()?, ..RowUse::default() },
        })
    }
}

/// A pull or push whose arguments were checked.
pub(crate) struct PeerTransfer {
    pub(crate) cluster: ClusterId,
    /// Name of the remote cache, with its slot.
    pub(crate) name: Name,
    pub(crate) local: Arc<Cache>,
    pub(crate) moves: PeerMoves,
    /// The notification that the peer gets at the end.
    pub(crate) notify: Option<Arc<Vec<u8>>>,
    /// The grant under which it pulls.
    pub(crate) grant: Option<Box<GrantUse>>,
    /// How thoroughly it checks the bytes that it has moved.
    pub(crate) verify: Verify,
}

impl PeerTransfer {
    /// Moves the bytes over `link`: on a lane for `execution`, which has the rows already, or on the calling thread.
    pub(crate) fn run(
        self,
        resources: Arc<Resources>,
        link: Arc<Link>,
        execution: Option<Arc<Execution>>,
        deadline: Deadline,
    ) -> Result<u64> {
        let PeerTransfer { name: slot, local, moves, notify, grant, verify, .. } = self;
        // The end of an asynchronous call says that nobody reads its rows any more.
        let to_the_end = execution.is_some();
        let grant = grant.map(|grant| *grant);
        let call = |name| Call {
            resources,
            link,
            name,
            local,
            deadline,
            execution,
            to_the_end,
            notify,
            grant,
            verify,
        };
        match moves {
            PeerMoves::Pull(checked) => call(slot).pull_rows(&checked),
            PeerMoves::Push(checked) => call(slot.without_slot().0).push_rows(slot, &checked),
        }
    }
}
