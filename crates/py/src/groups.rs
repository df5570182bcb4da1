//! The parts of a group of pulls or pushes: `(key, cache, source blocks, destination blocks)` each.

use llm_datadist_core::{GrantUse, GroupMember, PullRows, PushRows, SubRow};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::arguments::IntArg;
use crate::blocks::BlocksArg;
use crate::call_extras;
use crate::convert::{self, Any, only_support};
use crate::engine::Engine;
use crate::error::{invalid, of_item};
use crate::keys::KeyArg;
use crate::local_cache::CacheArg;
use crate::pull_push_arguments::{self, LayersArg};
use crate::sub_rows::SubRowArg;

arguments! {
    /// A list or tuple of parts.
    PartsArg;
}

/// The four values of a part.
type Part<'a, 'py> = (KeyArg<'a, 'py>, CacheArg<'a, 'py>, (BlocksArg<'a, 'py>, BlocksArg<'a, 'py>));

impl PartsArg<'_, '_> {
    /// Checks the parts of a pull. Each obeys the rules of `pull_blocks` (contract §7.13).
    /// `done` says that it is the last pull under their grants.
    pub(crate) fn pulls(self, engine: &Engine, done: bool) -> PyResult<Vec<GroupMember<PullRows>>> {
        let options = PyDict::new(self.py());
        self.read(6, |(key, cache, blocks), more| {
            let part = sub_row(more.get(1))?;
            let pull = pull_push_arguments::pull_blocks(engine, (key, cache), blocks, part, &options)?;
            let token = more
                .first()
                .filter(|given| !given.is_none())
                .map(|given| call_extras::token("grant", given))
                .transpose()?;
            let grant = token.map(|token| GrantUse { token, done });
            Ok(GroupMember { remote: pull.from, local: pull.to, rows: pull.rows, grant })
        })
    }

    /// Checks the parts of a push. Each obeys the rules of `push_blocks` (contract §7.15).
    pub(crate) fn pushes(self, engine: &Engine) -> PyResult<Vec<GroupMember<PushRows>>> {
        let py = self.py();
        let (all, two) = (py.None(), 2_u32.into_pyobject(py)?.into_any());
        self.read(5, |(key, cache, blocks), more| {
            let all = LayersArg::extract(all.bind_borrowed(py))?;
            let layers = (all, all, IntArg::extract(two.as_borrowed())?);
            let part = sub_row(more.first())?;
            let push = pull_push_arguments::push_blocks(engine, (key, cache), blocks, layers, part)?;
            Ok(GroupMember { remote: push.to, local: push.from, rows: push.rows, grant: None })
        })
    }

    /// Reads each part, of four to `most` values. An error says in which part it is.
    fn read<T>(
        self,
        most: usize,
        read: impl Fn(Part<'_, '_>, &[Any<'_>]) -> PyResult<T>,
    ) -> PyResult<Vec<T>> {
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
            let part = values(&item, index, most).and_then(|values| with_arguments(&values, &read));
            parts.push(part.map_err(|error| of_item(py, "parts", index, error))?);
        }
        Ok(parts)
    }
}

/// Returns the values of a part, which must be a tuple of four to `most`.
fn values<'py>(item: &Any<'py>, index: usize, most: usize) -> PyResult<Vec<Any<'py>>> {
    let name = format!("parts[{index}]");
    let part = item.cast::<PyTuple>().map_err(|_| only_support(&name, "['tuple']", item))?;
    if (4..=most).contains(&part.len()) {
        return Ok(part.iter().collect());
    }
    let allowed = if most == 6 {
        "4 to 6: the key, the cache, the blocks of the source and of the destination, and optionally a grant and the \
         part of every block"
    } else {
        "4 or 5: the key, the cache, the blocks of the source and of the destination, and optionally the part of every \
         block"
    };
    Err(invalid(item.py(), &format!("len({name})"), part.len(), allowed))
}

fn with_arguments<T>(
    values: &[Any<'_>],
    read: impl Fn(Part<'_, '_>, &[Any<'_>]) -> PyResult<T>,
) -> PyResult<T> {
    let at = |index: usize| values[index].as_borrowed();
    let blocks = (BlocksArg::extract(at(2))?, BlocksArg::extract(at(3))?);
    read((KeyArg::extract(at(0))?, CacheArg::extract(at(1))?, blocks), &values[4..])
}

/// Reads the part of every block that moves, which a member of a group may end with.
fn sub_row(given: Option<&Any<'_>>) -> PyResult<SubRow> {
    given.map_or_else(|| Ok(SubRow::default()), |given| SubRowArg::extract(given.as_borrowed())?.part())
}
