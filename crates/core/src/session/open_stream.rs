//! Opens call streams of a link as the dialing side: at which address of the peer, and with rings if both sides can use them.

use super::call_rings::{OfferedRings, RINGED};
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
                _ => !error.is_shortage(),
            };
            if blamed && self.alive() {
                at.note_failure(self.peer.cluster, error);
            }
        })
    }

    /// Opens a stream, with rings if possible.
    fn dial_call_stream(&self, dialer: &Dialer, reverse: bool, deadline: Deadline) -> Result<Stream> {
        let ring = OfferedRings::create(&dialer.address, self.ringed(reverse)).transpose();
        let Some(ring) = ring else { return self.dial_with(dialer, (reverse, false), deadline) };
        let failed = match ring {
            Err(error) => error,
            // The ring is closed if the stream cannot be opened, so another one may have its descriptor.
            Ok(ring) => match self.dial_with(dialer, (reverse, true), deadline) {
                Err(error) if error.is_shortage() => error,
                Err(error) => {
                    if error.kind() != ErrorKind::Interrupted {
                        self.note_rings(Some(&error));
                    }
                    return Err(error);
                }
                Ok(stream) => match ring.exchange(&stream, deadline) {
                    Ok(refused) => {
                        // A refusal of more streams than may have rings is no failure.
                        if stream.has_rings() || self.ringed(reverse) < RINGED {
                            self.note_rings(refused.as_ref());
                        }
                        return Ok(stream);
                    }
                    // One side could not receive or map the ring of the other one, for example because it has no free
                    // descriptor. So this stream is lost.
                    Err(error) => error,
                },
            },
        };
        if !self.alive() || failed.kind() == ErrorKind::Interrupted {
            return Err(failed);
        }
        self.note_rings(Some(&failed));
        if failed.kind() == ErrorKind::Timeout {
            return Err(failed);
        }
        self.dial_with(dialer, (reverse, false), deadline)
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
