//! What one process can see of another's memory: its pools, mapped read-only; its other memory, read by process id; and
//! the generations of its table.
//!
//! Both sides offer what they have over a socket that carries descriptors, try what they were offered, and tell each
//! other what came of it. What cannot be reached so travels through sockets. Not for: reading (`engine`), or which cache
//! lies where (`cluster`).

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use super::talk;
use crate::cluster::{Cluster, Whereabouts};
use crate::desc::Placement;
use crate::error::{Error, ErrorKind, Result};
use crate::id::Deadline;
use crate::mem::{self, ForeignGenerations, ForeignProcess, ForeignRegion, Probe, Tensors};
use crate::transport::Stream;
use crate::wire::{self, Attach, Attached, GREETING_LIMIT, Location, Run};

/// What this process can see of a peer's, and the other way round.
#[derive(Debug)]
pub(crate) struct Reach {
    generations: ForeignGenerations,
    /// By placement.
    pools: [Option<Arc<ForeignRegion>>; 2],
    /// `Err` says why memory outside of the pools cannot be read.
    process: Result<Arc<ForeignProcess>, String>,
    /// What the peer says it can see of ours.
    seen: Attached,
}

impl Reach {
    /// Offers what `cluster` has, takes what the peer offers, and exchanges what came of it: the side that dials.
    pub(crate) fn exchange(cluster: &Cluster, stream: &Stream, deadline: Deadline) -> Result<Reach> {
        Reach::offer(cluster, |frame, descriptors| stream.send_with(frame, descriptors, deadline))?;
        let (offered, descriptors): (Attach, _) = talk::hear_with(stream, GREETING_LIMIT, deadline)?;
        let (taken, told) = Reach::take(cluster, &offered, descriptors, stream, deadline);
        talk::say(stream, &told, deadline)?;
        let seen: Attached = talk::hear(stream, GREETING_LIMIT, Duration::ZERO, deadline)?;
        Ok(Reach::complete(cluster, taken?, seen))
    }

    /// Has `send` send what `cluster` offers.
    pub(crate) fn offer(
        cluster: &Cluster,
        send: impl FnOnce(&[u8], &[BorrowedFd<'_>]) -> Result<()>,
    ) -> Result<()> {
        let pools = Placement::ALL.map(|placement| cluster.pool(placement).map(|arena| arena.region()));
        let shared = pools.map(|region| region.and_then(|region| Some((region.len(), region.descriptor()?))));
        let generations = cluster.generations().descriptor();
        let descriptors: Vec<BorrowedFd<'_>> = generations
            .into_iter()
            .chain(shared.iter().flatten().map(|&(_, descriptor)| descriptor))
            .collect();
        mem::allow_readers();
        let probe = mem::own_probe()?;
        let offer = Attach {
            generations: generations.is_some(),
            regions: shared.map(|pool| pool.map(|(len, _)| len)),
            probe: Some((probe.address, probe.secret)),
        };
        send(&wire::encode(&offer)?, &descriptors)
    }

    /// Takes what the peer of `stream` offers, and what it is told about that.
    pub(crate) fn take(
        _cluster: &Cluster,
        offered: &Attach,
        descriptors: Vec<OwnedFd>,
        stream: &Stream,
        _deadline: Deadline,
    ) -> (Result<Offered>, Attached) {
        let taken = Offered::of(offered, descriptors, stream.peer_pid());
        let told = Attached {
            mapped: taken.as_ref().map(|_| ()).map_err(ToString::to_string),
            registered: taken.as_ref().map_or_else(
                |error| Err(error.to_string()),
                |taken| taken.process.as_ref().map(|_| ()).map_err(Clone::clone),
            ),
        };
        (taken, told)
    }

    /// What was taken, with what the peer says it can see of this side's.
    pub(crate) fn complete(cluster: &Cluster, taken: Offered, seen: Attached) -> Reach {
        let Offered { generations, pools, process } = taken;
        // A page of a pool that is touched already has to be mapped by the peer at its first read.
        cluster.merger.look();
        Reach { generations, pools, process, seen }
    }

    /// The generations of the peer's table.
    pub(crate) fn generations(&self) -> &ForeignGenerations {
        &self.generations
    }

    /// Whether a pool of the peer can be read in place.
    pub(crate) fn pooled(&self) -> bool {
        self.pools.iter().any(Option::is_some)
    }

    /// Why the peer's registered memory cannot be read by process id, if it cannot.
    pub(crate) fn refusal(&self) -> Option<&str> {
        self.process.as_ref().err().map(String::as_str)
    }

    /// Whether the peer can read what lies at `whereabouts` in this process.
    pub(crate) fn seen(&self, whereabouts: &Whereabouts) -> bool {
        match whereabouts {
            Whereabouts::Pool(..) => self.seen.mapped.is_ok(),
            Whereabouts::Process(_) => self.seen.registered.is_ok(),
            Whereabouts::Hidden => false,
        }
    }

    /// `count` tensors of `bytes` each that lie at `location` of the peer; `None` if this process cannot see them.
    pub(crate) fn tensors(
        &self,
        location: &Location,
        count: u32,
        bytes: u64,
    ) -> Result<Option<Arc<Tensors>>> {
        let tensors = match location {
            Location::Region { region, runs } => {
                let Some(Some(pool)) = self.pools.get(usize::from(*region)) else { return Ok(None) };
                Tensors::mapped(pool.clone(), Run::unpack(runs, count)?, bytes)?
            }
            Location::Process { runs } => {
                let Ok(process) = &self.process else { return Ok(None) };
                Tensors::of_process(process.clone(), Run::unpack(runs, count)?.into(), bytes)?
            }
            Location::Hidden => return Ok(None),
        };
        Ok(Some(Arc::new(tensors)))
    }
}

/// Whether this system keeps processes from reading each other unless they allow it.
pub(super) fn guarded() -> bool {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    scope.is_ok_and(|scope| scope.trim() != "0")
}

/// What a peer offered, as far as it could be taken.
#[derive(Debug)]
pub(crate) struct Offered {
    generations: ForeignGenerations,
    pools: [Option<Arc<ForeignRegion>>; 2],
    process: Result<Arc<ForeignProcess>, String>,
}

impl Offered {
    fn of(offered: &Attach, descriptors: Vec<OwnedFd>, pid: Option<i32>) -> Result<Offered> {
        let mut descriptors = descriptors.into_iter();
        let mut next = || {
            descriptors.next().ok_or_else(|| {
                Error::new(ErrorKind::LinkFailed, "the peer offered more memory than it sent descriptors")
            })
        };
        if !offered.generations {
            return Err(Error::new(ErrorKind::LinkFailed, "the peer shares no generations"));
        }
        let generations = ForeignGenerations::map(next()?)?;
        let mut map = |len: Option<u64>| len.map(|len| ForeignRegion::map(next()?, len)).transpose();
        let pools = [map(offered.regions[0])?, map(offered.regions[1])?];
        let process = match (pid, offered.probe) {
            (Some(pid), Some((address, secret))) => {
                ForeignProcess::open(pid, Probe { address, secret }).map_err(|error| error.to_string())
            }
            (None, _) => Err("the peer's process id is not visible here".into()),
            (_, None) => Err("the peer does not offer it".into()),
        };
        Ok(Offered { generations, pools, process })
    }
}

/// Where the tensors of a cache lie, for the wire.
pub(crate) fn location(whereabouts: Whereabouts) -> Location {
    match whereabouts {
        Whereabouts::Pool(placement, offsets) => {
            Location::Region { region: placement as u8, runs: Run::pack(&offsets) }
        }
        Whereabouts::Process(addrs) => Location::Process { runs: Run::pack(&addrs) },
        Whereabouts::Hidden => Location::Hidden,
    }
}
