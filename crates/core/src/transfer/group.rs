//! Groups: several pulls or pushes in one asynchronous call, which succeeds or fails as a whole.
//!
//! The parts run one after the other on one lane, with all rows of all parts taken. Keys are released only when the
//! bytes of every part are in place.

use std::sync::Arc;

use super::async_call::Execution;
use super::call::Call;
use super::call_grant::{CallGrant, GrantUse};
use super::pull::PullEnd;
use crate::cache::Cache;
use crate::error::{Error, Result, ensure};
use crate::fallible;
use crate::model::{ClusterId, Deadline, Name, Verify};
use crate::plan::{KvPart, assign_owners, check_same_model};
use crate::resources::Resources;
use crate::session::LinkOfCall;
use crate::stats::Op;
use crate::validate::{CheckedPull, CheckedPush, PullRows, PushRows, RemoteCache};

/// Name of these lists in out-of-memory errors.
const PARTS: &str = "the parts of a group";

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
    /// Whether the parts are several owners of one local cache: each layer and head is then read from one of them.
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
            grant: part.grant.map(CallGrant::new),
            verify: self.verify,
        })
    }
}

impl Group<CheckedPull<PullRows>> {
    /// Pulls all parts.
    pub(crate) fn pull(&self, execution: &Arc<Execution>, deadline: Deadline) -> Result<u64> {
        let assigned = if self.owners { Some(self.assigned(execution, deadline)?) } else { None };
        let part = |index: usize, call: &Call, part: &GroupPart<CheckedPull<PullRows>>| match &assigned {
            Some(assigned) => call.pull_checked(&part.checked.of_parts(assigned[index].clone())),
            None => call.pull_checked(&part.checked),
        };
        let finish = |call: &Call, end| call.finish(&end, None);
        let bytes = self.run(execution, deadline, part, finish)?;
        self.resources.count_bytes(Op::Pull, bytes);
        Ok(bytes)
    }

    /// Asks every owner for the layout of its cache, and returns which layers and heads to read from each.
    fn assigned(&self, execution: &Arc<Execution>, deadline: Deadline) -> Result<Vec<Vec<KvPart>>> {
        let missing = |which: &str| {
            Error::invalid(format!("several owners of one cache need KV layouts: the {which} cache has none"))
        };
        let local = self.parts[0].local.kv().ok_or_else(|| missing("local"))?;
        let mut owners = fallible::with_capacity(PARTS, self.parts.len())?;
        for (index, part) in self.parts.iter().enumerate() {
            let described = || {
                let call = self.call(part, execution, deadline)?;
                let known = call.link.known(part.name, deadline)?;
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
        self.check_assigned(owners.iter().map(|(known, _)| &known.remote).zip(&assigned))?;
        Ok(assigned)
    }

    /// Checks what is read from each owner before the first byte moves, and not when the turn of its owner comes.
    fn check_assigned<'a>(
        &self,
        owners: impl Iterator<Item = (&'a RemoteCache, &'a Vec<KvPart>)>,
    ) -> Result<()> {
        let mut first = None;
        for (index, (remote, parts)) in owners.enumerate() {
            let checked = self.parts[index].checked.of_parts(parts.clone());
            let conversion = checked.conversion(remote).map_err(|error| of_part(index, error))?;
            let Some(tokens) = conversion.and_then(|conversion| conversion.tokens) else { continue };
            let expected = *first.get_or_insert(tokens);
            ensure(tokens == expected, || {
                let text = format!(
                    "the lists of the owners hold different numbers of tokens, {expected} and {tokens}: name the tokens \
                     that move (src_tokens, dst_tokens)"
                );
                of_part(index, Error::invalid(text))
            })?;
        }
        Ok(())
    }
}

impl Group<CheckedPush<PushRows>> {
    /// Pushes all parts.
    pub(crate) fn push(&self, execution: &Arc<Execution>, deadline: Deadline) -> Result<u64> {
        let part = |_, call: &Call, part: &GroupPart<CheckedPush<PushRows>>| {
            let call = Call { name: part.name.without_slot().0, ..call.clone() };
            call.push_checked(part.name, &part.checked)
        };
        let bytes = self.run(execution, deadline, part, Call::release_slot)?;
        self.resources.count_bytes(Op::Push, bytes);
        Ok(bytes)
    }
}

/// Adds the position of a part to its error.
fn of_part(index: usize, error: Error) -> Error {
    error.with("part", index)
}
