//! The options of `initialize`. Those of network cards are checked and have no effect: transfers use the paths of the engine.

use std::collections::BTreeMap;

use llm_datadist_core::bindings::options::ResourceConfig;

use crate::address::MAX_TEXT;
use crate::comm_res;
use crate::status::{Outcome, Status};

macro_rules! options {
    ($($(#[$doc:meta])* $key:ident = $text:literal as $name:literal, $old:expr;)*) => {
        /// An option of `initialize`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum OptionKey { $($(#[$doc])* $key,)* }

        /// All options: the name of the public constant, and the key.
        pub const OPTIONS: &[(&str, &str)] = &[$(($name, $text),)*];

        impl OptionKey {
            /// Returns the option that a key names, and whether the key is its older spelling.
            fn named(key: &str) -> Option<(OptionKey, bool)> {
                $(
                    if key == $text {
                        return Some((OptionKey::$key, false));
                    }
                    if $old == Some(key) {
                        return Some((OptionKey::$key, true));
                    }
                )*
                None
            }
        }
    };
}

options! {
    /// Memory that the network cards of a node share.
    FabricMem = "EnableUseFabricMem" as "OPTION_ENABLE_USE_FABRIC_MEM", None::<&str>;
    /// The traffic class of RDMA.
    TrafficClass = "RdmaTrafficClass" as "OPTION_RDMA_TRAFFIC_CLASS", Some("adxl.RdmaTrafficClass");
    /// The service level of RDMA.
    ServiceLevel = "RdmaServiceLevel" as "OPTION_RDMA_SERVICE_LEVEL", Some("adxl.RdmaServiceLevel");
    /// The number and the size of staging buffers.
    BufferPool = "BufferPool" as "OPTION_BUFFER_POOL", Some("adxl.BufferPool");
    /// Limits of an engine, as a JSON object.
    ResourceConfig = "GlobalResourceConfig" as "OPTION_GLOBAL_RESOURCE_CONFIG", None::<&str>;
    /// Whether transfers connect by themselves.
    AutoConnect = "AutoConnect" as "OPTION_AUTO_CONNECT", None::<&str>;
    /// The network cards of an engine, as a JSON object.
    LocalCommRes = "LocalCommRes" as "OPTION_LOCAL_COMM_RES", Some("adxl.LocalCommRes");
}

/// The options of an engine, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// Whether transfers connect by themselves.
    pub(crate) auto_connect: bool,
    /// Number of threads for asynchronous connections.
    pub(crate) connect_threads: usize,
    /// Number of asynchronous connections that may wait.
    pub(crate) connect_queue: usize,
}

impl Options {
    /// Checks the options.
    pub(crate) fn read<T: AsRef<str>>(given: &[(T, T)]) -> Outcome<Options> {
        let mut values = BTreeMap::new();
        let named = |key: &T| OptionKey::named(key.as_ref());
        for (key, value) in given {
            let (option, is_old) = named(key).ok_or(Status::ParamInvalid)?;
            if value.as_ref().len() > MAX_TEXT {
                return Err(Status::ParamInvalid);
            }
            if !is_old || !given.iter().any(|(other, _)| named(other) == Some((option, false))) {
                values.insert(option, value.as_ref());
            }
        }
        let value = |option| values.get(&option).copied();
        let fabric = value(OptionKey::FabricMem).map_or(Ok(false), flag)?;
        let pool = value(OptionKey::BufferPool);
        let number_fits = |option, most, step| {
            let number = |text: &str| text.parse::<u64>().ok().filter(|_| digits(text));
            value(option).is_none_or(|text| number(text).is_some_and(|n| n <= most && n % step == 0))
        };
        let valid = number_fits(OptionKey::TrafficClass, 255, 4)
            && number_fits(OptionKey::ServiceLevel, 7, 1)
            && pool.is_none_or(is_buffer_pool)
            && !(fabric && pool.is_some());
        if !valid {
            return Err(Status::ParamInvalid);
        }
        let auto_connect = value(OptionKey::AutoConnect).map_or(Ok(false), flag)?;
        let comm_res = value(OptionKey::LocalCommRes).filter(|text| !text.is_empty());
        comm_res.map_or(Ok(()), comm_res::check)?;
        let config =
            value(OptionKey::ResourceConfig).map(|text| ResourceConfig::read("GlobalResourceConfig", text));
        let config =
            config.transpose().map_err(|error| Status::from_error("initialize", &error))?.unwrap_or_default();
        if let Some(path) = config.comm_res_path.as_ref().filter(|_| comm_res.is_none()) {
            comm_res::check(&comm_res::of_file(path)?)?;
        }
        Ok(Options {
            auto_connect: auto_connect || config.has_channel_pool,
            connect_threads: config.connect_threads,
            connect_queue: config.connect_queue,
        })
    }
}

fn flag(text: &str) -> Outcome<bool> {
    match text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err(Status::ParamInvalid),
    }
}

fn digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit())
}

/// Whether a text is `NUM:SIZE`.
fn is_buffer_pool(text: &str) -> bool {
    let number = |text: &str| digits(text) && text.parse::<u32>().is_ok();
    text.split_once(':').is_some_and(|(count, size)| number(count) && number(size))
}

#[cfg(test)]
mod tests {
    use super::Options;
    use crate::status::Status;

    fn read(pairs: &[(&str, &str)]) -> Result<Options, Status> {
        Options::read(pairs)
    }

    #[test]
    fn values_at_the_limits_are_accepted_and_those_beyond_refused() {
        let config = |body: &str| vec![("GlobalResourceConfig", body.to_owned())];
        let one = |key, value: &str| vec![(key, value.to_owned())];
        let accepted = [
            one("EnableUseFabricMem", "1"),
            one("RdmaTrafficClass", "0"),
            one("RdmaTrafficClass", "252"),
            one("RdmaServiceLevel", "7"),
            one("BufferPool", "0:0"),
            one("BufferPool", "4:8"),
            one("AutoConnect", "0"),
            one("LocalCommRes", ""),
            one("LocalCommRes", r#"{"version": "1.3"}"#),
            one("LocalCommRes", &format!("{{{}}}", " ".repeat((1 << 20) - 2))),
            one("adxl.RdmaTrafficClass", "4"),
            one("adxl.BufferPool", "1:1"),
            config("{}"),
            config(r#"{"connect_pool.thread_num": 64, "connect_pool.task_queue_capacity": "65535"}"#),
            config(r#"{"connect_pool": {"thread_num": "1"}, "unknown": []}"#),
            config(r#"{"comm_resource_config.qos": 7}"#),
            config(r#"{"channel_pool.high_waterline": 0.8, "channel_pool.low_waterline": "0.3"}"#),
            config(r#"{"comm_resource_config.protocol_desc": ["roce:device", "ubmem"]}"#),
            config(r#"{"fabric_memory": {"enable_aicpu_unfold": false, "task_stream_num": 8}}"#),
            config(r#"{"transfer_config.max_transfer_count_per_batch": 32766}"#),
        ];
        for pairs in &accepted {
            let pairs: Vec<_> = pairs.iter().map(|(key, value)| (*key, value.as_str())).collect();
            assert!(read(&pairs).is_ok(), "{pairs:?}");
        }
        let refused = [
            one("Unknown", "1"),
            one("", ""),
            one("EnableUseFabricMem", "2"),
            one("RdmaTrafficClass", "256"),
            one("RdmaTrafficClass", "2"),
            one("RdmaTrafficClass", "-4"),
            one("RdmaTrafficClass", ""),
            one("RdmaServiceLevel", "8"),
            one("BufferPool", "4"),
            one("BufferPool", "4:8:1"),
            one("BufferPool", "a:b"),
            one("AutoConnect", ""),
            one("AutoConnect", "true"),
            one("AutoConnect", "2"),
            one("LocalCommRes", "[]"),
            one("LocalCommRes", "{"),
            one("LocalCommRes", &format!("{{{}}}", " ".repeat((1 << 20) - 1))),
            one("LocalCommRes", r#"{"version": 1}"#),
            one("adxl.AutoConnect", "1"),
            config(""),
            config("[]"),
            config("{"),
            config(r#"{"connect_pool.thread_num": 0}"#),
            config(r#"{"connect_pool.thread_num": 65}"#),
            config(r#"{"connect_pool.thread_num": 1.5}"#),
            config(r#"{"connect_pool.thread_num": "-1"}"#),
            config(r#"{"connect_pool.task_queue_capacity": 65536}"#),
            config(r#"{"connect_pool": 3}"#),
            config(r#"{"comm_resource_config.qos": "7"}"#),
            config(r#"{"comm_resource_config.qos": 8}"#),
            config(r#"{"comm_resource_config.listen_port": 0}"#),
            config(r#"{"comm_resource_config.max_active_channels": 0}"#),
            config(r#"{"comm_resource_config.protocol_desc": 1}"#),
            config(r#"{"comm_resource_config.protocol_desc": "tcp"}"#),
            config(r#"{"channel_pool.high_waterline": 0.8}"#),
            config(r#"{"channel_pool.low_waterline": 0.8}"#),
            config(r#"{"channel_pool": {"high_waterline": 0.3, "low_waterline": 0.8}}"#),
            config(r#"{"channel_pool": {"high_waterline": 1, "low_waterline": 0.8}}"#),
            config(r#"{"channel_pool.max_channel": 513}"#),
            config(r#"{"fabric_memory.task_stream_num": 2}"#),
            config(r#"{"fabric_memory.enable_aicpu_unfold": 1}"#),
            config(r#"{"fabric_memory.max_capacity": 1025}"#),
            config(r#"{"fabric_memory.start_address": 1025}"#),
            config(r#"{"transfer_config.max_transfer_count_per_batch": 32767}"#),
            config(r#"{"local_comm_res_path": "/no/such/file"}"#),
            config(r#"{"local_comm_res_path": "/"}"#),
            config(r#"{"local_comm_res_path": 7}"#),
            vec![("EnableUseFabricMem", "1".into()), ("BufferPool", "4:8".into())],
        ];
        for pairs in &refused {
            let pairs: Vec<_> = pairs.iter().map(|(key, value)| (*key, value.as_str())).collect();
            assert_eq!(read(&pairs), Err(Status::ParamInvalid), "{pairs:?}");
        }
    }

    #[test]
    fn key_without_prefix_counts() {
        assert!(read(&[("adxl.RdmaTrafficClass", "3"), ("RdmaTrafficClass", "4")]).is_ok());
        assert!(read(&[("RdmaTrafficClass", "3"), ("adxl.RdmaTrafficClass", "4")]).is_err());
    }

    #[test]
    fn connect_pool_has_an_effect() {
        let options = read(&[(
            "GlobalResourceConfig",
            r#"{"connect_pool": {"thread_num": 3, "task_queue_capacity": "9"}}"#,
        )])
        .unwrap();
        assert_eq!((options.connect_threads, options.connect_queue, options.auto_connect), (3, 9, false));
        let options = read(&[("AutoConnect", "1")]).unwrap();
        assert_eq!((options.connect_threads, options.connect_queue, options.auto_connect), (2, 128, true));
    }
}
