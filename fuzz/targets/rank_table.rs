//! Rank tables: no panic, the same members twice and however the JSON is laid out, and only addresses that the table names.
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
    let resolved = |text: &str| rank_table::resolve(text, members, ClusterId(1), &links);
    match resolved(text) {
        Err(error) => {
            refused_as(&error, &[ErrorKind::InvalidArgument]);
            assert_eq!(resolved(text).map_err(|again| again.to_string()).err(), Some(error.to_string()));
        }
        Ok(found) => {
            assert_eq!(resolved(text).ok().as_ref(), Some(&found));
            let value: Value = serde_json::from_str(text).expect("accepted, and not JSON");
            let pretty = serde_json::to_string_pretty(&value).expect("a value is written");
            assert_eq!(resolved(&pretty).ok().as_ref(), Some(&found));
            assert_eq!(found.len(), members.len());
            for (member, &(cluster, rank)) in found.iter().zip(members) {
                assert_eq!((member.cluster, member.rank), (cluster, rank));
                sound(member, &value);
            }
        }
    }
});

fn sound(member: &RankMember, table: &Value) {
    assert!(!member.host.is_empty() && member.host.iter().all(|at| at.port() > 0), "{member:?}");
    let ip = member.host[0].ip();
    assert!(member.host.iter().all(|at| at.ip() == ip), "{member:?}");
    assert!(ip.is_loopback() || named(table, &ip.to_string(), ip), "{member:?} is not in the table");
    assert_eq!(member.bind.is_ipv4(), ip.is_ipv4());
    assert!(!member.configured, "no option says where a member is");
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
