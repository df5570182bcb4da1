//! Making, using and ending connections.

use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::{ClusterId, Deadline, Error, ErrorKind, WhileRefused};

use crate::address::EngineAddress;
use crate::connection::Connection;
use crate::connections::Leave;
use crate::messages::{METADATA, Message};
use crate::open_engine::OpenEngine;
use crate::regions::IN_USE;
use crate::replies::Reply;
use crate::status::{Outcome, Status};

/// Pause before a message is sent again, or a link is made again.
const PAUSE: Duration = Duration::from_millis(1);
/// How often a call that makes a link looks whether the engine closes.
const SLICE: Duration = Duration::from_millis(100);
/// How long the end of a link may take that no call waits for.
pub(crate) const BACKGROUND: Duration = Duration::from_secs(1);

impl OpenEngine {
    /// Connects to `engine`. Calls at the same time for one engine wait for each other, and one of them succeeds.
    pub(crate) fn connect(&self, engine: &str, deadline: Deadline) -> Outcome<()> {
        let address =
            EngineAddress::parse(engine).and_then(EngineAddress::listener).ok_or(Status::ParamInvalid)?;
        let engine: Arc<str> = engine.into();
        let stale = self.connections.begin_connect(&engine, deadline)?;
        let _guard = self.connections.guard(&engine);
        if let Some(stale) = stale
            && !self.end(&stale, deadline)
        {
            self.connections.keep_ended(&engine, stale);
            self.connections.end_disconnect(&engine);
            return Err(Status::Timeout);
        }
        let made = self.make(&engine, &address.to_string(), deadline);
        let status = made.as_ref().err().copied();
        if let Some((peer, leave)) = self.connections.end_connect(&engine, made.ok(), BACKGROUND) {
            self.leave_later(peer, leave, BACKGROUND);
        }
        status.map_or(Ok(()), Err)
    }

    /// Makes the link, if there is none, and tells the peer that this engine uses it.
    fn make(&self, engine: &Arc<str>, address: &str, deadline: Deadline) -> Outcome<Arc<Connection>> {
        let failed = |error: &Error| Status::from_error("connect", error);
        loop {
            let limit = Some(deadline.left().max(PAUSE));
            let linking = self.engine.link(address, None, limit, WhileRefused::Fail);
            let linking = linking.map_err(|error| failed(&error))?;
            // The wait fails only if interrupted, and no code interrupts this one.
            while linking.wait(Deadline::after(deadline.left().min(SLICE))) == Ok(false) {
                if self.is_closing() || deadline.passed() {
                    linking.cancel();
                    return Err(if self.is_closing() { Status::Failed } else { Status::Timeout });
                }
            }
            linking.join(deadline).map_err(|error| failed(&error))?;
            let peer = linking.peer().ok_or(Status::Failed)?;
            // A link that this end is ending is not used: there will be another one.
            if self.connections.reached(engine, peer.cluster) {
                if peer.metadata[..] != *METADATA {
                    return Err(Status::Failed);
                }
                let reply = self.ask(peer.cluster, deadline, |id| Message::Own { id })?;
                if reply == Reply::Done(true) && self.connections.is_reached(engine, peer.cluster) {
                    return Ok(Arc::new(Connection::new(peer.cluster)));
                }
            }
            // The link has ended, or one end is ending it.
            if self.is_closing() {
                return Err(Status::Failed);
            }
            if deadline.passed() {
                return Err(Status::Timeout);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Disconnects from `engine`: ends all transfers and requests over the connection, and the link if neither end uses it.
    pub(crate) fn disconnect(&self, engine: &str, deadline: Deadline) -> Outcome<()> {
        let (engine, connection) = self.connections.begin_disconnect(engine, deadline)?;
        let _guard = self.connections.guard(&engine);
        let has_ended = self.end(&connection, deadline);
        if !has_ended {
            self.connections.keep_ended(&engine, connection.clone());
        }
        if !connection.is_broken() {
            // While the peer reads memory for a transfer, the end of the link would only hide that.
            let limit = if has_ended { deadline.left().clamp(PAUSE, IN_USE) } else { IN_USE };
            match self.connections.leave(connection.peer, limit) {
                Leave::Unlink if has_ended => self.unlink(connection.peer, limit),
                leave => self.leave_later(connection.peer, leave, limit),
            }
        }
        self.connections.end_disconnect(&engine);
        Ok(())
    }

    /// Ends a connection with its transfers and the calls that wait for replies. Returns whether all transfers have ended.
    pub(crate) fn end(&self, connection: &Connection, deadline: Deadline) -> bool {
        connection.begin_end();
        self.replies.lost(connection.peer);
        connection.end(deadline)
    }

    /// Returns the connection to `engine`, and makes it if transfers connect by themselves.
    pub(crate) fn connection(&self, engine: &str, deadline: Deadline) -> Outcome<Arc<Connection>> {
        loop {
            match self.connections.find(engine, deadline)? {
                Some(connection) if !connection.is_broken() => return Ok(connection),
                Some(_) if !self.options.auto_connect => return Err(Status::Failed),
                None if !self.options.auto_connect => return Err(Status::NotConnected),
                _ => {}
            }
            match self.connect(engine, deadline) {
                Ok(()) | Err(Status::AlreadyConnected) => {}
                Err(status) => return Err(status),
            }
        }
    }

    /// Removes a connection over which a transfer has failed, if transfers connect by themselves.
    pub(crate) fn drop_failed(&self, connection: &Arc<Connection>, status: Status) {
        let fails = matches!(status, Status::Timeout | Status::Failed);
        if !fails || !self.options.auto_connect {
            return;
        }
        if let Some(engine) = self.connections.drop_failed(connection) {
            let has_ended = self.end(connection, Deadline::after(Duration::ZERO));
            if !has_ended {
                self.connections.keep_ended(&engine, connection.clone());
            }
            if !connection.is_broken() {
                let limit = if has_ended { BACKGROUND } else { IN_USE };
                self.leave_later(connection.peer, self.connections.leave(connection.peer, limit), limit);
            }
        }
    }

    /// Ends the link to a peer, and waits until it has ended.
    fn unlink(&self, peer: ClusterId, limit: Duration) {
        // The link is gone afterwards, whether the peer has confirmed or not.
        if let Ok(unlinking) = self.engine.unlink(peer, Some(limit)) {
            let _ = unlinking.join(Deadline::after(limit));
        }
    }

    /// Leaves the link to a peer without waiting.
    pub(crate) fn leave_later(&self, peer: ClusterId, leave: Leave, limit: Duration) {
        // Fails if the link has ended already.
        let _ = match leave {
            Leave::Nothing => Ok(()),
            Leave::Release => self.engine.send(peer, Message::Release.encode()),
            Leave::Unlink => self.engine.unlink(peer, Some(limit)).map(drop),
        };
    }

    /// Asks the peer of a connection, and waits for the reply. The end of the connection ends the wait.
    pub(crate) fn ask_over(
        &self,
        connection: &Connection,
        deadline: Deadline,
        question: impl FnOnce(u64) -> Message,
    ) -> Outcome<Reply> {
        self.ask_if(connection.peer, || !connection.has_ended(), deadline, question)
    }

    /// Asks a peer, and waits for the reply.
    fn ask(
        &self,
        peer: ClusterId,
        deadline: Deadline,
        question: impl FnOnce(u64) -> Message,
    ) -> Outcome<Reply> {
        self.ask_if(peer, || true, deadline, question)
    }

    fn ask_if(
        &self,
        peer: ClusterId,
        still: impl FnOnce() -> bool,
        deadline: Deadline,
        question: impl FnOnce(u64) -> Message,
    ) -> Outcome<Reply> {
        let asked = self.send_question(peer, still, deadline, question)?;
        asked.map_or(Ok(Reply::Lost), |id| self.replies.wait(id, deadline))
    }

    /// Sends a question, and returns its number. Returns `None` if it was not sent, because there is no link or `still` is false, and
    /// `Err` if it was not sent in time.
    pub(crate) fn send_question(
        &self,
        peer: ClusterId,
        still: impl FnOnce() -> bool,
        deadline: Deadline,
        question: impl FnOnce(u64) -> Message,
    ) -> Outcome<Option<u64>> {
        let id = self.replies.begin(peer);
        // What ends the connection loses the questions that have begun before.
        let sent = if still() { self.send(peer, &question(id), deadline) } else { Ok(false) };
        if sent == Ok(true) {
            return Ok(Some(id));
        }
        self.replies.forget(id);
        sent.map(|_| None)
    }

    /// Sends a message after those of the outbox, so that it does not overtake a withdrawal. Waits while the window of the link is full.
    /// Returns `false` if there is no link.
    pub(crate) fn send(&self, peer: ClusterId, message: &Message, deadline: Deadline) -> Outcome<bool> {
        let bytes = message.encode();
        loop {
            let is_first = !self.outbox.holds(peer);
            match is_first.then(|| self.engine.send(peer, bytes.clone())) {
                Some(Ok(())) => return Ok(true),
                Some(Err(error)) if error.kind() == ErrorKind::NotLinked => return Ok(false),
                Some(Err(error)) if error.kind() != ErrorKind::Busy => {
                    return Err(Status::from_error("sending to a peer", &error));
                }
                _ if deadline.passed() => return Err(Status::Timeout),
                _ => std::thread::sleep(PAUSE),
            }
        }
    }
}
