//! The twin: a plain reference model of every operation, against which tests check the engine.
//!
//! Bytes are vectors, keys are lists, sums have 128 bits, and pairs are copied one after the other. The model
//! shares only basic types with the engine. It runs the same cases as the engine
//! (`tests/integration/local_copies.rs`), so these cases check the model too. It ignores speed, threads and
//! deadlines.

use llm_datadist_core::testing::error::ErrorKind;
use llm_datadist_core::testing::model::{CacheKey, CacheKind, Placement};
use llm_datadist_core::testing::validate::CopyArgs;

/// A cache as its bytes, with one vector per tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TwinCache {
    /// Placement, and so the pool.
    pub placement: Placement,
    /// What a row is: a batch slot or a block.
    pub kind: CacheKind,
    /// Number of rows of each tensor.
    pub rows: usize,
    /// Bytes of each tensor.
    pub tensors: Vec<Vec<u8>>,
}

impl TwinCache {
    fn row_bytes(&self) -> usize {
        self.tensors[0].len() / self.rows
    }
}

/// Numbered caches, and the operations that move bytes between them.
#[derive(Clone, Debug, Default)]
pub struct Twin {
    /// The caches, numbered from 0.
    pub caches: Vec<TwinCache>,
}

impl Twin {
    /// Copies a range of one slot in every tensor (contract §7.9).
    pub fn copy_cache(&mut self, dst: usize, src: usize, args: CopyArgs) -> Result<(), ErrorKind> {
        let (from, to) = (self.caches[src].clone(), &mut self.caches[dst]);
        let (offset, size) = (i128::from(args.offset), i128::from(args.size));
        let (src_slot, dst_slot) = (i128::from(args.src_batch_index), i128::from(args.dst_batch_index));
        let (src_stride, dst_stride) = (wide(from.row_bytes()), wide(to.row_bytes()));
        let size = if size == -1 { src_stride - offset } else { size };
        if (args.size == -1 || args.size > 0) && from.tensors.len() != to.tensors.len() {
            return Err(ErrorKind::TensorCountMismatch);
        }
        let legal = (args.size == -1 || args.size > 0)
            && src_slot < wide(from.rows)
            && dst_slot < wide(to.rows)
            && (offset == 0 || (offset < src_stride && offset < dst_stride))
            && offset + size <= src_stride
            && offset + size <= dst_stride;
        if !legal {
            return Err(ErrorKind::InvalidArgument);
        }
        for (read, write) in from.tensors.iter().zip(&mut to.tensors) {
            for byte in offset..offset + size {
                write[narrow(dst_slot * dst_stride + byte)] = read[narrow(src_slot * src_stride + byte)];
            }
        }
        Ok(())
    }

    /// Does `CopyKvCache` of the original's documentation: only from a device cache.
    pub fn copy_kv_cache(&mut self, src: usize, dst: usize, args: CopyArgs) -> Result<(), ErrorKind> {
        match self.caches[src].placement {
            Placement::Host => Err(ErrorKind::InvalidArgument),
            Placement::Device => self.copy_cache(dst, src, args),
        }
    }

    /// Copies pairs of blocks of one cache, one after the other (contract §7.10).
    pub fn copy_blocks(&mut self, cache: usize, pairs: &[(i64, i64)]) -> Result<(), ErrorKind> {
        if self.caches[cache].kind != CacheKind::Blocks {
            return Err(ErrorKind::InvalidArgument);
        }
        self.pairs(cache, cache, pairs)
    }

    /// Copies pairs of blocks between two caches, one after the other (contract §7.11).
    pub fn swap_blocks(&mut self, src: usize, dst: usize, pairs: &[(i64, i64)]) -> Result<(), ErrorKind> {
        let (from, to) = (&self.caches[src], &self.caches[dst]);
        if from.kind != CacheKind::Blocks || to.kind != CacheKind::Blocks {
            return Err(ErrorKind::InvalidArgument);
        }
        if from.row_bytes() != to.row_bytes() || from.tensors.len() != to.tensors.len() {
            return Err(ErrorKind::InvalidArgument);
        }
        self.in_range(src, dst, pairs)?;
        if from.placement == to.placement {
            return Err(ErrorKind::InvalidArgument);
        }
        self.pairs(src, dst, pairs)
    }

    fn in_range(&self, src: usize, dst: usize, pairs: &[(i64, i64)]) -> Result<(), ErrorKind> {
        let inside =
            |index: i64, cache: usize| (0..wide(self.caches[cache].rows)).contains(&i128::from(index));
        let legal = pairs.iter().all(|&(from, to)| inside(from, src) && inside(to, dst));
        if legal { Ok(()) } else { Err(ErrorKind::InvalidArgument) }
    }

    fn pairs(&mut self, src: usize, dst: usize, pairs: &[(i64, i64)]) -> Result<(), ErrorKind> {
        self.in_range(src, dst, pairs)?;
        let bytes = self.caches[src].row_bytes();
        for &(from, to) in pairs {
            let (from, to) = (narrow(i128::from(from)) * bytes, narrow(i128::from(to)) * bytes);
            for tensor in 0..self.caches[src].tensors.len() {
                let block = self.caches[src].tensors[tensor][from..from + bytes].to_vec();
                self.caches[dst].tensors[tensor][to..to + bytes].copy_from_slice(&block);
            }
        }
        Ok(())
    }
}

fn wide(value: usize) -> i128 {
    i128::try_from(value).unwrap_or(i128::MAX)
}

fn narrow(value: i128) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// A cache as the table sees it: what holds it, and its keys.
#[derive(Clone, Debug)]
pub struct TwinEntry {
    /// The caller's number for it.
    pub name: usize,
    kind: CacheKind,
    registered: bool,
    by_id: bool,
    keys: Vec<(CacheKey, u32)>,
}

/// Model of the cache table: live caches and their keys, as lists that are searched from the front.
#[derive(Clone, Debug, Default)]
pub struct TwinTable {
    entries: Vec<TwinEntry>,
    names: usize,
}

impl TwinTable {
    /// Numbers of all live caches.
    pub fn alive(&self) -> Vec<usize> {
        self.entries.iter().map(|entry| entry.name).collect()
    }

    /// Number of keys.
    pub fn keys(&self) -> usize {
        self.entries.iter().map(|entry| entry.keys.len()).sum()
    }

    /// Returns the cache and the row that a key names.
    pub fn find_key(&self, key: CacheKey) -> Option<(usize, u32)> {
        self.entries.iter().find_map(|entry| {
            let found = entry.keys.iter().find(|(known, _)| *known == key);
            found.map(|&(_, row)| (entry.name, row))
        })
    }

    /// Allocates a cache. A refused call leaves nothing behind (contract §7.1, §7.3, §12.2).
    pub fn allocate(
        &mut self,
        kind: CacheKind,
        rows: usize,
        keys: &[Option<CacheKey>],
    ) -> Result<usize, ErrorKind> {
        if keys.len() > rows {
            return Err(ErrorKind::InvalidArgument);
        }
        if keys.iter().flatten().any(|&key| self.find_key(key).is_some()) {
            return Err(ErrorKind::KeyTaken);
        }
        Ok(self.enter(kind, false, keys))
    }

    /// Registers a cache. This never conflicts: a key that named another cache now names this one (contract
    /// §7.6, §7.7).
    pub fn register(&mut self, kind: CacheKind, keys: &[Option<CacheKey>]) -> usize {
        for key in keys.iter().flatten() {
            for entry in &mut self.entries {
                entry.keys.retain(|(known, _)| known != key);
            }
        }
        let name = self.enter(kind, true, keys);
        self.sweep();
        name
    }

    fn enter(&mut self, kind: CacheKind, registered: bool, keys: &[Option<CacheKey>]) -> usize {
        let name = self.names;
        self.names += 1;
        let mut bound: Vec<(CacheKey, u32)> = Vec::new();
        for (row, key) in (0..).zip(keys) {
            if let Some(key) = key {
                bound.retain(|(known, _)| known != key);
                bound.push((*key, row));
            }
        }
        self.entries.push(TwinEntry { name, kind, registered, by_id: true, keys: bound });
        name
    }

    /// Releases an allocated cache by its number (contract §7.2, §7.4).
    pub fn deallocate(&mut self, name: usize) {
        for entry in &mut self.entries {
            if entry.name == name && !entry.registered {
                entry.by_id = false;
                if entry.kind == CacheKind::Blocks {
                    entry.keys.clear();
                }
            }
        }
        self.sweep();
    }

    /// Unbinds a key of an allocated cache (contract §7.5).
    pub fn remove_key(&mut self, key: CacheKey) {
        for entry in &mut self.entries {
            if !entry.registered {
                entry.keys.retain(|(known, _)| *known != key);
            }
        }
        self.sweep();
    }

    /// Removes a registered cache (contract §7.8).
    pub fn unregister(&mut self, name: usize) {
        self.entries.retain(|entry| entry.name != name || !entry.registered);
    }

    fn sweep(&mut self) {
        self.entries.retain(|entry| entry.registered || entry.by_id || !entry.keys.is_empty());
    }
}
