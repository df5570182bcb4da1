//! One pull, push or layer in progress, with its attempts.
//!
//! The description of a remote cache may be out of date. The owner or the generation number then shows it,
//! and the call starts over within its deadline.

use std::sync::Arc;
use std::time::Instant;

use super::async_call::Execution;
use crate::cache::{Cache, CallRows, RowUse};
use crate::copy::{HeldPins, PathJob, PathKind, Progress, Rule, takes_rings, with_arrived_rows};
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::fabric::EngineFabric;
use crate::memory::{Access, Reach};
use crate::model::{CacheKey, Deadline, GrantUse, Name, RemoteCacheName, Verify, Words};
use crate::plan::{CopyPlan, Side};
use crate::protocol::WireUsedKey;
use crate::resources::Resources;
use crate::session::{DescriptionSource, KnownCache, Link, ReservedNotification, StreamLease};
use crate::validate;

/// Maximum number of attempts, of one request each, of a call whose remote cache keeps changing.
const MAX_ATTEMPTS: usize = 8;

/// Result of an attempt that did not fail.
pub(crate) enum Moved {
    /// All bytes are in place; this is their number.
    Bytes(u64),
    /// All bytes are in place and were equal to their source when they arrived; this is their number.
    Equal(u64),
    /// The remote cache has changed and must be described again.
    Stale,
}

/// What is left to do once the bytes of a pull or push are in place.
#[derive(Default)]
pub(super) struct TransferEnd {
    /// The key of a pull that is to be released, or the grant that is to be reported as done.
    pub(super) used_key: Option<WireUsedKey>,
    /// What was copied from the tensors of the key, for the list of rows that are in place. `None` if no rows are listed.
    pub(super) copied: Option<(CopyPlan, Arc<Progress>)>,
    /// The local slot of a push whose key is to be released.
    pub(super) slot: Option<u32>,
}

#[cfg(feature = "testing")]
impl Moved {
    /// Returns the same without the knowledge that the bytes were equal.
    pub(super) fn unknown(self) -> Self {
        if let Moved::Equal(bytes) = self { Moved::Bytes(bytes) } else { self }
    }
}

/// One pull, push or layer in progress.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) resources: Arc<Resources>,
    pub(crate) link: Arc<Link>,
    /// The words of the caller, and which side the local cache is.
    pub(super) words: (&'static Words, Side),
    /// The name of the remote cache that the caller gave.
    pub(crate) name: RemoteCacheName,
    pub(crate) local: Arc<Cache>,
    pub(crate) deadline: Deadline,
    /// The asynchronous call that a worker executes. `None` for a synchronous call.
    pub(crate) execution: Option<Arc<Execution>>,
    /// Whether the call ends only when the peer has ended its reads of this process's memory, however late that is.
    pub(crate) to_the_end: bool,
    /// The notification that the peer gets at the end of the call.
    pub(crate) notify: Option<Arc<Vec<u8>>>,
    /// The grant under which the call pulls.
    pub(crate) grant: Option<GrantUse>,
    /// How thoroughly it checks the bytes that it has moved.
    pub(crate) verify: Verify,
}

impl Call {
    /// Takes the rows of the local cache that the call uses. Code that touches their memory keeps the result.
    pub(super) fn pin(&self, used: RowUse) -> Result<HeldPins> {
        Ok(match &self.execution {
            Some(execution) => {
                execution.pin(self.deadline)?;
                execution.clone()
            }
            None => Arc::new(CallRows::of(self.local.clone(), used).pin(self.deadline)?),
        })
    }

    /// Returns the progress of a new attempt to move `total` bytes.
    pub(super) fn new_progress(&self, total: u64) -> Arc<Progress> {
        self.execution
            .as_ref()
            .map_or_else(Arc::default, |execution| execution.transfer().new_progress(total))
    }

    /// Reserves room for the notification in the peer's queue, before the first byte moves.
    pub(super) fn reserve_notification(&self) -> Result<Option<ReservedNotification>> {
        self.notify.as_ref().map(|message| self.link.reserve_notification(message)).transpose()
    }

    /// Refuses a cancellation of an asynchronous call from now on. Returns `Err` if it must end early.
    pub(super) fn commit(&self) -> Result<()> {
        self.execution.as_ref().map_or(Ok(()), |execution| execution.transfer().commit())
    }

    /// Has the owner release a key whose bytes are in place, or note that this side is done with a grant, and delivers the
    /// notification: one request.
    pub(super) fn finish(&self, end: &TransferEnd, notification: Option<ReservedNotification>) -> Result<()> {
        let TransferEnd { used_key, copied, .. } = end;
        if used_key.is_none() && notification.is_none() {
            return Ok(());
        }
        if let Some(notification) = &notification {
            notification.wait_for_earlier(self.deadline)?;
        }
        self.commit()?;
        let finished = match notification {
            Some(notification) => notification.deliver(*used_key, self.deadline),
            None => self.link.finish(*used_key, self.deadline),
        };
        // These names are used once.
        let name = self.grant_name().or_else(|| self.name.name());
        if used_key.is_some()
            && let Some(name @ (Name::Key(CacheKey::Request { .. }) | Name::Grant(_))) = name
        {
            self.link.view.forget(&name);
        }
        finished.map_err(|error| match copied {
            Some((plan, progress)) => self.with_arrived(error, plan, progress),
            None => error,
        })
    }

    /// Adds the rows that have arrived to the error of a pull.
    pub(super) fn with_arrived(&self, error: Error, plan: &CopyPlan, progress: &Progress) -> Error {
        with_arrived_rows(error, progress, plan, self.local.geometry().row_sizes())
    }

    /// Runs `call` and counts it with its link. An unlink does not remove the link before `call` has ended.
    pub(crate) fn counted(&self, call: impl FnOnce() -> Result<u64>) -> Result<u64> {
        self.counted_as(1, call)
    }

    /// Runs `call` like [`counted`](Self::counted), but counts it as `count` calls. A failure counts as one call.
    pub(super) fn counted_as(&self, count: u32, call: impl FnOnce() -> Result<u64>) -> Result<u64> {
        let started = Instant::now();
        let _outgoing = self.resources.outgoing_calls.begin();
        let result = self.link.begin().and_then(|_active| call());
        self.link.stats.count_transfers(count, started.elapsed(), result.as_ref().ok().copied());
        result
    }

    /// Finds the remote cache and attempts the transfer, again for as long as the remote cache turns out to
    /// have changed. Returns `Err(CacheNotFound)` after [`MAX_ATTEMPTS`] attempts.
    pub(crate) fn attempts(&self, mut attempt: impl FnMut(&Arc<KnownCache>) -> Result<Moved>) -> Result<u64> {
        let granted = self.open_grant().map_err(|error| self.named(error))?;
        self.check_local()?;
        let mut known = match granted {
            Some(granted) => self.same_as_named(granted)?,
            None => self.remote_cache(DescriptionSource::Stored)?,
        };
        for _ in 0..MAX_ATTEMPTS {
            let outcome = self.check_remote(&known).and_then(|()| attempt(&known));
            match outcome {
                Ok(Moved::Bytes(bytes) | Moved::Equal(bytes)) => return Ok(bytes),
                Ok(Moved::Stale) => {
                    self.deadline.waiting("finding a cache of the peer that keeps changing")?;
                }
                // An argument that does not fit the known description may fit the cache that is there now.
                Err(error) if error.kind() == ErrorKind::InvalidArgument => {
                    let now = self.described()?;
                    if now.at == known.at && now.cache == known.cache {
                        return Err(self.named(error));
                    }
                    known = now;
                    continue;
                }
                Err(error) => return Err(self.named(error)),
            }
            known = self.described()?;
        }
        let text = "the remote cache changed during every attempt";
        Err(self.named(Error::new(ErrorKind::CacheNotFound, text)))
    }

    /// Checks that peers may use the local cache, if this engine requires it.
    pub(super) fn check_local(&self) -> Result<()> {
        check_accessible(self.words, &self.resources, &self.local)
    }

    /// Checks that this engine may use the remote cache.
    pub(super) fn check_remote(&self, known: &KnownCache) -> Result<()> {
        let (words, side) = self.words;
        let remote = side.other().of(words.sides()).remote;
        validate::check_accessible(words, remote, known.remote.accessible)
    }

    /// Returns the grant as a name of the remote cache, if there is one.
    pub(super) fn grant_name(&self) -> Option<Name> {
        self.grant.map(|grant| Name::Grant(grant.token.grant))
    }

    /// Returns the name of the remote cache for requests about it, from the name that the caller gave.
    pub(super) fn name_of(&self, known: &KnownCache) -> Name {
        self.name.name().unwrap_or(Name::of_cache(known.cache))
    }

    /// Returns the name of the remote cache for requests that read it: the grant, if there is one.
    pub(super) fn name_to_read(&self, known: &KnownCache) -> Name {
        self.grant_name().unwrap_or_else(|| self.name_of(known))
    }

    /// Returns the remote cache that the caller has named.
    pub(super) fn remote_cache(&self, from: DescriptionSource) -> Result<Arc<KnownCache>> {
        self.link.remote_cache(&self.name, from, self.deadline)
    }

    /// Checks that the peer gave the grant, and that it has not ended. Returns what it lends, or `None` if there is no grant.
    fn open_grant(&self) -> Result<Option<Arc<KnownCache>>> {
        let (Some(grant), Some(name)) = (&self.grant, self.grant_name()) else { return Ok(None) };
        self.link.check_token(&grant.token)?;
        self.link.known(name, self.deadline).map(Some)
    }

    /// Asks the owner for the description of the remote cache. Under a grant, also checks that the caller's name is one of the same
    /// cache.
    pub(super) fn described(&self) -> Result<Arc<KnownCache>> {
        let Some(grant) = self.grant_name() else { return self.remote_cache(DescriptionSource::Owner) };
        self.same_as_named(self.link.describe(grant, self.deadline)?)
    }

    /// Returns `granted` if the caller's name is one of its cache.
    fn same_as_named(&self, granted: Arc<KnownCache>) -> Result<Arc<KnownCache>> {
        let mut named = self.remote_cache(DescriptionSource::Stored);
        // A key that the cache has lost has changed the generation of its entry.
        if named.as_ref().is_ok_and(|named| named.at != granted.at) {
            named = self.remote_cache(DescriptionSource::Owner);
        }
        // If the key is gone or names another cache because the cache was released, the grant has ended.
        let differs = match &named {
            Ok(named) => named.cache != granted.cache,
            Err(error) => error.kind() == ErrorKind::CacheNotFound,
        };
        if differs && let Some(grant) = self.grant_name() {
            self.link.describe(grant, self.deadline)?;
        }
        let named = named?;
        ensure(!differs, || {
            let (granted, named) = (granted.cache, named.cache);
            let text =
                format!("the grant is for cache {granted} of its owner, and the key names cache {named}");
            self.named(Error::invalid(text))
        })?;
        Ok(granted)
    }

    /// Adds to an error which peer and which cache the call was for.
    pub(crate) fn named(&self, error: Error) -> Error {
        let error = if error.fact("incarnation").is_some() { error } else { self.link.named(error) };
        if error.fact("name").is_some() { error } else { error.with("name", &self.name) }
    }

    /// Returns what a path needs to move the bytes of `plan` for this call.
    pub(super) fn job<'a>(&'a self, plan: &'a CopyPlan) -> PathJob<'a> {
        PathJob { copy_engine: &self.resources.copy_engine, plan, deadline: self.deadline }
    }

    /// Whether a failure of UCX fails the call: the configuration requires it, and this link uses it.
    pub(super) fn only_fabric(&self) -> bool {
        let required = self.resources.fabric.as_ref().is_ok_and(EngineFabric::is_required);
        required && self.link.view.uses_fabric()
    }

    /// Records why the owner sends the bytes of this transfer. Logs the reason when it differs from the previous one.
    pub(super) fn owner_sends(&self, reason: &str) {
        if self.link.stats.owner_sends(reason) {
            let peer = &self.link.peer;
            tracing::info!(target: "llm_datadist::links", "the owner sends the bytes of transfers with {peer}: {reason}");
        }
    }

    /// Counts a plan whose bytes were read on `path`. `staged` is whether they passed host buffers at this end.
    pub(super) fn count_read(&self, path: PathKind, bytes: u64, staged: bool) {
        self.link.stats.count_path(path, Rule::of(path, false), bytes, staged);
    }

    /// Counts a plan whose bytes went through streams on `path`. `short` is whether the transfer was too short for a read that was possible.
    pub(super) fn count_sent(&self, path: PathKind, short: bool, bytes: u64) {
        let staged = self.local.tensors().reach() == Reach::Device;
        self.link.stats.count_path(path, Rule::of(path, short), bytes, staged);
    }

    /// Returns an idle stream with rings if a transfer of `bytes` bytes takes it instead of `path`.
    pub(super) fn rings_instead_of(&self, path: PathKind, bytes: u64) -> Option<StreamLease> {
        let local = self.local.tensors();
        // A stream needs the whole local cache to have pages. For a push, a read by process id needs only the rows of the plan.
        let usable =
            takes_rings(path, bytes) && local.host_addressable() && local.check_present(Access::Read).is_ok();
        if usable { self.link.lease_idle_rings() } else { None }
    }
}

/// Checks the local cache: in remote-accessible mode both caches must be remotely accessible (contract §12.4). In the native API, only
/// the remote one: `shared` says who finds a cache.
pub(crate) fn check_accessible(
    (words, local_side): (&Words, Side),
    resources: &Resources,
    local: &Cache,
) -> Result<()> {
    if resources.config.remote_accessible && !resources.config.native {
        let name = local_side.of(words.sides()).local;
        validate::check_accessible(words, name, local.remote_accessible())?;
    }
    Ok(())
}
