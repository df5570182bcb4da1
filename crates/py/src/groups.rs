//! The parts of a group of pulls or pushes: a `GroupPart`, or `(key, cache, source blocks, destination blocks)`, each.

use llm_datadist_core::{GrantUse, GroupMember, Layers};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::arguments::IntArg;
use crate::blocks::BlocksArg;
use crate::call_extras::{self, VerifyArg};
use crate::convert::{self, Any, only_support};
use crate::engine::Engine;
use crate::error::{invalid, of_item};
use crate::keys::KeyArg;
use crate::local_cache::CacheArg;
use crate::notify::NotifyArg;
use crate::pull_push_arguments::{self, BlocksOptions, LayersArg};
use crate::python_types::PythonTypes;
use crate::selection::{GivenSelection, Selection};
use crate::sub_rows::SubRowArg;
use crate::token_ranges::{RawArg, TokensArg};

arguments! {
    /// A list or tuple of parts.
    PartsArg;
}

/// The unchecked values of a part.
struct GivenPart<'py> {
    /// The key, the cache, and the blocks of the source and of the destination.
    four: [Any<'py>; 4],
    /// The token of a grant, or `None`.
    grant: Option<Any<'py>>,
    /// The tokens of the source and of the destination, and the part of every block; `None` each in a tuple.
    selected: [Any<'py>; 3],
}

/// The arguments of a pull or push.
type Ends<'a, 'py> = (KeyArg<'a, 'py>, CacheArg<'a, 'py>);
type Lists<'a, 'py> = (BlocksArg<'a, 'py>, BlocksArg<'a, 'py>);

impl PartsArg<'_, '_> {
    /// Checks the parts of a pull. Each obeys the rules of `pull_blocks` (contract §7.13).
    /// `done` says that it is the last pull under their grants.
    pub(crate) fn pulls(self, engine: &Engine, done: bool) -> PyResult<Vec<GroupMember>> {
        let py = self.py();
        let (none, two) = (py.None(), 2_u32.into_pyobject(py)?.into_any());
        self.read(5, |part| {
            let none = none.bind_borrowed(py);
            let all = LayersArg::extract(none)?;
            let options = BlocksOptions {
                layers: (all, all, IntArg::extract(two.as_borrowed())?),
                extras: (NotifyArg::extract(none)?, VerifyArg::extract(none)?, RawArg::extract(none)?),
                grant: None,
                selected: part.selected()?,
            };
            let (ends, blocks) = part.arguments()?;
            let pull = pull_push_arguments::pull_blocks(engine, ends, blocks, options)?;
            let token = part.grant.as_ref().filter(|given| !given.is_none());
            let token = token.map(|given| call_extras::token("grant", given)).transpose()?;
            let grant = token.map(|token| GrantUse { token, done });
            Ok(GroupMember { remote: pull.from, local: pull.to, rows: pull.rows, layers: Layers::ALL, grant })
        })
    }

    /// Checks the parts of a push. Each obeys the rules of `push_blocks` (contract §7.15).
    pub(crate) fn pushes(self, engine: &Engine) -> PyResult<Vec<GroupMember>> {
        let py = self.py();
        let (all, two) = (py.None(), 2_u32.into_pyobject(py)?.into_any());
        self.read(4, |part| {
            let all = LayersArg::extract(all.bind_borrowed(py))?;
            let layers = (all, all, IntArg::extract(two.as_borrowed())?);
            part.without_grant()?;
            let ((ends, blocks), selected) = (part.arguments()?, Selection::of(part.selected()?)?);
            let push = pull_push_arguments::push_blocks(engine, ends, blocks, layers, selected)?;
            Ok(GroupMember {
                remote: push.to,
                local: push.from,
                rows: push.rows,
                layers: Layers::ALL,
                grant: None,
            })
        })
    }

    /// Reads each part. A tuple has four to `most` values. An error says in which part it is.
    fn read<T>(self, most: usize, read: impl Fn(&GivenPart<'_>) -> PyResult<T>) -> PyResult<Vec<T>> {
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
            let part = GivenPart::of(&item, index, most).and_then(|part| read(&part));
            parts.push(part.map_err(|error| of_item(py, "parts", index, error))?);
        }
        Ok(parts)
    }
}

impl<'py> GivenPart<'py> {
    /// Reads the values of a `GroupPart`, or of a tuple of four to `most`.
    fn of(item: &Any<'py>, index: usize, most: usize) -> PyResult<Self> {
        let py = item.py();
        if convert::instance(item, &PythonTypes::get(py)?.group_part)? {
            let of = |name| item.getattr(name);
            let cache = (of(intern!(py, "key"))?, of(intern!(py, "cache"))?);
            let four = [cache.0, cache.1, of(intern!(py, "src_blocks"))?, of(intern!(py, "dst_blocks"))?];
            let (src_offset, dst_offset) = (of(intern!(py, "src_offset"))?, of(intern!(py, "dst_offset"))?);
            let bytes = (src_offset, dst_offset, of(intern!(py, "length"))?).into_pyobject(py)?.into_any();
            let selected = [of(intern!(py, "src_tokens"))?, of(intern!(py, "dst_tokens"))?, bytes];
            return Ok(GivenPart { four, grant: Some(of(intern!(py, "grant"))?), selected });
        }
        let name = format!("parts[{index}]");
        let part = item.cast::<PyTuple>().map_err(|_| only_support(&name, "['tuple', 'GroupPart']", item))?;
        if !(4..=most).contains(&part.len()) {
            return Err(wrong_length(py, &name, part.len(), most));
        }
        let at = |index| part.get_item(index);
        let grant = if part.len() > 4 { Some(at(4)?) } else { None };
        let selected = [(); 3].map(|()| py.None().into_bound(py));
        Ok(GivenPart { four: [at(0)?, at(1)?, at(2)?, at(3)?], grant, selected })
    }

    /// Returns what moves of each block.
    fn selected(&self) -> PyResult<GivenSelection<'_, 'py>> {
        let [src, dst, bytes] = self.selected.each_ref().map(Bound::as_borrowed);
        Ok((TokensArg::extract(src)?, TokensArg::extract(dst)?, SubRowArg::extract(bytes)?))
    }

    /// Returns the ends and the blocks.
    fn arguments(&self) -> PyResult<(Ends<'_, 'py>, Lists<'_, 'py>)> {
        let [key, cache, src, dst] = self.four.each_ref().map(Bound::as_borrowed);
        let ends = (KeyArg::extract(key)?, CacheArg::extract(cache)?);
        Ok((ends, (BlocksArg::extract(src)?, BlocksArg::extract(dst)?)))
    }

    /// Refuses a grant in a push.
    fn without_grant(&self) -> PyResult<()> {
        match &self.grant {
            Some(given) if !given.is_none() => {
                Err(invalid(given.py(), "grant", "a token", "None in a push: grants are for readers"))
            }
            _ => Ok(()),
        }
    }
}

#[cold]
fn wrong_length(py: Python<'_>, name: &str, length: usize, most: usize) -> PyErr {
    let allowed = if most > 4 {
        "4 or 5: the key, the cache, the blocks of the source and of the destination, and optionally a grant"
    } else {
        "4: the key, the cache, and the blocks of the source and of the destination"
    };
    invalid(py, &format!("len({name})"), length, allowed)
}
