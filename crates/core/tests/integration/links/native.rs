//! Native engines have no number from their program: their incarnations are their cluster ids.
//!
//! `tests/native/test_peers.py` covers engines that restart.

use std::net::SocketAddr;

use llm_datadist_core::bindings::{
    CallExtras, Config, DataDist, Destination, GroupMember, LayerRange, LayerReceiver, Layers, LayerwiseArgs,
    Role, Side, Target,
};
use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::{
    CacheDesc, CacheKind, ClusterId, DataType, ErrorKind, Event, GrantUse, KvLayout, PeerInfo, Verify,
    WhileRefused,
};

use super::asynchronous::outcome;
use super::{
    Held, LONG, Pair, WAYS, Way, block_rows, check_pull, config, device, fails_with, member, of, open,
    open_gated, pulling, row, verified,
};
use crate::fixtures::{Gated, eventually, kv_layout};

/// A configuration as those of the other tests, of a native engine.
fn native(way: Way) -> Config {
    Config { role: Role::Mix, native: true, remote_accessible: true, ..config(0, way) }
}

/// A linked pair of native engines.
pub(super) fn native_pair(way: Way) -> Pair {
    let pair = Pair { local: open(native(way), way), remote: open(native(way), way) };
    peer(&pair.local, pair.remote.listening().unwrap());
    pair
}

fn peer(local: &DataDist, address: SocketAddr) -> PeerInfo {
    let call = local.ensure_link(address, LONG, None, WhileRefused::Retry).unwrap();
    outcome(&call).unwrap();
    let peer = call.peer().expect("the peer of a success").clone();
    assert_eq!(peer.incarnation, peer.cluster.0);
    peer
}

#[test]
fn a_native_configuration_has_no_cluster_id() {
    let config = Config::native();
    assert!(config.native && config.remote_accessible);
    assert_eq!((config.cluster, config.sync_timeout), (ClusterId(0), Config::NATIVE_TIMEOUT));
    assert!(!Config::new(Role::Mix, ClusterId(1)).native);
    let [first, second] = [0, 1].map(|_| DataDist::open(Config::native()).unwrap().config().cluster.0);
    assert!(first != second && ![first, second].iter().any(|drawn| [0, u64::MAX].contains(drawn)));
}

/// Ids that are drawn spread no readers over replicas: the order of the list decides.
#[test]
fn a_native_engine_reads_the_first_of_equal_owners() {
    let layout = KvLayout { model: "m".into(), ..kv_layout(4, 2, 8, 2) };
    let desc =
        CacheDesc { data_type: DataType::Int8, kv_layout: Some(Box::new(layout)), ..device(4, 3, 4 * 2 * 8) };
    for _ in 0..8 {
        let Pair { local, remote } = native_pair(Way::Local);
        let into = Held::pool(&local, &desc, CacheKind::Blocks);
        let replicas = [1, 2].map(|_| Held::pool(&remote, &desc, CacheKind::Blocks));
        for order in [[0, 1], [1, 0]] {
            let bytes = [0, 1].map(|at: usize| replicas[at].fill(3 + 50 * at as u8));
            let cluster = remote.config().cluster.0;
            let owner = |at: usize| {
                member(of(cluster, row(&replicas[at], 0)), &into, block_rows(&[0, 1, 2], &[0, 1, 2]))
            };
            let pull = |layers| {
                let owners = order.map(|at| GroupMember { layers, ..owner(at) }).into();
                local.transfer_group(Side::Destination, owners, true, CallExtras::default(), None)
            };
            outcome(&pull(Layers::ALL).unwrap()).unwrap();
            assert!(into.read() == bytes[order[0]], "{order:?}");
            let one = Some(LayerRange { first: 0, end: 1 });
            let refused = pull(Layers { src: one, dst: one, tensors_per_layer: 2 }).unwrap_err();
            assert_eq!((refused.kind(), refused.fact("part")), (ErrorKind::InvalidArgument, Some("0")));
        }
    }
}

/// Each part of a group may have its own layers.
#[test]
fn the_parts_of_a_group_move_their_layers() {
    for way in WAYS {
        let pair = native_pair(way);
        let [near, far] = pair.pools(&device(6, 2, 64), CacheKind::Blocks);
        let cluster = pair.remote.config().cluster.0;
        for pushes in [false, true] {
            let (ours, theirs) = (near.fill(1), far.fill(2));
            let part = |src: u32, dst: u32, block: i64| {
                let one = |first| Some(LayerRange { first, end: first + 1 });
                let layers = Layers { src: one(src), dst: one(dst), tensors_per_layer: 2 };
                let all = member(of(cluster, row(&far, 0)), &near, block_rows(&[block], &[block]));
                GroupMember { layers, ..all }
            };
            let members = vec![part(0, 2, 0), part(1, 0, 1)];
            let (side, src, mut dst) =
                if pushes { (Side::Source, ours, theirs) } else { (Side::Destination, theirs, ours) };
            let call = pair.local.transfer_group(side, members, false, CallExtras::default(), None);
            outcome(&call.unwrap()).unwrap();
            for (from, to, at) in [(0, 4, 0), (1, 5, 0), (2, 0, 1), (3, 1, 1)] {
                dst[to][at * 64..(at + 1) * 64].copy_from_slice(&src[from][at * 64..(at + 1) * 64]);
            }
            assert!(if pushes { far.read() } else { near.read() } == dst, "{way:?}, pushes {pushes}");
        }
    }
}

/// A link is ended without an address, after the calls in progress.
#[test]
fn an_unlink_needs_only_the_cluster() {
    let (way, gate) = (Way::TcpDevice, Gated::new(HostReach::Staged));
    let (local, remote) = (open_gated(native(way), way, &gate), open(native(way), way));
    let found = peer(&local, remote.listening().unwrap());
    let [into, source] =
        [&local, &remote].map(|engine| Held::pool(engine, &device(2, 1, 64), CacheKind::Blocks));
    let bytes = source.fill(4);
    gate.shut();
    let from = of(found.cluster.0, row(&source, 0));
    let pull = local.pull(from, &into.end(), block_rows(&[0], &[0]), Layers::ALL).start().unwrap();
    gate.wait_for(1);
    let unlinked = local.start_unlink(found.cluster, false, None).unwrap();
    assert!(!unlinked.done() && !pull.done());
    gate.open();
    outcome(&unlinked).unwrap();
    outcome(&pull).unwrap();
    assert!(into.read() == bytes);
    assert!(local.peers().is_empty());
    eventually("the goodbye", || remote.peers().is_empty());
    for force in [false, true] {
        outcome(&local.start_unlink(found.cluster, force, None).unwrap()).unwrap();
    }
    peer(&local, remote.listening().unwrap());
    check_pull(&local, &remote);
    outcome(&local.start_unlink(found.cluster, true, Some(LONG)).unwrap()).unwrap();
    assert!(local.peers().is_empty());
}

/// A revoked grant has ended at once; the transfer ends with the reads that were being served.
#[test]
fn a_revocation_ends_when_its_reads_have_ended() {
    let (way, gate) = (Way::TcpDevice, Gated::new(HostReach::Staged));
    let (local, remote) = (open(native(way), way), open_gated(native(way), way, &gate));
    let found = peer(&local, remote.listening().unwrap());
    let [into, source] =
        [&local, &remote].map(|engine| Held::pool(engine, &device(2, 1, 64), CacheKind::Blocks));
    source.fill(4);
    let grant = remote.grant(&source.end(), &[0], LONG, 1).unwrap();
    remote.renew(&grant, 2 * LONG).unwrap();
    let given = GrantUse { token: remote.grant_token(&grant), done: true };
    let pull = || {
        let extras = CallExtras { grant: Some(given), ..CallExtras::default() };
        let from = of(found.cluster.0, row(&source, 0));
        pulling(&local, from, &into, block_rows(&[0], &[0]), extras).start().unwrap()
    };
    gate.shut();
    let read = pull();
    gate.wait_for(1);
    let late = remote.start_revoke(&grant, Some(std::time::Duration::from_millis(1))).unwrap();
    assert!(grant.ended().is_some());
    assert_eq!(outcome(&late).unwrap_err().kind(), ErrorKind::Timeout);
    let revoked = remote.start_revoke(&grant, None).unwrap();
    assert_eq!(remote.renew(&grant, LONG).unwrap_err().kind(), ErrorKind::GrantEnded);
    assert!(!revoked.done());
    gate.open();
    outcome(&revoked).unwrap();
    let again = remote.start_revoke(&grant, None).unwrap();
    assert!(again.done() && !again.has_event(), "no read is left");
    assert_eq!(outcome(&read).unwrap_err().kind(), ErrorKind::GrantEnded);
    assert_eq!(outcome(&pull()).unwrap_err().kind(), ErrorKind::GrantEnded);
    let ttl = std::time::Duration::ZERO;
    assert_eq!(remote.renew(&grant, ttl).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

fn receiver(cluster: ClusterId, to: &Held, layers: (u32, u32)) -> LayerReceiver {
    let target = Target::Cache { name: row(to, 0).into(), first_layer: Some(layers.0) };
    let src_layers = LayerRange { first: layers.0, end: layers.1 };
    LayerReceiver {
        to: Destination { cluster, target, src_layers, src_row: 0 },
        args: LayerwiseArgs {
            src_blocks: vec![0, 1],
            dst_blocks: vec![1, 0],
            dst_block_bytes: None,
            tensors_per_layer: 2,
        },
    }
}

/// One transfer for all receivers; the notification comes when all layers are in place everywhere.
#[test]
fn a_push_of_layers_is_one_transfer_with_a_notification() {
    for way in WAYS {
        let Pair { local, remote } = native_pair(way);
        let cluster = remote.config().cluster;
        let source = Held::pool(&local, &device(6, 2, 64), CacheKind::Blocks);
        let into = [1, 2].map(|_| Held::pool(&remote, &device(6, 2, 64), CacheKind::Blocks));
        let (sent, before) = (source.fill(1), into.each_ref().map(|into| into.fill(2)));
        let receivers = || vec![receiver(cluster, &into[0], (0, 2)), receiver(cluster, &into[1], (1, 3))];
        let extras = || CallExtras { notify: Some(b"done".to_vec()), ..verified(Verify::Full) };
        let task = local.begin_push(&source.end(), receivers(), None, extras()).unwrap();
        let transfer = task.transfer().clone();
        let messages = || {
            let events = remote.poll(100).unwrap();
            let message = |event| match event {
                Event::Notification(message) => Some((message.peer.cluster, message.payload)),
                _ => None,
            };
            events.into_iter().filter_map(message).collect::<Vec<_>>()
        };
        task.ready(2).unwrap();
        task.ready(0).unwrap();
        assert!(!transfer.done() && messages().is_empty());
        task.ready(1).unwrap();
        assert_eq!(outcome(&transfer).unwrap(), 2 * 2 * 2 * 2 * 64);
        assert_eq!(messages(), [(local.config().cluster, b"done".to_vec())], "{way:?}");
        for (at, tensors) in [(0, 0..4), (1, 2..6)] {
            let mut expected = before[at].clone();
            for tensor in tensors {
                expected[tensor] = [&sent[tensor][64..], &sent[tensor][..64]].concat();
            }
            assert!(into[at].read() == expected, "{way:?}, {at}");
        }
        // The peer gets no notification of a push that fails.
        let task = local.begin_push(&source.end(), receivers(), None, extras()).unwrap();
        let transfer = task.transfer().clone();
        drop(task);
        assert_eq!(outcome(&transfer).unwrap_err().kind(), ErrorKind::Cancelled);
        assert!(messages().is_empty());
    }
}

#[test]
fn a_push_of_layers_checks_its_arguments() {
    let Pair { local, remote } = native_pair(Way::Local);
    let cluster = remote.config().cluster;
    let source = Held::pool(&local, &device(6, 2, 64), CacheKind::Blocks);
    let into = Held::pool(&remote, &device(6, 2, 64), CacheKind::Blocks);
    let [one, other] = [cluster, ClusterId(7)].map(|cluster| receiver(cluster, &into, (0, 2)));
    let notify = |bytes| CallExtras { notify: Some(vec![1; bytes]), ..CallExtras::default() };
    for (receivers, extras) in [
        (vec![], CallExtras::default()),
        (vec![one.clone(), other], notify(1)),
        (vec![one.clone()], notify((64 << 10) + 1)),
    ] {
        fails_with(local.begin_push(&source.end(), receivers, None, extras), ErrorKind::InvalidArgument);
    }
    assert_eq!(local.events().open_transfers(), 0);
}
