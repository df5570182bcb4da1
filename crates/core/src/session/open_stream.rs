//! Opens call streams of a link as the dialing side: at which address of the peer, and with rings if both sides can use them.

use super::call_rings::OfferedRing;
use super::dial::Dialer;
use super::link::Link;
use super::peer_addresses::FurtherAddress;
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;
use crate::net::Stream;
use crate::protocol::Purpose;

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

    fn dial_call_stream(&self, dialer: &Dialer, reverse: bool, deadline: Deadline) -> Result<Stream> {
        let Some(ring) = OfferedRing::create(self.peer.cluster, &dialer.address, self.ringed(reverse)) else {
            return self.dial_with(dialer, (reverse, false), deadline);
        };
        let stream = self.dial_with(dialer, (reverse, true), deadline)?;
        match ring.exchange(self.peer.cluster, &stream, deadline) {
            Ok(()) => Ok(stream),
            // The peer has switched to rings and this side cannot map them, so this stream is lost.
            Err(error) if matches!(error.kind(), ErrorKind::System | ErrorKind::OutOfMemory) => {
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
