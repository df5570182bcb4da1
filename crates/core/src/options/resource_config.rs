//! The option `global_resource_config` of the backend `hixl`, which is also one of the module `hixl`: limits of an engine as a JSON
//! object.

use std::fmt;

use serde_json::{Map, Value};

use crate::error::{Error, Result, ensure};
use crate::validate::{clipped, decimal, json};

/// What network cards may speak.
const PROTOCOLS: [&str; 8] = [
    "roce:device",
    "hccs:device",
    "ub_ctp:device",
    "ub_ctp:host",
    "uboe:device",
    "ub_rtp:device",
    "roce:host",
    "ubmem",
];
/// Fields with a whole number: their name, the smallest and the largest number. A text of digits is a number, too.
const NUMBERS: [(&str, u64, u64); 9] = [
    ("connect_pool.thread_num", 1, 64),
    ("connect_pool.task_queue_capacity", 1, 65_535),
    ("comm_resource_config.listen_port", 1, 65_535),
    ("comm_resource_config.max_active_channels", 1, 8192),
    ("channel_pool.max_channel", 1, 512),
    ("fabric_memory.max_capacity", 1, 1024),
    ("fabric_memory.start_address", 0, 1024),
    ("fabric_memory.task_stream_num", 1, 8),
    ("transfer_config.max_transfer_count_per_batch", 1, 32_766),
];

/// The fields that have an effect in the module `hixl`, or that other options of it need. In an engine of `LLMConfig` no field has
/// an effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceConfig {
    /// Number of threads for asynchronous connections.
    pub connect_threads: usize,
    /// Number of asynchronous connections that may wait.
    pub connect_queue: usize,
    /// Whether waterlines are given, with which transfers connect by themselves.
    pub has_channel_pool: bool,
    /// File with a description of network cards.
    pub comm_res_path: Option<String>,
}

impl Default for ResourceConfig {
    fn default() -> Self {
        ResourceConfig {
            connect_threads: 2,
            connect_queue: 128,
            has_channel_pool: false,
            comm_res_path: None,
        }
    }
}

impl ResourceConfig {
    /// Reads the text of the option, which errors call `name`. Checks all known fields, and ignores others. A field is a dotted key,
    /// or an entry of a nested object. `Err(InvalidArgument)` for an invalid value.
    pub fn read(name: &str, text: &str) -> Result<ResourceConfig> {
        let fields: Value =
            json(text).map_err(|error| refused(name, text, "a JSON object").because(error))?;
        let Value::Object(fields) = fields else { return Err(refused(name, text, "a JSON object")) };
        let object = ConfigObject { name, text, fields: &fields };
        for (field, least, most) in NUMBERS {
            object.number(field, least, most)?;
        }
        object.check_others()?;
        let comm_res_path = match fields.get("local_comm_res_path") {
            None => None,
            Some(Value::String(path)) => Some(path.clone()),
            Some(_) => return Err(object.refused("local_comm_res_path", "a text")),
        };
        let defaults = ResourceConfig::default();
        let count = |field, most, default: usize| {
            let number = object.number(field, 1, most)?;
            Ok(number.map_or(default, |number| usize::try_from(number).unwrap_or(default)))
        };
        Ok(ResourceConfig {
            connect_threads: count("connect_pool.thread_num", 64, defaults.connect_threads)?,
            connect_queue: count("connect_pool.task_queue_capacity", 65_535, defaults.connect_queue)?,
            has_channel_pool: object.has_waterlines()?,
            comm_res_path,
        })
    }
}

/// The option that is read.
struct ConfigObject<'a> {
    name: &'a str,
    text: &'a str,
    fields: &'a Map<String, Value>,
}

impl ConfigObject<'_> {
    fn refused(&self, field: &str, allowed: impl fmt::Display) -> Error {
        refused(self.name, self.text, format_args!("a JSON object whose {field} is {allowed}"))
    }

    /// Checks the fields that are no plain numbers and have no effect.
    fn check_others(&self) -> Result<()> {
        let qos = self.field("comm_resource_config.qos")?;
        ensure(qos.is_none_or(|qos| qos.as_u64().is_some_and(|qos| qos <= 7)), || {
            self.refused("comm_resource_config.qos", "a number, 0 to 7")
        })?;
        let known = |value: &Value| value.as_str().is_some_and(|text| PROTOCOLS.contains(&text));
        let protocols = self.field("comm_resource_config.protocol_desc")?;
        let valid =
            |value: &Value| value.as_array().map_or_else(|| known(value), |list| list.iter().all(known));
        ensure(protocols.is_none_or(valid), || {
            let words = PROTOCOLS.join(" or ");
            self.refused("comm_resource_config.protocol_desc", format_args!("{words}, or a list of them"))
        })?;
        let unfold = self.field("fabric_memory.enable_aicpu_unfold")?;
        let unfolds = unfold.map_or(Some(true), Value::as_bool);
        let unfolds =
            unfolds.ok_or_else(|| self.refused("fabric_memory.enable_aicpu_unfold", "true or false"))?;
        let streams = self.number("fabric_memory.task_stream_num", 1, 8)?.unwrap_or(1);
        ensure(!unfolds || streams == 1, || {
            self.refused("fabric_memory.task_stream_num", "1 unless enable_aicpu_unfold is false")
        })
    }

    /// Checks the waterlines, and returns whether they are given.
    fn has_waterlines(&self) -> Result<bool> {
        let (high, low) =
            (self.fraction("channel_pool.high_waterline")?, self.fraction("channel_pool.low_waterline")?);
        match (high, low) {
            (None, None) => Ok(false),
            (Some(high), Some(low)) if low < high => Ok(true),
            _ => Err(self.refused("channel_pool.low_waterline", "given with a larger high_waterline")),
        }
    }

    /// Returns a field, whose name has one dot.
    fn field(&self, name: &str) -> Result<Option<&Value>> {
        let (group, inner) = name.split_once('.').unwrap_or((name, ""));
        match (self.fields.get(name), self.fields.get(group)) {
            (Some(value), _) => Ok(Some(value)),
            (None, None) => Ok(None),
            (None, Some(Value::Object(nested))) => Ok(nested.get(inner)),
            (None, Some(_)) => Err(self.refused(group, "an object")),
        }
    }

    /// Returns a whole number in a range.
    fn number(&self, field: &str, least: u64, most: u64) -> Result<Option<u64>> {
        let Some(value) = self.field(field)? else { return Ok(None) };
        let number = match value {
            Value::String(text) => decimal(text),
            value => value.as_u64(),
        };
        let number = number.filter(|number| (least..=most).contains(number));
        let allowed = || format!("a whole number, {least} to {most}");
        number.map(Some).ok_or_else(|| self.refused(field, allowed()))
    }

    /// Returns a number between 0 and 1.
    fn fraction(&self, field: &str) -> Result<Option<f64>> {
        let Some(value) = self.field(field)? else { return Ok(None) };
        let number = match value {
            Value::String(text) => text.parse().ok(),
            value => value.as_f64(),
        };
        let number = number.filter(|&number| number > 0.0 && number < 1.0);
        number.map(Some).ok_or_else(|| self.refused(field, "a number between 0 and 1"))
    }
}

fn refused(name: &str, text: &str, allowed: impl fmt::Display) -> Error {
    Error::argument(name, format_args!("{:?}", clipped(text)), allowed)
}
