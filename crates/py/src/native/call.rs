//! Copies, pulls and pushes: reads their arguments, in one order for all of them, and starts the transfer.

use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::bindings::{fallible, validate};
use llm_datadist_core::{
    CallExtras, CopyMember, DataDist, Destination, End, Error, GrantToken, GrantUse, GroupMember, LayerRange,
    LayerReceiver, LayerTask, LayerwiseArgs, RemoteName, Result, Target, Transfer, Verify, Words,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use super::cache_names::{OwnCache, PeerCache, RowsCache};
use super::errors::{invalid, raise};
use super::moved_rows::{self, PeerCall};
use super::rows::{BlockRows, RowsPart};
use super::shared::EngineShared;
use super::transfer::NativeTransfer;
use super::values::{self, wrong_type};
use crate::convert::{self, Any};

/// Name of the lists in out-of-memory errors.
const PAIRS: &str = "the pairs of a call";

/// The unchecked arguments of a call beside its rows.
#[derive(Default)]
pub(crate) struct GivenExtras<'a, 'py> {
    /// A token, or a list with a token or `None` for each pair.
    pub(crate) grant: Option<&'a Any<'py>>,
    /// Whether this is the last pull under the grants.
    pub(crate) last: bool,
    /// The message for the peer.
    pub(crate) notify: Option<&'a Any<'py>>,
    /// How the bytes are compared.
    pub(crate) verify: Option<&'a Any<'py>>,
    /// The time limit in seconds.
    pub(crate) timeout: Option<&'a Any<'py>>,
}

/// What a call does beside moving bytes.
struct Extras {
    grants: Vec<Option<GrantUse>>,
    notify: Option<Vec<u8>>,
    verify: Option<Verify>,
    limit: Option<Duration>,
}

/// The destination and the source of a pair.
type RowsOfPair<'a> = (&'a BlockRows, &'a BlockRows);

/// One pair of rows of a call with a peer, and the caches to which they belong.
struct PeerPair<'a> {
    local: &'a BlockRows,
    own: &'a Arc<OwnCache>,
    remote: &'a BlockRows,
    of_peer: &'a Arc<PeerCache>,
}

/// The rows of a call: a destination and a source, or a list of such pairs.
pub(crate) struct Pairs<'py>(Vec<(Bound<'py, BlockRows>, Bound<'py, BlockRows>)>);

impl<'py> Pairs<'py> {
    /// Reads `(dst, src)`, or a list of such pairs in place of `dst`.
    pub(crate) fn read(dst: &Any<'py>, src: Option<&Any<'py>>) -> PyResult<Self> {
        if let Some(src) = src {
            return Ok(Pairs(vec![(rows("dst", dst)?, rows("src", src)?)]));
        }
        if dst.is_instance_of::<BlockRows>() {
            let text = "src is missing: give the rows that are read, or a list of (dst, src) pairs";
            return Err(PyTypeError::new_err(text));
        }
        if !dst.is_instance_of::<PyList>() && !dst.is_instance_of::<PyTuple>() {
            return Err(wrong_type("dst", "Rows, or a list of (dst, src) pairs", dst));
        }
        let items = convert::listed("dst", dst)?;
        if items.is_empty() {
            return Err(invalid(dst.py(), "len(dst)", 0, "at least 1"));
        }
        let pairs = items.iter().enumerate().map(|(index, item)| {
            let name = format!("dst[{index}]");
            let pair = item.cast::<PyTuple>().ok().filter(|pair| pair.len() == 2);
            let pair = pair.ok_or_else(|| wrong_type(&name, "a pair (dst, src) of Rows", item))?;
            Ok((rows(&name, &pair.get_item(0)?)?, rows(&name, &pair.get_item(1)?)?))
        });
        convert::gathered(dst.py(), items.len(), pairs).map(Pairs)
    }

    /// Returns the destination and the source of each pair, for code that may run detached from the interpreter.
    fn all(&self) -> Result<Vec<RowsOfPair<'_>>> {
        fallible::collect(PAIRS, self.0.iter().map(|(dst, src)| (dst.get(), src.get())))
    }

    /// Returns the number of blocks in all lists.
    fn num_blocks(&self) -> usize {
        self.0.iter().map(|(dst, src)| dst.get().blocks().len() + src.get().blocks().len()).sum()
    }
}

/// Runs `read` for each pair. An error says which one it is about, if there are several.
fn each<'a, T>(
    pairs: &[RowsOfPair<'a>],
    read: impl Fn(&'a BlockRows, &'a BlockRows) -> Result<T>,
) -> Result<Vec<T>> {
    let part = |(index, &(dst, src)): (usize, &RowsOfPair<'a>)| {
        read(dst, src).map_err(|error| of_part(error, index, pairs.len()))
    };
    fallible::try_collect(PAIRS, pairs.iter().enumerate().map(part))
}

/// Adds to an error which one of this many pairs it is about.
fn of_part(error: Error, index: usize, pairs: usize) -> Error {
    if pairs > 1 { error.with("part", index) } else { error }
}

/// Checks that one end of each pair is of `engine` and the other one of a peer of it.
fn with_peer<'a>(
    engine: &EngineShared,
    call: PeerCall,
    pairs: &[RowsOfPair<'a>],
) -> Result<Vec<PeerPair<'a>>> {
    let (own_name, peer_name) = match call {
        PeerCall::Pull => ("dst", "src"),
        PeerCall::Push => ("src", "dst"),
    };
    each(pairs, |dst, src| {
        let (local, remote) = if call == PeerCall::Pull { (dst, src) } else { (src, dst) };
        let (own, of_peer) = (own(own_name, local)?, of_peer(peer_name, remote)?);
        same_engine(engine, own_name, &own.shared)?;
        same_engine(engine, peer_name, &of_peer.shared)?;
        Ok(PeerPair { local, own, remote, of_peer })
    })
}

/// Starts a copy within an engine.
pub(crate) fn copy(
    py: Python<'_>,
    shared: &Arc<EngineShared>,
    pairs: &Pairs<'_>,
    given: &GivenExtras<'_, '_>,
) -> PyResult<Py<NativeTransfer>> {
    let ends = |dst, src| {
        let (dst, src) = (own("dst", dst)?, own("src", src)?);
        same_engine(shared, "dst", &dst.shared)?;
        same_engine(shared, "src", &src.shared)?;
        Ok((dst.end(), src.end()))
    };
    let all = shared.engine.attached(py, |_| {
        let all = pairs.all()?;
        each(&all, ends).map(|_| all)
    })?;
    let Extras { verify, limit, .. } = extras(py, all.len(), given)?;
    let transfer = shared.engine.start(py, pairs.num_blocks(), |engine| {
        let parts = each(&all, |dst, src| {
            let ((pairs, part), (dst, src)) = (moved_rows::within_engine(dst, src)?, ends(dst, src)?);
            Ok(CopyMember { dst, src, pairs, part })
        })?;
        let copies = match &parts[..] {
            [CopyMember { dst, src, pairs, part }] => engine.copy(dst, src, pairs, *part, verify),
            _ => engine.copy_group(&parts, verify),
        };
        copies.within(limit).start()
    })?;
    NativeTransfer::started(py, shared, &transfer)
}

/// Starts a pull or push.
pub(crate) fn move_rows(
    py: Python<'_>,
    shared: &Arc<EngineShared>,
    call: PeerCall,
    pairs: &Pairs<'_>,
    given: &GivenExtras<'_, '_>,
) -> PyResult<Py<NativeTransfer>> {
    let peers = shared.engine.attached(py, |_| with_peer(shared, call, &pairs.all()?))?;
    let extras = extras(py, peers.len(), given)?;
    let transfer =
        shared.engine.start(py, pairs.num_blocks(), |engine| start(engine, call, &peers, extras))?;
    NativeTransfer::started(py, shared, &transfer)
}

/// Starts a push of which the caller reports each layer.
pub(crate) fn push_layers(
    py: Python<'_>,
    shared: &Arc<EngineShared>,
    pairs: &Pairs<'_>,
    given: &GivenExtras<'_, '_>,
) -> PyResult<Py<NativeTransfer>> {
    let peers = shared.engine.attached(py, |_| with_peer(shared, PeerCall::Push, &pairs.all()?))?;
    let extras = extras(py, peers.len(), given)?;
    let task = shared.engine.start(py, pairs.num_blocks(), |engine| start_layers(engine, &peers, extras))?;
    NativeTransfer::of_layers(py, shared, task)
}

fn start(engine: &DataDist, call: PeerCall, pairs: &[PeerPair<'_>], extras: Extras) -> Result<Arc<Transfer>> {
    let Extras { grants, notify, verify, limit } = extras;
    let extras = CallExtras { notify, verify, words: Words::NATIVE, ..CallExtras::default() };
    let mut members = fallible::with_capacity(PAIRS, pairs.len())?;
    for (index, (pair, grant)) in pairs.iter().zip(grants).enumerate() {
        let moved = moved_rows::with_peer(call, pair.local, pair.remote, pair.own.tensors_per_layer);
        let (rows, layers) = moved.map_err(|error| of_part(error, index, pairs.len()))?;
        let remote = RemoteName { cluster: pair.of_peer.cluster, name: pair.of_peer.name.clone() };
        members.push(GroupMember { remote, local: pair.own.end(), rows, layers, grant });
    }
    let shares = are_shares(pairs);
    let operation = match (call, members.len() == 1, shares) {
        (PeerCall::Pull, false, true) => engine.pull_owners(members, extras),
        (PeerCall::Push, false, true) => engine.push_owners(members, extras),
        (PeerCall::Pull, false, false) => engine.pull_group(members, extras),
        (PeerCall::Push, false, false) => engine.push_group(members, extras),
        (_, true, _) => {
            let GroupMember { remote, local, rows, layers, grant } = members.remove(0);
            let extras = CallExtras { grant, ..extras };
            match call {
                PeerCall::Pull => engine.pull_with(remote, &local, rows, layers, extras),
                PeerCall::Push => engine.push_with(&local, remote, rows, layers, extras),
            }
        }
    };
    operation.within(limit).start()
}

/// Whether the pairs name the same rows of this engine, so that the caches of the peers hold shares of them: some layers and heads
/// each, which only layouts tell.
fn are_shares(pairs: &[PeerPair<'_>]) -> bool {
    let [first, others @ ..] = pairs else { return false };
    let same = |pair: &PeerPair<'_>| {
        let (one, other) = (first.local, pair.local);
        std::ptr::eq(one, other)
            || (first.own == pair.own && one.blocks() == other.blocks() && one.part() == other.part())
    };
    let narrowed =
        |pair: &PeerPair<'_>| [pair.local, pair.remote].iter().any(|rows| rows.part().layers.is_some());
    first.own.block_tokens.is_some() && others.iter().all(same) && !pairs.iter().any(narrowed)
}

fn start_layers(engine: &DataDist, pairs: &[PeerPair<'_>], extras: Extras) -> Result<LayerTask> {
    let Extras { notify, verify, limit, .. } = extras;
    let extras = CallExtras { notify, verify, words: Words::NATIVE, ..CallExtras::default() };
    let first = pairs.first().ok_or_else(|| Error::argument("len(dst)", 0, "at least 1"))?;
    let mut receivers = fallible::with_capacity(PAIRS, pairs.len())?;
    for (index, pair) in pairs.iter().enumerate() {
        let receiver = receiver(pair, first.own).map_err(|error| of_part(error, index, pairs.len()))?;
        receivers.push(receiver);
    }
    engine.begin_push(&first.own.end(), receivers, limit, extras)
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
    if pair.local.part().layers.is_some() != pair.remote.part().layers.is_some() {
        return Err(Error::argument(
            "dst",
            pair.remote,
            "rows with layers if src has layers, and without if it has none",
        ));
    }
    let all = 0..u32::try_from(pair.own.layers()).unwrap_or(u32::MAX);
    let read = pair.local.part().layers.clone().unwrap_or(all);
    let written = pair.remote.part().layers.clone();
    if let Some(written) = written.as_ref().filter(|written| written.len() != read.len()) {
        let many = format!("{} layers", written.len());
        return Err(Error::argument("dst", many, format!("{}, as many as src has", read.len())));
    }
    let target = Target::Cache {
        name: pair.of_peer.name.clone().into(),
        first_layer: written.map(|written| written.start),
    };
    let src_layers = LayerRange { first: read.start, end: read.end };
    let args = LayerwiseArgs {
        src_blocks: unsigned(pair.local)?,
        dst_blocks: unsigned(pair.remote)?,
        dst_block_bytes: None,
        tensors_per_layer: pair.own.tensors_per_layer,
    };
    Ok(LayerReceiver {
        to: Destination { cluster: pair.of_peer.cluster, target, src_layers, src_row: 0 },
        args,
    })
}

fn unsigned(rows: &BlockRows) -> Result<Vec<u64>> {
    fallible::collect(PAIRS, rows.blocks().iter().map(|block| block.unsigned_abs()))
}

fn own<'a>(name: &str, rows: &'a BlockRows) -> Result<&'a Arc<OwnCache>> {
    match rows.cache() {
        RowsCache::Own(cache) => Ok(cache),
        RowsCache::Peer(_) => Err(Error::argument(name, rows, "rows of a cache of this engine")),
    }
}

fn of_peer<'a>(name: &str, rows: &'a BlockRows) -> Result<&'a Arc<PeerCache>> {
    match rows.cache() {
        RowsCache::Peer(cache) => Ok(cache),
        RowsCache::Own(_) => {
            Err(Error::argument(name, rows, "rows of a cache of a peer, such as peer[\"kv\"]"))
        }
    }
}

/// Checks that the rows given as the argument `name` are of `engine`.
fn same_engine(engine: &EngineShared, name: &str, of: &EngineShared) -> Result<()> {
    if std::ptr::eq(engine, of) {
        return Ok(());
    }
    let other = format!("rows of engine '{}'", of.name);
    Err(Error::argument(name, other, format!("rows of engine '{}'", engine.name)))
}

/// Checks rows that are lent: whole blocks of a cache of this engine.
pub(crate) fn lent<'py>(
    shared: &Arc<EngineShared>,
    given: &Any<'py>,
) -> PyResult<(Bound<'py, BlockRows>, End)> {
    let (py, lent) = (given.py(), rows("rows", given)?);
    let end = shared.engine.attached(py, |_| {
        let cache = own("rows", lent.get())?;
        same_engine(shared, "rows", &cache.shared)?;
        if *lent.get().part() != RowsPart::default() {
            return Err(Error::argument("rows", lent.get(), "rows of whole blocks"));
        }
        Ok(cache.end())
    })?;
    Ok((lent, end))
}

fn rows<'py>(name: &str, given: &Any<'py>) -> PyResult<Bound<'py, BlockRows>> {
    given.cast::<BlockRows>().cloned().map_err(|_| wrong_type(name, "Rows, such as cache[[3, 4]]", given))
}

/// Reads what a call of this many pairs does beside moving bytes.
fn extras(py: Python<'_>, pairs: usize, given: &GivenExtras<'_, '_>) -> PyResult<Extras> {
    let grants = grants(py, pairs, given.grant, given.last)?;
    let notify = given.notify.map(|notify| values::bytes("notify", notify)).transpose()?;
    let verify = given.verify.map(verify).transpose()?;
    let limit = given.timeout.map(|limit| values::seconds("timeout", limit)).transpose()?;
    Ok(Extras { grants, notify, verify, limit })
}

/// Returns the grant of each pair.
fn grants(
    py: Python<'_>,
    pairs: usize,
    given: Option<&Any<'_>>,
    done: bool,
) -> PyResult<Vec<Option<GrantUse>>> {
    let mut grants = convert::room(py, pairs)?;
    let Some(given) = given else {
        grants.resize(pairs, None);
        return Ok(grants);
    };
    if let Ok(bytes) = given.cast::<PyBytes>() {
        let token = GrantToken::from_bytes(bytes.as_bytes()).map_err(|error| raise(py, &error))?;
        grants.resize(pairs, Some(GrantUse { token, done }));
        return Ok(grants);
    }
    if !given.is_instance_of::<PyList>() && !given.is_instance_of::<PyTuple>() {
        return Err(wrong_type("grant", "bytes, or a list with bytes or None for each pair", given));
    }
    let tokens = convert::listed("grant", given)?;
    if tokens.len() != pairs {
        return Err(invalid(py, "len(grant)", tokens.len(), &format!("{pairs}, one for each pair")));
    }
    for (index, token) in tokens.iter().enumerate() {
        grants.push(if token.is_none() {
            None
        } else {
            Some(GrantUse { token: self::token(index, token)?, done })
        });
    }
    Ok(grants)
}

fn token(index: usize, given: &Any<'_>) -> PyResult<GrantToken> {
    let name = format!("grant[{index}]");
    let bytes = given.cast::<PyBytes>().map_err(|_| wrong_type(name, "bytes or None", given))?;
    GrantToken::from_bytes(bytes.as_bytes()).map_err(|error| raise(given.py(), &error))
}

fn verify(given: &Any<'_>) -> PyResult<Verify> {
    let text = given.extract::<String>().map_err(|_| wrong_type("verify", "a str", given))?;
    validate::verify(&text).map_err(|error| raise(given.py(), &error))
}
