//! One row of the table of options: its names, its meaning, which values it takes, and what they set.

use std::time::Duration;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::validate::{clipped, decimal, one_of, shown_range, within};

/// The unit of a time that is given as a text.
#[derive(Clone, Copy, Debug)]
pub enum TimeUnit {
    /// Seconds.
    Seconds,
    /// Milliseconds.
    Millis,
    /// Microseconds.
    Micros,
}

impl TimeUnit {
    /// Returns the time of `count` units.
    pub(super) fn time(self, count: u64) -> Duration {
        match self {
            TimeUnit::Seconds => Duration::from_secs(count),
            TimeUnit::Millis => Duration::from_millis(count),
            TimeUnit::Micros => Duration::from_micros(count),
        }
    }

    fn name(self) -> &'static str {
        match self {
            TimeUnit::Seconds => " seconds",
            TimeUnit::Millis => " milliseconds",
            TimeUnit::Micros => " microseconds",
        }
    }
}

/// Which values an option takes, and what they set. Ranges include both ends.
#[derive(Clone, Copy, Debug)]
pub enum OptionKind {
    /// A `bool`; as a text `0` or `1`.
    Flag(fn(&mut Config, bool)),
    /// A whole number with its range.
    Count(u32, u32, fn(&mut Config, u32)),
    /// A time; as a text, a whole number of units. The range is in units, and `i64::MAX` stands for no upper limit.
    Time(i64, i64, TimeUnit, fn(&mut Config, Duration)),
    /// A number of bytes. The function returns whether it is allowed, and the text says which ones are.
    Size(&'static str, fn(&mut Config, u64) -> bool),
    /// A text. The function also takes the name that errors show.
    Text(fn(&mut Config, &str, &str) -> Result<()>),
    /// Without effect, or read together with other options in `texts` or `cpp`.
    Apart,
}

/// One option of an engine. A name or text that an option lacks is empty.
#[derive(Clone, Copy, Debug)]
pub struct OptionRow {
    /// Attribute of `LLMConfig`.
    pub name: &'static str,
    /// Key among the texts that `init` and the C++ class take.
    pub key: &'static str,
    /// Name among the values of the native API.
    pub native: &'static str,
    /// Environment variable that replaces the option if it is not given.
    pub variable: &'static str,
    /// Names of the Python classes of a value of the attribute.
    pub types: &'static [&'static str],
    /// The value that applies if none is given, in Markdown.
    pub default: &'static str,
    /// What the option does, in Markdown.
    pub meaning: &'static str,
    /// Whether the original lacks the option.
    pub own: bool,
    /// When the option is read: lower steps first, and the rows of one step in the order of the table. So the same one of
    /// several wrong values is always reported.
    pub(super) step: u8,
    pub(super) kind: OptionKind,
}

impl OptionRow {
    /// Returns an option of the original that is read in a step, and that has no effect yet.
    pub(super) const fn new(name: &'static str, key: &'static str, step: u8) -> Self {
        let [native, variable, meaning] = [""; 3];
        let kind = OptionKind::Apart;
        OptionRow {
            name,
            key,
            native,
            variable,
            types: &[],
            default: "none",
            meaning,
            own: false,
            step,
            kind,
        }
    }

    /// Sets which values the option takes, and what they set.
    pub(super) const fn takes(self, kind: OptionKind) -> Self {
        let types: &[&str] = match kind {
            _ if !self.types.is_empty() => self.types,
            OptionKind::Flag(_) => &["bool"],
            OptionKind::Text(_) => &["str"],
            _ => &["int"],
        };
        OptionRow { types, kind, ..self }
    }

    /// Sets the Python classes of a value.
    pub(super) const fn of_types(self, types: &'static [&'static str]) -> Self {
        OptionRow { types, ..self }
    }

    /// Makes this an option that the original lacks.
    pub(super) const fn own(self) -> Self {
        OptionRow { own: true, ..self }
    }

    /// Sets the name in the native API. The original lacks every such option.
    pub(super) const fn native(self, native: &'static str) -> Self {
        OptionRow { native, ..self.own() }
    }

    /// Sets the environment variable.
    pub(super) const fn or_variable(self, variable: &'static str) -> Self {
        OptionRow { variable, ..self }
    }

    /// Sets the default.
    pub(super) const fn default(self, default: &'static str) -> Self {
        OptionRow { default, ..self }
    }

    /// Sets the meaning.
    pub(super) const fn meaning(self, meaning: &'static str) -> Self {
        OptionRow { meaning, ..self }
    }

    /// Reads the text of the option, of which errors name `key` or `name`.
    pub(super) fn read_text(&self, config: &mut Config, key: &str, name: &str, text: &str) -> Result<()> {
        match self.kind {
            OptionKind::Flag(set) => set(config, one_of(key, text, &[("0", false), ("1", true)])?),
            OptionKind::Count(_, most, set) => {
                set(config, u32::try_from(self.number(key, text)?).unwrap_or(most));
            }
            OptionKind::Time(_, _, unit, set) => set(config, unit.time(self.number(key, text)?)),
            OptionKind::Size(_, set) => {
                set(config, self.number(key, text)?);
            }
            OptionKind::Text(set) => set(config, name, text)?,
            OptionKind::Apart => {}
        }
        Ok(())
    }

    /// Reads a whole number in the range of the option.
    fn number(&self, key: &str, text: &str) -> Result<u64> {
        let (least, most, unit) = self.range()?;
        let allowed = || format!("a whole number, {}", shown_range(least, most, unit));
        let value: i64 = decimal(text)
            .ok_or_else(|| Error::argument(key, format_args!("{:?}", clipped(text)), allowed()))?;
        self.check_number(value).map(|()| value.unsigned_abs())
    }

    /// Checks a value of the attribute of `LLMConfig`, which is a whole number.
    pub(super) fn check_number(&self, value: i64) -> Result<()> {
        let (least, most, unit) = self.range()?;
        within(self.name, value, least, most, unit)
    }

    /// Returns the least and the greatest whole number, and their unit.
    fn range(&self) -> Result<(i64, i64, &'static str)> {
        match self.kind {
            OptionKind::Count(least, most, _) => Ok((least.into(), most.into(), "")),
            OptionKind::Time(least, most, unit, _) => Ok((least, most, unit.name())),
            OptionKind::Size(..) => Ok((0, i64::MAX, " bytes")),
            _ => Err(Error::invalid(format!("{} is not an integer option", self.name))),
        }
    }
}
