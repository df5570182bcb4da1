//! The thread of a keeper: accepts clients, reads their messages, and answers them.
//!
//! It never waits for a client: a message arrives whole, and a client that does not take its replies is disconnected. It copies
//! values from memory of the client that cannot shrink. In each round, it answers one message of each client.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::keeper::{
    CloseOnFork, MapBudget, PeerMapping, Poller, Tensors, Watching, is_crowded, peer_credentials,
    peer_process_descriptor, same_user, take_descriptors,
};
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};
use rustix::io::Errno;

use crate::client::{AttachedClient, Client, ClientMemory, Goodbye, send_reply};
use crate::key::{IndexKey, StoreKey};
use crate::leases::ClientLeases;
use crate::messages::{
    AttachRequest, KeeperReply, KeeperRequest, ListRequest, NO_NAMESPACE, SharedGeometry, Stored, VERSION,
    decoded, encoded,
};
use crate::sizes::{self, MAX_CLIENTS, MAX_LEASE, MAX_OBSERVERS, MAX_PENDING, MESSAGE_BYTES};
use crate::socket::{ListeningPath, PeerFile, receive, send};
use crate::stats::{KeeperStats, nanos_since};
use crate::table::SlotTable;

/// The numbers of the descriptors that are no clients.
const STOP: u64 = 0;
const LISTENING: u64 = 1;
/// Added to the number of a client for the descriptor of its process.
const PROCESS: u64 = 1 << 63;
/// Descriptors of one round.
const ROUND: usize = 64;
/// How often leases are looked at while there are any: a lease may last so much longer.
const LEASE_LOOK: Duration = Duration::from_millis(500);
/// How long no client is accepted after one could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// What the thread owns.
#[derive(Debug)]
pub(crate) struct KeeperLoop {
    /// So that a forked process does not listen, and does not keep the path locked. Declared before the descriptors.
    _forked: [CloseOnFork; 2],
    /// Declared before the memory, so that the socket is gone before the memory is unmapped.
    listening: Arc<ListeningPath>,
    clients: BTreeMap<u64, Client>,
    poller: Poller,
    stop: OwnedFd,
    table: SlotTable,
    /// For the memory of clients that is mapped.
    budget: Arc<MapBudget>,
    /// The number of the last client.
    last: u64,
    /// When to look for leases whose time is over.
    late_leases: Instant,
    /// When clients are accepted again; `None` if they are accepted now.
    paused_until: Option<Instant>,
    counts: KeeperStats,
    /// Whether a client has asked it to end, because another keeper takes over.
    replaced: bool,
}

impl KeeperLoop {
    /// Creates the loop. It ends once `stop` is readable.
    pub(crate) fn new(listening: Arc<ListeningPath>, stop: OwnedFd, table: SlotTable) -> Result<KeeperLoop> {
        let poller = Poller::new()?;
        poller.add("the end of the keeper", &stop, STOP, Watching::Always)?;
        poller.add("the socket of the keeper", &*listening, LISTENING, Watching::Always)?;
        // Mappings have whole huge pages.
        let staging = sizes::most_staging_bytes(table.slot_bytes()).next_multiple_of(2 << 20);
        Ok(KeeperLoop {
            _forked: [CloseOnFork::new(&listening.socket), CloseOnFork::new(&listening.lock)],
            listening,
            clients: BTreeMap::new(),
            poller,
            stop,
            table,
            budget: MapBudget::new(Some(staging * MAX_CLIENTS as u64)),
            last: LISTENING,
            late_leases: Instant::now(),
            paused_until: None,
            counts: KeeperStats::default(),
            replaced: false,
        })
    }

    /// Serves clients until the keeper is closed, or another one takes over. Returns whether the latter has happened.
    /// Returns `Err(System)` if a descriptor of the keeper was closed by other code of its process.
    pub(crate) fn run(mut self) -> Result<bool> {
        let mut ready = Vec::with_capacity(ROUND);
        let mut buffer = vec![0; MESSAGE_BYTES];
        let waited = loop {
            ready.clear();
            let waited = self.poller.wait(&mut ready, ROUND, self.sleep_limit());
            if waited.is_err() || ready.contains(&STOP) {
                break waited;
            }
            for &number in &ready {
                match number {
                    LISTENING => self.accept(),
                    PROCESS.. => self.disconnect(number - PROCESS),
                    _ => self.serve(number, &mut buffer),
                }
            }
            if self.late_leases <= Instant::now() {
                self.end_late_leases();
            }
            self.end_pause();
            if self.replaced {
                break Ok(());
            }
        };
        self.end();
        waited.map(|()| self.replaced)
    }

    /// Ends all connections. Another thread closes their sockets, so clients might see the end later otherwise.
    fn end(&mut self) {
        self.poller.remove(&self.stop);
        while let Some(&number) = self.clients.keys().next() {
            self.disconnect(number);
        }
    }

    /// Accepts a client, if there is one. Accepts none for a while if the system has no descriptor for it, or if too many that clients
    /// have sent are not closed yet.
    fn accept(&mut self) {
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
    fn end_pause(&mut self) {
        let now = Instant::now();
        if self.paused_until.is_some_and(|until| until <= now) {
            let added =
                self.poller.add("the socket of the keeper", &*self.listening, LISTENING, Watching::Always);
            self.paused_until = added.is_err().then(|| now + PAUSE);
        }
    }

    /// Takes a connection. Whether it may attach is decided by its first message, so that a refusal reaches it.
    fn admit(&mut self, socket: OwnedFd) {
        let pending = || self.clients.iter().filter(|(_, client)| client.attached.is_none());
        if pending().count() >= MAX_PENDING
            && let Some((&oldest, _)) = pending().next()
        {
            self.disconnect(oldest);
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
            let client = Client { _forked: forked, socket: PeerFile::new(socket), process, attached: None };
            self.clients.insert(self.last, client);
        }
    }

    /// Answers a message of a client.
    fn serve(&mut self, number: u64, buffer: &mut [u8]) {
        let Some(client) = self.clients.get(&number) else { return };
        if client.attached.is_none() && is_crowded() {
            // What it sends may have descriptors. It may try again.
            return self.disconnect(number);
        }
        let mut descriptors = Vec::new();
        let goodbye = match receive(&client.socket, buffer, &mut descriptors) {
            Err(Errno::AGAIN) => return,
            Ok(None) | Err(Errno::CONNRESET) => Goodbye::Left,
            Err(errno) => Error::new(ErrorKind::System, "no message").errno(errno).into(),
            Ok(Some(message)) => match self.answer(number, message, descriptors) {
                Ok(()) => return,
                Err(goodbye) => goodbye,
            },
        };
        if let (Goodbye::Refused(refusal), Some(client)) = (goodbye, self.clients.get(&number)) {
            let told = send_reply(&client.socket, &KeeperReply::Refused(refusal));
            // It is disconnected in either case.
            drop(told);
            self.counts.refused += 1;
        }
        self.disconnect(number);
    }

    fn answer(&mut self, number: u64, message: &[u8], descriptors: Vec<PeerFile>) -> Result<(), Goodbye> {
        let request = decoded::<KeeperRequest>(message)?;
        if !descriptors.is_empty() && !matches!(request, KeeperRequest::Attach(_)) {
            return Err(Goodbye::refused("", "only an attach request may come with a descriptor"));
        }
        self.check_request(number, &request)?;
        let reply = match request {
            KeeperRequest::Attach(request) => return self.attach(number, &request, descriptors),
            KeeperRequest::Observe(version, with_memory) => {
                return self.observe(number, version, with_memory);
            }
            KeeperRequest::Put(first, keys) => self.put(number, first, &keys)?,
            KeeperRequest::Touch(slots) => {
                self.counts.touched += slots.len() as u64;
                self.table.touch(slots.into_iter());
                return Ok(());
            }
            KeeperRequest::Drop(keys) => self.drop_values(number, &keys)?,
            KeeperRequest::Clear(from) => self.clear(number, from)?,
            KeeperRequest::Lease(keys, milliseconds) => self.lease(number, &keys, milliseconds)?,
            KeeperRequest::Unlease(keys) => self.unlease(number, &keys)?,
            KeeperRequest::Stats => KeeperReply::Stats(self.stats()),
            KeeperRequest::List(request) => {
                let (page, next) = self.table.list(request);
                KeeperReply::Listed(page, next)
            }
            KeeperRequest::Changes(from) => KeeperReply::Changes(self.table.changes.page(from)),
            KeeperRequest::Namespaces(from) => {
                let (page, next) = self.table.namespaces.list(from);
                KeeperReply::Namespaces(page, next)
            }
            KeeperRequest::End => {
                self.replaced = true;
                return Ok(());
            }
        };
        send_reply(&self.attached(number)?.0.socket, &reply)
    }

    /// Returns the reason if a client may not ask this, because it has not attached or only looks.
    fn check_request(&self, number: u64, request: &KeeperRequest) -> Result<(), Goodbye> {
        use KeeperRequest::{Attach, Changes, End, List, Namespaces, Observe, Stats};
        if matches!(request, Attach(_) | Observe(..)) {
            return Ok(());
        }
        let looks = matches!(request, Stats | List(_) | Namespaces(_) | Changes(_) | End);
        if self.attached(number)?.1.memory.is_none() && !looks {
            return Err(Goodbye::refused("", "a client that only looks may change nothing"));
        }
        Ok(())
    }

    fn attach(
        &mut self,
        number: u64,
        request: &AttachRequest,
        descriptors: Vec<PeerFile>,
    ) -> Result<(), Goodbye> {
        self.check_attach(number, request)?;
        let &AttachRequest { ref namespace, value, .. } = request;
        let [memory] = <[PeerFile; 1]>::try_from(descriptors).map_err(|sent| {
            Goodbye::refused("", &format!("an attach request with {} descriptors", sent.len()))
        })?;
        let bytes = sizes::staging_bytes(value);
        let mapping =
            PeerMapping::map(memory.duplicate()?, bytes, &self.budget, Deadline::after(Duration::ZERO))?;
        let staging = Tensors::mapped(mapping, [0], bytes)?;
        let namespace = self.table.namespaces.attach(namespace, value).map_err(Goodbye::Refused)?;
        self.admit_as(number, namespace, Some(ClientMemory { value, staging, _file: memory }), true)
    }

    /// Attaches a client that only looks.
    fn observe(&mut self, number: u64, version: u32, with_memory: bool) -> Result<(), Goodbye> {
        self.check_client(number, version)?;
        if self.observers() >= MAX_OBSERVERS {
            let reason = format!("{MAX_OBSERVERS} clients that only look are attached, which is the limit");
            return Err(Goodbye::at_limit(reason));
        }
        self.admit_as(number, NO_NAMESPACE, None, with_memory)
    }

    /// Attaches a client, and sends it the descriptors if it maps the memory of the keeper.
    fn admit_as(
        &mut self,
        number: u64,
        namespace: u32,
        memory: Option<ClientMemory>,
        maps: bool,
    ) -> Result<(), Goodbye> {
        let client = self.clients.get_mut(&number).ok_or(Goodbye::Left)?;
        // On older kernels than Linux 6.16, the client can still send some. They are refused.
        take_descriptors(client.socket.as_fd(), false);
        client.attached = Some(AttachedClient { namespace, memory, leases: ClientLeases::default() });
        let geometry =
            SharedGeometry { namespace, slots: self.table.slots(), slot_bytes: self.table.slot_bytes() };
        let reply = encoded(&KeeperReply::Attached(geometry))?;
        let shared = self.table.shared.descriptors()?;
        send(&client.socket, &reply, if maps { &shared } else { &[] }).map_err(|_| Goodbye::Left)
    }

    /// Returns the reason if a client may not attach.
    fn check_attach(&self, number: u64, request: &AttachRequest) -> Result<(), Goodbye> {
        let &AttachRequest { version, ref namespace, value } = request;
        self.check_client(number, version)?;
        let invalid =
            |error: Error| Goodbye::refused(error.argument_name().unwrap_or_default(), error.reason());
        let most = self.table.slot_bytes();
        if self.attached_clients() >= MAX_CLIENTS {
            let reason = format!("{MAX_CLIENTS} clients are attached, which is the limit");
            Err(Goodbye::at_limit(reason))
        } else if value > most {
            let reason = format!("value={value} must be at most {most}, the slots of the keeper");
            Err(Goodbye::refused("value", &reason))
        } else {
            sizes::check_namespace(namespace).and_then(|()| sizes::check_value(value)).map_err(invalid)
        }
    }

    /// Returns the reason if a process may not attach, whatever for.
    fn check_client(&self, number: u64, version: u32) -> Result<(), Goodbye> {
        let client = self.clients.get(&number).ok_or(Goodbye::Left)?;
        if !peer_credentials(client.socket.as_fd()).is_some_and(same_user) {
            Err(Goodbye::refused("", "only processes of the user of the keeper may attach"))
        } else if version != VERSION {
            let reason =
                format!("the keeper speaks version {VERSION}, the client version {version}; use one version");
            Err(Goodbye::refused("", &reason))
        } else if client.attached.is_some() {
            Err(Goodbye::refused("", "the client has attached already"))
        } else {
            Ok(())
        }
    }

    /// Returns the number of clients that have memory.
    fn attached_clients(&self) -> usize {
        self.with_memory().filter(|memory| *memory).count()
    }

    /// Returns the number of clients that only look.
    fn observers(&self) -> usize {
        self.with_memory().filter(|memory| !memory).count()
    }

    /// Returns for each attached client whether it has memory.
    fn with_memory(&self) -> impl Iterator<Item = bool> {
        self.clients.values().filter_map(|client| Some(client.attached.as_ref()?.memory.is_some()))
    }

    /// Copies values, the last key of a chain first, so that the start of the chain is used last and outlives its end.
    fn put(&mut self, number: u64, first: u32, keys: &[StoreKey]) -> Result<KeeperReply, Goodbye> {
        let client = self.clients.get(&number).and_then(|client| client.attached.as_ref());
        let AttachedClient { namespace, memory, .. } = client.ok_or_else(Goodbye::unattached)?;
        let ClientMemory { value, staging, .. } = memory.as_ref().ok_or_else(Goodbye::unattached)?;
        let (begin, mut results) = (Instant::now(), vec![Stored::NoRoom; keys.len()]);
        for (at, key) in keys.iter().enumerate().rev() {
            let bytes = staging.window(0, (u64::from(first) + at as u64) * value, *value)?;
            let stored = self.table.put(&IndexKey::of(*namespace, key), bytes)?;
            match stored {
                Stored::Stored => {
                    self.counts.stored += 1;
                    self.counts.stored_bytes += value;
                }
                Stored::Present => self.counts.present += 1,
                Stored::NoRoom | Stored::Away => self.counts.no_room += 1,
            }
            results[at] = stored;
        }
        self.counts.puts += 1;
        self.counts.put_nanos += nanos_since(begin);
        Ok(KeeperReply::Put(results))
    }

    fn drop_values(&mut self, number: u64, keys: &[StoreKey]) -> Result<KeeperReply, Goodbye> {
        let namespace = self.attached(number)?.1.namespace;
        let dropped = keys.iter().filter(|key| self.table.drop_value(&IndexKey::of(namespace, key))).count();
        self.counts.dropped += dropped as u64;
        Ok(KeeperReply::Dropped(u32::try_from(dropped).unwrap_or(u32::MAX)))
    }

    fn clear(&mut self, number: u64, from: u32) -> Result<KeeperReply, Goodbye> {
        let namespace = Some(self.attached(number)?.1.namespace);
        let (dropped, next) = self.table.clear(ListRequest { from, namespace });
        self.counts.dropped += u64::from(dropped);
        Ok(KeeperReply::Cleared(dropped, next))
    }

    fn lease(&mut self, number: u64, keys: &[StoreKey], milliseconds: u32) -> Result<KeeperReply, Goodbye> {
        let client = self.clients.get_mut(&number).and_then(|client| client.attached.as_mut());
        let client = client.ok_or_else(Goodbye::unattached)?;
        let keys: Vec<_> = keys.iter().map(|key| IndexKey::of(client.namespace, key)).collect();
        let time = Duration::from_millis(milliseconds.into()).min(MAX_LEASE);
        let leased = self.table.lease(&mut client.leases, &keys, Instant::now() + time);
        let granted = leased.iter().filter(|&&leased| leased).count() as u64;
        self.counts.leases += granted;
        self.counts.leases_refused += leased.len() as u64 - granted;
        Ok(KeeperReply::Leased(leased))
    }

    fn unlease(&mut self, number: u64, keys: &[StoreKey]) -> Result<KeeperReply, Goodbye> {
        let client = self.clients.get_mut(&number).and_then(|client| client.attached.as_mut());
        let client = client.ok_or_else(Goodbye::unattached)?;
        for key in keys {
            self.table.unlease(&mut client.leases, &IndexKey::of(client.namespace, key));
        }
        Ok(KeeperReply::Unleased)
    }

    /// Ends the leases whose time is over.
    fn end_late_leases(&mut self) {
        let now = Instant::now();
        self.late_leases = now + LEASE_LOOK;
        for client in self.clients.values_mut().filter_map(|client| client.attached.as_mut()) {
            self.table.end_leases(&mut client.leases, |_, end| end <= now);
        }
    }

    /// Returns how long the thread may sleep; `None` without a limit.
    fn sleep_limit(&self) -> Option<Duration> {
        let leases = (self.table.held() > 0).then_some(self.late_leases);
        let next = [leases, self.paused_until].into_iter().flatten().min();
        next.map(|next| next.saturating_duration_since(Instant::now()))
    }

    fn stats(&self) -> KeeperStats {
        KeeperStats {
            slots: self.table.slots(),
            slot_bytes: self.table.slot_bytes(),
            values: self.table.values(),
            leased: self.table.held(),
            clients: u32::try_from(self.attached_clients()).unwrap_or(u32::MAX),
            observers: u32::try_from(self.observers()).unwrap_or(u32::MAX),
            namespaces: self.table.namespaces.count(),
            evicted: self.table.evicted,
            ..self.counts
        }
    }

    fn attached(&self, number: u64) -> Result<(&Client, &AttachedClient), Goodbye> {
        let client = self.clients.get(&number).and_then(|client| Some((client, client.attached.as_ref()?)));
        client.ok_or_else(Goodbye::unattached)
    }

    /// Ends a connection. A forked process may hold a copy of the socket, so it is removed from the poller, and shut down.
    fn disconnect(&mut self, number: u64) {
        if let Some(mut client) = self.clients.remove(&number) {
            if let Some(attached) = &mut client.attached {
                self.table.end_leases(&mut attached.leases, |_, _| true);
                self.table.namespaces.detach(attached.namespace);
            }
            self.poller.remove(&client.socket);
            if let Some(process) = &client.process {
                self.poller.remove(process);
            }
            // Fails only if the client has left.
            let _ = rustix::net::shutdown(&client.socket, rustix::net::Shutdown::Both);
        }
    }
}
