//! The connections of one engine, by the text of the other engine, and what is known of the links below them.
//!
//! A link serves both directions. It ends when neither end has a connection over it, so each end tells the other one when it
//! makes its first connection (`Own`), and when its last one has ended while the other end still has some (`Release`).

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use llm_datadist_core::{ClusterId, Deadline};

use crate::connection::Connection;
use crate::status::{Outcome, Status};
use crate::sync::lock;

/// How long after its limit the end of a link is certain.
const GRACE: Duration = Duration::from_secs(1);

/// The connections of one engine.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    table: Mutex<Table>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<Arc<str>, Entry>,
    /// Links with connections of the peer, and links that this side is ending.
    links: HashMap<ClusterId, LinkState>,
    /// Connections that have ended before their transfers. The next connection to the same engine waits for these.
    ended: HashMap<Arc<str>, Arc<Connection>>,
    closing: bool,
}

#[derive(Debug)]
enum Entry {
    /// A call connects or disconnects. The peer is known once the link is made.
    Changing(Option<ClusterId>),
    Connected(Arc<Connection>),
}

/// What is known of a link, until it has ended (`lost`).
#[derive(Clone, Copy, Debug)]
enum LinkState {
    /// The peer has connections over it.
    PeerOwns,
    /// This side is ending the link, which ends at this time at the latest.
    Ending(Deadline),
}

impl LinkState {
    fn is_ending(&self) -> bool {
        matches!(self, LinkState::Ending(until) if !until.passed())
    }
}

/// What remains to do for a link over which this end has no connection any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    /// This end has other connections over it, or is ending it already.
    Nothing,
    /// The peer has connections over it and must learn that this end has none.
    Release,
    /// Neither end has a connection over it.
    Unlink,
}

impl Table {
    /// Whether this end has or makes a connection to a peer.
    fn uses(&self, peer: ClusterId) -> bool {
        self.entries.values().any(|entry| match entry {
            Entry::Changing(known) => *known == Some(peer),
            Entry::Connected(connection) => connection.peer == peer,
        })
    }

    /// Returns how to leave the link to a peer. A link that this end is to end within `limit` counts as ending.
    fn leave(&mut self, peer: ClusterId, limit: Duration) -> Leave {
        if self.uses(peer) {
            return Leave::Nothing;
        }
        match self.links.get(&peer) {
            Some(LinkState::PeerOwns) => Leave::Release,
            Some(link) if link.is_ending() => Leave::Nothing,
            _ => {
                // The event of the end of a link may have come before its entry was made, so entries whose time has passed go here.
                self.links.retain(|_, link| matches!(link, LinkState::PeerOwns) || link.is_ending());
                self.links.insert(peer, LinkState::Ending(Deadline::after(limit + GRACE)));
                Leave::Unlink
            }
        }
    }
}

/// Ends the change of a call that panics, so that later calls for the same engine do not wait for it.
pub(crate) struct ChangeGuard<'a>(&'a Connections, &'a Arc<str>);

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.end_disconnect(self.1);
        }
    }
}

impl Connections {
    /// Ends the change of the caller if it panics.
    pub(crate) fn guard<'a>(&'a self, engine: &'a Arc<str>) -> ChangeGuard<'a> {
        ChangeGuard(self, engine)
    }

    /// Waits until no other call changes the connection to `engine`, and returns the table with what there is.
    fn wait_for_changes(
        &self,
        engine: &str,
        deadline: Deadline,
    ) -> Outcome<(MutexGuard<'_, Table>, Option<Arc<Connection>>)> {
        let mut table = lock(&self.table);
        loop {
            if table.closing {
                return Err(Status::Failed);
            }
            let found = match table.entries.get(engine) {
                Some(Entry::Changing(_)) => None,
                Some(Entry::Connected(connection)) => Some(Some(connection.clone())),
                None => Some(None),
            };
            if let Some(found) = found {
                return Ok((table, found));
            }
            if deadline.passed() {
                return Err(Status::Timeout);
            }
            let woken = self.changed.wait_timeout(table, deadline.left());
            table = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns the connection to `engine`, if there is one. Waits for a call that changes it.
    pub(crate) fn find(&self, engine: &str, deadline: Deadline) -> Outcome<Option<Arc<Connection>>> {
        self.wait_for_changes(engine, deadline).map(|(_, found)| found)
    }

    /// Whether there is a connection to `engine` now.
    pub(crate) fn is_connected(&self, engine: &str) -> bool {
        matches!(lock(&self.table).entries.get(engine), Some(Entry::Connected(connection)) if !connection.is_broken())
    }

    /// Lets the caller make the connection to `engine`. Returns `AlreadyConnected` if there is one that works. One whose link has
    /// ended, or whose transfers still run, is returned for the caller to end.
    pub(crate) fn begin_connect(
        &self,
        engine: &Arc<str>,
        deadline: Deadline,
    ) -> Outcome<Option<Arc<Connection>>> {
        let (mut table, found) = self.wait_for_changes(engine, deadline)?;
        if found.as_ref().is_some_and(|connection| !connection.is_broken()) {
            return Err(Status::AlreadyConnected);
        }
        table.entries.insert(engine.clone(), Entry::Changing(None));
        Ok(found.or_else(|| table.ended.remove(engine)))
    }

    /// Keeps a connection whose transfers still run, for the next call that connects to the same engine.
    pub(crate) fn keep_ended(&self, engine: &Arc<str>, connection: Arc<Connection>) {
        let ended = &mut lock(&self.table).ended;
        ended.retain(|_, connection| connection.is_running());
        ended.insert(engine.clone(), connection);
    }

    /// Notes the peer to which the caller makes a connection. Returns `false` if this end is ending the link.
    pub(crate) fn reached(&self, engine: &Arc<str>, peer: ClusterId) -> bool {
        let mut table = lock(&self.table);
        let ending = table.links.get(&peer).is_some_and(LinkState::is_ending);
        let change = Entry::Changing((!ending).then_some(peer));
        table.entries.insert(engine.clone(), change);
        !ending
    }

    /// Whether the link that the caller has [`reached`](Self::reached) has not ended since.
    pub(crate) fn is_reached(&self, engine: &Arc<str>, peer: ClusterId) -> bool {
        matches!(lock(&self.table).entries.get(engine), Some(Entry::Changing(Some(to))) if *to == peer)
    }

    /// Ends the change that [`begin_connect`](Self::begin_connect) has begun. Without a connection, returns how to leave the link to
    /// the peer that was reached, for which there is `limit`.
    pub(crate) fn end_connect(
        &self,
        engine: &Arc<str>,
        made: Option<Arc<Connection>>,
        limit: Duration,
    ) -> Option<(ClusterId, Leave)> {
        let mut table = lock(&self.table);
        let reached = match table.entries.remove(engine) {
            Some(Entry::Changing(reached)) => reached,
            _ => None,
        };
        self.changed.notify_all();
        if let Some(connection) = made {
            if reached != Some(connection.peer) {
                // The link has ended in this moment.
                connection.break_off();
            }
            table.entries.insert(engine.clone(), Entry::Connected(connection));
            return None;
        }
        reached.map(|peer| (peer, table.leave(peer, limit)))
    }

    /// Lets the caller end the connection to `engine`. Returns `NotConnected` if there is none.
    pub(crate) fn begin_disconnect(
        &self,
        engine: &str,
        deadline: Deadline,
    ) -> Outcome<(Arc<str>, Arc<Connection>)> {
        let (mut table, found) = self.wait_for_changes(engine, deadline)?;
        let known = table.entries.get_key_value(engine).map(|(engine, _)| engine.clone());
        let (engine, connection) = known.zip(found).ok_or(Status::NotConnected)?;
        table.entries.insert(engine.clone(), Entry::Changing(None));
        Ok((engine, connection))
    }

    /// Returns how to leave the link of a connection that is being ended, for which there is `limit`.
    pub(crate) fn leave(&self, peer: ClusterId, limit: Duration) -> Leave {
        lock(&self.table).leave(peer, limit)
    }

    /// Ends the change that [`begin_disconnect`](Self::begin_disconnect) has begun.
    pub(crate) fn end_disconnect(&self, engine: &Arc<str>) {
        lock(&self.table).entries.remove(engine);
        self.changed.notify_all();
    }

    /// Removes `connection`, which has failed, so that the next transfer connects again. Returns the engine, if it was there.
    pub(crate) fn drop_failed(&self, connection: &Arc<Connection>) -> Option<Arc<str>> {
        let mut table = lock(&self.table);
        let is = |entry: &Entry| matches!(entry, Entry::Connected(known) if Arc::ptr_eq(known, connection));
        let engine = table.entries.iter().find(|(_, entry)| is(entry)).map(|(engine, _)| engine.clone())?;
        table.entries.remove(&engine);
        Some(engine)
    }

    /// Notes that the peer has connections over its link. Returns `false` if this end is ending the link.
    pub(crate) fn peer_owns(&self, peer: ClusterId) -> bool {
        let mut table = lock(&self.table);
        let ending = table.links.get(&peer).is_some_and(LinkState::is_ending);
        if !ending {
            table.links.insert(peer, LinkState::PeerOwns);
        }
        !ending
    }

    /// Notes that the peer has no connection over its link any more. Returns how to leave the link, for which there is `limit`.
    pub(crate) fn peer_released(&self, peer: ClusterId, limit: Duration) -> Leave {
        let mut table = lock(&self.table);
        if let Some(LinkState::PeerOwns) = table.links.get(&peer) {
            table.links.remove(&peer);
        }
        table.leave(peer, limit)
    }

    /// Notes that a region of a peer has ended.
    pub(crate) fn region_ended(&self, peer: ClusterId, number: u64) {
        for entry in lock(&self.table).entries.values() {
            if let Entry::Connected(connection) = entry
                && connection.peer == peer
            {
                connection.regions.forget(number);
            }
        }
    }

    /// Notes that the link to a peer has ended, and returns its connections. With `remove`, they are no connections any more.
    pub(crate) fn lost(&self, peer: ClusterId, remove: bool) -> Vec<Arc<Connection>> {
        let mut table = lock(&self.table);
        table.links.remove(&peer);
        let of_peer = |entry: &Entry| match entry {
            Entry::Connected(connection) if connection.peer == peer => Some(connection.clone()),
            _ => None,
        };
        for entry in table.entries.values_mut() {
            if matches!(entry, Entry::Changing(Some(reached)) if *reached == peer) {
                *entry = Entry::Changing(None);
            }
        }
        let lost: Vec<_> = table.entries.values().filter_map(of_peer).collect();
        for connection in &lost {
            connection.break_off();
        }
        if remove {
            table.entries.retain(|_, entry| of_peer(entry).is_none());
        }
        lost
    }

    /// Lets all calls that wait end, because the engine closes, and returns all connections.
    pub(crate) fn close(&self) -> Vec<Arc<Connection>> {
        let mut table = lock(&self.table);
        table.closing = true;
        self.changed.notify_all();
        let connected = |entry: &Entry| match entry {
            Entry::Connected(connection) => Some(connection.clone()),
            Entry::Changing(_) => None,
        };
        table.entries.values().filter_map(connected).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use llm_datadist_core::{ClusterId, Deadline};

    use super::{Connection, Connections, Leave, LinkState};
    use crate::sync::lock;

    const PEER: ClusterId = ClusterId(7);
    const LIMIT: Duration = Duration::from_secs(60);

    fn connecting() -> (Connections, Arc<str>) {
        let (connections, engine) = (Connections::default(), Arc::from("engine"));
        assert!(connections.begin_connect(&engine, Deadline::after(LIMIT)).unwrap().is_none());
        (connections, engine)
    }

    fn connected() -> (Connections, Arc<str>) {
        let (connections, engine) = connecting();
        assert!(connections.reached(&engine, PEER) && connections.is_reached(&engine, PEER));
        let made = Some(Arc::new(Connection::new(PEER)));
        assert_eq!(connections.end_connect(&engine, made, LIMIT), None);
        assert!(connections.is_connected(&engine));
        (connections, engine)
    }

    #[test]
    fn link_that_ends_while_a_call_connects_breaks_the_connection() {
        let (connections, engine) = connecting();
        assert!(connections.reached(&engine, PEER));
        assert!(connections.lost(PEER, false).is_empty());
        assert!(!connections.is_reached(&engine, PEER));
        connections.end_connect(&engine, Some(Arc::new(Connection::new(PEER))), LIMIT);
        assert!(!connections.is_connected(&engine));
        assert!(connections.find(&engine, Deadline::after(LIMIT)).unwrap().unwrap().is_broken());
    }

    #[test]
    fn link_that_this_end_is_ending_is_not_used() {
        // The peer has released the link before this call knew which peer it reaches.
        let (connections, engine) = connecting();
        assert!(connections.peer_owns(PEER));
        assert_eq!(connections.peer_released(PEER, LIMIT), Leave::Unlink);
        assert_eq!(connections.peer_released(PEER, LIMIT), Leave::Nothing);
        assert!(!connections.reached(&engine, PEER) && !connections.peer_owns(PEER));
        connections.lost(PEER, false);
        assert!(connections.reached(&engine, PEER) && connections.peer_owns(PEER));
        assert_eq!(connections.end_connect(&engine, None, LIMIT), Some((PEER, Leave::Release)));
    }

    #[test]
    fn link_stays_while_either_end_uses_it() {
        let (connections, engine) = connected();
        assert!(connections.peer_owns(PEER));
        assert_eq!(connections.peer_released(PEER, LIMIT), Leave::Nothing);
        connections.begin_disconnect(&engine, Deadline::after(LIMIT)).unwrap();
        assert_eq!(connections.leave(PEER, LIMIT), Leave::Unlink);
        // The next link, over which the peer connects before this call has returned.
        connections.lost(PEER, false);
        assert!(connections.peer_owns(PEER));
        connections.end_disconnect(&engine);
        assert_eq!(connections.leave(PEER, LIMIT), Leave::Release);
    }

    #[test]
    fn lost_link_breaks_or_removes_its_connections() {
        let (connections, engine) = connected();
        assert_eq!(connections.lost(ClusterId(8), true).len(), 0);
        assert_eq!(connections.lost(PEER, false).len(), 1);
        assert!(connections.find(&engine, Deadline::after(LIMIT)).unwrap().unwrap().is_broken());
        let (connections, engine) = connected();
        assert_eq!(connections.lost(PEER, true).len(), 1);
        assert!(connections.find(&engine, Deadline::after(LIMIT)).unwrap().is_none());
    }

    #[test]
    fn nothing_is_kept_of_links_that_have_ended() {
        let connections = Connections::default();
        let known = || lock(&connections.table).links.len();
        for peer in (0..100).map(ClusterId) {
            // The event comes before the calls that it is about.
            let engine = Arc::from("engine");
            connections.begin_connect(&engine, Deadline::after(LIMIT)).unwrap();
            let before = known();
            assert!(connections.reached(&engine, peer));
            assert_eq!(known(), before);
            connections.end_connect(&engine, Some(Arc::new(Connection::new(peer))), LIMIT);
            connections.lost(peer, true);
            assert_eq!(connections.leave(peer, LIMIT), Leave::Unlink);
            assert_eq!(known(), 1, "no earlier one");
            // Its time passes.
            lock(&connections.table).links.insert(peer, LinkState::Ending(Deadline::after(Duration::ZERO)));
        }
        assert!(connections.peer_owns(PEER));
        connections.lost(PEER, false);
        connections.peer_released(ClusterId(200), LIMIT);
        assert_eq!(known(), 1);
    }
}
