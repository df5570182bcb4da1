//! Pool configurations against a model over `serde_json`: the same are accepted, with the same numbers.
#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use llm_datadist_core::testing::options::{config_from_texts, cpp};
use llm_datadist_core::bindings::{PoolConfig, Role};
use llm_datadist_core::{ClusterId, ErrorKind};
use llm_datadist_fuzz::refused_as;
use serde_json::Value;

const HOST_LIMIT: u64 = 20 << 30;

/// `memory_size` and `page_shift` of a pool that is accepted.
fn model(text: &str, limit: u64) -> Option<(u64, u32)> {
    let value: Value = serde_json::from_str(text).ok()?;
    let fields = value.as_object()?;
    let bytes = fields.get("memory_size")?.as_u64().filter(|&bytes| bytes > 0 && bytes <= limit)?;
    let shift = match fields.get("page_shift") {
        None => PoolConfig::DEFAULT_PAGE_SHIFT,
        Some(shift) => u32::try_from(shift.as_u64()?).ok().filter(|shift| (10..=30).contains(shift))?,
    };
    let pages = bytes / (1u64 << shift);
    (pages > 0 && pages < u64::from(u32::MAX)).then_some((bytes, shift))
}

fn pools(options: &[(&str, &str)]) -> Result<[Option<(u64, u32)>; 2], llm_datadist_core::Error> {
    let mut given: BTreeMap<String, String> =
        options.iter().map(|&(key, value)| (key.into(), value.into())).collect();
    given.insert("llm.EnableCacheManager".into(), "1".into());
    let config = config_from_texts(Role::Prompt, ClusterId(1), &given)?;
    let numbers = |pool: PoolConfig| (pool.memory_size, pool.page_shift);
    Ok([config.device_pool.map(numbers), config.host_pool.map(numbers)])
}

fuzz_target!(|input: &[u8]| {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if text.is_empty() {
        return; // no pool was asked for
    }
    for (key, limit, which) in [("llm.MemPoolConfig", u64::MAX, 0), ("llm.HostMemPoolConfig", HOST_LIMIT, 1)]
    {
        match (pools(&[(key, text)]), model(text, limit)) {
            (Ok(pools), expected) => assert_eq!(pools[which], expected, "{key}: {text:?}"),
            (Err(error), None) => refused_as(&error, &[ErrorKind::InvalidArgument]),
            (Err(error), Some(pool)) => panic!("{key}: {pool:?} is refused: {error}"),
        }
    }
    buffers(text);
});

/// `llm.BufPoolCfg` of the C++ class: a sum above 0, the same however the JSON is laid out.
fn buffers(text: &str) {
    match cpp::buffer_pool(text) {
        Ok(bytes) => {
            assert!(bytes > 0);
            let value: Value = serde_json::from_str(text).expect("accepted, and not JSON");
            let pretty = serde_json::to_string_pretty(&value).expect("a value is written");
            assert_eq!(cpp::buffer_pool(&pretty).ok(), Some(bytes));
            if let Some(size) = value.get("buf_pool_size") {
                assert_eq!(size.as_u64(), Some(bytes));
            }
        }
        Err(error) => refused_as(&error, &[ErrorKind::InvalidArgument]),
    }
}
