//! A read in progress.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::Instant;

use crate::abi::{
    Api, Handle, OP_CALLBACK, OP_MEMORY, OP_MULTI_SEND, OP_USER_DATA, RawStatus, RequestParams,
};
use crate::endpoints::{Closing, Endpoint, request_of};
use crate::error::Error;
use crate::fabric::{Piece, ReadOrder, SharedCounts};
use crate::mapping::MappedMemory;
use crate::status::{CANCELED, OK, peer_failed};

/// Number of requests that are posted between two checks of the deadline.
const POSTS: usize = 64;

/// A read that is being executed.
pub(crate) struct ActiveRead {
    pub(crate) order: ReadOrder,
    reply: SyncSender<Result<(), Error>>,
    counts: Arc<SharedCounts>,
    endpoint: Option<Endpoint>,
    /// Whether it counts as a user of an endpoint of its peer.
    uses_endpoint: bool,
    posted: usize,
    /// Not a `Box`: moving a `Box` asserts unique access to its content, and the library holds a pointer to it while requests are
    /// in flight.
    requests: Rc<Requests>,
    ending: Option<Ending>,
    /// Whether the outcome was sent.
    ended: bool,
}

/// The requests of a read, as the library reports them.
struct Requests {
    outstanding: Cell<usize>,
    failure: Cell<RawStatus>,
    free: unsafe extern "C" fn(Handle),
}

/// A read that has failed. It ends when its endpoint is closed and no request is left.
struct Ending {
    cause: Error,
    closing: Closing,
    since: Instant,
}

extern "C" fn request_ended(request: Handle, status: RawStatus, user_data: Handle) {
    // SAFETY: the user data is the counter of a read, which is not dropped before its last request has ended, and only
    // the thread of the fabric uses either.
    let requests = unsafe { &*user_data.cast::<Requests>() };
    requests.outstanding.set(requests.outstanding.get() - 1);
    if status != OK && requests.failure.get() == OK {
        requests.failure.set(status);
    }
    // SAFETY: the request has ended, and nothing uses it afterwards.
    unsafe { (requests.free)(request) };
}

impl ActiveRead {
    pub(crate) fn new(
        api: &Api,
        order: ReadOrder,
        reply: SyncSender<Result<(), Error>>,
        counts: Arc<SharedCounts>,
    ) -> Self {
        let requests = Rc::new(Requests {
            outstanding: Cell::new(0),
            failure: Cell::new(OK),
            free: api.ucp_request_free,
        });
        let (endpoint, uses_endpoint, ending) = (None, false, None);
        ActiveRead {
            order,
            reply,
            counts,
            endpoint,
            uses_endpoint,
            posted: 0,
            requests,
            ending,
            ended: false,
        }
    }

    /// Gives the read its endpoint.
    pub(crate) fn begin(&mut self, endpoint: Endpoint) {
        (self.endpoint, self.uses_endpoint) = (Some(endpoint), true);
    }

    /// Whether it waits for an endpoint.
    pub(crate) fn waits(&self) -> bool {
        self.endpoint.is_none() && self.ending.is_none() && !self.ended
    }

    /// Whether it counts as a user of an endpoint of its peer.
    pub(crate) fn uses_endpoint(&self) -> bool {
        self.uses_endpoint
    }

    /// Number of requests in flight.
    pub(crate) fn outstanding(&self) -> usize {
        self.requests.outstanding.get()
    }

    /// Posts at most as many requests as `room`. Returns whether it has posted any.
    pub(crate) fn post(&mut self, api: &Api, memory: &[(u64, MappedMemory)], room: usize) -> bool {
        let before = self.posted;
        if self.endpoint.is_some()
            && let Err(error) = self.try_post(api, memory, room.min(POSTS))
        {
            self.give_up(error);
        }
        self.posted > before
    }

    fn try_post(&mut self, api: &Api, memory: &[(u64, MappedMemory)], most: usize) -> Result<(), Error> {
        let Some(endpoint) = &mut self.endpoint else { return Ok(()) };
        endpoint.check()?;
        if self.requests.failure.get() != OK {
            return Err(peer_failed(self.requests.failure.get()));
        }
        let key = endpoint.key(&self.order.key)?;
        // SAFETY: zeros are a request without parameters.
        let mut params: RequestParams = unsafe { std::mem::zeroed() };
        params.mask = OP_CALLBACK | OP_USER_DATA | OP_MULTI_SEND;
        params.completed = Some(request_ended);
        params.user_data = Rc::as_ptr(&self.requests).cast_mut().cast();
        for &Piece { local, remote, len } in self.order.pieces.iter().skip(self.posted).take(most) {
            self.posted += 1;
            if len == 0 {
                continue;
            }
            let mapped = memory.iter().find(|(_, memory)| memory.contains(local, len));
            if let Some((_, memory)) = mapped {
                (params.mask, params.memory) = (params.mask | OP_MEMORY, memory.handle);
            } else {
                params.mask &= !OP_MEMORY;
            }
            let bytes = usize::try_from(len).unwrap_or(usize::MAX);
            // SAFETY: the destination is writable until the read ends, as the caller of `Peer::read` promises. The
            // endpoint is open, and the key belongs to it.
            let returned = unsafe {
                (api.ucp_get_nbx)(endpoint.handle, local as Handle, bytes, remote, key, &raw const params)
            };
            if request_of(returned).map_err(Error::Peer)?.is_some() {
                self.requests.outstanding.set(self.requests.outstanding.get() + 1);
            }
        }
        Ok(())
    }

    /// Ends the read without success: closes its endpoint, so that no request is left.
    pub(crate) fn give_up(&mut self, cause: Error) {
        match self.endpoint.take() {
            Some(endpoint) => {
                self.ending = Some(Ending { cause, closing: endpoint.close(), since: Instant::now() });
            }
            None if self.ending.is_none() && !self.ended => self.send(Err(cause)),
            None => {}
        }
    }

    /// Since when it ends without success.
    pub(crate) fn ending_since(&self) -> Option<Instant> {
        self.ending.as_ref().map(|ending| ending.since)
    }

    /// Gives up if the deadline has passed.
    pub(crate) fn check_deadline(&mut self, now: Instant) {
        if self.order.deadline.is_some_and(|deadline| deadline <= now) {
            self.give_up(Error::DeadlinePassed);
        }
    }

    /// If no request is left, sends the outcome. Returns whether the read has ended.
    pub(crate) fn end(&mut self) -> bool {
        if self.ended || self.outstanding() > 0 {
            return self.ended;
        }
        if let Some(ending) = &mut self.ending {
            if ending.closing.ended() {
                let cause = ending.cause.clone();
                self.send(Err(cause));
            }
        } else if self.endpoint.is_some() && self.posted == self.order.pieces.len() {
            match self.requests.failure.get() {
                OK => self.send(Ok(())),
                failure => self.give_up(peer_failed(failure)),
            }
        }
        self.ended
    }

    /// Ends the read although requests may be left, because their worker is gone.
    pub(crate) fn abandon(&mut self) {
        let cause = self.ending.take().map_or(peer_failed(CANCELED), |ending| ending.cause);
        self.endpoint = None;
        if !self.ended {
            self.send(Err(cause));
        }
    }

    /// Returns the endpoint of a read that has succeeded.
    pub(crate) fn into_endpoint(self) -> Option<Endpoint> {
        self.endpoint
    }

    fn send(&mut self, outcome: Result<(), Error>) {
        let SharedCounts { reads, bytes, failures, forced_closes, .. } = &*self.counts;
        let add = |number: &AtomicU64, more| number.fetch_add(more, Ordering::Relaxed);
        if outcome.is_ok() {
            add(reads, 1);
            add(bytes, self.order.pieces.iter().map(|piece| piece.len).sum());
        } else {
            add(failures, 1);
            add(forced_closes, self.uses_endpoint.into());
        }
        let _ = self.reply.send(outcome);
        self.ended = true;
    }
}
