//! Reports refused clients to the process that has started the keeper.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::keeper::peer_credentials;

use crate::client::Client;
use crate::socket::send;

/// The shortest time between two messages. The refusals of that time share the next one.
const INTERVAL: Duration = Duration::from_secs(60);

/// The refusals that were not reported yet.
#[derive(Debug)]
pub(crate) struct RefusalReports {
    /// Where each message goes, as a text. `None` if refusals are not reported.
    report_to: Option<OwnedFd>,
    /// When the next message may be sent.
    next: Instant,
    /// How many there are.
    count: u64,
    /// The text of the last one.
    last: String,
}

impl RefusalReports {
    pub(crate) fn new(report_to: Option<OwnedFd>) -> RefusalReports {
        RefusalReports { report_to, next: Instant::now(), count: 0, last: String::new() }
    }

    /// Adds a refusal, and reports it unless others were reported within the last minute.
    pub(crate) fn add(&mut self, client: &Client, reason: &str, now: Instant) {
        if self.report_to.is_none() {
            return;
        }
        let fact = |name, number: Option<String>| number.map(|number| format!(" {name}={number}"));
        let peer = peer_credentials(client.socket.as_fd());
        let process = fact("pid", peer.and_then(|peer| peer.pid).map(|pid| pid.to_string()));
        let user = fact("uid", peer.map(|peer| peer.uid.to_string()));
        let (process, user) = (process.unwrap_or_default(), user.unwrap_or_default());
        self.count += 1;
        self.last = format!("{process}{user}: {}", reason.replace(char::is_control, " "));
        self.report(now);
    }

    /// Returns when [`report`](Self::report) has something to send.
    pub(crate) fn due(&self) -> Option<Instant> {
        (self.count > 0).then_some(self.next)
    }

    /// Sends what is due. Never waits: a message that does not fit is lost.
    pub(crate) fn report(&mut self, now: Instant) {
        if self.due().is_none_or(|due| now < due) {
            return;
        }
        let text = match self.count {
            1 => format!("a client was refused:{}", self.last),
            count => format!("{count} clients were refused in a minute, the last one:{}", self.last),
        };
        if let Some(socket) = &self.report_to {
            // Fails if the holder does not read, or has closed its end.
            let _ = send(socket, text.as_bytes(), &[]);
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
    fn reported(reader: &OwnedFd) -> Option<String> {
        let (mut buffer, mut files) = ([0; 1000], Vec::new());
        match receive(reader, &mut buffer, &mut files) {
            Err(Errno::AGAIN) => None,
            message => Some(String::from_utf8(message.unwrap().unwrap().to_vec()).unwrap()),
        }
    }

    #[test]
    fn refusals_are_reported_once_a_minute() {
        let (reader, writer) = pair();
        let (mut refusals, client, begin) = (RefusalReports::new(Some(writer)), client(), Instant::now());
        let after = |seconds| begin + Duration::from_secs(seconds);
        let who = format!("pid={} uid={}", getpid().as_raw_nonzero(), getuid().as_raw());
        assert_eq!(refusals.due(), None);
        refusals.add(&client, "one\n\x1b[2J", after(0));
        assert_eq!(reported(&reader), Some(format!("a client was refused: {who}: one  [2J")));
        assert_eq!(refusals.due(), None);
        for reason in ["two", "three"] {
            refusals.add(&client, reason, after(1));
        }
        assert_eq!((reported(&reader), refusals.due()), (None, Some(after(60))));
        refusals.report(after(59));
        assert_eq!(reported(&reader), None);
        refusals.report(after(60));
        let text = format!("2 clients were refused in a minute, the last one: {who}: three");
        assert_eq!((reported(&reader), refusals.due()), (Some(text), None));
        refusals.report(after(600));
        assert_eq!(reported(&reader), None);
        refusals.add(&client, "four", after(600));
        assert_eq!(reported(&reader), Some(format!("a client was refused: {who}: four")));
    }

    #[test]
    fn refusal_without_reader_does_not_block() {
        let (reader, writer) = pair();
        let (mut refusals, client, begin) = (RefusalReports::new(Some(writer)), client(), Instant::now());
        for minute in 0..10_000 {
            refusals.add(&client, "wrong", begin + INTERVAL * minute);
        }
        assert!(reported(&reader).is_some());
        drop(reader);
        refusals.add(&client, "wrong", begin + INTERVAL * 10_000);
        assert_eq!(refusals.due(), None);
    }
}
