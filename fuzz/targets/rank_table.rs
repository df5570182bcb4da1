//! Rank tables: no panic, the same ends twice and however the JSON is laid out, and only addresses that the table names.
#![no_main]

use libfuzzer_sys::fuzz_target;
use llm_datadist_core::testing::config::LinkConfig;
use llm_datadist_core::testing::validate::rank_table::{self, RankMember};
use llm_datadist_core::{ClusterId, ErrorKind};
use llm_datadist_fuzz::refused_as;
use serde_json::Value;

const MEMBERS: [(ClusterId, u32); 4] =
    [(ClusterId(1), 0), (ClusterId(2), 1), (ClusterId(3), 2), (ClusterId(4), 7)];

fuzz_target!(|input: &[u8]| {
    let Some((&count, text)) = input.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let members = &MEMBERS[..2 + usize::from(count % 3)];
    let links = LinkConfig::default();
    let ends = |text: &str| rank_table::resolve(text, members, ClusterId(1), &links);
    match ends(text) {
        Err(error) => {
            refused_as(&error, &[ErrorKind::InvalidArgument]);
            assert_eq!(ends(text).map_err(|again| again.to_string()).err(), Some(error.to_string()));
        }
        Ok(found) => {
            assert_eq!(ends(text).ok().as_ref(), Some(&found));
            let value: Value = serde_json::from_str(text).expect("accepted, and not JSON");
            let pretty = serde_json::to_string_pretty(&value).expect("a value is written");
            assert_eq!(ends(&pretty).ok().as_ref(), Some(&found));
            assert_eq!(found.len(), members.len());
            for (end, &(cluster, rank)) in found.iter().zip(members) {
                assert_eq!((end.cluster, end.rank), (cluster, rank));
                sound(end, &value);
            }
        }
    }
});

fn sound(end: &RankMember, table: &Value) {
    assert!(!end.host.is_empty() && end.host.iter().all(|at| at.port() > 0), "{end:?}");
    let ip = end.host[0].ip();
    assert!(end.host.iter().all(|at| at.ip() == ip), "{end:?}");
    assert!(ip.is_loopback() || named(table, &ip.to_string(), ip), "{end:?} is not in the table");
    assert_eq!(end.bind.is_ipv4(), ip.is_ipv4());
    assert!(!end.configured, "no option says where an end is");
}

/// Whether a text anywhere in the table reads as this address.
fn named(value: &Value, shown: &str, ip: std::net::IpAddr) -> bool {
    match value {
        Value::String(text) => {
            let text = text.trim();
            let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
            bare == shown || bare.parse() == Ok(ip)
        }
        Value::Array(list) => list.iter().any(|value| named(value, shown, ip)),
        Value::Object(fields) => fields.values().any(|value| named(value, shown, ip)),
        _ => false,
    }
}
