//! The descriptors on which the control thread waits. Other threads add and remove listeners here.

use std::sync::Arc;

use hashbrown::HashMap;
use rustix::event::EventfdFlags;

use super::poller::{Poller, Watching, next_number};
use crate::error::Result;
use crate::memory::EventFd;
use crate::net::Listener;
use crate::sync::Mutex;

/// Poller number of the event descriptor. Other descriptors have higher numbers.
pub(super) const BELL: u64 = 0;

pub(super) struct ControlPoller {
    pub(super) poller: Poller,
    /// Signalled when links have changed, a handshake step is done, or the engine closes.
    bell: Arc<EventFd>,
    pub(super) listeners: Mutex<HashMap<u64, Arc<dyn Listener>>>,
    /// Whether the thread has been started.
    started: Mutex<bool>,
}

impl ControlPoller {
    pub(super) fn new() -> Result<ControlPoller> {
        let poller = Poller::new()?;
        let bell = Arc::new(EventFd::new("an eventfd", EventfdFlags::empty())?);
        poller.add("the descriptor that wakes a thread", &*bell, BELL, Watching::Always)?;
        Ok(ControlPoller { poller, bell, listeners: Mutex::default(), started: Mutex::default() })
    }

    pub(super) fn bell(&self) -> &Arc<EventFd> {
        &self.bell
    }

    /// Calls `spawn`, which starts the control thread, unless an earlier call has succeeded.
    pub(super) fn start(self: &Arc<Self>, spawn: impl FnOnce(Arc<Self>) -> Result<()>) -> Result<()> {
        let mut started = self.started.lock();
        if !*started {
            spawn(self.clone())?;
            *started = true;
        }
        Ok(())
    }

    /// Accepts connections at `listener` until [`leave`](Self::leave) is called with the returned number.
    pub(super) fn listen(&self, listener: Arc<dyn Listener>) -> Result<u64> {
        let number = next_number();
        self.poller.add("a listener", listener.readiness(), number, Watching::Always)?;
        self.listeners.lock().insert(number, listener);
        Ok(number)
    }

    /// Closes a listener. Its address is free when this returns.
    pub(super) fn leave(&self, number: u64) {
        // The control thread accepts only under this lock, so no other reference to the listener remains.
        let Some(listener) = self.listeners.lock().remove(&number) else { return };
        self.poller.remove(listener.readiness());
        listener.close();
    }
}
