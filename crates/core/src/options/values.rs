//! Reads the options of the native API, which are values with a type.

use std::fmt;
use std::time::Duration;

use super::lookup::{STEPS, rows_of};
use super::names::nearest;
use super::pool::{check_pages, size_with_unit};
use super::row::{OptionKind, OptionRow};
use super::table::OPTIONS;
use crate::config::Config;
use crate::error::{Error, Result, ensure};
use crate::validate::clipped;

/// The environment variables of the file of the token and of the token.
const TOKEN_VARIABLES: [&str; 2] = ["LLM_DATADIST_TOKEN_FILE", "LLM_DATADIST_TOKEN"];

/// A value of an option of the native API.
#[derive(Clone, Debug, PartialEq)]
pub enum OptionValue {
    /// A `bool`.
    Flag(bool),
    /// A whole number.
    Int(i128),
    /// A number with a fraction.
    Float(f64),
    /// A text.
    Text(String),
}

impl fmt::Display for OptionValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OptionValue::Flag(value) => value.fmt(f),
            OptionValue::Int(value) => value.fmt(f),
            OptionValue::Float(value) => fmt::Debug::fmt(value, f),
            OptionValue::Text(value) => write!(f, "{:?}", clipped(value)),
        }
    }
}

/// Reads the options of a native engine: times in seconds, and sizes in bytes or as a text with a unit. An option that is
/// not among `values` is taken from its environment variable, which `variable` returns, if it has one.
/// `Err(InvalidArgument)` for an unknown name or an invalid value.
pub fn config_from_values(
    values: &[(&str, OptionValue)],
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<Config> {
    check_native_names(values.iter().map(|(name, _)| *name))?;
    let given = |name: &str| values.iter().find(|(of, _)| *of == name).map(|(_, value)| value);
    let has_token = given("token").is_some() || given("token_file").is_some();
    if !has_token {
        check_token_variables(variable)?;
    }
    let mut config = Config::native();
    for row in STEPS.flat_map(rows_of).filter(|row| !row.native.is_empty()) {
        if let Some(value) = given(row.native) {
            row.set(&mut config, value)?;
        } else if !(row.variable.is_empty() || has_token && TOKEN_VARIABLES.contains(&row.variable)) {
            let text = variable(row.variable).filter(|text| !text.is_empty());
            text.map_or(Ok(()), |text| row.read_text(&mut config, row.variable, row.variable, &text))?;
        }
    }
    check_together(&config)?;
    Ok(config)
}

/// Reads a text as a value of an option: `true` or `false`, a number, or the text itself. A text that has another form stays one,
/// which [`config_from_values`] refuses.
pub fn value_of_text(name: &str, text: &str) -> OptionValue {
    let row = OPTIONS.iter().find(|row| row.native == name);
    let value = match row.map(|row| row.kind) {
        Some(OptionKind::Flag(_)) => text.parse().ok().map(OptionValue::Flag),
        Some(OptionKind::Count(..) | OptionKind::Size(..)) => text.parse().ok().map(OptionValue::Int),
        Some(OptionKind::Time(..)) => text.parse().ok().map(OptionValue::Float),
        _ => None,
    };
    value.unwrap_or_else(|| OptionValue::Text(text.to_owned()))
}

/// Checks that every name is one of the native API. The error names the nearest one.
pub fn check_native_names<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<()> {
    let valid = || OPTIONS.iter().map(|row| row.native).filter(|name| !name.is_empty());
    for name in names {
        if valid().any(|valid| valid == name) {
            continue;
        }
        // Names of `LLMConfig`, such as `link_heartbeat`, contain those of the native API.
        let contained = || valid().filter(|valid| name.contains(valid)).max_by_key(|valid| valid.len());
        let advice = match nearest(name, valid()).or_else(contained) {
            Some(meant) => format!("did you mean {meant:?}?"),
            None => "llm-datadist options lists every option".into(),
        };
        return Err(Error::invalid(format!("there is no option {:?}; {advice}", clipped(name))));
    }
    Ok(())
}

/// Refuses an empty variable, because the deployment forgot to fill in the secret, and two variables that are both set.
fn check_token_variables(variable: &dyn Fn(&str) -> Option<String>) -> Result<()> {
    let set = TOKEN_VARIABLES.map(variable);
    let [file, token] = TOKEN_VARIABLES;
    if set.iter().flatten().filter(|text| !text.is_empty()).count() > 1 {
        return Err(Error::invalid(format!("{file} and {token} are both set; unset one of them")));
    }
    if set.iter().flatten().any(|text| !text.is_empty()) {
        return Ok(());
    }
    match TOKEN_VARIABLES.iter().zip(&set).find(|(_, text)| text.is_some()) {
        None => Ok(()),
        Some((name, _)) => {
            Err(Error::invalid(format!("{name} is set, but empty; unset it, or give it a value")))
        }
    }
}

/// Applies the rules for several options.
fn check_together(config: &Config) -> Result<()> {
    for (name, pool) in [("pool", config.device_pool), ("host_pool", config.host_pool)] {
        pool.map_or(Ok(()), |pool| check_pages(name, pool.memory_size, pool))?;
    }
    let links = &config.links;
    ensure(links.token.is_none() || links.token_file.is_none(), || {
        Error::invalid("token and token_file are both given; give one of them").of_argument("token_file")
    })?;
    ensure(links.silence >= 2 * links.heartbeat, || {
        let allowed = format!("at least two heartbeats, {} seconds", 2.0 * links.heartbeat.as_secs_f64());
        Error::argument("silence", links.silence.as_secs_f64(), allowed)
    })
}

impl OptionRow {
    /// Sets the option to a value of the native API. `Err(InvalidArgument)` for a wrong type as well.
    fn set(&self, config: &mut Config, value: &OptionValue) -> Result<()> {
        let refused = || {
            let secret = TOKEN_VARIABLES.contains(&self.variable);
            let shown = if secret { "(not shown)".into() } else { value.to_string() };
            Error::argument(self.native, shown, self.allowed())
        };
        match (self.kind, value) {
            (OptionKind::Flag(set), &OptionValue::Flag(enabled)) => set(config, enabled),
            (OptionKind::Count(least, most, set), &OptionValue::Int(count)) => {
                let count = u32::try_from(count).ok().filter(|count| (least..=most).contains(count));
                set(config, count.ok_or_else(refused)?);
            }
            (OptionKind::Time(.., set), value) => set(config, self.time(value).ok_or_else(refused)?),
            (OptionKind::Size(_, set), value) => {
                bytes(value).filter(|&bytes| set(config, bytes)).map(drop).ok_or_else(refused)?;
            }
            (OptionKind::Text(set), OptionValue::Text(text)) => set(config, self.native, text)?,
            _ => return Err(refused()),
        }
        Ok(())
    }

    /// Returns the time of a number of seconds in the range of the option.
    fn time(&self, value: &OptionValue) -> Option<Duration> {
        let OptionKind::Time(least, most, unit, _) = self.kind else { return None };
        let time = match *value {
            OptionValue::Int(seconds) => Duration::from_secs(u64::try_from(seconds).ok()?),
            OptionValue::Float(seconds) => Duration::try_from_secs_f64(seconds).ok()?,
            _ => return None,
        };
        let range = unit.time(least.unsigned_abs())..=unit.time(most.unsigned_abs());
        range.contains(&time).then_some(time)
    }

    /// Whether the option takes values of this type.
    pub fn takes_type_of(&self, value: &OptionValue) -> bool {
        matches!(
            (self.kind, value),
            (OptionKind::Flag(_), OptionValue::Flag(_))
                | (OptionKind::Count(..), OptionValue::Int(_))
                | (OptionKind::Time(..), OptionValue::Int(_) | OptionValue::Float(_))
                | (OptionKind::Size(..), OptionValue::Int(_) | OptionValue::Text(_))
                | (OptionKind::Text(_), OptionValue::Text(_))
        )
    }

    /// Returns the text that says which values the native API accepts.
    pub fn allowed(&self) -> String {
        match self.kind {
            OptionKind::Flag(_) => "true or false".into(),
            OptionKind::Count(least, most, _) => format!("a whole number, {least} to {most}"),
            OptionKind::Time(least, most, unit, _) => {
                let seconds = |count: i64| unit.time(count.unsigned_abs()).as_secs_f64();
                format!("a number of seconds, {} to {}", seconds(least), seconds(most))
            }
            OptionKind::Size(which, _) => format!(
                "a number of bytes{which}, or such a text with a unit: \"64MiB\" (KiB, MiB, GiB, TiB)"
            ),
            OptionKind::Text(_) | OptionKind::Apart => "a text".into(),
        }
    }
}

/// Returns the bytes of a number, or of a text with a unit.
fn bytes(value: &OptionValue) -> Option<u64> {
    match value {
        OptionValue::Int(bytes) => u64::try_from(*bytes).ok(),
        OptionValue::Text(text) => size_with_unit(text),
        OptionValue::Flag(_) | OptionValue::Float(_) => None,
    }
}
