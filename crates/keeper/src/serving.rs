//! The thread of a keeper: accepts clients, reads their messages, and answers them.
//!
//! It never waits for a client: a message arrives whole, and a client that does not take its replies is disconnected. It copies
//! values from memory of the client that cannot shrink. In each round, it answers one message of each client.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::keeper::{MapBudget, PeerMapping, Tensors, is_crowded, take_descriptors};
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};
use rustix::io::Errno;

use crate::admission;
use crate::client::{AttachedClient, Client, ClientMemory, Goodbye, send_reply};
use crate::clients::{ClientEvent, Clients};
use crate::index::Location;
use crate::key::{IndexKey, StoreKey};
use crate::leases::ClientLeases;
use crate::messages::{
    AttachRequest, KeeperReply, KeeperRequest, ListRequest, NO_NAMESPACE, SharedGeometry, Stored, ValueTerms,
    decoded, encoded, version_of,
};
use crate::refusals::RefusalReports;
use crate::roles::{ClientRole, RoleTokens};
use crate::sizes::{
    self, MAX_CLIENTS, MAX_LEASE, MAX_OBSERVERS, MESSAGE_BYTES, RESERVED_CLIENTS, RESERVED_OBSERVERS,
};
use crate::socket::{ListeningPath, PeerFile, receive, send};
use crate::stats::{KeeperStats, nanos_since};
use crate::table::SlotTable;

/// How often leases are looked at while there are any: a lease may last so much longer.
const LEASE_LOOK: Duration = Duration::from_millis(500);

/// How long reports of wrong checksums are ignored that come from a user after a wrong report of it. To check a report takes as long as
/// to put the value.
const REPORT_PAUSE: Duration = Duration::from_secs(1);

/// What the thread owns.
#[derive(Debug)]
pub(crate) struct KeeperLoop {
    /// Declared before the memory, so that the socket is gone before the memory is unmapped.
    clients: Clients,
    table: SlotTable,
    tokens: Arc<RoleTokens>,
    /// For the memory of clients that is mapped.
    budget: Arc<MapBudget>,
    /// When to look for leases whose time is over.
    late_leases: Instant,
    /// Until when reports of users are ignored.
    wrong_reports: HashMap<Option<u32>, Instant>,
    counts: KeeperStats,
    refusals: RefusalReports,
    /// Whether a client has asked it to end, because another keeper takes over.
    replaced: bool,
}

impl KeeperLoop {
    /// Creates the loop. It ends once `stop` is readable. It sends a text about clients that it refuses to `report_to`, at most once a
    /// minute.
    pub(crate) fn new(
        listening: Arc<ListeningPath>,
        stop: OwnedFd,
        table: SlotTable,
        tokens: Arc<RoleTokens>,
        report_to: Option<OwnedFd>,
    ) -> Result<KeeperLoop> {
        // Mappings have whole huge pages.
        let staging = sizes::most_staging_bytes(table.slot_bytes()).next_multiple_of(2 << 20);
        Ok(KeeperLoop {
            clients: Clients::new(listening, stop)?,
            table,
            tokens,
            budget: MapBudget::new(Some(staging * MAX_CLIENTS as u64)),
            late_leases: Instant::now(),
            wrong_reports: HashMap::new(),
            counts: KeeperStats::default(),
            refusals: RefusalReports::new(report_to),
            replaced: false,
        })
    }

    /// Serves clients until the keeper is closed, or another one takes over. Returns whether the latter has happened.
    /// Returns `Err(System)` if a descriptor of the keeper was closed by other code of its process.
    pub(crate) fn run(mut self) -> Result<bool> {
        let (mut events, mut buffer) = (Vec::new(), vec![0; MESSAGE_BYTES]);
        let waited = loop {
            let goes_on = self.round(&mut events, &mut buffer);
            if !matches!(goes_on, Ok(true)) {
                break goes_on;
            }
        };
        let replaced = self.end();
        waited.map(|_| replaced)
    }

    /// Ends all connections. Returns whether another keeper takes over.
    pub(crate) fn end(mut self) -> bool {
        // Another thread closes the sockets, so clients might see the end later otherwise.
        self.clients.end().into_iter().for_each(|client| self.detach(client));
        self.replaced
    }

    /// Waits until something happens, and does what it asks for. Returns whether the keeper goes on.
    pub(crate) fn round(&mut self, events: &mut Vec<ClientEvent>, buffer: &mut [u8]) -> Result<bool> {
        let leases = (self.table.held() > 0).then_some(self.late_leases);
        self.clients.wait(events, leases.into_iter().chain(self.refusals.due()).min())?;
        if events.contains(&ClientEvent::Stop) {
            return Ok(false);
        }
        for &event in &*events {
            match event {
                ClientEvent::Connection => self.clients.accept(),
                ClientEvent::Ended(number) => self.disconnect(number),
                ClientEvent::Message(number) => self.serve(number, buffer),
                ClientEvent::Stop => {}
            }
        }
        if self.late_leases <= Instant::now() {
            self.end_late_leases();
        }
        self.refusals.report(Instant::now());
        self.clients.end_pause();
        Ok(!self.replaced)
    }

    /// Answers a message of a client.
    fn serve(&mut self, number: u64, buffer: &mut [u8]) {
        let Some(client) = self.clients.get(number) else { return };
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
        if let (Goodbye::Refused(refusal), Some(client)) = (goodbye, self.clients.get(number)) {
            self.counts.refused += 1;
            self.refusals.add(client, &refusal.reason, Instant::now());
            let sent = send_reply(&client.socket, &KeeperReply::Refused(refusal));
            // It is disconnected in either case.
            drop(sent);
        }
        self.disconnect(number);
    }

    fn answer(&mut self, number: u64, message: &[u8], descriptors: Vec<PeerFile>) -> Result<(), Goodbye> {
        let request = self.checked(number, message, &descriptors)?;
        if let Some(client) = self.clients.get(number)
            && let Some(attached) = &client.attached
            && attached.role < request.needs()
        {
            self.counts.forbidden += 1;
            return send_reply(&client.socket, &KeeperReply::Forbidden(attached.role, request.needs()));
        }
        let reply = match request {
            KeeperRequest::Greet(..) | KeeperRequest::Prove(_) => return self.authenticate(number, &request),
            KeeperRequest::Attach(request) => return self.attach(number, &request, descriptors),
            KeeperRequest::Observe(version, with_memory) => {
                return self.observe(number, version, with_memory);
            }
            KeeperRequest::Put(first, keys, checksums) => self.put(number, first, &keys, &checksums)?,
            KeeperRequest::Touch(slots) => {
                self.counts.touched += slots.len() as u64;
                self.table.touch(slots.into_iter());
                return Ok(());
            }
            KeeperRequest::Corrupt(slot, generation) => {
                return self.check_reported(number, Location { slot, generation });
            }
            KeeperRequest::Drop(keys) => self.drop_values(number, &keys)?,
            KeeperRequest::Clear(from) => self.clear(number, from)?,
            KeeperRequest::Lease(keys, milliseconds) => self.lease(number, &keys, milliseconds)?,
            KeeperRequest::Unlease(keys) => return self.unlease(number, &keys),
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
                // Cannot be sent if the client has given up meanwhile: then nobody else has the values.
                send_reply(&self.clients.attached(number)?.0.socket, &KeeperReply::Ending)?;
                self.replaced = true;
                return Ok(());
            }
        };
        send_reply(&self.clients.attached(number)?.0.socket, &reply)
    }

    /// Reads a request. Returns the reason if a client may not send it, whatever its role.
    fn checked(
        &self,
        number: u64,
        message: &[u8],
        descriptors: &[PeerFile],
    ) -> Result<KeeperRequest, Goodbye> {
        if self.clients.get(number).is_some_and(|client| client.attached.is_none())
            && let Some(version) = version_of(message)
        {
            // Before the rest, which may be another one in another version.
            admission::check_version(version)?;
        }
        let request = decoded::<KeeperRequest>(message)?;
        if !descriptors.is_empty() && !matches!(request, KeeperRequest::Attach(_)) {
            return Err(Goodbye::refused("", "only an attach request may come with a descriptor"));
        }
        self.check_request(number, &request)?;
        Ok(request)
    }

    /// Returns the reason if a client may not ask this, because it has not attached or is an observer.
    fn check_request(&self, number: u64, request: &KeeperRequest) -> Result<(), Goodbye> {
        use KeeperRequest::{Attach, Changes, End, Greet, List, Namespaces, Observe, Prove, Stats};
        if matches!(request, Attach(_) | Observe(..) | Greet(..) | Prove(_)) {
            return Ok(());
        }
        let looks = matches!(request, Stats | List(_) | Namespaces(_) | Changes(_) | End);
        if self.clients.attached(number)?.1.memory.is_none() && !looks {
            return Err(Goodbye::refused("", "an observer may not change anything"));
        }
        Ok(())
    }

    fn authenticate(&mut self, number: u64, request: &KeeperRequest) -> Result<(), Goodbye> {
        let client = self.clients.get_mut(number).ok_or(Goodbye::Left)?;
        let reply = match request {
            KeeperRequest::Greet(version, nonce) => admission::greet(client, &self.tokens, *version, *nonce)?,
            KeeperRequest::Prove(proof) => {
                let proved = admission::prove(client, &self.tokens, proof)?;
                // It may attach now, with its memory.
                take_descriptors(client.socket.as_fd(), true);
                proved
            }
            _ => return Err(Goodbye::unattached()),
        };
        send_reply(&client.socket, &reply)
    }

    fn attach(
        &mut self,
        number: u64,
        request: &AttachRequest,
        descriptors: Vec<PeerFile>,
    ) -> Result<(), Goodbye> {
        let role = self.check_attach(number, request)?;
        let &AttachRequest { ref namespace, terms, .. } = request;
        let [memory] = <[PeerFile; 1]>::try_from(descriptors).map_err(|sent| {
            Goodbye::refused("", &format!("an attach request with {} descriptors", sent.len()))
        })?;
        let bytes = sizes::staging_bytes(terms.value);
        let mapping =
            PeerMapping::map(memory.duplicate()?, bytes, &self.budget, Deadline::after(Duration::ZERO))?;
        let staging = Tensors::mapped(mapping, [0], bytes)?;
        let namespaces = &mut self.table.namespaces;
        let namespace = match role {
            ClientRole::Read => namespaces.attach_reader(namespace, terms),
            ClientRole::Write | ClientRole::Admin => namespaces.attach(namespace, terms),
        };
        let namespace = namespace.map_err(Goodbye::Refused)?;
        if role >= ClientRole::Write {
            let others = self.clients.of(&self.table.namespaces.with_other_terms(namespace));
            for other in others {
                self.disconnect(other);
            }
        }
        let memory = Some(ClientMemory { terms, staging, _file: memory });
        self.admit_as(
            number,
            AttachedClient { namespace, role, memory, leases: ClientLeases::default() },
            true,
        )
    }

    /// Attaches an observer.
    fn observe(&mut self, number: u64, version: u32, with_memory: bool) -> Result<(), Goodbye> {
        let role = self.check_client(number, version)?;
        let most = limit_for(role, MAX_OBSERVERS, RESERVED_OBSERVERS);
        if self.clients.observers() >= most {
            let reason = format!("{most} observers are attached, which is the limit");
            return Err(Goodbye::at_limit(reason));
        }
        let (namespace, memory, leases) = (NO_NAMESPACE, None, ClientLeases::default());
        self.admit_as(number, AttachedClient { namespace, role, memory, leases }, with_memory)
    }

    /// Attaches a client, and sends it the descriptors if it maps the memory of the keeper.
    fn admit_as(&mut self, number: u64, attached: AttachedClient, maps: bool) -> Result<(), Goodbye> {
        let namespace = attached.namespace;
        let client = self.clients.attach(number, attached)?;
        // On older kernels than Linux 6.16, the client can still send some. They are refused.
        take_descriptors(client.socket.as_fd(), false);
        let geometry =
            SharedGeometry { namespace, slots: self.table.slots(), slot_bytes: self.table.slot_bytes() };
        let reply = encoded(&KeeperReply::Attached(geometry))?;
        let shared = self.table.shared.descriptors()?;
        send(&client.socket, &reply, if maps { &shared } else { &[] }).map_err(|_| Goodbye::Left)
    }

    /// Returns the role of a client that attaches, or the reason if it may not.
    fn check_attach(&self, number: u64, request: &AttachRequest) -> Result<ClientRole, Goodbye> {
        let &AttachRequest { version, ref namespace, terms: ValueTerms { value, .. } } = request;
        let role = self.check_client(number, version)?;
        let invalid =
            |error: Error| Goodbye::refused(error.argument_name().unwrap_or_default(), error.reason());
        let (most, clients) = (self.table.slot_bytes(), limit_for(role, MAX_CLIENTS, RESERVED_CLIENTS));
        if self.clients.with_memory() >= clients {
            let reason = format!("{clients} clients are attached, which is the limit");
            Err(Goodbye::at_limit(reason))
        } else if value > most {
            let reason = format!("value={value} must be at most {most}, the slots of the keeper");
            Err(Goodbye::refused("value", &reason))
        } else {
            sizes::check_namespace(namespace).and_then(|()| sizes::check_value(value)).map_err(invalid)?;
            Ok(role)
        }
    }

    /// Returns the role of a process that attaches, whatever for, or the reason if it may not.
    fn check_client(&self, number: u64, version: u32) -> Result<ClientRole, Goodbye> {
        let client = self.clients.get(number).ok_or(Goodbye::Left)?;
        let role = admission::role(client, &self.tokens)?;
        admission::check_version(version)?;
        if client.attached.is_some() {
            return Err(Goodbye::refused("", "the client has attached already"));
        }
        Ok(role)
    }

    /// Copies values, the last key of a chain first, so that the start of the chain is used last and outlives its end.
    fn put(
        &mut self,
        number: u64,
        first: u32,
        keys: &[StoreKey],
        checksums: &[u64],
    ) -> Result<KeeperReply, Goodbye> {
        let AttachedClient { namespace, memory, .. } = self.clients.attached(number)?.1;
        let ClientMemory { terms, staging, .. } = memory.as_ref().ok_or_else(Goodbye::unattached)?;
        let value = &terms.value;
        if checksums.len() != if terms.checksums { keys.len() } else { 0 } {
            return Err(Goodbye::refused(
                "",
                "another number of checksums than the namespace has for the keys",
            ));
        }
        let (begin, mut results) = (Instant::now(), vec![Stored::NoRoom; keys.len()]);
        for (at, key) in keys.iter().enumerate().rev() {
            let bytes = staging.window(0, (u64::from(first) + at as u64) * value, *value)?;
            let checksum = checksums.get(at).copied().unwrap_or_default();
            let stored = self.table.put_value(&IndexKey::of(*namespace, key), bytes, checksum)?;
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

    /// Drops a value that a client has reported, if its bytes do not match its checksum.
    fn check_reported(&mut self, number: u64, location: Location) -> Result<(), Goodbye> {
        let (client, attached) = self.clients.attached(number)?;
        let (user, namespace, now) = (client.user, attached.namespace, Instant::now());
        self.wrong_reports.retain(|_, until| *until > now);
        if self.wrong_reports.contains_key(&user) {
            return Ok(());
        }
        match self.table.drop_corrupt(namespace, location)? {
            Some(true) => self.counts.corrupt += 1,
            Some(false) => {
                self.counts.wrong_reports += 1;
                self.wrong_reports.insert(user, now + REPORT_PAUSE);
            }
            None => {}
        }
        Ok(())
    }

    fn drop_values(&mut self, number: u64, keys: &[StoreKey]) -> Result<KeeperReply, Goodbye> {
        let namespace = self.clients.attached(number)?.1.namespace;
        let dropped = keys.iter().filter(|key| self.table.drop_value(&IndexKey::of(namespace, key))).count();
        self.counts.dropped += dropped as u64;
        Ok(KeeperReply::Dropped(u32::try_from(dropped).unwrap_or(u32::MAX)))
    }

    fn clear(&mut self, number: u64, from: u32) -> Result<KeeperReply, Goodbye> {
        let namespace = Some(self.clients.attached(number)?.1.namespace);
        let (dropped, next) = self.table.clear(ListRequest { from, namespace, used_after: 0 });
        self.counts.dropped += u64::from(dropped);
        Ok(KeeperReply::Cleared(dropped, next))
    }

    fn lease(&mut self, number: u64, keys: &[StoreKey], milliseconds: u32) -> Result<KeeperReply, Goodbye> {
        let client = self.clients.attached_mut(number)?;
        let keys: Vec<_> = keys.iter().map(|key| IndexKey::of(client.namespace, key)).collect();
        let time = Duration::from_millis(milliseconds.into()).min(MAX_LEASE);
        let leased = self.table.lease(&mut client.leases, &keys, Instant::now() + time);
        let granted = leased.iter().filter(|&&leased| leased).count() as u64;
        self.counts.leases += granted;
        self.counts.leases_refused += leased.len() as u64 - granted;
        Ok(KeeperReply::Leased(leased))
    }

    fn unlease(&mut self, number: u64, keys: &[StoreKey]) -> Result<(), Goodbye> {
        let client = self.clients.attached_mut(number)?;
        for key in keys {
            self.table.unlease(&mut client.leases, &IndexKey::of(client.namespace, key));
        }
        Ok(())
    }

    /// Ends the leases whose time is over.
    fn end_late_leases(&mut self) {
        let now = Instant::now();
        self.late_leases = now + LEASE_LOOK;
        for client in self.clients.all_attached_mut() {
            self.table.end_leases(&mut client.leases, |_, end| end <= now);
        }
    }

    fn stats(&self) -> KeeperStats {
        KeeperStats {
            slots: self.table.slots(),
            slot_bytes: self.table.slot_bytes(),
            values: self.table.values(),
            leased: self.table.held(),
            clients: u32::try_from(self.clients.with_memory()).unwrap_or(u32::MAX),
            observers: u32::try_from(self.clients.observers()).unwrap_or(u32::MAX),
            namespaces: self.table.namespaces.count(),
            evicted: self.table.evicted,
            ..self.counts
        }
    }

    fn disconnect(&mut self, number: u64) {
        if let Some(client) = self.clients.remove(number) {
            self.detach(client);
        }
    }

    /// Ends what a client has here, after its connection.
    fn detach(&mut self, client: Client) {
        if let Some(mut attached) = client.attached {
            self.table.end_leases(&mut attached.leases, |_, _| true);
            match attached.role {
                ClientRole::Read => self.table.namespaces.detach_reader(attached.namespace),
                ClientRole::Write | ClientRole::Admin => self.table.namespaces.detach(attached.namespace),
            }
        }
    }
}

/// Returns how many of `all` connections may be open when a client with a role comes, if `reserved` of them are for the role `admin`.
fn limit_for(role: ClientRole, all: usize, reserved: usize) -> usize {
    if role == ClientRole::Admin { all } else { all - reserved }
}
