//! Conversion of a `KvLayout`: what the rows of a cache mean.
//!
//! The core has the rules for its values; here, each has the right type and fits its width.

use llm_datadist_core::bindings::validate;
use llm_datadist_core::{KvLayout, KvLayoutNames, KvPlanes, TokenOrder};
use pyo3::intern;
use pyo3::prelude::*;

use crate::convert::{self, Any, int};
use crate::error::{invalid, raise};
use crate::python_types::PythonTypes;

/// Checks a `KvLayout` whose attributes are set, without the sizes of a cache.
#[pyfunction]
pub(crate) fn check_kv_layout(layout: &Any<'_>) -> PyResult<()> {
    validate::kv_layout(&read(layout)?, KvLayoutNames::ORIGINAL).map_err(|error| raise(layout.py(), &error))
}

/// Reads the layout of a `CacheDesc`, or `None`.
pub(crate) fn of_desc(desc: &Any<'_>) -> PyResult<Option<Box<KvLayout>>> {
    let value = desc.getattr(intern!(desc.py(), "_layout"))?;
    if value.is_none() {
        return Ok(None);
    }
    convert::required("layout", &value, &PythonTypes::get(value.py())?.kv_layout, "KvLayout")?;
    read(&value).map(|layout| Some(Box::new(layout)))
}

fn read(value: &Any<'_>) -> PyResult<KvLayout> {
    let py = value.py();
    Ok(KvLayout {
        tokens_per_block: int("tokens_per_block", &value.getattr(intern!(py, "tokens_per_block"))?)?,
        // First, because it is also the end of the default of the heads.
        total_heads: int("total_kv_heads", &value.getattr(intern!(py, "total_kv_heads"))?)?,
        heads: convert::range("kv_heads", &value.getattr(intern!(py, "kv_heads"))?)?,
        head_dim: int("head_dim", &value.getattr(intern!(py, "head_dim"))?)?,
        order: order(&value.getattr(intern!(py, "order"))?)?,
        kv: planes(&value.getattr(intern!(py, "kv"))?)?,
        layers: convert::range("layers", &value.getattr(intern!(py, "layers"))?)?,
        model: convert::text("model", &value.getattr(intern!(py, "model"))?)?,
    })
}

fn order(value: &Any<'_>) -> PyResult<TokenOrder> {
    let given = convert::text("order", value)?;
    let found = TokenOrder::ALL.into_iter().find(|order| order.name() == given);
    found.ok_or_else(|| invalid(value.py(), "order", format_args!("{given:?}"), "\"NHD\" or \"HND\""))
}

fn planes(value: &Any<'_>) -> PyResult<KvPlanes> {
    let given = convert::text("kv", value)?;
    let found = KvPlanes::ALL.into_iter().find(|planes| planes.name() == given);
    let allowed = "\"separate\", \"k_then_v\", \"latent\" or \"single\"";
    found.ok_or_else(|| invalid(value.py(), "kv", format_args!("{given:?}"), allowed))
}
