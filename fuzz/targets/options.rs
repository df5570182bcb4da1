//! Option texts of `init` and of the C++ class: the same answer twice, values inside their ranges, and no secret shown.
#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use llm_datadist_core::testing::options::{config_from_texts, cpp};
use llm_datadist_core::bindings::{Config, Role};
use llm_datadist_core::{ClusterId, ErrorKind, Result};
use llm_datadist_fuzz::refused_as;

const TOKEN: &str = "llm.LinkToken";
const KINDS: [ErrorKind; 2] = [ErrorKind::InvalidArgument, ErrorKind::NotEnabled];

fuzz_target!(|input: &[u8]| {
    let Some((&role, text)) = input.split_first() else { return };
    let role = [Role::Prompt, Role::Decoder, Role::Mix][usize::from(role % 3)];
    let text = String::from_utf8_lossy(text);
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    let given: BTreeMap<String, String> = pairs.map(|(key, value)| (key.into(), value.into())).collect();
    let python = |given: &BTreeMap<_, _>| config_from_texts(role, ClusterId(1), given);
    let class =
        |given: &BTreeMap<_, _>| cpp::options(role, ClusterId(1), given).map(|options| options.config);
    judge(&python, &given);
    judge(&class, &given);
});

fn judge(parse: &dyn Fn(&BTreeMap<String, String>) -> Result<Config>, given: &BTreeMap<String, String>) {
    let (once, twice) = (parse(given), parse(given));
    secret(parse, given, &once);
    match (once, twice) {
        (Ok(config), Ok(again)) => {
            assert_eq!(config, again);
            in_range(&config, given);
        }
        (Err(error), Err(again)) => {
            refused_as(&error, &KINDS);
            assert_eq!(error.to_string(), again.to_string());
        }
        (once, twice) => panic!("{once:?}, then {twice:?}"),
    }
}

/// The guarantees of the reference page for each value, parsed again from the text if it is a number.
fn in_range(config: &Config, given: &BTreeMap<String, String>) {
    let links = &config.links;
    let number =
        |key: &str| given.get(key).map(|text| text.parse::<u64>().expect("only digits are accepted"));
    if let Some(workers) = number("llm.CopyWorkers") {
        assert!((1..=256).contains(&workers));
        assert_eq!(config.copy_workers.map(|count| count as u64), Some(workers));
    }
    if let Some(millis) = number("llm.SyncKvCacheWaitTime") {
        assert!(millis > 0);
        assert_eq!(config.sync_timeout.as_millis(), u128::from(millis));
    }
    if let Some(retries) = number("llm.LinkRetryCount") {
        assert_eq!(u64::from(links.retries), retries);
    }
    if let Some(port) = number("llm.RankPort") {
        assert_eq!(u64::from(links.rank_port), port);
    }
    assert!((1..=100).contains(&links.retries));
    // 0 leaves the number to the engine.
    assert!((0..=16).contains(&links.streams));
    assert!(links.rank_port > 0);
    assert!(!links.heartbeat.is_zero() && links.silence >= links.heartbeat, "{links:?}");
    for pool in [config.device_pool, config.host_pool].into_iter().flatten() {
        assert!((10..=30).contains(&pool.page_shift) && pool.memory_size > 0, "{pool:?}");
    }
}

/// A token appears neither in an error nor in the `Debug` output of the configuration.
fn secret(
    parse: &dyn Fn(&BTreeMap<String, String>) -> Result<Config>,
    given: &BTreeMap<String, String>,
    result: &Result<Config>,
) {
    let Some(token) = given.get(TOKEN).filter(|token| token.chars().count() >= 16) else { return };
    let shown = |result: &Result<Config>| match result {
        Ok(config) => format!("{config:?}"),
        Err(error) => format!("{error:?} {error}"),
    };
    let mut without = given.clone();
    without.remove(TOKEN);
    // The same text may stand in another option, which may be shown.
    let elsewhere = shown(&parse(&without)).contains(token.as_str());
    assert!(elsewhere || !shown(result).contains(token.as_str()), "the token shows");
}
