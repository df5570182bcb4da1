//! Groups of pulls or pushes: one asynchronous call for several caches.

use std::sync::Arc;

use hashbrown::HashSet;

use super::asynchronous::CallOptions;
use super::call_extras::{checked_notification, no_grant_in_push};
use super::{DataDist, End, RemoteName};
use crate::cache::{CallRows, RowUse};
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::events::Transfer;
use crate::fallible;
use crate::model::GrantUse;
use crate::stats::Op;
use crate::transfer::{CallPurpose, Execution, Group, GroupPart, LaneKey};
use crate::validate::{Layers, PullRows, PushRows};

/// Name of these lists in out-of-memory errors.
const PARTS: &str = "the parts of a group";

/// One part of a group: the cache of a peer, a cache of this engine, and the rows that move.
#[derive(Clone, Debug)]
pub struct GroupMember<Rows> {
    /// The cache of the peer.
    pub remote: RemoteName,
    /// The cache of this engine.
    pub local: End,
    /// The rows that move.
    pub rows: Rows,
    /// The grant under which the part is pulled.
    pub grant: Option<GrantUse>,
}

impl DataDist {
    /// Starts one call that [pulls](Self::pull) all `parts`, and succeeds only if the bytes of all are in place. Keys
    /// are released after that. Otherwise like [`pull_async`](Self::pull_async). An error names the part, counted from 0.
    pub fn pull_group_async(
        &self,
        parts: Vec<GroupMember<PullRows>>,
        options: impl Into<CallOptions>,
    ) -> Result<Arc<Transfer>> {
        self.pull_members(parts, options.into(), false)
    }

    /// Starts one call that pulls the blocks of a sequence from several `owners`, each of which holds some layers and heads
    /// of it, for example the ranks of a tensor-parallel group. All members name one local cache and the same rows of it,
    /// and all caches have KV layouts. Each layer and head of the local cache is read from one owner; where several hold
    /// it, engines with neighbouring ids read from different ones. Otherwise like
    /// [`pull_group_async`](Self::pull_group_async).
    ///
    /// The transfer fails with `InvalidArgument` before any byte moves if an owner has no layout, or one of another model,
    /// or if nobody holds some head of the local cache.
    pub fn pull_owners_async(
        &self,
        owners: Vec<GroupMember<PullRows>>,
        options: impl Into<CallOptions>,
    ) -> Result<Arc<Transfer>> {
        self.pull_members(owners, options.into(), true)
    }

    fn pull_members(
        &self,
        parts: Vec<GroupMember<PullRows>>,
        options: CallOptions,
        owners: bool,
    ) -> Result<Arc<Transfer>> {
        let CallOptions { limit, extras, quiet } = options;
        ensure(!owners || !extras.raw_layout, || {
            Error::invalid("several owners of one cache need KV layouts: layout=\"raw\" must not be given")
        })?;
        let deadline = self.limited(limit);
        let (mut checked, mut used) = lists(&parts)?;
        for (index, GroupMember { remote, local, rows, grant }) in parts.into_iter().enumerate() {
            let of_part = |error: Error| error.with("part", index);
            let (local, pull) =
                self.checked_pull(remote, &local, rows, Layers::ALL, extras.raw_layout).map_err(of_part)?;
            let writes = pull.rows().local_rows()?;
            used.push((local.clone(), RowUse { writes, ..RowUse::default() }));
            let link = self.links.finder().for_later(remote.cluster);
            checked.push(GroupPart {
                cluster: remote.cluster,
                link,
                name: remote.name,
                local,
                checked: pull,
                grant,
            });
        }
        report_each_grant_once(&mut checked)?;
        let one_cache = checked.iter().all(|part| Arc::ptr_eq(&part.local, &checked[0].local));
        ensure(!owners || one_cache, || Error::invalid("several owners need one destination cache"))?;
        let verify = self.verify(&extras);
        let (lanes, notify) = (lanes_of(&checked), group_notification(&checked, extras.notify)?);
        let purpose = CallPurpose { event: !quiet, ..self.outgoing(Op::Pull, lanes, deadline) };
        let group = Group { resources: self.resources.clone(), parts: checked, notify, verify, owners };
        let work = move |execution: &Arc<Execution>, deadline| group.pull(execution, deadline);
        self.start(purpose, CallRows::of_all(used)?, Box::new(work))
    }

    /// Starts one call that [pushes](Self::push) all `parts`; otherwise like
    /// [`pull_group_async`](Self::pull_group_async).
    pub fn push_group_async(
        &self,
        parts: Vec<GroupMember<PushRows>>,
        options: impl Into<CallOptions>,
    ) -> Result<Arc<Transfer>> {
        self.push_members(parts, options.into(), false)
    }

    /// Starts one call that pushes the blocks of a sequence to several `owners`, each of which gets the layers and heads that
    /// both caches hold, possibly none. All members name the same rows of one local cache. Otherwise like
    /// [`push_group_async`](Self::push_group_async).
    ///
    /// The transfer fails with `InvalidArgument` before any byte moves if the push does not fit the cache of an owner, if
    /// no owner holds a layer and head of the local cache, or if the owners get different numbers of tokens.
    pub fn push_owners_async(
        &self,
        owners: Vec<GroupMember<PushRows>>,
        options: impl Into<CallOptions>,
    ) -> Result<Arc<Transfer>> {
        self.push_members(owners, options.into(), true)
    }

    fn push_members(
        &self,
        parts: Vec<GroupMember<PushRows>>,
        options: CallOptions,
        owners: bool,
    ) -> Result<Arc<Transfer>> {
        let CallOptions { limit, extras, quiet } = options;
        let deadline = self.limited(limit);
        let (mut checked, mut used) = lists(&parts)?;
        for (index, GroupMember { remote, local, rows, grant }) in parts.into_iter().enumerate() {
            let of_part = |error: Error| error.with("part", index);
            no_grant_in_push(grant).map_err(of_part)?;
            let (local, push) =
                self.checked_push(&local, remote, rows, Layers::ALL, extras.raw_layout).map_err(of_part)?;
            let reads = push.rows().local_rows()?;
            used.push((local.clone(), RowUse { reads, ..RowUse::default() }));
            let link = self.links.finder().for_later(remote.cluster);
            checked.push(GroupPart {
                cluster: remote.cluster,
                link,
                name: remote.name,
                local,
                checked: push,
                grant,
            });
        }
        let verify = self.verify(&extras);
        let (lanes, notify) = (lanes_of(&checked), group_notification(&checked, extras.notify)?);
        let purpose = CallPurpose { event: !quiet, ..self.outgoing(Op::Push, lanes, deadline) };
        let group = Group { resources: self.resources.clone(), parts: checked, notify, verify, owners };
        let work = move |execution: &Arc<Execution>, deadline| group.push(execution, deadline);
        self.start(purpose, CallRows::of_all(used)?, Box::new(work))
    }
}

type Lists<Checked> = (Vec<GroupPart<Checked>>, Vec<(Arc<crate::cache::Cache>, RowUse)>);

/// Returns the empty lists for a group, which must have a part.
fn lists<Rows, Checked>(parts: &[GroupMember<Rows>]) -> Result<Lists<Checked>> {
    ensure(!parts.is_empty(), || Error::argument("len(parts)", 0, "at least 1"))?;
    Ok((fallible::with_capacity(PARTS, parts.len())?, fallible::with_capacity(PARTS, parts.len())?))
}

/// Leaves the report of a grant that several parts use to the last one of them.
fn report_each_grant_once<Checked>(parts: &mut [GroupPart<Checked>]) -> Result<()> {
    let mut later = HashSet::new();
    later.try_reserve(parts.len()).map_err(|_| fallible::out_of_memory(PARTS, parts.len()))?;
    for grant in parts.iter_mut().rev().filter_map(|part| part.grant.as_mut()) {
        grant.done &= later.insert(grant.token);
    }
    Ok(())
}

/// Returns the lanes that run a group.
fn lanes_of<Checked>(parts: &[GroupPart<Checked>]) -> LaneKey {
    let first = parts[0].cluster;
    let one = parts.iter().all(|part| part.cluster == first);
    if one { LaneKey::Calls(first) } else { LaneKey::SeveralClusters }
}

/// Checks the notification of a group, which has one peer then.
fn group_notification<Checked>(
    parts: &[GroupPart<Checked>],
    notify: Option<Vec<u8>>,
) -> Result<Option<Arc<Vec<u8>>>> {
    let one_peer = lanes_of(parts) != LaneKey::SeveralClusters;
    let text = "notify needs parts or keys of one cluster";
    ensure(notify.is_none() || one_peer, || Error::new(ErrorKind::InvalidArgument, text))?;
    checked_notification(notify)
}
