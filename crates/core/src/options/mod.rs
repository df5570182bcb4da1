//! The options of an engine: one table, and the readers that turn options into a [`Config`](crate::config::Config).
//!
//! An engine refuses every invalid option before it allocates or opens anything. Rules about which options imply others in
//! `LLMDataDist.init` are in the Python package.

pub mod cpp;
mod lookup;
mod names;
mod pool;
mod resource_config;
mod row;
mod rules;
mod table;
mod texts;
mod values;

pub use lookup::{check_number, check_text};
pub use names::nearest;
#[cfg(feature = "testing")]
pub use pool::page_shift;
pub use pool::size_with_unit;
pub use resource_config::ResourceConfig;
pub use row::OptionRow;
pub use rules::{link_token, mem_utilization};
pub use table::OPTIONS;
pub use texts::config_from_texts;
pub use values::{OptionValue, check_native_names, config_from_values, value_of_text};
