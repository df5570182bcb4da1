//! Groups: several pulls or pushes in one asynchronous call, which succeeds or fails as a whole.
//!
//! The parts run one after the other on one worker, with all rows of all parts taken. Keys are released only when the
//! bytes of every part are in place.

use std::sync::Arc;

use super::async_call::Execution;
use super::call::{Call, TransferEnd};
use super::peer_transfer::PeerTransfer;
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::Deadline;
use crate::plan::{KvPart, Side, assign_owners, check_same_model};
use crate::resources::Resources;
use crate::session::DescriptionSource;
use crate::stats::Op;
use crate::validate::OwnerShare;

/// Name of these lists in out-of-memory errors.
const PARTS: &str = "the parts of a group";

/// The parts of one group.
pub(crate) struct Group {
    pub(crate) resources: Arc<Resources>,
    /// The first one has the notification of the group.
    pub(crate) parts: Vec<PeerTransfer>,
    /// Whether the parts are several owners of one local cache, which are checked before the first byte moves. Each layer and
    /// head is read from one of them, and written to all that hold it.
    pub(crate) owners: bool,
}

impl Group {
    /// Moves the bytes of all parts, and returns their number.
    pub(crate) fn run(&self, execution: &Arc<Execution>, deadline: Deadline) -> Result<u64> {
        let (shares, all) = (self.shares(execution, deadline)?, Some(OwnerShare::default()));
        let (mut bytes, mut notification) = (0, None);
        let mut moved = fallible::with_capacity(PARTS, self.parts.len())?;
        for (index, part) in self.parts.iter().enumerate() {
            let call = self.call(part, execution, deadline).map_err(|error| of_part(index, error))?;
            if index == 0 {
                notification = call.reserve_notification()?;
            }
            let mut end = TransferEnd::default();
            let counted = call.counted(|| {
                let Some(share) = shares.get(index).unwrap_or(&all) else { return Ok(0) };
                let (bytes, left) = part.moved(&call, share)?;
                end = left;
                Ok(bytes)
            });
            let part_bytes = counted.map_err(|error| of_part(index, error))?;
            execution.transfer().part_done(part_bytes);
            bytes += part_bytes;
            moved.push((call, end));
        }
        for (index, (call, end)) in moved.iter().enumerate() {
            let finished = call.finish(end, None).and_then(|()| call.release_slot(end.slot));
            finished.map_err(|error| of_part(index, call.named(error)))?;
        }
        if let Some((call, _)) = moved.first().filter(|_| notification.is_some()) {
            call.finish(&TransferEnd::default(), notification).map_err(|error| call.named(error))?;
        }
        self.resources.stats.add_bytes(self.local_side().of((Op::Push, Op::Pull)), bytes);
        Ok(bytes)
    }

    /// Returns what moves between each owner and the local cache; `None` for nothing. Empty unless the parts are owners.
    fn shares(&self, execution: &Arc<Execution>, deadline: Deadline) -> Result<Vec<Option<OwnerShare>>> {
        if !self.owners {
            return Ok(Vec::new());
        }
        match self.shares_by(DescriptionSource::Stored, execution, deadline) {
            // The stored descriptions may be outdated, as in `Call::attempts`.
            Err(error) if error.kind() == ErrorKind::InvalidArgument => {
                self.shares_by(DescriptionSource::Owner, execution, deadline)
            }
            shares => shares,
        }
    }

    fn shares_by(
        &self,
        from: DescriptionSource,
        execution: &Arc<Execution>,
        deadline: Deadline,
    ) -> Result<Vec<Option<OwnerShare>>> {
        match self.local_side() {
            Side::Destination => self.pulled_shares(from, execution, deadline),
            Side::Source => self.pushed_shares(from, execution, deadline),
        }
    }

    fn local_side(&self) -> Side {
        self.parts[0].checked.local_side()
    }

    fn call(&self, part: &PeerTransfer, execution: &Arc<Execution>, deadline: Deadline) -> Result<Call> {
        let link = part.link.find(deadline)?;
        Ok(part.call(self.resources.clone(), link, Some(execution.clone()), deadline))
    }

    /// Finds out the layout of every owner's cache by its description, and returns what to read from each owner.
    fn pulled_shares(
        &self,
        from: DescriptionSource,
        execution: &Arc<Execution>,
        deadline: Deadline,
    ) -> Result<Vec<Option<OwnerShare>>> {
        let missing = |end: &str| {
            Error::invalid(format!("several owners of one cache need KV layouts: the {end} cache has none"))
        };
        let local = self.parts[0].local.kv().ok_or_else(|| missing("local"))?;
        let mut owners = fallible::with_capacity(PARTS, self.parts.len())?;
        for (index, part) in self.parts.iter().enumerate() {
            let described = || {
                let call = self.call(part, execution, deadline)?;
                let known = call.remote_cache(from)?;
                let layout = known.remote.kv.clone().ok_or_else(|| missing("remote"))?;
                check_same_model(&layout, local).map_err(|error| call.named(error))?;
                Ok((known, layout))
            };
            owners.push(described().map_err(|error| of_part(index, error))?);
        }
        let mut layouts = fallible::with_capacity(PARTS, owners.len())?;
        layouts.extend(owners.iter().map(|(_, layout)| layout.layout()));
        // Neighbouring ranks usually have neighbouring ids, and are to read from different replicas. The id of a native engine is
        // drawn: there the order of the list decides.
        let config = &self.resources.config;
        let reader = if config.native { 0 } else { usize::try_from(config.cluster.0).unwrap_or(usize::MAX) };
        let assigned = assign_owners(&KvPart::of(local.layout()), &layouts, reader)?;
        let mut shares = fallible::with_capacity(PARTS, owners.len())?;
        // Each is checked here, before the first byte moves, and not only when the turn of its owner comes.
        let mut tokens = None;
        for (index, (parts, (known, _))) in assigned.into_iter().zip(&owners).enumerate() {
            let share = OwnerShare { parts: Some(parts), tokens };
            let planned = self.parts[index].checked.plan(&known.remote, &share);
            tokens = tokens.or(planned.map_err(|error| of_part(index, error))?.tokens);
            shares.push(Some(share));
        }
        shares.iter_mut().flatten().for_each(|share| share.tokens = tokens);
        Ok(shares)
    }

    /// Checks the push to each owner, and returns what to write there; `None` if the caches have no layer or no head in common.
    /// `Err(InvalidArgument)` also if nothing is written to any of them, or if the lists of the owners hold different numbers of
    /// tokens.
    fn pushed_shares(
        &self,
        from: DescriptionSource,
        execution: &Arc<Execution>,
        deadline: Deadline,
    ) -> Result<Vec<Option<OwnerShare>>> {
        let mut shares = fallible::with_capacity(PARTS, self.parts.len())?;
        let (mut expected, mut nothing) = (None, None);
        for (index, part) in self.parts.iter().enumerate() {
            let share = || {
                let call = self.call(part, execution, deadline)?;
                let named = |error: Error| call.named(error.with("name", &part.name));
                let (_, row) = part.name.without_slot();
                let remote = call.remote_cache(from)?.remote.with_row(row);
                let share = OwnerShare { parts: None, tokens: expected };
                let (tokens, nothing) = part.checked.check_share(&remote, &share).map_err(named)?;
                Ok((tokens, nothing.map(named)))
            };
            let (tokens, reason) = share().map_err(|error| of_part(index, error))?;
            expected = expected.or(tokens);
            shares.push(reason.is_none().then_some(OwnerShare { parts: None, tokens }));
            nothing = nothing.or(reason.map(|reason| of_part(index, reason)));
        }
        let all = shares.iter().all(Option::is_none);
        nothing.filter(|_| all).map_or(Ok(shares), Err)
    }
}

/// Adds the position of a part to its error.
fn of_part(index: usize, error: Error) -> Error {
    error.with("part", index)
}
