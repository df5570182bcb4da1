//! Tells the process that has started the keeper which clients the keeper refuses.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::keeper::peer_credentials;

use crate::client::Client;
use crate::socket::send;

/// The shortest time between two messages. The refusals of that time share the next one.
const INTERVAL: Duration = Duration::from_secs(60);

/// The refusals that were not told yet.
#[derive(Debug)]
pub(crate) struct Refusals {
    /// Where each message goes, as a text; `None` if nobody is told.
    told: Option<OwnedFd>,
    /// When the next message may be sent.
    next: Instant,
    /// How many there are.
    count: u64,
    /// The text of the last one.
    last: String,
}

impl Refusals {
    pub(crate) fn new(told: Option<OwnedFd>) -> Refusals {
        Refusals { told, next: Instant::now(), count: 0, last: String::new() }
    }

    /// Adds a refusal, and tells it unless others were told before within a minute.
    pub(crate) fn add(&mut self, client: &Client, reason: &str, now: Instant) {
        if self.told.is_none() {
            return;
        }
        let fact = |name, number: Option<String>| number.map(|number| format!(" {name}={number}"));
        let peer = peer_credentials(client.socket.as_fd());
        let process = fact("pid", peer.and_then(|peer| peer.pid).map(|pid| pid.to_string()));
        let user = fact("uid", peer.map(|peer| peer.uid.to_string()));
        let (process, user) = (process.unwrap_or_default(), user.unwrap_or_default());
        self.count += 1;
        self.last = format!("{process}{user}: {}", reason.replace(char::is_control, " "));
        self.tell(now);
    }

    /// Returns when [`tell`](Self::tell) has something to send.
    pub(crate) fn due(&self) -> Option<Instant> {
        (self.count > 0).then_some(self.next)
    }

    /// Sends what is due. Never waits: a message that does not fit is lost.
    pub(crate) fn tell(&mut self, now: Instant) {
        if self.due().is_none_or(|due| now < due) {
            return;
        }
        let text = match self.count {
            1 => format!("a client was refused:{}", self.last),
            count => format!("{count} clients were refused in a minute, the last one:{}", self.last),
        };
        if let Some(told) = &self.told {
            // Fails if nobody reads, or the other end is closed.
            let _ = send(told, text.as_bytes(), &[]);
        }
        (self.count, self.next) = (0, now + INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use llm_datadist_core::bindings::keeper::CloseOnFork;
    use rustix::io::Errno;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use rustix::process::{getpid, getuid};

    use super::*;
    use crate::client::Standing;
    use crate::socket::{PeerFile, receive};

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    fn client() -> Client {
        let (socket, _) = pair();
        let forked = CloseOnFork::new(&socket);
        let (socket, standing) = (PeerFile::new(socket), Standing::User);
        Client { _forked: forked, socket, process: None, user: None, standing, attached: None }
    }

    /// Returns the next message; `None` if there is none.
    fn told(reader: &OwnedFd) -> Option<String> {
        let (mut buffer, mut files) = ([0; 1000], Vec::new());
        match receive(reader, &mut buffer, &mut files) {
            Err(Errno::AGAIN) => None,
            message => Some(String::from_utf8(message.unwrap().unwrap().to_vec()).unwrap()),
        }
    }

    #[test]
    fn the_first_refusal_is_told_at_once_and_those_of_a_minute_together() {
        let (reader, writer) = pair();
        let (mut refusals, client, begin) = (Refusals::new(Some(writer)), client(), Instant::now());
        let after = |seconds| begin + Duration::from_secs(seconds);
        let who = format!("pid={} uid={}", getpid().as_raw_nonzero(), getuid().as_raw());
        assert_eq!(refusals.due(), None);
        refusals.add(&client, "one\n\x1b[2J", after(0));
        assert_eq!(told(&reader), Some(format!("a client was refused: {who}: one  [2J")));
        assert_eq!(refusals.due(), None);
        for reason in ["two", "three"] {
            refusals.add(&client, reason, after(1));
        }
        assert_eq!((told(&reader), refusals.due()), (None, Some(after(60))));
        refusals.tell(after(59));
        assert_eq!(told(&reader), None);
        refusals.tell(after(60));
        let text = format!("2 clients were refused in a minute, the last one: {who}: three");
        assert_eq!((told(&reader), refusals.due()), (Some(text), None));
        refusals.tell(after(600));
        assert_eq!(told(&reader), None);
        refusals.add(&client, "four", after(600));
        assert_eq!(told(&reader), Some(format!("a client was refused: {who}: four")));
    }

    #[test]
    fn a_reader_that_is_away_or_takes_nothing_holds_nobody_up() {
        let (reader, writer) = pair();
        let (mut refusals, client, begin) = (Refusals::new(Some(writer)), client(), Instant::now());
        for minute in 0..10_000 {
            refusals.add(&client, "wrong", begin + INTERVAL * minute);
        }
        assert!(told(&reader).is_some());
        drop(reader);
        refusals.add(&client, "wrong", begin + INTERVAL * 10_000);
        assert_eq!(refusals.due(), None);
    }
}
