//! The parts of a group of pulls or pushes: `(key, cache, source blocks, destination blocks)` each.

use llm_datadist_core::{GroupMember, PullRows, PushRows};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::arguments::IntArg;
use crate::blocks::BlocksArg;
use crate::convert::{self, only_support};
use crate::engine::Engine;
use crate::error::{invalid, of_item};
use crate::keys::KeyArg;
use crate::local_cache::CacheArg;
use crate::pull_push_arguments::{self, LayersArg};

arguments! {
    /// A list or tuple of parts.
    PartsArg;
}

/// The four values of a part.
type Part<'a, 'py> = (KeyArg<'a, 'py>, CacheArg<'a, 'py>, (BlocksArg<'a, 'py>, BlocksArg<'a, 'py>));

impl PartsArg<'_, '_> {
    /// Checks the parts of a pull. Each obeys the rules of `pull_blocks` (contract §7.13).
    pub(crate) fn pulls(self, engine: &Engine) -> PyResult<Vec<GroupMember<PullRows>>> {
        let options = PyDict::new(self.py());
        self.read(|(key, cache, blocks)| {
            let pull = pull_push_arguments::pull_blocks(engine, (key, cache), blocks, &options)?;
            Ok(GroupMember { remote: pull.from, local: pull.to, rows: pull.rows })
        })
    }

    /// Checks the parts of a push. Each obeys the rules of `push_blocks` (contract §7.15).
    pub(crate) fn pushes(self, engine: &Engine) -> PyResult<Vec<GroupMember<PushRows>>> {
        let py = self.py();
        let (all, two) = (py.None(), 2_u32.into_pyobject(py)?.into_any());
        self.read(|(key, cache, blocks)| {
            let all = LayersArg::extract(all.bind_borrowed(py))?;
            let layers = (all, all, IntArg::extract(two.as_borrowed())?);
            let push = pull_push_arguments::push_blocks(engine, (key, cache), blocks, layers)?;
            Ok(GroupMember { remote: push.to, local: push.from, rows: push.rows })
        })
    }

    /// Reads each part. An error says in which part it is.
    fn read<T>(self, read: impl Fn(Part<'_, '_>) -> PyResult<T>) -> PyResult<Vec<T>> {
        let py = self.py();
        let items = match self.0.cast::<PyList>() {
            Ok(list) => list.to_tuple(),
            Err(_) => self
                .0
                .cast::<PyTuple>()
                .map_err(|_| only_support("parts", "['list', 'tuple']", &self.0))?
                .to_owned(),
        };
        let mut parts = convert::room(py, items.len())?;
        for (index, item) in items.iter().enumerate() {
            let part = values(&item, index).and_then(|values| with_arguments(&values, &read));
            parts.push(part.map_err(|error| of_item(py, "parts", index, error))?);
        }
        Ok(parts)
    }
}

/// Returns the values of a part, which must be a tuple of four.
fn values<'py>(item: &Bound<'py, PyAny>, index: usize) -> PyResult<[Bound<'py, PyAny>; 4]> {
    let name = format!("parts[{index}]");
    let part = item.cast::<PyTuple>().map_err(|_| only_support(&name, "['tuple']", item))?;
    if part.len() != 4 {
        let allowed = "4: the key, the cache, and the blocks of the source and of the destination";
        return Err(invalid(item.py(), &format!("len({name})"), part.len(), allowed));
    }
    Ok([part.get_item(0)?, part.get_item(1)?, part.get_item(2)?, part.get_item(3)?])
}

fn with_arguments<T>(
    [key, cache, src, dst]: &[Bound<'_, PyAny>; 4],
    read: impl Fn(Part<'_, '_>) -> PyResult<T>,
) -> PyResult<T> {
    let blocks = (BlocksArg::extract(src.as_borrowed())?, BlocksArg::extract(dst.as_borrowed())?);
    read((KeyArg::extract(key.as_borrowed())?, CacheArg::extract(cache.as_borrowed())?, blocks))
}
