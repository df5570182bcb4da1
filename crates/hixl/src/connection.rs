//! A connection that this engine has made to another one, and what runs over it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use llm_datadist_core::{ClusterId, Deadline, Transfer};

use crate::remote_regions::RemoteRegions;
use crate::status::{Outcome, Status};
use crate::sync::lock;

/// A connection that this engine has made. The link below it may serve connections of the peer, too.
#[derive(Debug)]
pub(crate) struct Connection {
    /// The peer.
    pub(crate) peer: ClusterId,
    /// What is known of its regions.
    pub(crate) regions: RemoteRegions,
    /// Whether the link has ended.
    broken: AtomicBool,
    running: Mutex<Running>,
}

#[derive(Debug, Default)]
struct Running {
    /// Whether the program has disconnected, so that nothing new begins.
    ended: bool,
    transfers: HashMap<u64, Arc<Transfer>>,
}

impl Connection {
    pub(crate) fn new(peer: ClusterId) -> Self {
        let (regions, broken, running) = (RemoteRegions::default(), AtomicBool::default(), Mutex::default());
        Connection { peer, regions, broken, running }
    }

    /// Notes that the link has ended.
    pub(crate) fn break_off(&self) {
        self.broken.store(true, Ordering::Release);
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// Whether the program has disconnected.
    pub(crate) fn has_ended(&self) -> bool {
        lock(&self.running).ended
    }

    /// Notes a transfer that runs. If the program has disconnected meanwhile, cancels it.
    pub(crate) fn track(&self, transfer: &Arc<Transfer>) -> Outcome<()> {
        let mut running = lock(&self.running);
        if running.ended {
            transfer.cancel();
            return Err(Status::NotConnected);
        }
        running.transfers.insert(transfer.number(), transfer.clone());
        Ok(())
    }

    /// Notes that a transfer has ended.
    pub(crate) fn untrack(&self, transfer: &Transfer) {
        lock(&self.running).transfers.remove(&transfer.number());
    }

    /// Lets nothing begin over the connection any more.
    pub(crate) fn begin_end(&self) {
        lock(&self.running).ended = true;
    }

    /// Ends the connection: cancels what runs, and waits until it has ended. Returns whether all has ended.
    pub(crate) fn end(&self, deadline: Deadline) -> bool {
        let mut running = lock(&self.running);
        running.ended = true;
        let transfers: Vec<_> = running.transfers.values().cloned().collect();
        drop(running);
        for transfer in &transfers {
            transfer.cancel();
        }
        for transfer in &transfers {
            // Fails only if interrupted, and no code interrupts this wait.
            let _ = transfer.wait(deadline);
        }
        !self.is_running()
    }

    /// Whether transfers run.
    pub(crate) fn is_running(&self) -> bool {
        let mut running = lock(&self.running);
        running.transfers.retain(|_, transfer| !transfer.done());
        !running.transfers.is_empty()
    }
}
