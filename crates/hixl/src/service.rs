//! The thread of an engine that reads its events: messages of peers, which it answers, and the ends of links.

use std::sync::{Arc, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use llm_datadist_core::{ClusterId, Error, ErrorKind, Event, EventQueue, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::connect::BACKGROUND;
use crate::inbox::Notice;
use crate::messages::Message;
use crate::open_engine::OpenEngine;
use crate::replies::Reply;

/// Maximum number of events that are handled at a time.
const EVENTS: usize = 1024;
/// Pause before messages are sent again, and before events are read again that there was no memory for.
const PAUSE: Duration = Duration::from_millis(1);

/// Starts the thread. It ends when the engine is closed.
pub(crate) fn start(open: &Arc<OpenEngine>) -> Result<JoinHandle<()>> {
    let queue = open.engine.event_queue()?;
    queue.drop_outcomes();
    let failed =
        |error| Error::new(ErrorKind::System, "the service thread could not be started").because(error);
    let (readable, left) = (queue.descriptor()?, open.outbox.left.try_clone().map_err(failed)?);
    let open = Arc::downgrade(open);
    let run = move || {
        let mut waits = false;
        loop {
            let pause = Timespec { tv_sec: 0, tv_nsec: PAUSE.as_nanos().try_into().unwrap_or(0) };
            let fds = &mut [PollFd::new(&*readable, PollFlags::IN), PollFd::new(&left, PollFlags::IN)];
            // Fails only with EINTR: then there may be events as well.
            let _ = poll(fds, waits.then_some(&pause));
            match step(&open, &queue) {
                Some(others_wait) => waits = others_wait,
                None => return,
            }
        }
    };
    Builder::new().name("llm-hixl".into()).spawn(run).map_err(failed)
}

/// Handles the events that there are. Returns whether messages wait for room, and `None` once the engine is closed.
fn step(open: &Weak<OpenEngine>, queue: &EventQueue) -> Option<bool> {
    let open = open.upgrade()?;
    match queue.poll(EVENTS) {
        Ok(events) => events.into_iter().for_each(|event| open.handle(event)),
        Err(error) if error.kind() == ErrorKind::OutOfMemory => std::thread::sleep(PAUSE),
        Err(_) => return None,
    }
    Some(open.outbox.flush(&open.engine))
}

impl OpenEngine {
    fn handle(&self, event: Event) {
        match event {
            Event::Notification(message) => {
                let peer = message.peer.cluster;
                let answer = Message::decode(&message.payload).and_then(|message| self.answer(peer, message));
                if let Some(answer) = answer {
                    self.outbox.send(&self.engine, peer, answer.encode());
                }
            }
            Event::LinkDown(end) => {
                let peer = end.peer.cluster;
                self.connections.lost(peer, self.options.auto_connect);
                self.replies.lost(peer);
            }
            // Transfers report their ends by their handles.
            _ => {}
        }
    }

    /// Handles a message, and returns the answer.
    fn answer(&self, peer: ClusterId, message: Message) -> Option<Message> {
        match message {
            Message::Own { id } => Some(Message::Done { id, accepted: self.connections.peer_owns(peer) }),
            Message::Release => {
                let leave = self.connections.peer_released(peer, BACKGROUND);
                self.leave_later(peer, leave, BACKGROUND);
                None
            }
            Message::Locate { id, addrs } => {
                Some(Message::Located { id, regions: self.regions.locate(peer, &addrs) })
            }
            Message::Notify { id, name, text } => {
                let accepted = self.inbox.add(peer, id, Notice { name, text });
                Some(Message::Done { id, accepted })
            }
            Message::Withdraw { id } => {
                self.inbox.withdraw(peer, id);
                None
            }
            Message::Ended { id, number } => {
                self.connections.region_ended(peer, number);
                Some(Message::Done { id, accepted: true })
            }
            Message::Done { id, accepted } => {
                self.replies.set(peer, id, Reply::Done(accepted));
                None
            }
            Message::Located { id, regions } => {
                self.replies.set(peer, id, Reply::Located(regions));
                None
            }
        }
    }
}
