//! The KV layout in the description of a cache: it survives the message, and a peer cannot describe an impossible one.

use llm_datadist_core::bindings::{CacheLayout, Geometry, KvGeometry};
use llm_datadist_core::testing::protocol::{
    CHECKSUM, EntryVersion, HEADER, MESSAGE, WireCache, WireLayout, decode, decode_message, encode,
};
use llm_datadist_core::{
    CacheDesc, CacheId, CacheKind, DataType, ErrorKind, KvLayout, KvPlanes, Placement, TokenOrder,
};

use crate::arguments::refused_as;
use crate::fixtures::{desc, kv_layout};
use crate::kv_layouts::{num_tensors, row_elements};

fn layout(order: TokenOrder, kv: KvPlanes) -> KvLayout {
    let (heads, total_heads) = if kv == KvPlanes::Latent { (0..1, 1) } else { (2..6, 8) };
    let whole = kv_layout(16, total_heads, 128, 7);
    KvLayout { heads, order, kv, layers: 3..7, model: "a model, version 2".into(), ..whole }
}

/// A description of a cache with this layout, of 16-bit floats.
fn record(layout: &KvLayout) -> (WireCache, KvGeometry) {
    let elements = row_elements(layout) as usize;
    let desc = CacheDesc {
        data_type: DataType::Float16,
        ..desc(Placement::Device, num_tensors(layout), 9, elements)
    };
    let geometry = Geometry::new(&desc).unwrap();
    let cache = CacheLayout { geometry, kind: CacheKind::Blocks, placement: Placement::Device };
    let mut record = WireCache::new(EntryVersion { index: 1, generation: 2 }, CacheId(3), 0, cache);
    let kv = KvGeometry::new(layout.clone(), &geometry, DataType::Float16).unwrap();
    record.layout = Some(WireLayout::from(&kv));
    (record, kv)
}

#[test]
fn a_layout_survives_the_message() {
    for order in [TokenOrder::Nhd, TokenOrder::Hnd] {
        for kv in KvPlanes::ALL {
            let (record, kv) = record(&layout(order, kv));
            let frame = encode(&record).unwrap();
            assert_eq!(frame[3], MESSAGE);
            let read: WireCache = decode(&frame[HEADER..]).unwrap();
            let geometry = read.layout().unwrap().geometry;
            assert_eq!(read.kv_geometry(&geometry).unwrap(), Some(kv));
        }
    }
}

/// The bytes of a layout: they may change only with the version of the protocol.
#[test]
fn layout_bytes() {
    let (record, _) = record(&layout(TokenOrder::Hnd, KvPlanes::KThenV));
    let mut expected = vec![1, 1, 16, 2, 6, 8, 0x80, 1, 1, 1, 3, 7, 18];
    expected.extend(b"a model, version 2");
    expected.push(0); // no grant
    let frame = encode(&record).unwrap();
    assert!(frame[..frame.len() - CHECKSUM].ends_with(&expected));
}

#[test]
fn a_peer_cannot_describe_an_impossible_layout() {
    // `kv_geometry` has every rule of a layout.
    let changes: [fn(&mut WireLayout); 7] = [
        |layout| layout.data_type = 99,
        |layout| layout.data_type = DataType::Float as u8,
        |layout| layout.layout.tokens_per_block = u32::MAX,
        |layout| layout.layout.heads = 5..9,
        |layout| layout.layout.heads = 0..u32::MAX,
        |layout| layout.layout.head_dim = u32::MAX,
        |layout| layout.layout.model = "m".repeat(257),
    ];
    let (good, _) = record(&layout(TokenOrder::Nhd, KvPlanes::Separate));
    let geometry = good.layout().unwrap().geometry;
    for change in changes {
        let mut bad = good.clone();
        bad.layout.as_mut().into_iter().for_each(change);
        refused_as(ErrorKind::NotLinked, bad.kv_geometry(&geometry), &["cache 3 with an invalid layout"]);
    }
    assert_eq!(WireCache { layout: None, ..good.clone() }.kv_geometry(&geometry).unwrap(), None);
    // Numbers that no order or arrangement has, and a long name, are refused while the message is read.
    let layout = good.layout.unwrap();
    let mut long = layout.clone();
    long.layout.model = "m".repeat(257);
    decode::<WireLayout>(&encode(&long).unwrap()[HEADER..]).unwrap_err();
    let message = encode(&layout).unwrap();
    let message = &message[HEADER..message.len() - CHECKSUM];
    assert_eq!(decode_message::<WireLayout>(message).unwrap(), layout);
    for at in [message.len() - 23, message.len() - 22] {
        let mut other = message.to_vec();
        other[at] = 4;
        decode_message::<WireLayout>(&other).unwrap_err();
    }
}
