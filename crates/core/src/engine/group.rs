//! Groups of pulls, pushes or copies: one call for several caches.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashSet;

use super::transfer::{CallExtras, checked_notification, no_grant_in_push};
use super::{DataDist, End, RemoteName};
use crate::cache::{Cache, CallRows, RowUse};
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::events::Transfer;
use crate::fallible;
use crate::model::{GrantUse, Name, RemoteCacheName, SubRow, Verify};
use crate::plan::Side;
use crate::stats::Op;
use crate::transfer::{CallPurpose, Group, JobClass, PeerTransfer, Work, run_in_order, used_rows};
use crate::validate::{Layers, Rows};

/// Name of these lists in out-of-memory errors.
const PARTS: &str = "the parts of a group";

/// One part of a group: the cache of a peer, a cache of this engine, and the rows that move.
#[derive(Clone, Debug)]
pub struct GroupMember<N = Name> {
    /// The cache of the peer.
    pub remote: RemoteName<N>,
    /// The cache of this engine.
    pub local: End,
    /// The rows that move.
    pub rows: Rows,
    /// The layers that move. All of them between different KV layouts, and from and to several owners.
    pub layers: Layers,
    /// The grant under which the part is pulled.
    pub grant: Option<GrantUse>,
}

/// One part of a group of copies within this engine.
#[derive(Clone, Debug)]
pub struct CopyMember {
    /// The cache that is written.
    pub dst: End,
    /// The cache that is read. It may be the same one.
    pub src: End,
    /// The rows that move: source and destination.
    pub pairs: Vec<(i64, i64)>,
    /// The bytes of every row that move.
    pub part: SubRow,
}

/// The checked parts of a group, and the rows that they use.
type Parts = (Vec<PeerTransfer>, Vec<(Arc<Cache>, RowUse)>);

impl DataDist {
    /// Starts to [copy](Self::copy) all `parts`, one after the other, under the pins of all. Nothing moves if a part is refused. An
    /// error names the part, counted from 0; the parts before it are in place then.
    pub fn copy_group(
        &self,
        parts: &[CopyMember],
        verify: Option<Verify>,
        limit: Option<Duration>,
    ) -> Result<Arc<Transfer>> {
        at_least_one(parts)?;
        let mut copies = fallible::with_capacity(PARTS, parts.len())?;
        let mut used = fallible::with_capacity(PARTS, 2 * parts.len())?;
        for (index, CopyMember { dst, src, pairs, part }) in parts.iter().enumerate() {
            let check = || self.checked_copy(self.resolve(dst)?, self.resolve(src)?, pairs, *part, verify);
            let mut copy = check().map_err(|error: Error| error.with("part", index))?;
            used.extend(copy.take_used());
            copies.push(copy);
        }
        let resources = self.resources.clone();
        let work: Work =
            Box::new(move |execution, deadline| run_in_order(copies, &resources, execution, deadline));
        self.start_work(Op::CopyBlocks, self.own_class(), limit, (CallRows::of_all(used)?, work))
    }

    /// Starts to [pull](Self::pull) or [push](Self::push) all `members`; the local caches are the side `local_side`. Succeeds only
    /// if the bytes of all are in place. Keys are released after that. An error names the part, counted from 0.
    ///
    /// With `owners`, the peers are several owners of one sequence, each of which holds some layers and heads of it, for example the
    /// ranks of a tensor-parallel group. All members name the same rows of one local cache. A pull reads each layer and head of the
    /// local cache from one owner; all caches have KV layouts. Where several owners hold it, engines with neighbouring ids read from
    /// different ones, and a native engine reads from the first one in the list. A push writes to each owner the layers and heads
    /// that both caches hold, possibly none.
    ///
    /// Fails with `InvalidArgument` before any byte moves if an owner of a pull has no layout, or one of another model, or if no
    /// owner holds some head of the local cache; and if a push does not fit the cache of an owner, if no owner holds a layer and
    /// head of the local cache, or if the owners get different numbers of tokens.
    pub fn transfer_group(
        &self,
        local_side: Side,
        members: Vec<GroupMember<impl Into<RemoteCacheName>>>,
        owners: bool,
        extras: CallExtras,
        limit: Option<Duration>,
    ) -> Result<Arc<Transfer>> {
        let read_owners = owners && local_side == Side::Destination;
        let deadline = self.limited(Instant::now(), limit);
        let (mut parts, used) = self.parts(local_side, members, owners, &extras)?;
        report_each_grant_once(&mut parts)?;
        let first = &parts[0].local;
        let one_cache = parts.iter().all(|part| Arc::ptr_eq(&part.local, first));
        ensure(!read_owners || one_cache, || Error::invalid("several owners need one destination cache"))?;
        let class = class_of(&parts);
        parts[0].notify = group_notification(class, extras.notify)?;
        let group = Group { resources: self.resources.clone(), parts, owners };
        let work: Work = Box::new(move |execution, deadline| group.run(execution, deadline));
        let purpose = CallPurpose::new(Some(local_side.of((Op::Push, Op::Pull))), class, deadline);
        self.calls.start(purpose.outgoing(&self.resources), CallRows::of_all(used)?, work)
    }

    /// Checks each member of a group.
    fn parts(
        &self,
        local_side: Side,
        members: Vec<GroupMember<impl Into<RemoteCacheName>>>,
        owners: bool,
        extras: &CallExtras,
    ) -> Result<Parts> {
        at_least_one(&members)?;
        let mut parts = fallible::with_capacity(PARTS, members.len())?;
        let mut used = fallible::with_capacity(PARTS, members.len())?;
        let verify = self.verify(extras);
        for (index, GroupMember { remote, local, rows, layers, grant }) in members.into_iter().enumerate() {
            let remote = remote.of_any_form();
            let check = || {
                no_grant_in_push(local_side, grant)?;
                ensure(!owners || layers.src.or(layers.dst).is_none(), || {
                    Error::invalid(
                        "several owners of one cache take no layers: they follow from the KV layouts",
                    )
                })?;
                let (local, checked) = self.checked(local_side, &remote, &local, (rows, layers), extras)?;
                let rows = used_rows(&checked)?;
                Ok((local, checked, rows))
            };
            let (local, checked, rows) = check().map_err(|error: Error| error.with("part", index))?;
            used.push((local.clone(), rows));
            let (link, name) = (self.links.finder().for_later(remote.cluster), remote.name);
            let grant = grant.map(Box::new);
            parts.push(PeerTransfer { link, name, local, checked, notify: None, grant, verify });
        }
        Ok((parts, used))
    }
}

fn at_least_one<T>(parts: &[T]) -> Result<()> {
    ensure(!parts.is_empty(), || Error::argument("len(parts)", 0, "at least 1"))
}

/// Leaves the report of a grant that several parts use to the last one of them.
fn report_each_grant_once(parts: &mut [PeerTransfer]) -> Result<()> {
    let mut later = HashSet::new();
    later.try_reserve(parts.len()).map_err(|_| fallible::out_of_memory(PARTS, parts.len()))?;
    for grant in parts.iter_mut().rev().filter_map(|part| part.grant.as_mut()) {
        grant.done &= later.insert(grant.token);
    }
    Ok(())
}

/// Returns the class of the job of a group.
fn class_of(parts: &[PeerTransfer]) -> JobClass {
    let first = parts[0].link.cluster();
    let one = parts.iter().all(|part| part.link.cluster() == first);
    if one { JobClass::Calls(first) } else { JobClass::SeveralClusters }
}

/// Checks the notification of a group, which has one peer then.
fn group_notification(class: JobClass, notify: Option<Vec<u8>>) -> Result<Option<Arc<Vec<u8>>>> {
    let one_peer = class != JobClass::SeveralClusters;
    let text = "notify needs parts or keys of one peer";
    ensure(notify.is_none() || one_peer, || {
        Error::new(ErrorKind::InvalidArgument, text).of_argument("notify")
    })?;
    checked_notification(notify)
}
