//! Groups: several pulls or pushes in one asynchronous call, which succeeds or fails as a whole.
//!
//! The parts run one after the other on one lane, with all rows of all parts taken. Keys are released only when the
//! bytes of every part are in place.

use std::sync::Arc;

use super::async_call::Execution;
use super::call::{Call, Describe};
use super::pull::PullEnd;
use crate::cache::Cache;
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::{ClusterId, Deadline, GrantUse, Name, Verify};
use crate::plan::{KvPart, assign_owners, check_same_model};
use crate::resources::Resources;
use crate::session::{Link, LinkOfCall};
use crate::stats::Op;
use crate::validate::{CheckedPull, CheckedPush, OwnerShare, PullRows, PushRows};

/// Name of these lists in out-of-memory errors.
const PARTS: &str = "the parts of a group";

/// Runs `check` with the descriptions that are known here, and if they are refused, with those that the owners give now: the
/// known ones may be outdated, as in `Call::rounds`.
fn checked_by_description<T>(check: impl Fn(Describe) -> Result<T>) -> Result<T> {
    match check(Link::known) {
        Err(error) if error.kind() == ErrorKind::InvalidArgument => check(Link::describe),
        checked => checked,
    }
}

/// One part of a group: the cache of a peer, the local cache, and what moves between them.
pub(crate) struct GroupPart<Checked> {
    pub(crate) cluster: ClusterId,
    pub(crate) link: LinkOfCall,
    /// Name of the remote cache, with its slot.
    pub(crate) name: Name,
    pub(crate) local: Arc<Cache>,
    pub(crate) checked: Checked,
    /// The grant under which the part is pulled.
    pub(crate) grant: Option<GrantUse>,
}

/// The parts of one group.
pub(crate) struct Group<Checked> {
    pub(crate) resources: Arc<Resources>,
    pub(crate) parts: Vec<GroupPart<Checked>>,
    /// The notification for the peer of the first part.
    pub(crate) notify: Option<Arc<Vec<u8>>>,
    /// How thoroughly it checks the bytes that it has moved.
    pub(crate) verify: Verify,
    /// Whether the parts are several owners of one local cache, which are checked before the first byte moves. Each layer and
    /// head is read from one of them, and written to all that hold it.
    pub(crate) owners: bool,
}

impl<Checked> Group<Checked> {
    /// Runs `part` for each part with its call, which returns the number of bytes and what `finish` has still to do. Returns
    /// the number of all bytes.
    fn run<Left>(
        &self,
        execution: &Arc<Execution>,
        deadline: Deadline,
        part: impl Fn(usize, &Call, &GroupPart<Checked>) -> Result<(u64, Left)>,
        finish: impl Fn(&Call, Left) -> Result<()>,
    ) -> Result<u64> {
        let (mut bytes, mut notification) = (0, None);
        let mut moved = fallible::with_capacity(PARTS, self.parts.len())?;
        for (index, of_group) in self.parts.iter().enumerate() {
            let call = self.call(of_group, execution, deadline).map_err(|error| of_part(index, error))?;
            if index == 0 {
                notification = call.reserve_notification()?;
            }
            let mut left = None;
            let counted = call.counted(|| {
                let (bytes, rest) = part(index, &call, of_group)?;
                left = Some(rest);
                Ok(bytes)
            });
            let part_bytes = counted.map_err(|error| of_part(index, error))?;
            execution.transfer().part_done(part_bytes);
            bytes += part_bytes;
            moved.push((call, left));
        }
        for (index, (call, left)) in moved.iter_mut().enumerate() {
            let finished = left.take().map_or(Ok(()), |left| finish(call, left));
            finished.map_err(|error| of_part(index, call.named(error)))?;
        }
        let Some((call, _)) = moved.first().filter(|_| notification.is_some()) else { return Ok(bytes) };
        call.finish(&PullEnd::default(), notification).map_err(|error| call.named(error))?;
        Ok(bytes)
    }

    fn call(
        &self,
        part: &GroupPart<Checked>,
        execution: &Arc<Execution>,
        deadline: Deadline,
    ) -> Result<Call> {
        Ok(Call {
            resources: self.resources.clone(),
            link: part.link.find(deadline)?,
            name: part.name,
            local: part.local.clone(),
            deadline,
            execution: Some(execution.clone()),
            to_the_end: true,
            notify: self.notify.clone(),
            grant: part.grant,
            verify: self.verify,
        })
    }
}

impl Group<CheckedPull<PullRows>> {
    /// Pulls all parts.
    pub(crate) fn pull(&self, execution: &Arc<Execution>, deadline: Deadline) -> Result<u64> {
        let assigned = if self.owners { Some(self.assigned(execution, deadline)?) } else { None };
        let part = |index: usize, call: &Call, part: &GroupPart<CheckedPull<PullRows>>| match &assigned {
            Some(assigned) => call.pull_checked(&assigned[index]),
            None => call.pull_checked(&part.checked),
        };
        let finish = |call: &Call, end| call.finish(&end, None);
        let bytes = self.run(execution, deadline, part, finish)?;
        self.resources.stats.add_bytes(Op::Pull, bytes);
        Ok(bytes)
    }

    /// Returns what to read from each owner.
    fn assigned(
        &self,
        execution: &Arc<Execution>,
        deadline: Deadline,
    ) -> Result<Vec<CheckedPull<&PullRows>>> {
        checked_by_description(|describe| self.assigned_by(describe, execution, deadline))
    }

    /// Finds out the layout of every owner's cache with `describe`, and returns what to read from each owner.
    fn assigned_by(
        &self,
        describe: Describe,
        execution: &Arc<Execution>,
        deadline: Deadline,
    ) -> Result<Vec<CheckedPull<&PullRows>>> {
        let missing = |which: &str| {
            Error::invalid(format!("several owners of one cache need KV layouts: the {which} cache has none"))
        };
        let local = self.parts[0].local.kv().ok_or_else(|| missing("local"))?;
        let mut owners = fallible::with_capacity(PARTS, self.parts.len())?;
        for (index, part) in self.parts.iter().enumerate() {
            let described = || {
                let call = self.call(part, execution, deadline)?;
                let known = describe(&call.link, part.name, deadline)?;
                let layout = known.remote.kv.clone().ok_or_else(|| missing("remote"))?;
                check_same_model(&layout, local).map_err(|error| call.named(error))?;
                Ok((known, layout))
            };
            owners.push(described().map_err(|error| of_part(index, error))?);
        }
        let mut layouts = fallible::with_capacity(PARTS, owners.len())?;
        layouts.extend(owners.iter().map(|(_, layout)| layout.layout()));
        // Neighbouring ranks usually have neighbouring ids, and are to read from different replicas.
        let reader = usize::try_from(self.resources.config.cluster.0).unwrap_or(usize::MAX);
        let assigned = assign_owners(&KvPart::of(local.layout()), &layouts, reader)?;
        let mut pulls = fallible::with_capacity(PARTS, owners.len())?;
        // Each is checked here, before the first byte moves, and not only when the turn of its owner comes.
        let mut tokens = None;
        for (index, (parts, (known, _))) in assigned.into_iter().zip(&owners).enumerate() {
            let pull = self.parts[index].checked.of_parts(parts, tokens);
            let conversion = pull.conversion(&known.remote).map_err(|error| of_part(index, error))?;
            tokens = tokens.or(conversion.and_then(|conversion| conversion.tokens));
            pulls.push(pull);
        }
        for pull in &mut pulls {
            pull.must_move(tokens);
        }
        Ok(pulls)
    }
}

impl Group<CheckedPush<PushRows>> {
    /// Pushes all parts.
    pub(crate) fn push(&self, execution: &Arc<Execution>, deadline: Deadline) -> Result<u64> {
        let shares = if self.owners { Some(self.shares(execution, deadline)?) } else { None };
        let part = |index: usize, call: &Call, part: &GroupPart<CheckedPush<PushRows>>| {
            let call = Call { name: part.name.without_slot().0, ..call.clone() };
            match shares.as_ref().map(|shares| shares[index]) {
                Some(OwnerShare::Nothing(_)) => Ok((0, None)),
                Some(OwnerShare::Tokens(tokens)) => {
                    call.push_checked(part.name, &part.checked.of_owner(Some(tokens)))
                }
                Some(OwnerShare::Rows) | None => call.push_checked(part.name, &part.checked),
            }
        };
        let bytes = self.run(execution, deadline, part, Call::release_slot)?;
        self.resources.stats.add_bytes(Op::Push, bytes);
        Ok(bytes)
    }

    /// Checks the push to each owner, and returns what it writes there. `Err(InvalidArgument)` also if nothing is written to
    /// any of them, or if the lists of the owners hold different numbers of tokens.
    fn shares(&self, execution: &Arc<Execution>, deadline: Deadline) -> Result<Vec<OwnerShare>> {
        checked_by_description(|describe| self.shares_by(describe, execution, deadline))
    }

    fn shares_by(
        &self,
        describe: Describe,
        execution: &Arc<Execution>,
        deadline: Deadline,
    ) -> Result<Vec<OwnerShare>> {
        let mut shares = fallible::with_capacity(PARTS, self.parts.len())?;
        let (mut expected, mut nothing) = (None, None);
        for (index, part) in self.parts.iter().enumerate() {
            let mut share = || {
                let call = self.call(part, execution, deadline)?;
                let named = |error: Error| call.named(error.with("name", part.name));
                let (name, row) = part.name.without_slot();
                let remote = describe(&call.link, name, deadline)?.remote.with_row(row);
                let share = part.checked.of_owner(expected).share(&remote).map_err(named)?;
                if let (OwnerShare::Nothing(_), Some(src), Some(dst)) = (share, part.local.kv(), &remote.kv) {
                    let reason = KvPart::common(src.layout(), dst.layout()).err().map(named);
                    nothing = nothing.take().or(reason.map(|reason| of_part(index, reason)));
                }
                Ok(share)
            };
            let share: OwnerShare = share().map_err(|error| of_part(index, error))?;
            expected = expected.or(share.tokens());
            shares.push(share);
        }
        let all = shares.iter().all(|share| matches!(share, OwnerShare::Nothing(_)));
        nothing.filter(|_| all).map_or(Ok(shares), Err)
    }
}

/// Adds the position of a part to its error.
fn of_part(index: usize, error: Error) -> Error {
    error.with("part", index)
}
