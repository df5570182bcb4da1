//! Pieces of bytes between caches of one block, over every way and between memory of every kind.

use std::cell::RefCell;

use llm_datadist_core::bindings::{DataDist, Layers, Name, Rows, Side};
use llm_datadist_core::{CacheKind, ErrorKind, Piece, Placement, Result};

use super::{Held, LONG, each, of, pairs, row};
use crate::fixtures::{Chance, desc};

const SIZE: u64 = 5000;

/// Moves `pieces` with the cache of the peer, whose cluster is 2.
fn moved(local: &DataDist, side: Side, own: &Held, name: Name, pieces: &[Piece]) -> Result<()> {
    let rows = Rows::Bytes { pieces: pieces.to_vec() };
    match side {
        Side::Destination => local.pull(of(2, name), &own.end(), rows, Layers::ALL).within(LONG).run(),
        Side::Source => local.push(&own.end(), of(2, name), rows, Layers::ALL).within(LONG).run(),
    }
}

/// Copies pieces one after the other in every tensor.
fn copied(pieces: &[Piece], src: &[Vec<u8>], dst: &mut [Vec<u8>]) {
    for (from, to) in src.iter().zip(dst) {
        for piece in pieces {
            let (src, dst, len) = (piece.src as usize, piece.dst as usize, piece.len as usize);
            to[dst..dst + len].copy_from_slice(&from[src..src + len]);
        }
    }
}

#[test]
fn pieces_move_as_one_after_the_other() {
    let chance = RefCell::new(Chance(1));
    let draw = |below| chance.borrow_mut().below(below);
    each(|_, pair, own, peer| {
        let [local, remote] = [(own, &pair.local), (peer, &pair.remote)]
            .map(|(memory, engine)| memory.held(engine, (2, 1, SIZE as usize), CacheKind::Blocks, &[]));
        for side in [Side::Destination, Side::Source] {
            let (mut here, mut there) = (local.fill(3), remote.fill(5));
            for count in [1, 5, 60] {
                let piece = |_| {
                    let len = 1 + draw(200);
                    Piece { src: draw(SIZE - len), dst: draw(SIZE - len), len }
                };
                let pieces: Vec<_> = (0..count).map(piece).collect();
                moved(&pair.local, side, &local, row(&remote, 0), &pieces).unwrap();
                match side {
                    Side::Destination => copied(&pieces, &there, &mut here),
                    Side::Source => copied(&pieces, &here, &mut there),
                }
                assert_eq!((local.read(), remote.read()), (here.clone(), there.clone()), "{pieces:?}");
            }
        }
    });
}

#[test]
fn wrong_pieces_move_nothing() {
    for pair in pairs() {
        let one = |size| desc(Placement::Device, 1, 1, size);
        let [local, larger] = [SIZE as usize, 2 * SIZE as usize]
            .map(|size| Held::pool(&pair.local, &one(size), CacheKind::Blocks));
        let remote = Held::pool(&pair.remote, &one(SIZE as usize), CacheKind::Blocks);
        let rows = Held::pool(&pair.remote, &desc(Placement::Device, 1, 2, SIZE as usize), CacheKind::Blocks);
        let before = (local.fill(1), larger.fill(2), remote.fill(3), rows.fill(4));
        let good = Piece { src: 1, dst: 2, len: 3 };
        let wrong = [
            Piece { len: 0, ..good },
            Piece { src: SIZE - 2, ..good },
            Piece { dst: SIZE - 2, ..good },
            Piece { src: u64::MAX, ..good },
            Piece { len: u64::MAX, ..good },
        ];
        for side in [Side::Destination, Side::Source] {
            let refused = |own: &Held, peer: &Held, pieces: &[Piece]| {
                let error = moved(&pair.local, side, own, row(peer, 0), pieces).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{pieces:?}: {error}");
            };
            for piece in wrong {
                refused(&local, &remote, &[good, piece]);
            }
            refused(&local, &remote, &[]);
            refused(&local, &rows, &[good]);
            // Inside the local cache, and beyond the remote one.
            refused(&larger, &remote, &[Piece { src: SIZE, dst: SIZE, len: 1 }]);
        }
        assert_eq!((local.read(), larger.read(), remote.read(), rows.read()), before);
        moved(&pair.local, Side::Destination, &local, row(&remote, 0), &[good]).unwrap();
    }
}
