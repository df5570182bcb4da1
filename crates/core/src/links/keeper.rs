//! The thread that watches every link: signs of life in both directions, goodbyes, and requests for streams.
//!
//! It sleeps in `epoll` on all control streams and wakes for a message, a change of links, or the next heartbeat. A message
//! costs what its link costs, however many others there are: with `poll` each of n heartbeats a second looked at n links. Not
//! for: calls, which travel on streams of their own.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
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
/// Messages that are taken in one go; those of more links wait for the next.
const AT_ONCE: usize = 64;
/// What names the bell among the links, whose names are addresses.
const BELL: u64 = 0;

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

/// The links that are watched. Each is taken out before it is let go: a process that was forked may hold its socket open, and
/// what is closed here would ring for ever.
#[derive(Debug)]
pub(super) struct Watch {
    epoll: OwnedFd,
    links: HashMap<u64, Arc<Link>>,
}

/// What woke the thread.
struct Woken {
    rung: bool,
    links: Vec<u64>,
}

impl Watch {
    /// Watches `bell` and no link yet.
    pub(super) fn new(bell: &Bell) -> Result<Watch> {
        let watched = epoll::create(CreateFlags::CLOEXEC).and_then(|epoll| {
            epoll::add(&epoll, &bell.0, EventData::new_u64(BELL), EventFlags::IN)?;
            Ok(Watch { epoll, links: HashMap::new() })
        });
        watched.map_err(|error| {
            let text = "the links cannot be watched";
            Error::new(ErrorKind::System, text).because(std::io::Error::from(error))
        })
    }

    /// Watches `links` from now on and no others; hands out those that the system refuses to watch.
    fn change(&mut self, links: Vec<Arc<Link>>) -> Vec<(Arc<Link>, Errno)> {
        let mut before = std::mem::take(&mut self.links);
        let mut refused = Vec::new();
        for link in links {
            let name = name_of(&link);
            if before.remove(&name).is_none() {
                let stream = link.control().as_fd();
                if let Err(errno) = epoll::add(&self.epoll, stream, EventData::new_u64(name), EventFlags::IN)
                {
                    refused.push((link, errno));
                    continue;
                }
            }
            self.links.insert(name, link);
        }
        before.values().for_each(|link| self.forget(link));
        refused
    }

    /// A link that has ended is watched no longer.
    fn drop_ended(&mut self, name: u64) {
        if self.links.get(&name).is_some_and(|link| !link.alive())
            && let Some(link) = self.links.remove(&name)
        {
            self.forget(&link);
        }
    }

    fn forget(&self, link: &Link) {
        // Fails only if it was not watched.
        let _ = epoll::delete(&self.epoll, link.control().as_fd());
    }

    /// The links whose peers have said something.
    fn wait(&self, limit: Option<Duration>) -> rustix::io::Result<Woken> {
        let mut events = Vec::<Event>::with_capacity(AT_ONCE);
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), limit.as_ref())?;
        let names = events.iter().map(|event| event.data.u64());
        let (rung, links): (Vec<_>, Vec<_>) = names.partition(|&name| name == BELL);
        Ok(Woken { rung: !rung.is_empty(), links })
    }
}

/// Names a link while it is held.
fn name_of(link: &Arc<Link>) -> u64 {
    Arc::as_ptr(link).addr() as u64
}

/// Keeps the links of `shared` until it is closed or gone.
pub(super) fn keep(weak: &Weak<Shared>, bell: &Arc<Bell>, mut watch: Watch) {
    let mut beat = Instant::now();
    let mut woken = Woken { rung: true, links: Vec::new() };
    while let Some(shared) = weak.upgrade() {
        let config = &shared.cluster.config.links;
        let (heartbeat, silence) = (config.heartbeat, config.silence);
        for name in std::mem::take(&mut woken.links) {
            let Some(link) = watch.links.get(&name).cloned() else { continue };
            attend(&shared, &link);
            watch.drop_ended(name);
        }
        if woken.rung {
            // Before looking, so that whatever changes from now on rings again.
            bell.silence();
            let Some(links) = shared.kept() else { return };
            for (link, errno) in watch.change(links) {
                shared.died(&link, &format!("the link cannot be watched: {errno}"));
            }
        }
        if beat.elapsed() >= heartbeat {
            beat = Instant::now();
            watch.links.values().for_each(|link| look_after(&shared, link, heartbeat, silence));
        }
        let until = (beat + heartbeat).saturating_duration_since(Instant::now());
        drop(shared);
        // Without links there is nothing to beat for: the bell is all that can ring.
        woken = match watch.wait(if watch.links.is_empty() { None } else { Some(until) }) {
            Ok(woken) => woken,
            Err(Errno::INTR) => Woken { rung: false, links: Vec::new() },
            Err(errno) => {
                let Some(shared) = weak.upgrade() else { return };
                shared.state.note(format!("the links cannot be watched: {errno}"));
                drop(shared);
                std::thread::sleep(REST);
                Woken { rung: true, links: Vec::new() }
            }
        };
    }
}

/// Takes what the peer of one link has said.
fn attend(shared: &Arc<Shared>, link: &Arc<Link>) {
    match listen(shared, link) {
        Ok(None) => {}
        // Only who says so is not to be looked for again: an engine that ends may be started again.
        Ok(Some((goodbye, true))) => drop(shared.lost(link, &goodbye)),
        Ok(Some((goodbye, false))) => shared.died(link, &goodbye),
        Err(error) => shared.died(link, &error.to_string()),
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ClusterId;
    use crate::links::link::{Kind, Peer};
    use crate::transport::{Address, Local, Stream, Transport};

    /// A link, and what its peer speaks on.
    fn linked() -> (Arc<Link>, Stream) {
        let (local, at) = (Local::default(), Address::Local("keeper".into()));
        let listener = local.listen(&at).unwrap();
        let near = local.dial(&at, Deadline::after(MESSAGE_TIME)).unwrap();
        let far = listener.accept().unwrap().unwrap();
        let peer = Peer { cluster: ClusterId(2), instance: 1, address: at.to_string() };
        (Link::new(1, Kind::Outgoing, peer, "local", None, Arc::new(near), None), far)
    }

    fn speak(far: &Stream) {
        let ping = crate::wire::encode(&Control::Ping).unwrap();
        far.send(&ping, Deadline::after(Duration::from_secs(5))).unwrap();
    }

    fn woken(watch: &Watch) -> (bool, Vec<u64>) {
        let woken = watch.wait(Some(Duration::from_millis(30))).unwrap();
        (woken.rung, woken.links)
    }

    #[test]
    fn only_who_has_something_to_say_is_looked_at() {
        let bell = Bell::new().unwrap();
        let mut watch = Watch::new(&bell).unwrap();
        let ((one, _quiet), (other, far)) = (linked(), linked());
        assert!(watch.change(vec![one.clone(), other.clone()]).is_empty());
        assert_eq!(woken(&watch), (false, vec![]));
        speak(&far);
        assert_eq!(woken(&watch), (false, vec![name_of(&other)]));
        bell.ring();
        let (rung, links) = woken(&watch);
        assert!(rung && links == [name_of(&other)], "what was not taken is still there");
        bell.silence();
        // Watched once however often it is said, and no more once it is left out.
        assert!(watch.change(vec![other.clone(), one.clone()]).is_empty());
        assert_eq!(woken(&watch), (false, vec![name_of(&other)]));
        assert!(watch.change(vec![one]).is_empty());
        assert_eq!(woken(&watch), (false, vec![]));
        assert!(watch.change(vec![other.clone()]).is_empty());
        assert_eq!(woken(&watch), (false, vec![name_of(&other)]));
    }

    #[test]
    fn a_link_that_ended_wakes_nobody_though_its_socket_is_held_open() {
        let mut watch = Watch::new(&Bell::new().unwrap()).unwrap();
        let (link, far) = linked();
        // As a process that was forked holds it.
        let held = rustix::io::dup(link.control().as_fd()).unwrap();
        let name = name_of(&link);
        assert_ne!(name, BELL);
        assert!(watch.change(vec![link.clone()]).is_empty());
        watch.drop_ended(name);
        speak(&far);
        assert_eq!(woken(&watch), (false, vec![name]), "it lives and is still watched");
        link.shatter("the test ends it");
        assert_eq!(woken(&watch), (false, vec![name]), "its end is seen");
        watch.drop_ended(name);
        drop(link);
        assert_eq!(woken(&watch), (false, vec![]));
        drop((held, far));
    }
}
