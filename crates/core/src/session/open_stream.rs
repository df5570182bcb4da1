//! Opens call streams of a link as the dialing side: at which address of the peer, and with rings if both sides can use them.

use std::time::{Duration, Instant};

use super::call_rings::{OfferedRing, RINGED};
use super::dial::Dialer;
use super::link::Link;
use super::peer_addresses::FurtherAddress;
use super::stream_set::StreamSet;
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;
use crate::net::{Address, Stream};
use crate::protocol::Purpose;

/// How long calls use streams without rings, after one was to get them and did not, before another one is opened.
const RETRY_TIME: Duration = Duration::from_secs(30);

impl Link {
    /// Opens another stream of this link with `dialer`, at a further address or at the main one. With `reverse` the peer will
    /// send requests on it. Returns `Err` with `NotLinked` if another process answers at the address of the peer.
    pub(super) fn open_call_stream(
        &self,
        dialer: &Dialer,
        at: Option<&FurtherAddress>,
        reverse: bool,
        deadline: Deadline,
    ) -> Result<Stream> {
        let Some(at) = at else { return self.dial_call_stream(dialer, reverse, deadline) };
        let (dialer, limit, hurried) = dialer.to(at, deadline);
        self.dial_call_stream(&dialer, reverse, limit).inspect_err(|error| {
            let blamed = match error.kind() {
                ErrorKind::Interrupted => false,
                ErrorKind::Timeout => !hurried,
                _ => true,
            };
            if blamed && self.alive() {
                at.note_failure(self.peer.cluster, error);
            }
        })
    }

    /// Whether another stream of `streams` may get rings: there are too few, and none was refused lately.
    pub(super) fn may_ring(&self, streams: &StreamSet) -> bool {
        let local = self.dialer.as_ref().is_some_and(|dialer| !matches!(dialer.address, Address::Tcp(_)));
        let refused = || self.rings_refused.lock().is_some_and(|when| when.elapsed() < RETRY_TIME);
        local && streams.ringed() + streams.opening.len() < RINGED && !refused()
    }

    fn dial_call_stream(&self, dialer: &Dialer, reverse: bool, deadline: Deadline) -> Result<Stream> {
        let Some(ring) = OfferedRing::create(self.peer.cluster, &dialer.address, self.ringed(reverse)) else {
            return self.dial_with(dialer, (reverse, false), deadline);
        };
        let stream = self.dial_with(dialer, (reverse, true), deadline)?;
        let exchanged = ring.exchange(self.peer.cluster, &stream, deadline);
        *self.rings_refused.lock() = (!stream.has_rings()).then(Instant::now);
        match exchanged {
            Ok(()) => Ok(stream),
            Err(error) if matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Interrupted) => Err(error),
            // One side could not receive or map the ring of the other one, for example because it has no free descriptor. So
            // this stream is lost.
            Err(_) if self.alive() => {
                drop(stream);
                self.dial_with(dialer, (reverse, false), deadline)
            }
            Err(error) => Err(error),
        }
    }

    fn dial_with(
        &self,
        dialer: &Dialer,
        (reverse, rings): (bool, bool),
        deadline: Deadline,
    ) -> Result<Stream> {
        let dial = || {
            let purpose = Purpose::Call { link: self.id, reverse, rings };
            dialer.handshake(Some(self.peer.cluster), purpose, deadline)
        };
        // A listener that is full of unauthenticated connections drops the oldest one, which may be this one.
        // So retry once.
        let opened = match dial() {
            Err(error) if error.kind() == ErrorKind::NotLinked && self.alive() => dial(),
            opened => opened,
        };
        let (stream, welcome) = opened?;
        if welcome.from.instance == self.peer.instance {
            return Ok(stream);
        }
        let text = "another process answers at the address of the peer: it was restarted; link again";
        Err(Error::new(ErrorKind::NotLinked, text))
    }
}
