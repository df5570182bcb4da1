//! What this side does for the requests of one peer: the streams on which it answers them, and writes over several streams.

use std::sync::Arc;
use std::time::Duration;

use super::call_pool::MAX_CALLS;
use super::shared_writes::SharedWrites;
use crate::error::{Error, ErrorKind, Result};
use crate::net::Stream;
use crate::sync::Mutex;

/// Most streams on which one peer may send requests. A peer uses at most [`MAX_CALLS`]; the rest allows for
/// streams that it has closed and this side has not noticed yet (`the_streams_of_one_peer_are_bounded`).
const MAX_SERVED: usize = 2 * MAX_CALLS;

/// The streams on which requests of one peer are answered. [`end`](Self::end) closes them, and ends the writes.
#[derive(Debug)]
pub(super) struct Served {
    state: Mutex<State>,
    /// Writes of the peer over several streams.
    pub(super) writes: SharedWrites,
}

#[derive(Debug, Default)]
struct State {
    streams: Vec<Arc<Stream>>,
    /// Streams that this side is opening at the request of the peer.
    opening: usize,
}

impl Served {
    /// Returns an empty set, of a peer that may be silent for `silence`.
    pub(super) fn new(silence: Duration) -> Served {
        Served { state: Mutex::default(), writes: SharedWrites::new(silence) }
    }

    /// Adds a stream, or closes it if the link is not `alive`. Refuses more than [`MAX_SERVED`] streams.
    pub(super) fn add(&self, stream: &Arc<Stream>, alive: impl Fn() -> bool) -> Result<()> {
        let mut state = self.state.lock();
        if state.streams.len() >= MAX_SERVED {
            let error = Error::new(ErrorKind::NotLinked, "the link has too many streams of calls");
            return Err(error.with("limit", MAX_SERVED));
        }
        state.streams.push(stream.clone());
        drop(state);
        if !alive() {
            stream.close();
        }
        Ok(())
    }

    /// Removes a stream that has ended.
    pub(super) fn remove(&self, stream: &Arc<Stream>) {
        self.state.lock().streams.retain(|known| !Arc::ptr_eq(known, stream));
    }

    /// Returns the number of streams that `counts`.
    pub(super) fn count(&self, counts: impl Fn(&Stream) -> bool) -> usize {
        self.state.lock().streams.iter().filter(|stream| counts(stream)).count()
    }

    /// Reserves room for one more stream. Returns `false` if there is none. Each success is paired with a call of
    /// [`opened`](Self::opened).
    pub(super) fn may_open(&self) -> bool {
        let mut state = self.state.lock();
        let room = state.streams.len() + state.opening < MAX_SERVED;
        state.opening += usize::from(room);
        room
    }

    /// Returns the reservation of [`may_open`](Self::may_open).
    pub(super) fn opened(&self) {
        self.state.lock().opening -= 1;
    }

    /// Closes all streams and ends all writes, because the link has broken. No write begins afterwards.
    pub(super) fn end(&self) {
        self.writes.end();
        let streams = self.state.lock().streams.clone();
        for stream in streams {
            stream.close();
        }
    }
}
