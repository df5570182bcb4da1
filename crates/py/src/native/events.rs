//! The events of an engine, as Python holds them.

use std::sync::Arc;

use llm_datadist_core::bindings::DataDist;
use llm_datadist_core::{Error, ErrorKind, Event, EventQueue, Result};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::errors::raise;
use super::grant::{self, NativeGrant};
use super::owner::TransferOwner;
use super::peer::NativePeer;
use super::shared::EngineShared;
use super::transfer::NativeTransfer;
use crate::convert;

/// The event that a transfer has ended and nobody has taken its outcome. There is one for each such transfer.
#[pyclass(frozen, get_all, name = "Completed", module = "llm_datadist.native")]
pub(crate) struct TransferEnded {
    /// The handle that the call returned: the same object, unless the program has dropped it.
    transfer: Py<NativeTransfer>,
    /// The error of the transfer, or ``None`` if it succeeded.
    error: Option<Py<PyAny>>,
}

/// The event that the program at a peer has sent a message, by ``Peer.send`` or ``notify=``.
#[pyclass(frozen, get_all, name = "Message", module = "llm_datadist.native")]
pub(crate) struct MessageEvent {
    /// The peer that sent it. Its link may have ended since.
    peer: Py<NativePeer>,
    /// The message, at most 64 KiB.
    data: Py<PyBytes>,
}

/// The event that a link was made, by either end.
#[pyclass(frozen, get_all, name = "PeerUp", module = "llm_datadist.native")]
pub(crate) struct PeerUpEvent {
    /// The other end.
    peer: Py<NativePeer>,
}

/// The event that a link has ended, for whatever reason.
///
/// It comes after the messages of the peer, and after the ends of the transfers over the link. It waits for them for at
/// most one second, and not if the same peer has been linked again.
#[pyclass(frozen, get_all, name = "PeerDown", module = "llm_datadist.native")]
pub(crate) struct PeerDownEvent {
    /// The other end.
    peer: Py<NativePeer>,
    /// Why the link ended, for people. Do not compare it.
    reason: String,
    /// The number of messages to the peer whose arrival it has not confirmed. Each may have arrived or not.
    unconfirmed: u64,
}

/// The event that a grant of this engine has ended.
///
/// The blocks of the grant may be written again. There is one event for each grant, also after ``revoke``.
#[pyclass(frozen, get_all, name = "GrantClosed", module = "llm_datadist.native")]
pub(crate) struct GrantClosedEvent {
    /// The grant, equal to the object that ``Engine.lend`` returned.
    grant: Py<NativeGrant>,
    /// Why the grant has ended, as ``Grant.ended`` says.
    reason: &'static str,
}

/// Returns at most `most` events of an engine. If that fails, they stay in the queue.
pub(crate) fn taken(py: Python<'_>, shared: &Arc<EngineShared>, most: usize) -> PyResult<Vec<Py<PyAny>>> {
    let poll = |engine: &DataDist| Ok((engine.events().clone(), engine.poll(most)?));
    let (queue, events) = shared.engine.attached(py, poll)?;
    delivered(py, &TransferOwner::Engine(shared.clone()), &queue, events)
}

/// Returns events that were taken out of a queue. If that fails, puts them back.
pub(crate) fn delivered(
    py: Python<'_>,
    owner: &TransferOwner,
    queue: &EventQueue,
    mut events: Vec<Event>,
) -> PyResult<Vec<Py<PyAny>>> {
    // A call on many blocks starts while it is detached from the interpreter. Its transfer may end before the call has made the
    // handle that it returns, and the event has the same one.
    let unknown = |event: &Event| match event {
        Event::Completed(transfer) => owner.transfers().get(&transfer.number(), |_| ()).is_none(),
        _ => false,
    };
    if let Some(at) = events.iter().position(unknown) {
        queue.put_back(events.split_off(at).into_iter());
    }
    let made = events.iter().filter_map(|event| of(py, owner, event).transpose());
    let made: PyResult<Vec<_>> = made.collect();
    match &made {
        Ok(_) => events.iter().for_each(|event| forget(owner, event)),
        Err(_) => queue.put_back(events.into_iter()),
    }
    made
}

/// Returns an event as Python sees it; `None` for the end of a grant that `lend` could not return.
fn of(py: Python<'_>, owner: &TransferOwner, event: &Event) -> PyResult<Option<Py<PyAny>>> {
    if let Event::Completed(transfer) = event {
        let error = transfer.peek().and_then(Result::err).map(|error| owner.raise(py, &error));
        let error = error.map(|error| error.into_value(py).into_any());
        let transfer = NativeTransfer::of_event(py, owner, transfer)?;
        return Ok(Some(Py::new(py, TransferEnded { transfer, error })?.into_any()));
    }
    // A store has no other events.
    let TransferOwner::Engine(shared) = owner else { return Ok(None) };
    let event = match event {
        Event::Notification(message) => {
            let data = convert::bytes(py, &message.payload, raise)?.unbind();
            let peer = NativePeer::of(py, shared, &message.peer)?;
            Py::new(py, MessageEvent { peer, data })?.into_any()
        }
        Event::LinkUp(peer) => {
            Py::new(py, PeerUpEvent { peer: NativePeer::of(py, shared, peer)? })?.into_any()
        }
        Event::LinkDown(end) => {
            let peer = NativePeer::of(py, shared, &end.peer)?;
            let (reason, unconfirmed) = (end.reason.clone(), end.unacknowledged);
            Py::new(py, PeerDownEvent { peer, reason, unconfirmed })?.into_any()
        }
        Event::GrantEnded(grant, why) => {
            let Some(grant) = NativeGrant::of_event(py, shared, grant) else { return Ok(None) };
            Py::new(py, GrantClosedEvent { grant, reason: why.name() })?.into_any()
        }
        _ => {
            return Err(raise(
                py,
                &Error::new(ErrorKind::System, "an event that this binding does not know"),
            ));
        }
    };
    Ok(Some(event))
}

/// Forgets what an event that Python has got was about.
fn forget(owner: &TransferOwner, event: &Event) {
    match (event, owner) {
        (Event::Completed(transfer), _) => drop(owner.transfers().remove(&transfer.number())),
        (Event::GrantEnded(grant, _), TransferOwner::Engine(shared)) => {
            drop(shared.grants.remove(&grant::key(grant)));
        }
        _ => {}
    }
}

#[pymethods]
impl TransferEnded {
    #[classattr]
    fn __match_args__() -> (&'static str, &'static str) {
        ("transfer", "error")
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Completed({})", self.transfer.bind(py).repr()?))
    }
}

#[pymethods]
impl MessageEvent {
    #[classattr]
    fn __match_args__() -> (&'static str, &'static str) {
        ("peer", "data")
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Message({}, {})", self.peer.bind(py).repr()?, self.data.bind(py).repr()?))
    }
}

#[pymethods]
impl PeerUpEvent {
    #[classattr]
    fn __match_args__() -> (&'static str,) {
        ("peer",)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("PeerUp({})", self.peer.bind(py).repr()?))
    }
}

#[pymethods]
impl PeerDownEvent {
    #[classattr]
    fn __match_args__() -> (&'static str, &'static str, &'static str) {
        ("peer", "reason", "unconfirmed")
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let PeerDownEvent { peer, reason, unconfirmed } = self;
        Ok(format!("PeerDown({}, '{reason}', unconfirmed={unconfirmed})", peer.bind(py).repr()?))
    }
}

#[pymethods]
impl GrantClosedEvent {
    #[classattr]
    fn __match_args__() -> (&'static str, &'static str) {
        ("grant", "reason")
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("GrantClosed({}, '{}')", self.grant.bind(py).repr()?, self.reason))
    }
}
