//! Copies, pulls and pushes of pairs of rows: what the rows must be, and which call of the engine moves them.

use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::block_rows::{BlockRows, RowsPart};
use super::cache_names::{EngineName, OwnCache, PeerCache, RowsCache};
use super::moved_rows::{self, layer_range};
use crate::engine::{CallExtras, CopyMember, DataDist, GroupMember, LayerReceiver};
use crate::error::{Error, Result, ensure};
use crate::events::Transfer;
use crate::fallible;
use crate::model::{GrantUse, Verify, Words};
use crate::plan::Side;
use crate::transfer::LayerTask;
use crate::validate::{Destination, LayerwiseArgs, Target};

/// Name of the lists in out-of-memory errors.
const PAIRS: &str = "the pairs of a call";

/// One value for each pair. Most calls have one pair, which needs no memory.
type OfEach<T> = SmallVec<[T; 1]>;

/// The destination and the source of a pair.
pub type RowsOfPair<'a> = (&'a BlockRows, &'a BlockRows);

/// What a call does beside moving bytes.
#[derive(Clone, Debug, Default)]
pub struct PairExtras {
    /// The grants under which a pull reads: one entry for each pair, or none for no grants.
    pub grants: Vec<Option<GrantUse>>,
    /// The message for the peer.
    pub notify: Option<Vec<u8>>,
    /// How the bytes are compared; as the engine does if `None`.
    pub verify: Option<Verify>,
    /// The time limit of the call, or of each layer; that of the engine if `None`.
    pub limit: Option<Duration>,
}

/// Pairs of rows of one engine.
pub struct OwnPairs<'a>(OfEach<OwnPair<'a>>);

/// A pair of rows, and the caches to which they belong.
struct OwnPair<'a> {
    rows: RowsOfPair<'a>,
    caches: (&'a OwnCache, &'a OwnCache),
}

/// Pairs of rows, of which one side belongs to an engine, and the other one to its peers.
pub struct PeerPairs<'a> {
    /// The side of the rows of the engine.
    local_side: Side,
    pairs: OfEach<PeerPair<'a>>,
}

/// One pair of rows of a call with a peer, and the caches to which they belong.
struct PeerPair<'a> {
    local: &'a BlockRows,
    own: &'a Arc<OwnCache>,
    remote: &'a BlockRows,
    of_peer: &'a PeerCache,
}

impl<'a> OwnPairs<'a> {
    /// Checks that both sides of each pair are of `engine`.
    pub fn checked(
        engine: &EngineName,
        pairs: impl ExactSizeIterator<Item = RowsOfPair<'a>>,
    ) -> Result<Self> {
        each(pairs, |(dst, src)| {
            let caches = (own("dst", dst)?, own("src", src)?);
            same_engine(engine, "dst", &caches.0.engine)?;
            same_engine(engine, "src", &caches.1.engine)?;
            Ok(OwnPair { rows: (dst, src), caches: (caches.0, caches.1) })
        })
        .map(OwnPairs)
    }

    /// Starts to copy. `engine` is that of the rows. A copy takes no grants, and no message.
    pub fn copy(&self, engine: &DataDist, extras: &PairExtras) -> Result<Arc<Transfer>> {
        no_grants(&extras.grants)?;
        if let Some(message) = &extras.notify {
            return Err(Error::argument("len(notify)", message.len(), "absent: a copy has no peer"));
        }
        let parts = each(self.0.iter(), |pair| {
            let ((dst, src), (to, from)) = (pair.rows, pair.caches);
            let (pairs, part) = moved_rows::within_engine(dst, src)?;
            Ok(CopyMember { dst: to.end(), src: from.end(), pairs, part })
        })?;
        match &parts[..] {
            [CopyMember { dst, src, pairs, part }] => {
                engine.copy(dst, src, pairs, *part, extras.verify).within(extras.limit).start()
            }
            _ => engine.copy_group(&parts, extras.verify, extras.limit),
        }
    }
}

impl<'a> PeerPairs<'a> {
    /// Checks that the side `local_side` of each pair is of `engine`, and the other one of a peer of it.
    pub fn checked(
        engine: &EngineName,
        local_side: Side,
        pairs: impl ExactSizeIterator<Item = RowsOfPair<'a>>,
    ) -> Result<Self> {
        let (own_name, peer_name) = local_side.of((("src", "dst"), ("dst", "src")));
        let pairs = each(pairs, |(dst, src)| {
            let (local, remote) = local_side.of(((src, dst), (dst, src)));
            let swapped = matches!((local.cache(), remote.cache()), (RowsCache::Peer(_), RowsCache::Own(_)));
            let own = own(own_name, local)
                .map_err(|error| if swapped { error.with_text("; dst comes before src") } else { error })?;
            let of_peer = of_peer(peer_name, remote)?;
            same_engine(engine, own_name, &own.engine)?;
            same_engine(engine, peer_name, &of_peer.engine)?;
            Ok(PeerPair { local, own, remote, of_peer })
        })?;
        Ok(PeerPairs { local_side, pairs })
    }

    /// Starts the pull or push. `engine` is that of the rows.
    pub fn start(&self, engine: &DataDist, extras: PairExtras) -> Result<Arc<Transfer>> {
        let PairExtras { grants, notify, verify, limit } = extras;
        ensure(grants.is_empty() || grants.len() == self.pairs.len(), || {
            let required = format!("0 or {}, one for each pair", self.pairs.len());
            Error::argument("len(grants)", grants.len(), required)
        })?;
        let extras = CallExtras { notify, verify, words: Words::NATIVE, ..CallExtras::default() };
        let member = |(index, pair): (usize, &PeerPair<'a>)| {
            let moved =
                moved_rows::with_peer(self.local_side, pair.local, pair.remote, pair.own.tensors_per_layer);
            let (rows, layers) = moved.map_err(|error| of_part(error, index, self.pairs.len()))?;
            let (remote, grant) = (pair.of_peer.remote_name(), grants.get(index).copied().flatten());
            Ok(GroupMember { remote, local: pair.own.end(), rows, layers, grant })
        };
        if let [pair] = &self.pairs[..] {
            let GroupMember { remote, local, rows, layers, grant } = member((0, pair))?;
            let extras = CallExtras { grant, ..extras };
            let operation = engine.transfer(self.local_side, remote, &local, (rows, layers), extras);
            return operation.within(limit).start();
        }
        let members = fallible::try_collect(PAIRS, self.pairs.iter().enumerate().map(member))?;
        engine.transfer_group(self.local_side, members, are_shares(&self.pairs), extras, limit)
    }

    /// Starts a push of which the caller reports each layer. `engine` is that of the rows. A push takes no grants.
    pub fn start_layers(&self, engine: &DataDist, extras: PairExtras) -> Result<LayerTask> {
        let PairExtras { grants, notify, verify, limit } = extras;
        no_grants(&grants)?;
        let extras = CallExtras { notify, verify, words: Words::NATIVE, ..CallExtras::default() };
        let first = self.pairs.first().ok_or_else(|| Error::argument("len(dst)", 0, "at least 1"))?;
        let receivers = each(self.pairs.iter(), |pair| receiver(pair, first.own))?;
        engine.begin_push(&first.own.end(), receivers.into_vec(), limit, extras)
    }
}

/// Refuses the grants of a call that reads nothing of a peer.
fn no_grants(grants: &[Option<GrantUse>]) -> Result<()> {
    ensure(grants.is_empty(), || Error::argument("len(grants)", grants.len(), "0: only a pull takes grants"))
}

/// Returns the cache of rows that `engine` may lend: whole blocks of a cache of it.
pub(super) fn lent_cache<'a>(engine: &EngineName, rows: &'a BlockRows) -> Result<&'a Arc<OwnCache>> {
    let cache = own("rows", rows)?;
    same_engine(engine, "rows", &cache.engine)?;
    if *rows.part() != RowsPart::default() {
        return Err(Error::argument("rows", rows, "rows of whole blocks"));
    }
    Ok(cache)
}

/// Runs `read` for each pair. An error says which one it is about, if there are several.
fn each<P, T>(pairs: impl ExactSizeIterator<Item = P>, read: impl Fn(P) -> Result<T>) -> Result<OfEach<T>> {
    let count = pairs.len();
    let mut all = fallible::inline_with_capacity(PAIRS, count)?;
    for (index, pair) in pairs.enumerate() {
        all.push(read(pair).map_err(|error| of_part(error, index, count))?);
    }
    Ok(all)
}

/// Adds to an error which one of this many pairs it is about.
fn of_part(error: Error, index: usize, pairs: usize) -> Error {
    if pairs > 1 { error.with("part", index) } else { error }
}

/// Whether the pairs name the same rows of this engine, so that the caches of the peers hold shares of them: some layers and heads
/// each, which only layouts tell.
fn are_shares(pairs: &[PeerPair<'_>]) -> bool {
    let [first, others @ ..] = pairs else { return false };
    let same = |pair: &PeerPair<'_>| ptr::eq(first.local, pair.local) || first.local == pair.local;
    let narrowed =
        |pair: &PeerPair<'_>| [pair.local, pair.remote].iter().any(|rows| rows.part().layers.is_some());
    first.own.block_tokens.is_some() && others.iter().all(same) && !pairs.iter().any(narrowed)
}

/// Returns one destination of a layer-wise push of layers of `cache`.
fn receiver(pair: &PeerPair<'_>, cache: &OwnCache) -> Result<LayerReceiver> {
    if **pair.own != *cache {
        return Err(Error::argument("src", pair.local, "rows of one cache in a layer-wise push"));
    }
    for (name, rows) in [("src", pair.local), ("dst", pair.remote)] {
        if rows.part().tokens.is_some() || rows.part().bytes.is_some() {
            return Err(Error::argument(name, rows, "rows of whole blocks in a layer-wise push"));
        }
    }
    let (read, written) = (&pair.local.part().layers, &pair.remote.part().layers);
    if read.is_some() != written.is_some() {
        let required = "rows with layers if src has layers, and without if it has none";
        return Err(Error::argument("dst", pair.remote, required));
    }
    let read = layer_range(&read.clone().unwrap_or(0..pair.own.layers()));
    let (written, layers) = (written.as_ref().map(layer_range), read.end - read.first);
    if let Some(written) = written.filter(|written| written.end - written.first != layers) {
        let many = format!("{} layers", written.end - written.first);
        return Err(Error::argument("dst", many, format!("{layers}, as many as src has")));
    }
    let target = Target::Cache {
        name: pair.of_peer.name.clone().into(),
        first_layer: written.map(|written| written.first),
    };
    let args = LayerwiseArgs {
        src_blocks: unsigned(pair.local.blocks())?,
        dst_blocks: unsigned(pair.remote.blocks())?,
        dst_block_bytes: None,
        tensors_per_layer: pair.own.tensors_per_layer,
    };
    let to = Destination { cluster: pair.of_peer.cluster, target, src_layers: read, src_row: 0 };
    Ok(LayerReceiver { to, args })
}

/// Returns the blocks as the core counts them. A negative one becomes one that no cache has.
fn unsigned(blocks: &[i64]) -> Result<Vec<u64>> {
    fallible::collect(PAIRS, blocks.iter().map(|&block| u64::try_from(block).unwrap_or(u64::MAX)))
}

fn own<'a>(name: &str, rows: &'a BlockRows) -> Result<&'a Arc<OwnCache>> {
    match rows.cache() {
        RowsCache::Own(cache) => Ok(cache),
        RowsCache::Peer(_) => Err(Error::argument(name, rows, "rows of a cache of this engine")),
    }
}

fn of_peer<'a>(name: &str, rows: &'a BlockRows) -> Result<&'a PeerCache> {
    match rows.cache() {
        RowsCache::Peer(cache) => Ok(cache),
        RowsCache::Own(_) => Err(Error::argument(name, rows, "rows of a cache of a peer")),
    }
}

/// Checks that the rows given as the argument `name` are of `engine`.
fn same_engine(engine: &EngineName, name: &str, of: &EngineName) -> Result<()> {
    if engine == of {
        return Ok(());
    }
    let other = format!("rows of engine '{}'", &**of);
    Err(Error::argument(name, other, format!("rows of engine '{}'", &**engine)))
}

#[cfg(test)]
mod tests {
    use super::unsigned;

    #[test]
    fn negative_block_is_no_block_of_any_cache() {
        assert_eq!(unsigned(&[0, 7, -1, -7, i64::MIN]).unwrap(), [0, 7, u64::MAX, u64::MAX, u64::MAX]);
    }
}
