//! READ and WRITE: lists of addresses become parts of one pull or push.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::bindings::fallible;
use llm_datadist_core::{BytesOfPair, Deadline, Error, ErrorKind, MAX_SECONDS, Piece, Transfer};

use crate::connection::Connection;
use crate::messages::{MAX_ADDRESSES, Message, WireRegion};
use crate::open_engine::OpenEngine;
use crate::regions::{Region, cache_name};
use crate::remote_regions::RemoteRegion;
use crate::replies::Reply;
use crate::status::{Outcome, Status};

/// Maximum number of pieces of one part. A plan of as many has at most twice as many runs of bytes, which a message carries.
const MAX_PIECES: usize = 32_000;
/// How much longer than its limit a call waits for the end of a transfer: longer than a link to a silent peer lasts, and the end of the
/// link ends the transfer (`docs/links.md`).
const SLACK: Duration = Duration::from_secs(10);

/// The direction of a transfer, as the caller sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the memory of the other engine to that of this one.
    Read = 0,
    /// From the memory of this engine to that of the other one.
    Write = 1,
}

impl Direction {
    /// Returns the direction with this number. `None` if there is none, which every call refuses.
    pub fn of(number: i64) -> Option<Self> {
        [Direction::Read, Direction::Write].into_iter().find(|direction| *direction as i64 == number)
    }
}

/// One operation of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpDesc {
    /// Address in this process.
    pub local: u64,
    /// Address at the other engine.
    pub remote: u64,
    /// Number of bytes.
    pub len: u64,
}

/// Why a transfer was not started.
pub(crate) enum Refusal {
    Status(Status),
    /// A cache was not found: what is known of the regions of the peer is outdated, or a region of this engine has ended.
    Outdated,
}

impl OpenEngine {
    /// Moves bytes, and returns when they are in place.
    pub(crate) fn transfer(
        &self,
        engine: &str,
        direction: Direction,
        ops: &[OpDesc],
        deadline: Deadline,
    ) -> Outcome<()> {
        check_ops(ops)?;
        let connection = self.connection(engine, deadline)?;
        let moved = self.transfer_over(&connection, direction, ops, deadline);
        moved.inspect_err(|status| self.drop_failed(&connection, *status))
    }

    fn transfer_over(
        &self,
        connection: &Arc<Connection>,
        direction: Direction,
        ops: &[OpDesc],
        deadline: Deadline,
    ) -> Outcome<()> {
        let mut is_retry = false;
        loop {
            let started = self.start(connection, direction, ops, deadline, None);
            let outcome = started.and_then(|transfer| {
                let joined = transfer.join(Deadline::after(deadline.left() + SLACK));
                if transfer.done() {
                    connection.untrack(&transfer);
                } else {
                    transfer.cancel();
                }
                joined.map_err(|error| Refusal::of("transfer_sync", &error))
            });
            match outcome {
                Ok(()) => return Ok(()),
                Err(Refusal::Outdated) if !is_retry => connection.regions.clear(),
                Err(_) if connection.has_ended() => return Err(Status::NotConnected),
                Err(Refusal::Status(status)) => return Err(status),
                Err(Refusal::Outdated) => return Err(Status::ParamInvalid),
            }
            is_retry = true;
        }
    }

    /// Starts a transfer over `connection`, which then tracks it. This call ends by `deadline`. The transfer ends by `limit`, or by
    /// `deadline` without one.
    pub(crate) fn start(
        &self,
        connection: &Arc<Connection>,
        direction: Direction,
        ops: &[OpDesc],
        deadline: Deadline,
        limit: Option<Duration>,
    ) -> Result<Arc<Transfer>, Refusal> {
        let parts = self.parts(connection, direction, ops, deadline).map_err(Refusal::Status)?;
        let limit = limit.unwrap_or_else(|| deadline.left());
        let limit = Some(limit.clamp(Duration::from_nanos(1), Duration::from_secs(MAX_SECONDS)));
        let started = match direction {
            Direction::Read => self.engine.pull_bytes(parts, limit),
            Direction::Write => self.engine.push_bytes(parts, limit),
        };
        let transfer = started.map_err(|error| Refusal::of("transfer", &error))?;
        if let Err(status) = connection.track(&transfer) {
            // It was cancelled. It must not touch memory after this call, and fails only if interrupted.
            let _ = transfer.wait(Deadline::after(SLACK));
            return Err(Refusal::Status(status));
        }
        Ok(transfer)
    }

    /// Finds the regions of all operations. Asks the peer for those that are not known.
    fn parts(
        &self,
        connection: &Connection,
        direction: Direction,
        ops: &[OpDesc],
        deadline: Deadline,
    ) -> Outcome<Vec<BytesOfPair>> {
        let out_of_memory = |_: Error| Status::ResourceExhausted;
        let mut parts = Parts { list: Vec::new(), open: HashMap::new(), last: None };
        let (mut last_local, mut last_remote): (Option<Arc<Region>>, Option<RemoteRegion>) = (None, None);
        for (at, op) in ops.iter().enumerate() {
            let local = match last_local.take().filter(|region| region.holds(op.local, op.len)) {
                Some(region) => region,
                None => self.regions.find(op.local, op.len).ok_or(Status::ParamInvalid)?,
            };
            let remote = match last_remote.take().filter(|region| region.holds(op.remote, op.len)) {
                Some(region) => region,
                None => self.remote_region(connection, &ops[at..], deadline)?,
            };
            let (here, there) = (op.local - local.range.addr, op.remote - remote.addr);
            let piece = match direction {
                Direction::Read => Piece { src: there, dst: here, len: op.len },
                Direction::Write => Piece { src: here, dst: there, len: op.len },
            };
            parts.add(&local, &remote, piece, ops.len() - at).map_err(out_of_memory)?;
            (last_local, last_remote) = (Some(local), Some(remote));
        }
        Ok(parts.list)
    }

    /// Returns the remote region of the first operation. If it is not known, asks for those of the following ones, too.
    fn remote_region(
        &self,
        connection: &Connection,
        ops: &[OpDesc],
        deadline: Deadline,
    ) -> Outcome<RemoteRegion> {
        let known = |op: &OpDesc| connection.regions.find(op.remote, op.len);
        let Some(first) = ops.first() else { return Err(Status::ParamInvalid) };
        if let Some(region) = known(first) {
            return Ok(region);
        }
        // Most lists name many addresses of few regions.
        let mut addrs = vec![first.remote];
        if ops.len() > 1 {
            let step = ops.len().div_ceil(MAX_ADDRESSES / 2);
            addrs.extend(ops.iter().step_by(step).filter(|op| known(op).is_none()).map(|op| op.remote));
        }
        match self.ask_over(connection, deadline, |id| Message::Locate { id, addrs })? {
            Reply::Located(found) => {
                // Not looked up among the known ones, which another thread may change, and which do not overlap.
                let mut asked = None;
                let has_bytes =
                    |region: &WireRegion| region.len > 0 && region.addr.checked_add(region.len).is_some();
                for WireRegion { addr, len, number } in found.into_iter().filter(has_bytes) {
                    let name = cache_name(number);
                    let cache = self.engine.peer_cache(connection.peer, &name).map_err(|_| Status::Failed)?;
                    let region = RemoteRegion { addr, len, number, cache };
                    if asked.is_none() && region.holds(first.remote, first.len) {
                        asked = Some(region.clone());
                    }
                    connection.regions.add(region);
                }
                asked.ok_or(Status::ParamInvalid)
            }
            _ if connection.has_ended() => Err(Status::NotConnected),
            _ => Err(Status::Failed),
        }
    }
}

/// The parts of a transfer: one for each pair of regions, or several if it has many pieces.
struct Parts {
    list: Vec<BytesOfPair>,
    /// The part of a pair of regions to which pieces are added.
    open: HashMap<(u64, Arc<str>), usize>,
    last: Option<usize>,
}

impl Parts {
    /// Adds a piece. `more` is how many pieces there are at most from this one on.
    fn add(&mut self, local: &Region, remote: &RemoteRegion, piece: Piece, more: usize) -> Result<(), Error> {
        let fits = |part: &BytesOfPair| {
            part.own.id == local.cache.id
                && Arc::ptr_eq(&part.of_peer, &remote.cache)
                && part.pieces.len() < MAX_PIECES
        };
        let same = self.last.filter(|&at| fits(&self.list[at])).or_else(|| {
            let known = self.open.get(&(local.number, remote.cache.name.clone())).copied();
            known.filter(|&at| fits(&self.list[at]))
        });
        let at = if let Some(at) = same {
            at
        } else {
            // Most transfers have one part, and those with many parts have few pieces in each.
            let room = if self.list.is_empty() { more.min(MAX_PIECES) } else { 1 };
            let pieces = fallible::with_capacity("the pieces of a transfer", room)?;
            let part = BytesOfPair { own: local.cache.clone(), of_peer: remote.cache.clone(), pieces };
            fallible::push("the parts of a transfer", &mut self.list, part)?;
            self.open.insert((local.number, remote.cache.name.clone()), self.list.len() - 1);
            self.list.len() - 1
        };
        self.last = Some(at);
        fallible::push("the pieces of a transfer", &mut self.list[at].pieces, piece)
    }
}

impl Refusal {
    pub(crate) fn of(doing: &str, error: &Error) -> Self {
        if error.kind() == ErrorKind::CacheNotFound {
            Refusal::Outdated
        } else {
            Refusal::Status(Status::from_error(doing, error))
        }
    }
}

/// Checks what needs no region.
pub(crate) fn check_ops(ops: &[OpDesc]) -> Outcome<()> {
    let sound = |op: &OpDesc| {
        op.len > 0 && op.local.checked_add(op.len).is_some() && op.remote.checked_add(op.len).is_some()
    };
    if !ops.is_empty() && ops.iter().all(sound) { Ok(()) } else { Err(Status::ParamInvalid) }
}
