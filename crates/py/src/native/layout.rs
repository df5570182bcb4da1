//! `KvLayout`: how the bytes of a block are ordered.

use std::ops::Range;

use llm_datadist_core::{DataType, ElementTypes, KvLayout, KvPlanes, TokenOrder};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyRange, PyString, PyTuple, PyType};

use super::errors::{invalid, raise};
use super::values::{int, int32, wrong_type};
use super::{dtypes, spans};
use crate::convert::{Any, shown};

/// How the bytes of a block are ordered. It cannot be changed, compares and hashes by value, and can be pickled.
///
/// A cache whose blocks have no such meaning needs no layout.
///
/// Args:
///     layers: the layers of the model that the cache holds, at least one: a number ``n`` for ``range(n)``, or a ``range`` of
///         step 1 for a pipeline-parallel rank.
///     block_tokens: number of tokens in a block, at least 1.
///     heads: the key-value heads that the cache holds: a number ``n`` for ``range(n)``, or a ``range`` of step 1 for a
///         tensor-parallel rank. Required, except with ``kv="latent"``, which has none.
///     total_heads: number of key-value heads of the whole model. ``None``: as many as ``heads`` has. Give it together with a
///         ``range``.
///     head_dim: number of elements of one head of one token, or of one latent vector; at least 1.
///     dtype: type of the elements, as for ``Engine.allocate``.
///     order: ``"NHD"``: a block is ``[tokens, heads, head_dim]``. ``"HND"``: ``[heads, tokens, head_dim]``.
///     kv: ``"separate"``: two tensors for each layer, keys and then values. ``"k_then_v"``: one tensor for each layer, whose
///         blocks have the keys of all tokens and then the values. ``"latent"``: one tensor for each layer, with one vector for
///         each token (MLA), the same in every rank. ``"single"``: one tensor for each layer, with one vector for each head of
///         each token.
///     model: name or version of the model, at most 256 bytes of UTF-8. Both ends of a transfer must have the same.
///
/// Raises:
///     TypeError: an argument has the wrong type, or ``heads`` is missing.
///     InvalidArgument: a number is out of range; a range is empty or has another step; heads outside ``total_heads``; an unknown
///         ``order``, ``kv`` or ``dtype``; ``model`` is too long.
#[pyclass(frozen, eq, hash, name = "KvLayout", module = "llm_datadist.native")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct NativeLayout {
    layout: KvLayout,
    data_type: DataType,
}

impl NativeLayout {
    /// Reads the argument `layout`.
    pub(crate) fn given<'a, 'py>(layout: &'a Any<'py>) -> PyResult<&'a Bound<'py, NativeLayout>> {
        layout.cast().map_err(|_| wrong_type("layout", "a KvLayout", layout))
    }

    /// Returns the layout as the core has it.
    pub(crate) fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Returns the type of the elements.
    pub(crate) fn data_type(&self) -> DataType {
        self.data_type
    }

    /// Returns all arguments by name.
    fn arguments<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let KvLayout { tokens_per_block, heads, total_heads, head_dim, order, kv, layers, model } =
            &self.layout;
        let arguments = PyDict::new(py);
        arguments.set_item(intern!(py, "layers"), python_range(py, layers)?)?;
        arguments.set_item(intern!(py, "block_tokens"), tokens_per_block)?;
        arguments.set_item(intern!(py, "heads"), python_range(py, heads)?)?;
        arguments.set_item(intern!(py, "total_heads"), total_heads)?;
        arguments.set_item(intern!(py, "head_dim"), head_dim)?;
        arguments.set_item(intern!(py, "dtype"), ElementTypes::name(self.data_type))?;
        arguments.set_item(intern!(py, "order"), order.name())?;
        arguments.set_item(intern!(py, "kv"), kv.name())?;
        arguments.set_item(intern!(py, "model"), model)?;
        Ok(arguments)
    }
}

#[pymethods]
impl NativeLayout {
    #[new]
    #[pyo3(
        signature = (
            *, layers, block_tokens, heads=None, total_heads=None, head_dim, dtype, order=None, kv=None, model=None
        ),
        text_signature = "(*, layers, block_tokens, heads=None, total_heads=None, head_dim, dtype, order='NHD', \
                          kv='separate', model='')"
    )]
    #[expect(clippy::too_many_arguments, reason = "the parameters of the class")]
    fn new(
        layers: &Any<'_>,
        block_tokens: &Any<'_>,
        heads: Option<&Any<'_>>,
        total_heads: Option<&Any<'_>>,
        head_dim: &Any<'_>,
        dtype: &Any<'_>,
        order: Option<&Any<'_>>,
        kv: Option<&Any<'_>>,
        model: Option<&Any<'_>>,
    ) -> PyResult<Self> {
        let kv = kv.map_or(Ok(KvPlanes::Separate), planes)?;
        let (heads, total_heads) = heads_of(kv, heads, total_heads)?;
        let layout = KvLayout {
            tokens_per_block: int32("block_tokens", block_tokens, 1)?,
            heads,
            total_heads,
            head_dim: int32("head_dim", head_dim, 1)?,
            order: order.map_or(Ok(TokenOrder::Nhd), token_order)?,
            kv,
            layers: numbered("layers", layers)?,
            model: model.map_or(Ok(String::new()), |model| text("model", model))?,
        };
        let data_type = dtypes::read("dtype", dtype)?;
        layout.check_ranges().map_err(|error| raise(layers.py(), &error))?;
        Ok(NativeLayout { layout, data_type })
    }

    /// The layers of the model that the cache holds.
    #[getter]
    fn layers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyRange>> {
        python_range(py, &self.layout.layers)
    }

    /// The number of tokens in a block.
    #[getter]
    fn block_tokens(&self) -> u32 {
        self.layout.tokens_per_block
    }

    /// The key-value heads that the cache holds; ``range(1)`` for ``kv="latent"``.
    #[getter]
    fn heads<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyRange>> {
        python_range(py, &self.layout.heads)
    }

    /// The number of key-value heads of the model.
    #[getter]
    fn total_heads(&self) -> u32 {
        self.layout.total_heads
    }

    /// The number of elements of one head of one token.
    #[getter]
    fn head_dim(&self) -> u32 {
        self.layout.head_dim
    }

    /// The name of the element type, such as ``"bfloat16"``.
    #[getter]
    fn dtype(&self) -> &'static str {
        ElementTypes::name(self.data_type)
    }

    /// The order of dimensions in a block.
    #[getter]
    fn order(&self) -> &'static str {
        self.layout.order.name()
    }

    /// Where keys and values are.
    #[getter]
    fn kv(&self) -> &'static str {
        self.layout.kv.name()
    }

    /// The name or version of the model.
    #[getter]
    fn model(&self) -> &str {
        &self.layout.model
    }

    /// The number of tensors of a cache with this layout: one or two for each layer.
    #[getter]
    fn tensors(&self) -> u64 {
        self.layout.num_tensors()
    }

    /// Return the shape of one tensor of ``blocks`` blocks.
    ///
    /// It is ``[blocks, tokens, heads, head_dim]`` for ``"NHD"`` and ``[blocks, heads, tokens, head_dim]`` for ``"HND"``.
    /// ``"k_then_v"`` has a dimension of 2 after the blocks, and ``"latent"`` has no dimension of heads.
    ///
    /// Raises:
    ///     TypeError: ``blocks`` is not an integer.
    ///     InvalidArgument: ``blocks`` is negative or above 2**63 - 1.
    #[pyo3(signature = (blocks, /))]
    fn shape(&self, blocks: &Any<'_>) -> PyResult<Vec<i64>> {
        Ok(self.layout.shape(int("blocks", blocks, 0..=i64::MAX.cast_unsigned())?))
    }

    /// Return a layout in which some arguments are replaced, for ``copy.replace``.
    #[pyo3(signature = (**changes))]
    fn __replace__<'py>(slf: &Bound<'py, Self>, changes: Option<&Bound<'py, PyDict>>) -> PyResult<Any<'py>> {
        let arguments = slf.get().arguments(slf.py())?;
        if let Some(changes) = changes {
            arguments.update(changes.as_mapping())?;
        }
        slf.get_type().call((), Some(&arguments))
    }

    /// Return how to make the layout again, for ``pickle`` and ``copy``.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Any<'py>, Remade<'py>)> {
        let py = slf.py();
        let make = py.import(intern!(py, "copyreg"))?.getattr(intern!(py, "__newobj_ex__"))?;
        Ok((make, (slf.get_type(), PyTuple::empty(py), slf.get().arguments(py)?)))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let arguments = self.arguments(py)?;
        let shown = arguments.iter().map(|(name, value)| Ok(format!("{name}={}", value.repr()?)));
        Ok(format!("KvLayout({})", shown.collect::<PyResult<Vec<_>>>()?.join(", ")))
    }
}

/// The arguments of `copyreg.__newobj_ex__`.
type Remade<'py> = (Bound<'py, PyType>, Bound<'py, PyTuple>, Bound<'py, PyDict>);

fn python_range<'py>(py: Python<'py>, range: &Range<u32>) -> PyResult<Bound<'py, PyRange>> {
    let end = |end: u32| isize::try_from(end);
    PyRange::new(py, end(range.start)?, end(range.end)?)
}

/// Reads layers or heads: a number, which is the end of a range from 0, or a range.
fn numbered(name: &str, value: &Any<'_>) -> PyResult<Range<u32>> {
    if !value.is_instance_of::<PyRange>() {
        return Ok(0..int32(name, value, 1)?);
    }
    let range = spans::read(name, value, None)?;
    match (u32::try_from(range.start), u32::try_from(range.end)) {
        (Ok(start), Ok(end)) => Ok(start..end),
        _ => Err(invalid(value.py(), name, shown(value), "a range below 2^32")),
    }
}

/// Reads the heads of the cache, and their number in the model.
fn heads_of(
    kv: KvPlanes,
    heads: Option<&Any<'_>>,
    total_heads: Option<&Any<'_>>,
) -> PyResult<(Range<u32>, u32)> {
    let heads = match heads {
        Some(heads) => numbered("heads", heads)?,
        None if kv == KvPlanes::Latent => 0..1,
        None => return Err(PyTypeError::new_err("KvLayout() needs heads, except with kv=\"latent\"")),
    };
    // The rules refuse an empty range by its own name.
    let count = heads.end.saturating_sub(heads.start).max(1);
    Ok((heads, total_heads.map_or(Ok(count), |total| int32("total_heads", total, 1))?))
}

fn token_order(value: &Any<'_>) -> PyResult<TokenOrder> {
    let given = text("order", value)?;
    let found = TokenOrder::ALL.into_iter().find(|order| order.name() == given);
    found.ok_or_else(|| invalid(value.py(), "order", format_args!("{given:?}"), "\"NHD\" or \"HND\""))
}

fn planes(value: &Any<'_>) -> PyResult<KvPlanes> {
    let given = text("kv", value)?;
    let found = KvPlanes::ALL.into_iter().find(|planes| planes.name() == given);
    let allowed = "\"separate\", \"k_then_v\", \"latent\" or \"single\"";
    found.ok_or_else(|| invalid(value.py(), "kv", format_args!("{given:?}"), allowed))
}

fn text(name: &str, value: &Any<'_>) -> PyResult<String> {
    let text = value.cast::<PyString>().map_err(|_| wrong_type(name, "a str", value))?;
    text.extract().map_err(|_| invalid(value.py(), name, "(not UTF-8)", "a text of UTF-8"))
}
