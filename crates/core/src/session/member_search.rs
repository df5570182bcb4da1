//! The search for members of a communicator: the side of higher rank dials, again and again, until `link_total_time` has
//! passed; who was here before and has gone is looked for without end, with longer rests.
//!
//! Not for: what a communicator is and where it listens (`communicator`).

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::Shared;
use super::communicator::{CommStatus, Communicator, Progress};
use super::link::{Kind, Link};
use crate::config::TransportChoice;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{ClusterId, Deadline};
use crate::net::Address;
use crate::protocol::Purpose;
use crate::validate::rank_table::RankEnd;

/// Rest between two rounds of tries: short at first, because peers often start together.
const RESTS: std::ops::RangeInclusive<Duration> = Duration::from_millis(20)..=Duration::from_secs(1);
/// Longest rest once `link_total_time` has passed and a member that was here before is still away.
const LONG_REST: Duration = Duration::from_secs(5);

/// A link of a communicator broke: where this side dials, it looks for the member again.
pub(super) fn mend(shared: &Arc<Shared>, link: &Arc<Link>) {
    let Kind::Communicator(id) = link.kind() else { return };
    let Some(comm) = shared.state.comm_by_id(id) else { return };
    if !comm.dials(link.peer().cluster) {
        return;
    }
    comm.miss(link.peer().cluster);
    if let Err(error) = look(shared, &comm) {
        let cluster = link.peer().cluster;
        tracing::error!(target: "llm_datadist::links", "stopped searching for cluster {cluster}; call link again: {error}");
    }
}

/// Starts the thread that looks for members, unless there is one.
pub(super) fn look(shared: &Arc<Shared>, comm: &Arc<Communicator>) -> Result<()> {
    if std::mem::replace(&mut comm.locked().looking, true) {
        comm.changed.notify_all();
        return Ok(());
    }
    let (weak, looking) = (Arc::downgrade(shared), comm.clone());
    let started = shared.threads.spawn("llm-search", move || {
        let deadline = Deadline::after(looking.limit).named("link_total_time");
        let (mut rest, mut told) = (*RESTS.start(), false);
        if let Some(shared) = weak.upgrade() {
            looking.knock(&shared, deadline);
        }
        while let Some(shared) = weak.upgrade() {
            let began = Instant::now();
            looking.round(&shared, deadline);
            if !looking.goes_on(&shared, deadline, &mut told) {
                return;
            }
            drop(shared);
            let most = if told { LONG_REST } else { (*RESTS.end()).min(deadline.left()) };
            let woken = looking.rest(rest.min(most));
            // However often somebody knocks, the rounds keep a distance.
            std::thread::sleep(RESTS.start().saturating_sub(began.elapsed()));
            rest = if woken { *RESTS.start() } else { (rest * 2).min(LONG_REST) };
        }
    });
    // Whoever asked for it meanwhile found that somebody was looking: nobody is, and the next one to ask is told.
    started.inspect_err(|_| comm.locked().looking = false)
}

impl Communicator {
    /// Whether this side dials to `cluster`: the higher rank does.
    fn dials(&self, cluster: ClusterId) -> bool {
        let rank = |id| self.ends.iter().find(|end| end.cluster == id).map(|end| end.rank);
        rank(cluster) < rank(self.own)
    }

    /// Tells members of this host that dial this one that it is there now, in case they came first and rest between two
    /// tries (`whoever_knocks_ends_the_rest`).
    fn knock(&self, shared: &Arc<Shared>, deadline: Deadline) {
        let config = &shared.cluster.config.links;
        if config.transport == TransportChoice::Tcp {
            return;
        }
        for end in self.ends.iter().filter(|end| end.cluster != self.own && !self.dials(end.cluster)) {
            let dialer = shared.dialer(self.local_address(end, config.token.as_ref()));
            let limit = Deadline::after(self.one_try.min(deadline.left())).named("the limit of one try");
            // Whoever is not there yet will find this side listening.
            let _ = dialer.greet(Some(end.cluster), Purpose::Knock { comm: self.at(end) }, limit);
        }
    }

    /// Tries every missing member that this side dials.
    fn round(&self, shared: &Arc<Shared>, deadline: Deadline) {
        let missing = self.locked().missing.clone();
        for end in self.ends.iter().filter(|end| missing.contains(&end.cluster) && self.dials(end.cluster)) {
            match self.reach(shared, end, deadline) {
                Ok(link) => {
                    self.join(end.cluster);
                    // It may have gone before it was known to be here.
                    if !link.alive() {
                        self.miss(end.cluster);
                    }
                    shared.state.announce();
                }
                // No further try helps where the two do not fit together.
                Err(error) if error.kind() == ErrorKind::InvalidArgument => {
                    self.fail(end.cluster, &error.to_string());
                    shared.state.announce();
                }
                Err(error) => drop(self.locked().why.insert(end.cluster, error.to_string())),
            }
        }
    }

    /// Whether it is worth another round; if not, nobody is looking any more from this moment on. When the first limit has
    /// passed, those who were never here are given up, and the others looked for without end
    /// (`a_member_that_stays_away_for_long_is_met_again`).
    fn goes_on(&self, shared: &Arc<Shared>, deadline: Deadline, told: &mut bool) -> bool {
        let mut progress = self.locked();
        let late = deadline.passed() && !progress.left && !progress.missing.is_empty() && !*told;
        let note = late.then(|| self.report(&progress));
        if late {
            *told = true;
            if progress.status == CommStatus::Preparing {
                progress.status = CommStatus::Failed;
            }
            let Progress { missing, met, .. } = &mut *progress;
            missing.retain(|cluster| met.contains(cluster) && self.dials(*cluster));
        }
        let on = !progress.left && !progress.missing.is_empty();
        progress.looking = on;
        drop(progress);
        if let Some(note) = note {
            tracing::error!(target: "llm_datadist::links", "{note}");
            shared.state.announce();
        }
        on
    }

    /// Tries the addresses at which a member may be.
    fn reach(&self, shared: &Arc<Shared>, end: &RankEnd, deadline: Deadline) -> Result<Arc<Link>> {
        let config = &shared.cluster.config.links;
        let local = (config.transport != TransportChoice::Tcp)
            .then(|| self.local_address(end, config.token.as_ref()));
        let comm = self.at(end);
        let mut first = None;
        for address in local.into_iter().chain(end.host.iter().map(|&at| Address::Tcp(at))) {
            if self.locked().left {
                break;
            }
            // Half of what is left, so that one silent stranger leaves time for the next port.
            let left = if deadline.passed() { self.limit } else { deadline.left() };
            let limit = Deadline::after(self.one_try.min(left / 2)).named("the limit of one try");
            let kind = Kind::Communicator(self.id);
            let error = match shared.connect(&address, end.cluster, Some(&comm), kind, limit) {
                Ok(link) => return Ok(link),
                Err(error) => error,
            };
            // The further ports are of no use where the host itself does not answer. A stranger at this port may take
            // the connection and say nothing: that says nothing of the next.
            let silent = error.kind() == ErrorKind::Timeout && error.fact("address").is_some();
            if matches!(address, Address::Tcp(_)) {
                first = first.or(Some(error.with("chosen_by", end.why)));
            }
            if silent {
                break;
            }
        }
        Err(first.unwrap_or_else(|| Error::new(ErrorKind::LinkFailed, "the member has no address")))
    }

    /// Whether somebody woke it early.
    fn rest(&self, rest: Duration) -> bool {
        let mut progress = self.locked();
        if progress.left || std::mem::take(&mut progress.knocked) {
            return true;
        }
        let waited = self.changed.wait_timeout(progress, rest);
        let (mut progress, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut progress.knocked) || !waited.timed_out()
    }

    /// What has come of the search, for people.
    fn report(&self, progress: &Progress) -> String {
        let view: Vec<String> =
            progress.missing.iter().map(|cluster| self.view(*cluster, &progress.why)).collect();
        let what = match progress.status {
            CommStatus::Preparing => "failed",
            CommStatus::Ready | CommStatus::Failed => "has lost members, who are still looked for",
        };
        format!("link({:?}) {what} after {} ms: {}", self.comm.name, self.limit.as_millis(), view.join("; "))
    }

    /// What was tried for one member, for people.
    fn view(&self, cluster: ClusterId, why: &BTreeMap<ClusterId, String>) -> String {
        let Some(end) = self.ends.iter().find(|end| end.cluster == cluster) else {
            return cluster.to_string();
        };
        let at: Vec<String> = end.host.iter().map(ToString::to_string).collect();
        let way = if self.dials(cluster) { "was looked for at" } else { "did not come; it would listen at" };
        let last = why.get(&cluster).map_or(String::new(), |why| format!(" (last: {why})"));
        format!("cluster {cluster}, rank {}, {way} {}, chosen by {}{last}", end.rank, at.join(" "), end.why)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use super::*;
    use crate::protocol::Comm;

    #[test]
    fn whoever_knocks_ends_the_rest() {
        let comm = Comm { name: "c".into(), members: vec![(1, 0), (2, 1)], listener: String::new() };
        let progress = Progress {
            missing: vec![ClusterId(1)],
            met: vec![],
            doors: vec![],
            status: CommStatus::Preparing,
            left: false,
            looking: true,
            knocked: false,
            why: BTreeMap::new(),
        };
        let hour = Duration::from_secs(3600);
        let waiting = Communicator {
            id: 1,
            comm,
            own: ClusterId(2),
            ends: vec![],
            limit: hour,
            one_try: hour,
            progress: Mutex::new(progress),
            changed: Condvar::new(),
        };
        assert!(!waiting.rest(Duration::ZERO), "nobody has come");
        // Before the rest, as well as in the middle of it.
        waiting.knocked();
        assert!(waiting.rest(hour));
        std::thread::scope(|scope| {
            let rested = scope.spawn(|| waiting.rest(hour));
            waiting.knocked();
            assert!(rested.join().unwrap());
        });
    }
}
