//! The thread that watches every link: signs of life in both directions, goodbyes, and requests for streams.
//!
//! It sleeps in `poll` on all control streams and wakes for a message, a change of links, or the next heartbeat. Not for:
//! calls, which travel on streams of their own.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::link::Link;
use super::{Shared, talk};
use crate::error::{Error, ErrorKind, Result};
use crate::id::Deadline;
use crate::wire::{Control, GREETING_LIMIT};

/// A control message comes in one piece; a peer that stops in the middle of one has lost the link.
const MESSAGE_TIME: Duration = Duration::from_millis(100);

/// Wakes the thread.
#[derive(Debug)]
pub(super) struct Bell(OwnedFd);

impl Bell {
    pub(super) fn new() -> Result<Bell> {
        let made = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        made.map(Bell).map_err(|error| {
            let text = "no descriptor to wake the thread that keeps the links";
            Error::new(ErrorKind::System, text).because(std::io::Error::from(error))
        })
    }

    /// The set of links has changed.
    pub(super) fn ring(&self) {
        // A full counter means that the bell is ringing already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    fn silence(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

/// Keeps the links of `shared` until it is closed or gone.
pub(super) fn keep(shared: &Weak<Shared>, bell: &Arc<Bell>) {
    let mut beat = Instant::now();
    while let Some((links, heartbeat, silence)) = shared.upgrade().and_then(|shared| {
        let config = &shared.cluster.config.links;
        Some((shared.kept()?, config.heartbeat, config.silence))
    }) {
        let until = (beat + heartbeat).saturating_duration_since(Instant::now());
        // Without links there is nothing to beat for: the bell is all that can ring.
        let limit = if links.is_empty() { None } else { Some(until) };
        let ready = wait(bell, &links, limit);
        bell.silence();
        let Some(shared) = shared.upgrade() else { return };
        for link in ready.iter().filter_map(|&index| links.get(index)) {
            match listen(&shared, link) {
                Ok(None) => {}
                Ok(Some(goodbye)) => shared.lost(link, &goodbye),
                Err(error) => shared.died(link, &error.to_string()),
            }
        }
        if beat.elapsed() >= heartbeat {
            beat = Instant::now();
            for link in &links {
                look_after(&shared, link, heartbeat, silence);
            }
        }
    }
}

/// The links whose peers have said something.
fn wait(bell: &Bell, links: &[Arc<Link>], limit: Option<Duration>) -> Vec<usize> {
    let mut polled = Vec::with_capacity(links.len() + 1);
    polled.push(PollFd::new(&bell.0, PollFlags::IN));
    polled.extend(links.iter().map(|link| PollFd::from_borrowed_fd(link.control().as_fd(), PollFlags::IN)));
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    if poll(&mut polled, limit.as_ref()).is_err() {
        return Vec::new(); // interrupted: the next round asks again
    }
    let rings = |fd: &PollFd<'_>| !fd.revents().is_empty();
    polled[1..].iter().enumerate().filter(|(_, fd)| rings(fd)).map(|(index, _)| index).collect()
}

/// Takes one message of a peer; returns its reason if it says goodbye.
fn listen(shared: &Arc<Shared>, link: &Arc<Link>) -> Result<Option<String>> {
    let deadline = Deadline::after(MESSAGE_TIME).named("the limit of a control message");
    let message = talk::hear_next(link.control(), GREETING_LIMIT, Duration::ZERO, deadline)?;
    let gone =
        || Error::new(ErrorKind::NotLinked, "the peer closed the connection: it was unlinked there or ended");
    link.hear();
    match message.ok_or_else(gone)? {
        // A peer that does not take the answer is silent to us as well, and found out by that.
        Control::Ping => drop(link.tell(&Control::Pong)),
        Control::Pong => {}
        Control::Dial => shared.dial_back(link),
        Control::Bye { reason, .. } => return Ok(Some(reason)),
    }
    Ok(None)
}

/// Breaks a link that has been silent for too long, and asks one that is silent for a sign of life.
fn look_after(shared: &Arc<Shared>, link: &Arc<Link>, heartbeat: Duration, silence: Duration) {
    let silent = link.silent();
    if silent >= silence {
        let text = format!(
            "the peer gave no sign of life for {} ms (llm.LinkSilence): it is stopped, or the way to it is cut",
            silent.as_millis()
        );
        shared.died(link, &text);
    } else if silent >= heartbeat / 2 {
        let _ = link.tell(&Control::Ping);
    }
}
