//! A layout is refused unless it fits its cache.

use std::ops::Range;

use llm_datadist_core::bindings::{Geometry, KvGeometry};
use llm_datadist_core::testing::validate::local_rows_alike;
use llm_datadist_core::{CacheDesc, DataType, KvLayout, KvPlanes, Placement, TokenOrder};

use crate::arguments::refused;
use crate::fixtures::{desc, kv_layout};

fn layout() -> KvLayout {
    KvLayout { heads: 4..8, ..kv_layout(16, 8, 8, 4) }
}

/// Each rule of a layout, with its argument, its value and what is allowed.
#[test]
fn layouts_that_do_not_fit_their_cache_are_refused() {
    let elements = 16 * 4 * 8;
    let checked = |layout: KvLayout, num_tensors: u32, elements: usize| {
        let data_type = DataType::Float16;
        let desc = CacheDesc { data_type, ..desc(Placement::Device, num_tensors, 4, elements) };
        KvGeometry::new(layout, &Geometry::new(&desc).unwrap(), data_type)
    };
    let good = checked(layout(), 8, elements).unwrap();
    assert_eq!((good.geometry().rows(), good.geometry().row_bytes()), (4, 1024));
    assert_eq!((good.plane_bytes(), good.head_bytes(), good.data_type()), (1024, 16, DataType::Float16));
    assert_eq!((good.token_step(), good.head_step()), (64, 16));
    /// A layout, and the tensors and the elements of a row of the cache.
    struct Fit(KvLayout, u32, usize);
    let cases: [(fn(&mut Fit), &str); 14] = [
        (|fit| fit.0.tokens_per_block = 0, "block_tokens=0 must be above 0"),
        (|fit| fit.0.total_heads = 0, "total_heads=0 must be above 0"),
        (|fit| fit.0.head_dim = 0, "head_dim=0 must be above 0"),
        (|fit| fit.0.heads = 2..2, "heads=2..2 must be a range of at least one head inside 0..8"),
        (|fit| fit.0.heads = Range { start: 3, end: 2 }, "heads=3..2 must be a range of at least"),
        (|fit| fit.0.heads = 6..9, "heads=6..9 must be a range of at least one head inside 0..8"),
        (|fit| fit.0.layers = 3..3, "layers=3..3 must be a range of at least one layer"),
        (|fit| fit.0.kv = KvPlanes::Latent, "total_heads=8 must be 1 in a latent layout"),
        (|fit| fit.1 = 7, "num_tensors=7 must be 8 for layers 0..4 (kv separate)"),
        (|fit| fit.0.kv = KvPlanes::KThenV, "num_tensors=8 must be 4 for layers 0..4 (kv k_then_v)"),
        (
            |fit| (fit.0.kv, fit.1) = (KvPlanes::KThenV, 4),
            "row_bytes=1024 must be 2048, the bytes of a block",
        ),
        (|fit| fit.2 += 1, "row_bytes=1026 must be 1024, the bytes of a block"),
        (|fit| fit.0.layers = 0..u32::MAX, "num_tensors=8 must be 8589934590 for layers"),
        (
            |fit| (fit.0.tokens_per_block, fit.0.head_dim) = (u32::MAX, u32::MAX),
            "a layout whose blocks have less than 2^64 bytes",
        ),
    ];
    for (change, text) in cases {
        let mut fit = Fit(layout(), 8, elements);
        change(&mut fit);
        refused(checked(fit.0, fit.1, fit.2), &[text]);
    }
}

/// Copies within an engine do not convert. A cache without a layout may hold anything.
#[test]
fn local_rows_of_different_layouts_are_not_alike() {
    let geometry = |change: fn(&mut KvLayout), data_type: DataType| {
        let mut layout = layout();
        change(&mut layout);
        let elements = layout.tokens_per_block as usize * layout.heads.len() * layout.head_dim as usize;
        let desc = CacheDesc { data_type, ..desc(Placement::Device, 8, 4, elements) };
        KvGeometry::new(layout, &Geometry::new(&desc).unwrap(), data_type).unwrap()
    };
    let alike = |change, data_type| {
        let (own, other) = (geometry(|_| (), DataType::Float16), geometry(change, data_type));
        local_rows_alike(Some(&own), Some(&other))
    };
    let own = geometry(|_| (), DataType::Float16);
    for (src, dst) in [(None, None), (Some(&own), None), (None, Some(&own)), (Some(&own), Some(&own))] {
        local_rows_alike(src, dst).unwrap();
    }
    let cases: [(fn(&mut KvLayout), DataType, &str); 7] = [
        (|layout| layout.layers = 4..8, DataType::Float16, "different KV layouts"),
        (|layout| layout.order = TokenOrder::Hnd, DataType::Float16, "different KV layouts"),
        (|layout| layout.heads = 0..4, DataType::Float16, "different KV layouts"),
        (|layout| layout.tokens_per_block = 32, DataType::Float16, "different KV layouts"),
        (|layout| layout.model = "b".into(), DataType::Float16, "model differs"),
        (|layout| layout.head_dim = 16, DataType::Float16, "head_dim differs"),
        (|_| (), DataType::Bf16, "data_type differs"),
    ];
    for (change, data_type, text) in cases {
        refused(alike(change, data_type), &[text]);
    }
}
