//! Finds options in the table, and checks single values for attributes of `LLMConfig`.

use std::ops::RangeInclusive;

use super::row::{OptionKind, OptionRow};
use super::table::OPTIONS;
use crate::config::{Config, Role};
use crate::error::{Error, Result};
use crate::model::ClusterId;

/// The steps in which options are read.
pub(super) const STEPS: RangeInclusive<u8> = 1..=11;

/// Returns the options that are read in a step, in order.
pub(super) fn rows_of(step: u8) -> impl Iterator<Item = &'static OptionRow> {
    OPTIONS.iter().filter(move |row| row.step == step)
}

/// Returns the option with this attribute of `LLMConfig`.
pub(super) fn row(name: &str) -> Option<&'static OptionRow> {
    OPTIONS.iter().find(|row| row.name == name)
}

/// Checks a whole number for the attribute `name` of `LLMConfig`.
pub fn check_number(name: &str, value: i64) -> Result<()> {
    let unknown = || Error::invalid(format!("{name} is not an integer option"));
    row(name).ok_or_else(unknown)?.check_number(value)
}

/// Checks a text for the attribute `name` of `LLMConfig`.
pub fn check_text(name: &str, text: &str) -> Result<()> {
    match row(name).map(|row| row.kind) {
        Some(OptionKind::Text(set)) => set(&mut Config::new(Role::Mix, ClusterId(0)), name, text),
        _ => Err(Error::invalid(format!("{name} is not a text option"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::OptionName;

    #[test]
    fn errors_name_options_of_the_table() {
        for name in OptionName::ALL {
            let original = OPTIONS.iter().find(|row| row.key == name.original).unwrap();
            let same = |row: &OptionRow| row.native == name.native;
            // A row of its own has the native name if the two APIs take other values.
            assert!(same(original) || (original.native.is_empty() && OPTIONS.iter().any(same)), "{name:?}");
        }
    }
}
