//! Every kind of error has a code, a cause that this file produces, and a text with its facts.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::{
    CacheId, CacheKey, CacheKind, ClusterId, CopyArgs, DataDist, Destination, End, Error, ErrorKind,
    LayerRange, LayerwiseArgs, Outcome, PeerAddress, Placement, Role, StatusCode, SwapInPath, Target,
};
use llm_datadist_testing::SimDevice;

use crate::fixtures::{Own, config, desc, engine_on};
use crate::links::fake_peer::Fake;
use CacheKind::{Batch, Blocks};
use Placement::{Device, Host};

/// An error of `kind` as a user meets it, or `None` for those that are made elsewhere.
fn produced(kind: ErrorKind) -> Option<Error> {
    let engine = DataDist::open(config(1 << 20)).unwrap();
    let cache = engine.allocate(&desc(Device, 1, 4, 64), Blocks, &[]).unwrap();
    let end = End::Managed(cache.id());
    let error = match kind {
        ErrorKind::InvalidArgument => engine.copy_blocks(&end, &[(0, 4)]),
        ErrorKind::CacheNotFound => engine.copy_blocks(&End::Managed(CacheId(77)), &[]),
        ErrorKind::OutOfMemory => engine.allocate(&desc(Device, 1, 4, 1 << 20), Blocks, &[]).map(|_| ()),
        ErrorKind::Timeout => {
            static OVER: AtomicBool = AtomicBool::new(true);
            engine.over_when(&OVER).copy_blocks(&end, &[(0, 1), (1, 2), (2, 3)])
        }
        ErrorKind::NotEnabled => {
            let mut config = config(1 << 20);
            config.swap_in = SwapInPath::Direct;
            let engine = engine_on(config, Arc::new(SimDevice::new(HostReach::Staged)));
            let own = Own::loose(&desc(Host, 1, 4, 64), Blocks);
            let cache = engine.allocate(&desc(Device, 1, 4, 64), Blocks, &[]).unwrap();
            engine.swap_blocks(&End::Loose(own.cache.clone()), &End::Managed(cache.id()), &[(0, 0)])
        }
        ErrorKind::System => {
            let sim = Arc::new(SimDevice::new(HostReach::Direct));
            sim.fail_after(0);
            let engine = engine_on(config(1 << 20), sim);
            let cache = engine.allocate(&desc(Device, 1, 4, 64), Blocks, &[]).unwrap();
            engine.copy_blocks(&End::Managed(cache.id()), &[(0, 1)])
        }
        ErrorKind::NotLinked => engine.check_link(ClusterId(9)),
        ErrorKind::LinkFailed => link_to_self(&engine, "127.0.0.1:1"),
        ErrorKind::Interrupted => {
            link_to_absent_member(&engine);
            engine.interrupted_by(|| true).check_link(ClusterId(9))
        }
        ErrorKind::Cancelled => {
            let args = LayerwiseArgs { tensors_per_layer: 1, ..LayerwiseArgs::default() };
            let to = Destination {
                cluster: ClusterId(9),
                target: Target::Addresses(vec![4096]),
                src_layers: LayerRange { first: 0, end: 1 },
                src_row: 0,
            };
            let slot = engine.allocate(&desc(Device, 1, 4, 64), Batch, &[]).unwrap();
            link_to_absent_member(&engine);
            let task = engine.transfer_async(&End::Managed(slot.id()), &args, vec![to], None).unwrap();
            assert!(task.cancel() && !task.cancel());
            match task.outcomes().remove(0) {
                Outcome::Failed(error) => Err(Error::new(error.kind(), error.to_string())),
                other => panic!("{other:?}"),
            }
        }
        ErrorKind::AlreadyLinked | ErrorKind::LinksExist => {
            let mut config = config(1 << 20);
            config.links.listen = Some("127.0.0.1:0".parse().unwrap());
            let engine = DataDist::open(config).unwrap();
            let address = engine.listening().unwrap().to_string();
            link_to_self(&engine, &address).unwrap();
            match kind {
                ErrorKind::AlreadyLinked => link_to_self(&engine, &address),
                _ => engine.switch_role(Role::Decoder, None),
            }
        }
        ErrorKind::UnlinkFailed => {
            // The peer disconnects while it is being unlinked.
            let peer = Fake::new(9, 1);
            let at = [peer.address()];
            let mut config = config(1 << 20);
            config.links.accept_remote = true;
            let engine = DataDist::open(config).unwrap();
            std::thread::scope(|scope| {
                let away = scope.spawn(|| (peer.linked(), peer.greet().0.close()));
                engine.link_clusters(&at, Duration::from_secs(5)).remove(0).unwrap();
                let unlinked = engine.unlink_clusters(&at, Duration::from_secs(5), false).remove(0);
                drop(away.join().unwrap());
                unlinked
            })
        }
        ErrorKind::KeyTaken => {
            let key = [Some(CacheKey::Blocks { model: 5 })];
            engine.allocate(&desc(Device, 1, 4, 64), Blocks, &key).unwrap();
            engine.allocate(&desc(Device, 1, 4, 64), Blocks, &key).map(|_| ())
        }
        ErrorKind::TensorCountMismatch => {
            let [one, two] = [1, 2].map(|count| {
                let cache = engine.allocate(&desc(Device, count, 4, 64), CacheKind::Batch, &[]).unwrap();
                End::Managed(cache.id())
            });
            let args = CopyArgs { dst_batch_index: 0, src_batch_index: 0, offset: 0, size: -1 };
            engine.copy_cache(&one, &two, args)
        }
        // `crates/py`: a method of a closed engine, and of one opened by the parent of a fork.
        ErrorKind::Closed | ErrorKind::Forked => return None,
    };
    Some(error.expect_err("the case of this kind succeeds"))
}

fn link_to_self(engine: &DataDist, address: &str) -> Result<(), Error> {
    let cluster = engine.config().cluster;
    let peer = PeerAddress { cluster, remote: vec![address.parse().unwrap()], local: vec![] };
    engine.link_clusters(&[peer], Duration::from_secs(2)).remove(0)
}

/// Links cluster 9, whose engine does not exist, so that calls wait for it.
fn link_to_absent_member(engine: &DataDist) {
    let table = r#"{"server_count": "1", "server_list": [{"device": [{"rank_id": 0}, {"rank_id": 1}]}]}"#;
    engine.link("absent", &[(engine.config().cluster, 0), (ClusterId(9), 1)], table).unwrap();
}

#[test]
fn every_kind_is_produced() {
    let (by_the_core, by_the_binding): (Vec<_>, Vec<_>) =
        ErrorKind::ALL.into_iter().map(|kind| (kind, produced(kind))).partition(|(_, error)| error.is_some());
    for (kind, error) in &by_the_core {
        let error = error.as_ref().unwrap();
        assert_eq!(error.kind(), *kind, "{error}");
        assert!(error.to_string().len() > 20, "{error}");
        assert!(format!("{error:?}").starts_with(&format!("{kind:?}: ")));
    }
    let by_the_binding: Vec<_> = by_the_binding.iter().map(|(kind, _)| *kind).collect();
    assert_eq!(by_the_binding, [ErrorKind::Closed, ErrorKind::Forked]);
}

#[test]
fn codes_are_the_numbers_of_the_contract() {
    use StatusCode as S;
    let expected: [(ErrorKind, S, i64); 17] = [
        (ErrorKind::InvalidArgument, S::ParamInvalid, 0x5010_B005),
        (ErrorKind::CacheNotFound, S::KvCacheNotExist, 0x5010_B002),
        (ErrorKind::OutOfMemory, S::OutOfMemory, 0x5010_B01C),
        (ErrorKind::Timeout, S::Timeout, 0x5010_B01A),
        (ErrorKind::Closed, S::EngineFinalized, 0x5010_B006),
        (ErrorKind::Forked, S::Failed, 0xFFFF_FFFF),
        (ErrorKind::NotEnabled, S::FeatureNotEnabled, 0x5010_B019),
        (ErrorKind::NotLinked, S::NotYetLink, 0x5010_B007),
        (ErrorKind::AlreadyLinked, S::AlreadyLink, 0x5010_B008),
        (ErrorKind::LinkFailed, S::LinkFailed, 0x5010_B009),
        (ErrorKind::UnlinkFailed, S::UnlinkFailed, 0x5010_B00A),
        (ErrorKind::LinksExist, S::ExistLink, 0x5010_B018),
        (ErrorKind::Interrupted, S::Failed, 0xFFFF_FFFF),
        (ErrorKind::System, S::Failed, 0xFFFF_FFFF),
        (ErrorKind::Cancelled, S::Failed, 0xFFFF_FFFF),
        (ErrorKind::KeyTaken, S::ParamInvalid, 0x5010_B005),
        (ErrorKind::TensorCountMismatch, S::ParamInvalid, 0x5010_B005),
    ];
    assert_eq!(expected.map(|(kind, _, _)| kind), ErrorKind::ALL);
    for (kind, code, value) in expected {
        assert_eq!((StatusCode::from(kind), code.value()), (code, value));
    }
    let mut values: Vec<i64> = S::ALL.iter().map(|code| code.value()).collect();
    let mut names: Vec<&str> = S::ALL.iter().map(|code| code.name()).collect();
    assert!(names.iter().all(|name| name.starts_with("LLM_")));
    values.sort_unstable();
    values.dedup();
    names.sort_unstable();
    names.dedup();
    assert_eq!((values.len(), names.len()), (S::ALL.len(), S::ALL.len()), "numbers and names are unique");
}

#[test]
fn interfaces_without_the_cache_manager_change_some_codes() {
    use StatusCode as S;
    let of_kv_cache_manager = [
        (ErrorKind::OutOfMemory, S::DeviceOutOfMemory),
        (ErrorKind::Timeout, S::WaitProcessTimeout),
        (ErrorKind::UnlinkFailed, S::NotifyPromptUnlinkFailed),
        (ErrorKind::TensorCountMismatch, S::Failed),
    ];
    let of_cpp = [(ErrorKind::OutOfMemory, S::DeviceOutOfMemory), (ErrorKind::Closed, S::Failed)];
    let interfaces: [(fn(ErrorKind) -> S, &[(ErrorKind, S)]); 2] =
        [(S::of_kv_cache_manager, &of_kv_cache_manager), (S::of_cpp, &of_cpp)];
    for (code_of, own) in interfaces {
        for kind in ErrorKind::ALL {
            let expected = own.iter().find(|entry| entry.0 == kind).map_or(S::from(kind), |entry| entry.1);
            assert_eq!(code_of(kind), expected, "{kind:?}");
        }
        assert!(own.iter().all(|&(kind, code)| S::from(kind) != code));
    }
}

#[test]
fn a_text_holds_message_facts_and_source() {
    let source = std::io::Error::other("the disk is gone");
    let error = Error::new(ErrorKind::System, "no page").with("bytes", 5).with("path", "/x").because(source);
    assert_eq!(error.to_string(), "no page (bytes=5, path=/x): the disk is gone");
    assert_eq!(format!("{error:?}"), "System: no page (bytes=5, path=/x): the disk is gone");
    assert_eq!((error.fact("path"), error.fact("none")), (Some("/x"), None));
    assert_eq!(error.source().unwrap().to_string(), "the disk is gone");
    let bare = Error::new(ErrorKind::Closed, "closed");
    assert_eq!((bare.to_string().as_str(), bare.source().is_none()), ("closed", true));
    assert_eq!(Error::argument("size", -2, "1 to 3").to_string(), "size=-2 must be 1 to 3");
    assert_eq!(size_of::<llm_datadist_core::Result<u32>>(), 16);
    assert_eq!(size_of::<llm_datadist_core::Result<()>>(), 8);
}
