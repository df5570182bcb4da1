//! Communicators: the links between all members of a rank table, for which every member calls `link`.
//!
//! Of two members, the one with the higher rank dials, and the other listens. Both try until they are linked
//! or `link_total_time` has passed. A member that was linked before and returns is admitted again; if it is
//! the listening one, this side also searches for it again. The search is in `membership`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::SocketAddr;
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::config::Token;
use crate::error::{Error, ErrorKind};
use crate::model::ClusterId;
use crate::net::Address;
use crate::protocol::Comm;
use crate::sync::{Condvar, Mutex};
use crate::validate::rank_table::RankMember;

/// The progress of a communicator. `Ready` and `Failed` are final.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CommStatus {
    /// Not all members have been linked yet.
    #[default]
    Preparing,
    /// Every member has been linked.
    Ready,
    /// A member could not be linked in time, or can never be linked.
    Failed,
}

/// One communicator.
pub(super) struct Communicator {
    pub(super) id: u64,
    pub(super) comm: Comm,
    pub(super) own: ClusterId,
    /// All members, including this one.
    pub(super) members: Vec<RankMember>,
    /// Time limit of the first search.
    pub(super) limit: Duration,
    /// Time limit of one attempt.
    pub(super) one_try: Duration,
    pub(super) progress: Mutex<CommState>,
    pub(super) changed: Condvar,
}

/// The mutable state of a communicator.
#[derive(Default)]
pub(super) struct CommState {
    /// Members that are awaited or searched for now.
    pub(super) missing: Vec<ClusterId>,
    /// Members that have been linked at least once.
    pub(super) linked_before: Vec<ClusterId>,
    /// The addresses at which this side listens for the communicator.
    pub(super) listening_at: Vec<Address>,
    pub(super) status: CommStatus,
    /// Whether this side has left the communicator.
    pub(super) left: bool,
    /// Whether a thread searches for members.
    pub(super) searching: bool,
    /// Whether a member has reported, since the last check, that it is listening.
    pub(super) member_listens: bool,
    /// Why each member that is missing could not be linked.
    pub(super) why: BTreeMap<ClusterId, FailedAttempt>,
}

/// Why an attempt to link a member failed.
#[derive(Debug)]
pub(super) struct FailedAttempt {
    cause: Cause,
    pub(super) text: String,
}

/// What ended an attempt to link a member. A later one says more than those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Cause {
    /// The member was not reached, or is not ready.
    Unreached,
    /// A side refused the other one.
    Refused,
    /// A side refused the other one, and only another configuration can change that.
    Permanent,
}

impl FailedAttempt {
    fn new(error: &Error) -> FailedAttempt {
        let cause = match error.kind() {
            _ if error.is_permanent() => Cause::Permanent,
            ErrorKind::InvalidArgument => Cause::Permanent,
            ErrorKind::LinkFailed if error.fact("errno").is_none() => Cause::Refused,
            _ => Cause::Unreached,
        };
        FailedAttempt { cause, text: error.original().to_string() }
    }
}

/// Returns the entry of a member in the table and its first port, which distinguishes jobs on one host that
/// use the same names.
fn with_port(member: &RankMember) -> String {
    let port = member.host.first().map_or(0, SocketAddr::port);
    format!("{} at {port}", member.description)
}

impl Communicator {
    /// Whether `comm` has the same name and members, and names this member as the listener.
    pub(super) fn is(&self, comm: &Comm) -> bool {
        let own = self.members.iter().find(|member| member.cluster == self.own);
        let here = |own: &RankMember| comm.listener == own.description || comm.listener == with_port(own);
        self.same_members(comm) && own.is_some_and(here)
    }

    /// Whether `comm` has the same name and members.
    pub(super) fn same_members(&self, comm: &Comm) -> bool {
        (&self.comm.name, &self.comm.members) == (&comm.name, &comm.members)
    }

    /// Records that a member is listening, and ends the pause of the search.
    pub(super) fn member_listens(&self) {
        self.progress.lock().member_listens = true;
        self.changed.notify_all();
    }

    /// Keeps why a missing member could not be linked: the first refusal, which later failures to reach the member do not
    /// replace (`first_refusal_of_member_is_kept`). Without a refusal, the latest failure.
    pub(super) fn note(&self, cluster: ClusterId, error: &Error) {
        let mut progress = self.progress.lock();
        if !progress.missing.contains(&cluster) {
            return;
        }
        let (new, known) = (FailedAttempt::new(error), progress.why.get(&cluster));
        if known.is_none_or(|known| {
            new.cause > known.cause || new.cause == Cause::Unreached && known.cause == new.cause
        }) {
            progress.why.insert(cluster, new);
        }
    }

    /// Returns why the member `cluster` could not be linked, if it is known.
    pub(super) fn reason(&self, cluster: ClusterId) -> Option<String> {
        self.progress.lock().why.get(&cluster).map(|attempt| attempt.text.clone())
    }

    /// Marks the communicator as failed because a member can never be linked.
    pub(super) fn fail(&self, cluster: ClusterId, why: &str) {
        let mut progress = self.progress.lock();
        // The peer that was refused may not be a member, or may have been linked before.
        if progress.status != CommStatus::Preparing || !progress.missing.contains(&cluster) {
            return;
        }
        progress.missing.retain(|&missing| missing != cluster);
        progress.why.insert(cluster, FailedAttempt { cause: Cause::Permanent, text: why.to_owned() });
        progress.status = CommStatus::Failed;
        drop(progress);
        tracing::error!(
            target: "llm_datadist::links",
            "link({:?}) failed: cluster {cluster} cannot be linked: {why}",
            self.comm.name
        );
        self.changed.notify_all();
    }

    /// Returns the communicator as sent to `listener`. A port from this side's configuration is left out,
    /// because it may differ at the listener behind a network address translation.
    pub(super) fn at(&self, listener: &RankMember) -> Comm {
        let text = if listener.configured { listener.description.clone() } else { with_port(listener) };
        Comm { listener: text, ..self.comm.clone() }
    }

    pub(super) fn status(&self) -> CommStatus {
        self.progress.lock().status
    }

    /// Whether members have not been linked for the first time yet.
    pub(super) fn preparing(&self) -> bool {
        self.status() == CommStatus::Preparing
    }

    /// Whether it may still make a link to `cluster`.
    pub(super) fn prepares(&self, cluster: ClusterId) -> bool {
        self.preparing() && self.progress.lock().missing.contains(&cluster)
    }

    /// Adds the state of the communicator to the timeout `error` of a call that waited for it. Returns other
    /// errors unchanged.
    pub(super) fn unprepared(&self, cluster: ClusterId, error: Error) -> Error {
        if error.kind() != ErrorKind::Timeout {
            return error;
        }
        let text =
            format!("the link to cluster {cluster} by link({:?}) is still being prepared", self.comm.name);
        let why = self.reason(cluster).unwrap_or_else(|| "the member has not connected".into());
        Error::new(ErrorKind::NotLinked, text).with("comm_id", self.id).with("because", why)
    }

    /// Marks the communicator as left, and returns the addresses at which this side listened.
    pub(super) fn abandon(&self) -> Vec<Address> {
        let mut progress = self.progress.lock();
        progress.left = true;
        let listening_at = std::mem::take(&mut progress.listening_at);
        drop(progress);
        self.changed.notify_all();
        listening_at
    }

    /// Records that a member was linked.
    pub(super) fn join(&self, cluster: ClusterId) {
        let mut progress = self.progress.lock();
        progress.missing.retain(|&missing| missing != cluster);
        progress.why.remove(&cluster);
        if !progress.linked_before.contains(&cluster) {
            progress.linked_before.push(cluster);
        }
        if progress.linked_before.len() + 1 == self.members.len() && progress.status == CommStatus::Preparing
        {
            progress.status = CommStatus::Ready;
        }
        drop(progress);
        self.changed.notify_all();
    }

    /// Records that a linked member is gone.
    pub(super) fn miss(&self, cluster: ClusterId) {
        let mut progress = self.progress.lock();
        if !progress.missing.contains(&cluster) {
            progress.missing.push(cluster);
        }
    }

    /// Returns the local socket at which `listener` waits for members on its host; all members compute the
    /// same name. Without a token the name contains the user id, so that other users do not take it by
    /// accident. With a token only processes that know the token can compute it.
    pub(super) fn local_address(&self, listener: &RankMember, token: Option<&Token>) -> Address {
        let Comm { name, members, .. } = &self.comm;
        let text = format!("{name:?} {members:?} {} {}", listener.cluster, with_port(listener));
        let digest = match token.and_then(|token| Hmac::<Sha256>::new_from_slice(token.bytes()).ok()) {
            Some(mut mac) => {
                mac.update(b"local socket ");
                mac.update(text.as_bytes());
                mac.finalize().into_bytes()
            }
            None => Sha256::digest(text.as_bytes()),
        };
        let user = match token {
            Some(_) => "token".to_owned(),
            None => rustix::process::geteuid().as_raw().to_string(),
        };
        let mut name = format!("llm_datadist.{user}.comm.");
        for byte in &digest[..16] {
            // Writing to a `String` cannot fail.
            let _ = write!(name, "{byte:02x}");
        }
        Address::Unix(name)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A communicator of the members 1, this one, and 2, with limits of an hour.
    pub(in crate::session) fn communicator(progress: CommState) -> Communicator {
        let hour = Duration::from_secs(3600);
        Communicator {
            id: 1,
            comm: Comm { name: "c".into(), members: vec![(1, 0), (2, 1)], listener: String::new() },
            own: ClusterId(1),
            members: vec![],
            limit: hour,
            one_try: hour,
            progress: Mutex::new(progress),
            changed: Condvar::new(),
        }
    }

    #[test]
    fn first_refusal_of_member_is_kept() {
        let member = ClusterId(2);
        let comm = communicator(CommState { missing: vec![member], ..CommState::default() });
        let failed = |text: &str| Error::new(ErrorKind::LinkFailed, text);
        let unreached = |text: &str| failed(text).with("errno", 111);
        for (error, expected) in [
            (unreached("first"), "first (errno=111)"),
            (unreached("second"), "second (errno=111)"),
            (failed("refused"), "refused"),
            (failed("refused again"), "refused"),
            (unreached("third"), "refused"),
            (failed("for good").permanent(), "for good"),
            (failed("again").permanent(), "for good"),
            (unreached("fourth"), "for good"),
        ] {
            comm.note(member, &error);
            assert_eq!(comm.reason(member).as_deref(), Some(expected));
        }
        comm.join(member);
        assert_eq!(comm.reason(member), None);
        comm.note(member, &failed("a member that is linked"));
        assert_eq!(comm.reason(member), None);
    }
}
