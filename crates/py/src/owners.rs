//! Pulls from several owners, and pushes to several: a list of keys, and as many lists of blocks.

use llm_datadist_core::{CallExtras, Error, ErrorKind, GrantUse, GroupMember, Layers};
use pyo3::prelude::*;

use crate::blocks::BlocksArg;
use crate::call_extras::{self, GivenGrant};
use crate::convert::{self, Any};
use crate::engine::Engine;
use crate::error::{invalid, of_item, raise};
use crate::keys::KeyArg;
use crate::local_cache::CacheArg;
use crate::pull_push_arguments::{self, BlocksOptions, GivenLayers};
use crate::selection::Selection;

arguments! {
    /// A list or tuple of keys, one for each owner.
    OwnersArg;
    /// A list or tuple with one list of blocks for each owner.
    BlockListsArg;
}

/// The checked arguments of a pull from several owners.
pub(crate) struct OwnersPull {
    /// The part of each owner.
    pub(crate) parts: Vec<GroupMember>,
    /// What it does beside moving bytes, without grants.
    pub(crate) extras: CallExtras,
}

/// Checks the arguments of a pull from several owners. Each owner obeys the rules of `pull_blocks`.
pub(crate) fn pull(
    engine: &Engine,
    (keys, cache): (OwnersArg<'_, '_>, CacheArg<'_, '_>),
    (src_blocks, dst_blocks): (BlockListsArg<'_, '_>, BlocksArg<'_, '_>),
    grant: GivenGrant<'_, '_>,
    options: BlocksOptions<'_, '_>,
) -> PyResult<OwnersPull> {
    const KEYS: &str = "src_cache_key";
    let py = cache.py();
    let keys = keys.keys(KEYS)?;
    let lists = src_blocks.lists("src_blocks", keys.len())?;
    let grants = OwnerGrants::of(grant, keys.len())?;
    let mut owners = OwnersPull { parts: convert::room(py, keys.len())?, extras: CallExtras::default() };
    for (index, (key, blocks)) in keys.iter().zip(&lists).enumerate() {
        let one = || {
            let blocks = (BlocksArg::extract(blocks.as_borrowed())?, dst_blocks);
            let key = KeyArg::extract(key.as_borrowed())?;
            let pull = pull_push_arguments::pull_blocks(engine, (key, cache), blocks, options)?;
            no_layers(py, pull.layers.src.or(pull.layers.dst).is_some())?;
            let part = GroupMember {
                remote: pull.from,
                local: pull.to,
                rows: pull.rows,
                layers: Layers::ALL,
                grant: grants.at(index)?,
            };
            Ok((part, pull.extras))
        };
        let (part, extras) = one().map_err(|error| of_item(py, KEYS, index, error))?;
        owners.parts.push(part);
        owners.extras = extras;
    }
    Ok(owners)
}

/// Checks the arguments of a push to several owners. Each owner obeys the rules of `push_blocks`.
pub(crate) fn push(
    engine: &Engine,
    (keys, cache): (OwnersArg<'_, '_>, CacheArg<'_, '_>),
    (src_blocks, dst_blocks): (BlocksArg<'_, '_>, BlockListsArg<'_, '_>),
    layers: GivenLayers<'_, '_>,
    selected: &Selection,
) -> PyResult<Vec<GroupMember>> {
    const KEYS: &str = "dst_cache_key";
    let py = cache.py();
    let keys = keys.keys(KEYS)?;
    let lists = dst_blocks.lists("dst_blocks", keys.len())?;
    let mut parts = convert::room(py, keys.len())?;
    for (index, (key, blocks)) in keys.iter().zip(&lists).enumerate() {
        let one = || {
            let blocks = (src_blocks, BlocksArg::extract(blocks.as_borrowed())?);
            let key = KeyArg::extract(key.as_borrowed())?;
            let push =
                pull_push_arguments::push_blocks(engine, (key, cache), blocks, layers, selected.clone())?;
            no_layers(py, push.layers.src.or(push.layers.dst).is_some())?;
            Ok(GroupMember {
                remote: push.to,
                local: push.from,
                rows: push.rows,
                layers: Layers::ALL,
                grant: None,
            })
        };
        parts.push(one().map_err(|error: PyErr| of_item(py, KEYS, index, error))?);
    }
    Ok(parts)
}

impl<'py> OwnersArg<'_, 'py> {
    fn keys(self, name: &str) -> PyResult<Vec<Any<'py>>> {
        let keys = convert::listed(name, &self.0)?;
        if keys.is_empty() {
            return Err(invalid(self.py(), &format!("len({name})"), 0, "at least 1"));
        }
        Ok(keys)
    }
}

impl<'py> BlockListsArg<'_, 'py> {
    fn lists(self, name: &str, count: usize) -> PyResult<Vec<Any<'py>>> {
        let lists = convert::listed(name, &self.0)?;
        if lists.len() != count {
            let allowed = format!("{count}, one list of blocks for each key");
            return Err(invalid(self.py(), &format!("len({name})"), lists.len(), &allowed));
        }
        Ok(lists)
    }
}

/// The tokens of the grants of several owners.
struct OwnerGrants<'py> {
    tokens: Option<Vec<Any<'py>>>,
    done: bool,
}

impl<'py> OwnerGrants<'py> {
    fn of((tokens, done): GivenGrant<'_, 'py>, count: usize) -> PyResult<Self> {
        let (py, done) = (done.py(), done.required("grant_done")?);
        let tokens = tokens.tokens("grant")?;
        if let Some(listed) = &tokens
            && listed.len() != count
        {
            return Err(invalid(py, "len(grant)", listed.len(), &format!("{count}, one for each key")));
        }
        if done && tokens.is_none() {
            return Err(call_extras::done_without_grant(py));
        }
        Ok(OwnerGrants { tokens, done })
    }

    /// Returns the grant under which the part with this index is pulled.
    fn at(&self, index: usize) -> PyResult<Option<GrantUse>> {
        match &self.tokens {
            Some(tokens) if !tokens[index].is_none() => {
                Ok(Some(GrantUse { token: call_extras::token("grant", &tokens[index])?, done: self.done }))
            }
            _ => Ok(None),
        }
    }
}

fn no_layers(py: Python<'_>, given: bool) -> PyResult<()> {
    if !given {
        return Ok(());
    }
    let text = "a call with several keys takes no layer ranges: the layers follow from the KV layouts";
    Err(raise(py, &Error::new(ErrorKind::InvalidArgument, text)))
}
