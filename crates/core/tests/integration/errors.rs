//! Every kind of error has a code, and its text has its facts.

use std::collections::HashSet;
use std::error::Error as _;

use llm_datadist_core::bindings::StatusCode;
use llm_datadist_core::{Error, ErrorKind};

#[test]
fn codes_are_the_numbers_of_the_contract() {
    use StatusCode as S;
    let expected: [(ErrorKind, S, i64); 20] = [
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
        (ErrorKind::Busy, S::LinkBusy, 0x5010_B01B),
        (ErrorKind::GrantEnded, S::GrantEnded, 0x4C44_0001),
        (ErrorKind::VerifyFailed, S::VerifyFailed, 0x4C44_0002),
    ];
    assert_eq!(expected.map(|(kind, _, _)| kind), ErrorKind::ALL);
    for (kind, code, value) in expected {
        assert_eq!((StatusCode::from(kind), code.value()), (code, value));
    }
    let values: HashSet<i64> = S::ALL.iter().map(|code| code.value()).collect();
    let names: HashSet<&str> = S::ALL.iter().map(|code| code.name()).collect();
    assert!(names.iter().all(|name| name.starts_with("LLM_")));
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
fn cluster_ids_are_facts_of_the_original_api_only() {
    let source = Error::new(ErrorKind::NotLinked, "it is gone").with("cluster", 5);
    let error =
        Error::new(ErrorKind::Timeout, "too late").with("cluster", 5).with("bytes", 1).because(source);
    assert_eq!(error.to_string(), "too late (bytes=1): it is gone");
    assert_eq!(error.original().to_string(), "too late (cluster=5, bytes=1): it is gone (cluster=5)");
    assert_eq!((error.facts().count(), error.fact("cluster")), (1, Some("5")));
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
