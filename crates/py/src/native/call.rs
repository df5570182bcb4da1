//! Copies, pulls and pushes: reads their arguments, in one order for all of them, and starts the transfer.

use std::sync::Arc;

use llm_datadist_core::bindings::validate;
use llm_datadist_core::bindings::{OwnPairs, PeerPairs, Side};
use llm_datadist_core::{GrantToken, GrantUse, PairExtras, RowsOfPair, Verify};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use super::errors::{invalid, raise};
use super::rows::NativeRows;
use super::shared::EngineShared;
use super::transfer::NativeTransfer;
use super::values::{self, wrong_type};
use crate::convert::{self, Any};

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

/// The rows of a call: a destination and a source, or a list of such pairs.
pub(crate) struct Pairs<'py>(Vec<(Bound<'py, NativeRows>, Bound<'py, NativeRows>)>);

impl<'py> Pairs<'py> {
    /// Reads `(dst, src)`, or a list of such pairs in place of `dst`.
    pub(crate) fn read(dst: &Any<'py>, src: Option<&Any<'py>>) -> PyResult<Self> {
        if let Some(src) = src {
            return Ok(Pairs(vec![(rows("dst", dst)?, rows("src", src)?)]));
        }
        if dst.is_instance_of::<NativeRows>() {
            let text = "src is missing: give the rows that are read, or a list of (dst, src) pairs";
            return Err(PyTypeError::new_err(text));
        }
        if !dst.is_instance_of::<PyList>() && !dst.is_instance_of::<PyTuple>() {
            return Err(wrong_type("dst", "Rows, or a list of (dst, src) pairs", dst));
        }
        let items = convert::listed("dst", dst, raise)?;
        if items.is_empty() {
            return Err(invalid(dst.py(), "len(dst)", 0, "at least 1"));
        }
        let pairs = items.iter().enumerate().map(|(index, item)| {
            let name = format!("dst[{index}]");
            let pair = item.cast::<PyTuple>().ok().filter(|pair| pair.len() == 2);
            let pair = pair.ok_or_else(|| wrong_type(&name, "a pair (dst, src) of Rows", item))?;
            Ok((rows(&name, &pair.get_item(0)?)?, rows(&name, &pair.get_item(1)?)?))
        });
        convert::gathered(dst.py(), items.len(), pairs, raise).map(Pairs)
    }

    /// Returns the destination and the source of each pair, for code that may run detached from the interpreter.
    fn all(&self) -> impl ExactSizeIterator<Item = RowsOfPair<'_>> {
        self.0.iter().map(|(dst, src)| (&dst.get().rows, &src.get().rows))
    }

    /// Returns the number of blocks in all lists.
    fn num_blocks(&self) -> usize {
        self.all().map(|(dst, src)| dst.blocks().len() + src.blocks().len()).sum()
    }
}

/// Starts a copy within an engine.
pub(crate) fn copy(
    py: Python<'_>,
    shared: &Arc<EngineShared>,
    pairs: &Pairs<'_>,
    given: &GivenExtras<'_, '_>,
) -> PyResult<Py<NativeTransfer>> {
    let checked = shared.engine.attached(py, |_| OwnPairs::checked(&shared.name, pairs.all()))?;
    let extras = extras(py, pairs.0.len(), given)?;
    let transfer = shared.engine.start(py, pairs.num_blocks(), |engine| checked.copy(engine, &extras))?;
    NativeTransfer::started(py, shared, &transfer)
}

/// Starts a pull or push. The rows of the engine are the side `local_side`.
pub(crate) fn move_rows(
    py: Python<'_>,
    shared: &Arc<EngineShared>,
    local_side: Side,
    pairs: &Pairs<'_>,
    given: &GivenExtras<'_, '_>,
) -> PyResult<Py<NativeTransfer>> {
    let checked =
        shared.engine.attached(py, |_| PeerPairs::checked(&shared.name, local_side, pairs.all()))?;
    let extras = extras(py, pairs.0.len(), given)?;
    let transfer = shared.engine.start(py, pairs.num_blocks(), |engine| checked.start(engine, extras))?;
    NativeTransfer::started(py, shared, &transfer)
}

/// Starts a push of which the caller reports each layer.
pub(crate) fn push_layers(
    py: Python<'_>,
    shared: &Arc<EngineShared>,
    pairs: &Pairs<'_>,
    given: &GivenExtras<'_, '_>,
) -> PyResult<Py<NativeTransfer>> {
    let checked =
        shared.engine.attached(py, |_| PeerPairs::checked(&shared.name, Side::Source, pairs.all()))?;
    let extras = extras(py, pairs.0.len(), given)?;
    let task = shared.engine.start(py, pairs.num_blocks(), |engine| checked.start_layers(engine, extras))?;
    NativeTransfer::of_layers(py, shared, task)
}

/// Reads the argument `name`, which must be rows.
pub(crate) fn rows<'py>(name: &str, given: &Any<'py>) -> PyResult<Bound<'py, NativeRows>> {
    given.cast::<NativeRows>().cloned().map_err(|_| wrong_type(name, "Rows, such as cache[[3, 4]]", given))
}

/// Reads what a call of this many pairs does beside moving bytes.
fn extras(py: Python<'_>, pairs: usize, given: &GivenExtras<'_, '_>) -> PyResult<PairExtras> {
    let grants = grants(py, pairs, given.grant, given.last)?;
    let notify = given.notify.map(|notify| values::bytes("notify", notify)).transpose()?;
    let verify = given.verify.map(verify).transpose()?;
    let limit = given.timeout.map(|limit| values::seconds("timeout", limit)).transpose()?;
    Ok(PairExtras { grants, notify, verify, limit })
}

/// Returns the grant of each pair, or none for no grants.
fn grants(
    py: Python<'_>,
    pairs: usize,
    given: Option<&Any<'_>>,
    done: bool,
) -> PyResult<Vec<Option<GrantUse>>> {
    let Some(given) = given else { return Ok(Vec::new()) };
    let mut grants = convert::room(py, pairs, raise)?;
    if let Ok(bytes) = given.cast::<PyBytes>() {
        let token = GrantToken::from_bytes("grant", bytes.as_bytes()).map_err(|error| raise(py, &error))?;
        grants.resize(pairs, Some(GrantUse { token, done }));
        return Ok(grants);
    }
    if !given.is_instance_of::<PyList>() && !given.is_instance_of::<PyTuple>() {
        return Err(wrong_type("grant", "bytes, or a list with bytes or None for each pair", given));
    }
    let tokens = convert::listed("grant", given, raise)?;
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
    let bytes = given.cast::<PyBytes>().map_err(|_| wrong_type(&*name, "bytes or None", given))?;
    GrantToken::from_bytes(&name, bytes.as_bytes()).map_err(|error| raise(given.py(), &error))
}

fn verify(given: &Any<'_>) -> PyResult<Verify> {
    let text = values::text("verify", given)?;
    validate::verify(&text).map_err(|error| raise(given.py(), &error))
}
