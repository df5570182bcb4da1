//! The thread that watches every link: signs of life in both directions, goodbyes, and requests for streams.
//!
//! It sleeps in `poll` on all control streams and wakes for a message, a change of links, or the next heartbeat. Not for:
//! calls, which travel on streams of their own.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use super::link::Link;
use super::{Shared, talk};
use crate::error::{Error, ErrorKind, Result};
use crate::id::Deadline;
use crate::wire::{Control, GREETING_LIMIT};

/// A control message is sent in one piece, and comes in one: a peer that stops in the middle has lost the link. All other
/// links wait for it (`half_a_control_message_is_the_end`).
const MESSAGE_TIME: Duration = Duration::from_millis(5);
/// How long the thread rests after the system refused to watch.
const REST: Duration = Duration::from_millis(50);

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
        let ready = match ready {
            Ok(ready) => ready,
            Err(Errno::INTR) => continue,
            Err(errno) => {
                shared.state.note(format!("the links cannot be watched: {errno}"));
                drop(shared);
                std::thread::sleep(REST);
                continue;
            }
        };
        for link in ready.iter().filter_map(|&index| links.get(index)) {
            match listen(&shared, link) {
                Ok(None) => {}
                // Only who says so is not to be looked for again: an engine that ends may be started again.
                Ok(Some((goodbye, true))) => drop(shared.lost(link, &goodbye)),
                Ok(Some((goodbye, false))) => shared.died(link, &goodbye),
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
fn wait(bell: &Bell, links: &[Arc<Link>], limit: Option<Duration>) -> rustix::io::Result<Vec<usize>> {
    let mut polled = Vec::with_capacity(links.len() + 1);
    polled.push(PollFd::new(&bell.0, PollFlags::IN));
    polled.extend(links.iter().map(|link| PollFd::from_borrowed_fd(link.control().as_fd(), PollFlags::IN)));
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    poll(&mut polled, limit.as_ref())?;
    let rings = |fd: &PollFd<'_>| !fd.revents().is_empty();
    Ok(polled[1..].iter().enumerate().filter(|(_, fd)| rings(fd)).map(|(index, _)| index).collect())
}

/// Takes one message of a peer; if it says goodbye, returns why, and whether it was unlinked.
fn listen(shared: &Arc<Shared>, link: &Arc<Link>) -> Result<Option<(String, bool)>> {
    let deadline = Deadline::after(MESSAGE_TIME).named("the limit of a control message");
    let message = talk::hear_next(link.control(), GREETING_LIMIT, Duration::ZERO, deadline)?;
    let gone =
        || Error::new(ErrorKind::NotLinked, "the peer closed the connection: it was unlinked there or ended");
    link.hear();
    match message.ok_or_else(gone)? {
        // A peer that does not take the answer is silent to us as well, and found out by that.
        Control::Ping => drop(link.tell(&Control::Pong)),
        Control::Pong => link.answered(),
        Control::Dial => shared.dial_back(link),
        Control::Bye { reason, unlinked } => return Ok(Some((reason, unlinked))),
    }
    Ok(None)
}

/// Breaks a link that has been silent for too long, asks one that is silent for a sign of life, and ends streams that
/// nobody has used for long.
fn look_after(shared: &Arc<Shared>, link: &Arc<Link>, heartbeat: Duration, silence: Duration) {
    link.trim();
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
