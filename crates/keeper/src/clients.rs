//! The connections of a keeper: accepts them, waits for their messages, and ends them.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use llm_datadist_core::Result;
use llm_datadist_core::bindings::keeper::{
    CloseOnFork, Poller, Watching, is_crowded, peer_credentials, peer_process_descriptor, same_user,
    take_descriptors,
};
use rustix::io::Errno;

use crate::admission;
use crate::client::{AttachedClient, Client, Goodbye, Standing};
use crate::sizes::MAX_PENDING;
use crate::socket::{ListeningPath, PeerFile};

/// The numbers of the descriptors that are no clients.
const STOP: u64 = 0;
const LISTENING: u64 = 1;
/// Added to the number of a client for the descriptor of its process.
const PROCESS: u64 = 1 << 63;
/// Descriptors of one round.
const ROUND: usize = 64;
/// How long no client is accepted after one could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// The clients, by numbers that are not used again.
#[derive(Debug)]
pub(crate) struct Clients {
    /// So that a forked process does not listen, and does not keep the path locked. Declared before the descriptors.
    _forked: [CloseOnFork; 2],
    listening: Arc<ListeningPath>,
    by_number: BTreeMap<u64, Client>,
    poller: Poller,
    stop: OwnedFd,
    /// The numbers of the last round. Kept for its memory.
    ready: Vec<u64>,
    /// The number of the last client.
    last: u64,
    /// When clients are accepted again; `None` if they are accepted now.
    paused_until: Option<Instant>,
}

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientEvent {
    /// The keeper is to end.
    Stop,
    /// Somebody wants to connect.
    Connection,
    /// A client has sent something, or has left.
    Message(u64),
    /// The process of a client has ended.
    Ended(u64),
}

impl ClientEvent {
    fn of(number: u64) -> ClientEvent {
        match number {
            STOP => ClientEvent::Stop,
            LISTENING => ClientEvent::Connection,
            PROCESS.. => ClientEvent::Ended(number - PROCESS),
            _ => ClientEvent::Message(number),
        }
    }
}

impl Clients {
    /// No clients yet. There is a [`ClientEvent::Stop`] once `stop` is readable.
    pub(crate) fn new(listening: Arc<ListeningPath>, stop: OwnedFd) -> Result<Clients> {
        let poller = Poller::new()?;
        poller.add("the end of the keeper", &stop, STOP, Watching::Always)?;
        poller.add("the socket of the keeper", &*listening, LISTENING, Watching::Always)?;
        Ok(Clients {
            _forked: [CloseOnFork::new(&listening.socket), CloseOnFork::new(&listening.lock)],
            listening,
            by_number: BTreeMap::new(),
            poller,
            stop,
            ready: Vec::with_capacity(ROUND),
            last: LISTENING,
            paused_until: None,
        })
    }

    /// Waits until something happens, at most until `until`, and writes it to `events`. Returns `Err(System)` if a descriptor of the
    /// keeper was closed by other code of its process.
    pub(crate) fn wait(&mut self, events: &mut Vec<ClientEvent>, until: Option<Instant>) -> Result<()> {
        let next = [until, self.paused_until].into_iter().flatten().min();
        let limit = next.map(|next| next.saturating_duration_since(Instant::now()));
        self.ready.clear();
        events.clear();
        self.poller.wait(&mut self.ready, ROUND, limit)?;
        events.extend(self.ready.iter().map(|&number| ClientEvent::of(number)));
        Ok(())
    }

    /// Accepts a client, if there is one. Accepts none for a while if the system has no descriptor for it, or if too many that clients
    /// have sent are not closed yet.
    pub(crate) fn accept(&mut self) {
        let accepted = if is_crowded() { Err(Errno::TOOMANYREFS) } else { self.listening.accept() };
        match accepted {
            Ok(Some(socket)) => self.admit(socket),
            Ok(None) => {}
            Err(_) => {
                self.poller.remove(&*self.listening);
                self.paused_until = Some(Instant::now() + PAUSE);
            }
        }
    }

    /// Accepts clients again once the pause is over, however busy the others are.
    pub(crate) fn end_pause(&mut self) {
        let now = Instant::now();
        if self.paused_until.is_some_and(|until| until <= now) {
            let added =
                self.poller.add("the socket of the keeper", &*self.listening, LISTENING, Watching::Always);
            self.paused_until = added.is_err().then(|| now + PAUSE);
        }
    }

    /// Takes a connection. Whether it may attach is decided by its first message, so that a refusal reaches it.
    fn admit(&mut self, socket: OwnedFd) {
        if let Some(oldest) = admission::gives_way(&self.by_number, MAX_PENDING) {
            self.remove(oldest);
        }
        self.last += 1;
        if self.poller.add("a client", &socket, self.last, Watching::Always).is_ok() {
            let process = peer_process_descriptor(socket.as_fd()).filter(|process| {
                let watched = self.poller.add(
                    "the process of a client",
                    process,
                    PROCESS + self.last,
                    Watching::Always,
                );
                watched.is_ok()
            });
            let forked = CloseOnFork::new(&socket);
            let peer = peer_credentials(socket.as_fd());
            if !peer.is_some_and(same_user) {
                // Until it has proved a token. Before Linux 6.16, it can send descriptors; they are closed with its message.
                take_descriptors(socket.as_fd(), false);
            }
            let user = peer.map(|peer| peer.uid);
            let (socket, standing) = (PeerFile::new(socket), Standing::User);
            let client = Client { _forked: forked, socket, process, user, standing, attached: None };
            self.by_number.insert(self.last, client);
        }
    }

    /// Returns a client.
    pub(crate) fn get(&self, number: u64) -> Option<&Client> {
        self.by_number.get(&number)
    }

    /// Returns a client.
    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut Client> {
        self.by_number.get_mut(&number)
    }

    /// Returns a client that has attached.
    pub(crate) fn attached(&self, number: u64) -> Result<(&Client, &AttachedClient), Goodbye> {
        let client = self.by_number.get(&number).and_then(|client| Some((client, client.attached.as_ref()?)));
        client.ok_or_else(Goodbye::unattached)
    }

    /// Returns what a client that has attached has said in its first message, and its leases.
    pub(crate) fn attached_mut(&mut self, number: u64) -> Result<&mut AttachedClient, Goodbye> {
        let client = self.by_number.get_mut(&number).and_then(|client| client.attached.as_mut());
        client.ok_or_else(Goodbye::unattached)
    }

    /// Returns all clients that have attached.
    pub(crate) fn all_attached_mut(&mut self) -> impl Iterator<Item = &mut AttachedClient> {
        self.by_number.values_mut().filter_map(|client| client.attached.as_mut())
    }

    /// Attaches a client.
    pub(crate) fn attach(&mut self, number: u64, attached: AttachedClient) -> Result<&Client, Goodbye> {
        let client = self.by_number.get_mut(&number).ok_or(Goodbye::Left)?;
        client.attached = Some(attached);
        Ok(client)
    }

    /// Returns the clients of namespaces.
    pub(crate) fn of(&self, namespaces: &[u32]) -> Vec<u64> {
        let of = |client: &Client| {
            client.attached.as_ref().is_some_and(|attached| namespaces.contains(&attached.namespace))
        };
        self.by_number.iter().filter(|(_, client)| of(client)).map(|(&number, _)| number).collect()
    }

    /// Returns the number of clients that have memory.
    pub(crate) fn with_memory(&self) -> usize {
        self.memories().filter(|memory| *memory).count()
    }

    /// Returns the number of observers.
    pub(crate) fn observers(&self) -> usize {
        self.memories().filter(|memory| !memory).count()
    }

    /// Returns for each attached client whether it has memory.
    fn memories(&self) -> impl Iterator<Item = bool> {
        self.by_number.values().filter_map(|client| Some(client.attached.as_ref()?.memory.is_some()))
    }

    /// Ends a connection. A forked process may hold a copy of the socket, so it is removed from the poller, and shut down.
    pub(crate) fn remove(&mut self, number: u64) -> Option<Client> {
        let client = self.by_number.remove(&number)?;
        self.poller.remove(&client.socket);
        if let Some(process) = &client.process {
            self.poller.remove(process);
        }
        // Fails only if the client has left.
        let _ = rustix::net::shutdown(&client.socket, rustix::net::Shutdown::Both);
        Some(client)
    }

    /// Ends all connections, and watches nothing more.
    pub(crate) fn end(&mut self) -> Vec<Client> {
        self.poller.remove(&self.stop);
        let numbers: Vec<u64> = self.by_number.keys().copied().collect();
        numbers.into_iter().filter_map(|number| self.remove(number)).collect()
    }
}
