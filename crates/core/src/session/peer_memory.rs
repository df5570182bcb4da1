//! The memory of a peer that this process can read in place: its pools, mapped read-only; its other memory,
//! read by process id; and the generations of its table.
//!
//! Both sides offer their memory over a socket that carries descriptors, try what they were offered, and
//! report the result to each other. The owner sends the bytes of memory that cannot be read in place.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use super::message_io;
use crate::copy::{PathKind, PeerTensors, ReadAccess};
use crate::error::{Error, ErrorKind, OptionName, Result};
pub(crate) use crate::fabric::Readable;
use crate::memory::{self, PeerGenerations, PeerMapping, PeerProcess, Probe, Tensors};
use crate::model::{Deadline, Placement};
use crate::net::Stream;
use crate::protocol::{self, Attach, Attached, HANDSHAKE_LIMIT, MAX_RUNS, Run, WireLocation};
use crate::resources::{MemoryLocation, Resources};

/// Maximum number of descriptors that a peer may send: its generations and two pools.
const MAX_OFFERED: usize = 3;
/// How long the memory of the peer's process may take to respond when it is opened.
const PROBE_LIMIT: Duration = Duration::from_millis(500);
/// How long a new link waits for memory of ended links to be unmapped, if its own does not fit beside that.
const UNMAP_LIMIT: Duration = Duration::from_secs(1);

/// Why one side cannot read memory whose location the owner does not send.
const HIDDEN: &str = "the memory belongs to a device, or lies in too many pieces to list";

/// The offered memory of a peer that this process can read, and what the peer can read of this process. The owner sends the rest;
/// the link is made anyway.
#[derive(Debug)]
pub(crate) struct PeerMemory {
    taken: TakenMemory,
    /// The peer's report of what it can read of this process.
    seen: Attached,
}

/// The offered memory of a peer that this process can read, before the peer has reported what it can read of this process.
#[derive(Debug)]
pub(super) struct TakenMemory {
    /// `None` if they could not be mapped. Then no memory of the peer is read in place.
    generations: Option<PeerGenerations>,
    /// The mapped pools, indexed by placement, or why the pools that the peer offered are not mapped.
    pools: Result<[Option<Arc<PeerMapping>>; 2], String>,
    /// `Err` with the reason if memory outside the pools cannot be read.
    process: Result<Arc<PeerProcess>, String>,
}

impl PeerMemory {
    /// Runs the exchange on the dialing side: offers the memory of `resources`, takes the peer's offer, and
    /// exchanges reports.
    pub(crate) fn exchange(resources: &Resources, stream: &Stream, deadline: Deadline) -> Result<PeerMemory> {
        PeerMemory::offer(resources, |frame, descriptors| stream.send_with(frame, descriptors, deadline))?;
        let (offered, descriptors): (Attach, _) =
            message_io::receive_message_with(stream, HANDSHAKE_LIMIT, deadline)?;
        stream.refuse_descriptors()?;
        let memory = TakenMemory::take(resources, &offered, descriptors, stream, deadline);
        message_io::send_message(stream, &memory.report(), deadline)?;
        let seen: Attached = message_io::receive_message(stream, HANDSHAKE_LIMIT, deadline)?;
        Ok(memory.seen_as(seen))
    }

    /// Sends the offer of `resources` with the function `send`.
    pub(crate) fn offer(
        resources: &Resources,
        send: impl FnOnce(&[u8], &[BorrowedFd<'_>]) -> Result<()>,
    ) -> Result<()> {
        let pools = Placement::ALL.map(|placement| resources.pool(placement).map(|arena| arena.region()));
        let shared = pools.map(|region| region.and_then(|region| Some((region.len(), region.descriptor()?))));
        let generations = resources.generations().descriptor();
        let descriptors: Vec<BorrowedFd<'_>> = generations
            .into_iter()
            .chain(shared.iter().flatten().map(|&(_, descriptor)| descriptor))
            .collect();
        memory::allow_readers();
        let probe = memory::own_probe()?;
        let offer = Attach {
            generations: generations.is_some(),
            pools: shared.map(|pool| pool.map(|(len, _)| len)),
            probe: Some((probe.address, probe.secret)),
        };
        send(&protocol::encode(&offer)?, &descriptors)
    }

    /// Records that the link has ended, so that new links wait until this memory is unmapped.
    pub(super) fn release_soon(&self) {
        self.taken.generations.iter().for_each(PeerGenerations::release_soon);
        self.taken.pools.iter().flatten().flatten().for_each(|pool| pool.release_soon());
    }

    /// Returns the generations of the peer's table, or `None` if they could not be mapped.
    pub(super) fn generations(&self) -> Option<&PeerGenerations> {
        self.taken.generations.as_ref()
    }

    /// Returns why the peer's pools are not read in place although it offered them.
    pub(super) fn unmapped(&self) -> Option<&str> {
        self.taken.pools.as_ref().err().map(String::as_str)
    }

    /// Returns how the peer's pools are read: `mapped`, `stream` or `none`.
    pub(super) fn pools(&self) -> &'static str {
        match &self.taken.pools {
            Err(_) => "stream",
            Ok([None, None]) => "none",
            Ok(_) => "mapped",
        }
    }

    /// Returns why the peer's registered memory cannot be read by process id, if it cannot.
    pub(super) fn refusal(&self) -> Option<&str> {
        self.taken.process.as_ref().err().map(String::as_str)
    }

    /// Returns what this side can read of the peer's memory.
    pub(super) fn reads(&self) -> ReadAccess<'_> {
        ReadAccess {
            pools: self.unmapped().map_or(Ok(PathKind::Mapped), Err),
            process: self.refusal().map_or(Ok(PathKind::Process), Err),
            hidden: HIDDEN,
        }
    }

    /// Returns what the peer can read of this side's memory, as it has reported.
    pub(super) fn read_by_peer(&self) -> ReadAccess<'_> {
        let Attached { pools, process } = &self.seen;
        ReadAccess {
            pools: pools.as_ref().map(|()| PathKind::Mapped).map_err(String::as_str),
            process: process.as_ref().map(|()| PathKind::Process).map_err(String::as_str),
            hidden: HIDDEN,
        }
    }

    /// Returns `count` tensors of `bytes` bytes at `location` of the peer, which this side can read; `None` if the peer has
    /// offered no such memory. Returns `Err` if the location is invalid.
    pub(super) fn tensors(
        &self,
        location: &WireLocation,
        count: u32,
        bytes: u64,
    ) -> Result<Option<PeerTensors>> {
        Ok(match location {
            WireLocation::Pool { pool, runs } => {
                let Some(Some(mapping)) =
                    self.taken.pools.as_ref().ok().and_then(|pools| pools.get(usize::from(*pool)))
                else {
                    return Ok(None);
                };
                Some(PeerTensors::Mapped(Arc::new(Tensors::mapped(
                    mapping.clone(),
                    Run::unpack(runs, count)?,
                    bytes,
                )?)))
            }
            WireLocation::Process { runs } => {
                let Ok(process) = &self.taken.process else { return Ok(None) };
                let tensors = Tensors::of_process(process.clone(), Run::unpack(runs, count)?, bytes)?;
                Some(PeerTensors::Process(Arc::new(tensors), process.clone()))
            }
            WireLocation::Hidden => None,
        })
    }
}

impl TakenMemory {
    /// Returns the report for the peer: what this process can read of its memory.
    pub(super) fn report(&self) -> Attached {
        Attached {
            pools: self.pools.as_ref().map(|_| ()).map_err(Clone::clone),
            process: self.process.as_ref().map(|_| ()).map_err(Clone::clone),
        }
    }

    /// Adds the peer's report.
    pub(super) fn seen_as(self, seen: Attached) -> PeerMemory {
        PeerMemory { taken: self, seen }
    }

    /// Takes the offer of the peer of `stream`.
    pub(super) fn take(
        resources: &Resources,
        offered: &Attach,
        descriptors: Vec<OwnedFd>,
        stream: &Stream,
        deadline: Deadline,
    ) -> TakenMemory {
        let pid = stream.about.credentials.and_then(|peer| peer.pid);
        let who = || pid.map_or_else(|| "unknown".into(), |pid| pid.to_string());
        let mut descriptors = if descriptors.len() > MAX_OFFERED { vec![] } else { descriptors }.into_iter();
        let limit = Deadline::after(UNMAP_LIMIT.min(deadline.left()));
        let generations = Self::map_generations(resources, offered, &mut descriptors, limit);
        let pools = generations.as_ref().map_err(ToString::to_string).and_then(|_| {
            Self::map_pools(resources, offered, &mut descriptors, limit).map_err(|error| error.to_string())
        });
        // Without generations, the reader cannot verify that the bytes still belonged to the cache.
        let process = match &generations {
            Ok(_) => Self::open_process(resources, offered, stream, deadline),
            Err(error) => Err(error.to_string()),
        };
        if let Err(why) = &pools {
            tracing::warn!(
                target: "llm_datadist::links",
                "the memory of the peer at {} (process {}) is not mapped, so the owner sends the bytes of its pools: {why}",
                stream.about.peer,
                who(),
            );
        }
        TakenMemory { generations: generations.ok(), pools, process }
    }

    fn map_generations(
        resources: &Resources,
        offered: &Attach,
        descriptors: &mut impl Iterator<Item = OwnedFd>,
        limit: Deadline,
    ) -> Result<PeerGenerations> {
        if !offered.generations {
            return Err(Error::new(ErrorKind::LinkFailed, "the peer shares no generations"));
        }
        PeerGenerations::map(descriptors.next().ok_or_else(missing)?, &resources.remote_memory, limit)
            .map_err(bounded)
    }

    fn map_pools(
        resources: &Resources,
        offered: &Attach,
        descriptors: &mut impl Iterator<Item = OwnedFd>,
        limit: Deadline,
    ) -> Result<[Option<Arc<PeerMapping>>; 2]> {
        let budget = &resources.remote_memory;
        // One link may use half of the budget, so that one peer leaves memory for others.
        let most = budget.limit() / 2;
        let sum = offered.pools.iter().flatten().try_fold(0_u64, |sum, &len| sum.checked_add(len));
        if sum.is_none_or(|sum| sum > most) {
            let offered = sum.map_or_else(|| "more than 2^64".into(), |sum| sum.to_string());
            let text = "the pools of the peer are larger than one link may map";
            let error = Error::new(ErrorKind::System, text);
            return Err(bounded(error.with("offered_bytes", offered).with("limit_bytes", most)));
        }
        let mut map = |len: Option<u64>| {
            len.map(|len| PeerMapping::map(descriptors.next().ok_or_else(missing)?, len, budget, limit))
                .transpose()
        };
        Ok([map(offered.pools[0]).map_err(bounded)?, map(offered.pools[1]).map_err(bounded)?])
    }

    fn open_process(
        resources: &Resources,
        offered: &Attach,
        stream: &Stream,
        deadline: Deadline,
    ) -> Result<Arc<PeerProcess>, String> {
        let (pid, (address, secret)) =
            match (stream.about.credentials.and_then(|peer| peer.pid), offered.probe) {
                (Some(pid), Some(probe)) => (pid, probe),
                (None, _) => return Err("the peer's process id is not visible here".into()),
                (_, None) => return Err("the peer does not offer it".into()),
            };
        let limit =
            Deadline::after(PROBE_LIMIT.min(deadline.left())).named("the time limit of opening a process");
        let opened = resources.copy_engine.open_process(pid, Probe { address, secret }, limit);
        opened.map_err(|error| error.to_string())
    }
}

/// Whether the kernel keeps processes from reading each other's memory unless they permit it (Yama).
pub(super) fn guarded() -> bool {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    scope.is_ok_and(|scope| scope.trim() != "0")
}

fn missing() -> Error {
    Error::new(ErrorKind::LinkFailed, "the peer offered memory without the matching descriptors")
}

/// Adds the option that raises the limit to `error`.
fn bounded(error: Error) -> Error {
    error.of_option(OptionName::REMOTE_MEMORY)
}

/// Returns the location of a cache's tensors as sent to peers.
pub(crate) fn location(memory_location: MemoryLocation) -> Result<WireLocation> {
    let location = match memory_location {
        MemoryLocation::Pool(placement, offsets) => {
            WireLocation::Pool { pool: placement as u8, runs: Run::pack(&offsets)? }
        }
        MemoryLocation::Process(addrs) => WireLocation::Process { runs: Run::pack(&addrs)? },
        MemoryLocation::Hidden => WireLocation::Hidden,
    };
    match &location {
        // The peer would reject a list this long. Sockets need none.
        WireLocation::Pool { runs, .. } | WireLocation::Process { runs } if runs.len() > MAX_RUNS => {
            Ok(WireLocation::Hidden)
        }
        _ => Ok(location),
    }
}
