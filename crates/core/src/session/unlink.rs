//! Ends the links to a peer on purpose.

use super::link::{self, Kind, Link};
use super::shared::Shared;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{ClusterId, Deadline};
use crate::protocol::Request;

impl Shared {
    /// Ends links as [`Links::unlink`](super::Links::unlink) does.
    pub(super) fn unlink(&self, cluster: ClusterId, force: bool, deadline: Deadline) -> Result<()> {
        self.registry.forget_broken(cluster);
        let mut result = Ok(());
        for link in self.registry.links_to(cluster) {
            if let Kind::Communicator(_) = link.kind {
                continue;
            }
            link.calls.begin_unlink();
            if !force {
                let drained = link.calls.drain(|| link.alive(), deadline).map_err(|error| link.named(error));
                let done = drained.and_then(|()| link.done(&Request::Unlink, deadline).map(drop));
                result = result.and(done.or_else(|error| unlinked(&link, error, deadline)));
            }
            self.registry.drop_link(&link, link::UNLINKED_HERE);
        }
        result
    }
}

/// Decides the result of an unlink that the peer did not answer. A link that has ended counts as unlinked
/// (`both_sides_may_unlink_at_once`, `a_goodbye_that_is_read_late_counts`).
#[cold]
fn unlinked(link: &Link, error: Error, deadline: Deadline) -> Result<()> {
    if error.kind() == ErrorKind::NotLinked {
        // The peer's own unlink may have ended the call. Its goodbye arrives on the control stream, so wait
        // for it.
        let limit = Deadline::after(link::ANSWER_TIME.min(deadline.left()));
        // If even the ping fails, the goodbye may still be unread.
        if !link.answers(limit.left()) {
            link.wait_until_broken(limit);
        }
    }
    match error.kind() {
        ErrorKind::Timeout | ErrorKind::Interrupted => Err(error),
        _ if !link.alive() => Ok(()),
        _ => {
            let text = "the peer did not confirm; the link is dropped on this side";
            Err(Error::new(ErrorKind::UnlinkFailed, text).because(error))
        }
    }
}
